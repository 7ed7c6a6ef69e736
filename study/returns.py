"""Prompts that return, in pools that were not made for draws: the tiny model, with and without a memory.

    python -m study returns --pools parts --seeds 101 --rates 1e-4,2e-4,4e-4    the rates; likewise of "one"
    python -m study returns                                     the comparison, at the chosen rates
    python -m study draw                                        tables and figure of study/results/returns

The protocol was fixed before any run. Before it came one look at the starting model of seed 901: its exact
success probabilities by kind of prompt. Each later change is named below:

- The starting model is the tiny preset's, after its 560 supervised steps. A seed fixes model, problems
  and order.
- Pool "parts", 1,024 prompts: a quarter mastered (sorting, each right with probability 0.95 or more),
  half nearly hopeless (sums and differences of two numbers of three digits, about 0.4 % right), a quarter
  that can be learned (sums and differences of five or six characters, about 10 % right). Pool "one": 256
  sums of two numbers of two digits, about 3 % right; their texts tell the memory nothing, counts alone
  can.
- Changed when seeds 1 and 2 of "parts" had run, before any result of this pool was read: some starting
  models master fewer than 256 prompts by this rule. There they are the 256 sorting prompts that the model
  solves best.
- Held out are as many other problems of the kind that can be learned: in "parts" those of five or six
  characters, in "one" the sums of two digits.
- A run generates 16,384 rollouts ("parts") or 8,192 ("one"): two and four passes of GRPO with groups of
  8. A step trains on 512 or 256 rollouts, in two optimizer steps. All else is as in study/spend.py.
- Changed after the rates of seed 101, before any other run: "parts" had 256 prompts, 8,192 rollouts and
  256 a step (parts-256.csv). Every arm ended below its start at every rate, and GRPO at 1e-4 and 2e-4 0.3 points above
  it: 64 prompts were too few to learn a rule from. On the new pool grpo, none and first-pass were looked
  at on seed 101.
- Arms. "grpo": groups of 8. "draws": --method draws, groups of 4 by the memory, from nothing. "half" and
  "none": the same with importance weights to the power 0.5 and 0. "greso": --method greso, groups of 8.
  "first-pass": GRPO, from the second pass on only with the prompts whose group of the first pass was
  mixed. "two-stage": 2 rollouts and 14 more where these differ.
- Learning rates: 1e-4, 2e-4 and 4e-4 ("parts") or 4e-4, 8e-4 and 1.6e-3 ("one") for every arm on seed
  101, by the rule of study/spend.py: highest mean over the run; where the best is the lowest or highest
  rate, the one beyond it is tried once. (Done before the runs of seeds 1 to 8; none beyond was better.)
- Outcome, on seeds 1 to 8: exact held-out accuracy, first its mean over the run, second its end. Each
  arm minus grpo, paired by seed, Holm's correction over the six arms within a pool and an outcome. "half"
  and "none" minus "draws" as intervals. Beside it the share of groups of the second half that were of
  prompts that can be learned ("parts"), and of mixed groups.
- The deviations of study/results/spend let eight seeds show about 0.7 to 1.2 points.
- Expected at first: in "parts" draws, none and first-pass spend most groups of the second half on the
  learnable quarter, and are above grpo by one to three points in the mean over the run, none the most;
  greso and two-stage by half of that. In "one" all differences are below one point. After the looks: in
  "parts" GRPO itself gains one point, and no difference exceeds half a point.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from openrlhf_dbb import tiny
from study import analysis, cells, exact, rows, spend
from study.run import commit
from study.spend import Arm

TITLE = "Prompts that return"
NAME = "returns"
SEEDS = range(1, 9)
GRPO = "grpo"
FIRST_PASS = "first-pass"
CANDIDATES = 8192  # problems from which pools are taken
MASTERED = 0.95  # least success probability before training
_SHARES_E = np.linspace(0, 1, 17)
"""Points of a curve, as shares of the run's rollouts."""

LEARNABLE = re.compile(r"(?=.{5,6}\Z)\d+[-+]\d+=")
"""Sums and differences of five or six characters, which the starting model can learn."""
TWO_DIGITS = re.compile(r"\d\d\+\d\d=")
THREE_DIGITS = re.compile(r"\d{3}[-+]\d{3}=")
Problem = dict[str, str]


@dataclass(frozen=True)
class Pool:
    """A pool of prompts and how it is trained on.

    Attributes:
        label: printed name.
        size: prompts, and problems held out.
        budget: rollouts of a run.
        trained: rollouts that a step trains on.
        rates: learning rate of each arm, by the rule of the protocol.
    """

    label: str
    size: int
    budget: int
    trained: int
    rates: Mapping[str, float]


ARMS = {
    GRPO: Arm("GRPO, N = 8", "plain", 8),
    "draws": Arm("drawn by the memory, N = 4", "posterior", 4),
    "half": Arm("drawn, half weights", "posterior", 4, {"weight_power": 0.5}),
    "none": Arm("drawn, no weights", "posterior", 4, {"weight_power": 0.0}),
    "greso": Arm("GRESO, N = 8", "greso", 8),
    FIRST_PASS: Arm("mixed in the first pass, N = 8", "plain", 8),
    "two-stage": Arm("two stages, 2 + 14", "two_stage", 16, {"first": 2}),
}
POOLS = {
    "parts": Pool(
        "a quarter mastered, half nearly hopeless",
        1024,
        16_384,
        512,
        dict.fromkeys(ARMS, 1e-4) | {"greso": 2e-4, "two-stage": 4e-4},
    ),
    "one": Pool("sums of two digits", 256, 8192, 256, dict.fromkeys(ARMS, 4e-4) | {"greso": 8e-4}),
}


class ReturnsRow(NamedTuple):
    """A row of a pool's CSV file: a point of a run's curve.

    Attributes:
        rollouts: generated so far.
        accuracy: exact, held out, in [0, 1], on the straight line between the steps around this number.
        steps: of the whole run.
        groups: trained on so far; mixed and learnable ones are among them. On the same kind of line.
        commit: of the code that trained it.
    """

    pool: str
    seed: int
    arm: str
    rate: float
    rollouts: int
    accuracy: float
    steps: int
    groups: float
    mixed: float
    learnable: float
    commit: str


def is_learnable(prompt: str) -> bool:
    """Return whether a prompt is one that the starting model can learn: a sum or difference of 5 or 6 characters."""
    return LEARNABLE.fullmatch(prompt) is not None


def prepare(output: Path, pool: str, seed: int) -> Path:
    """Make the task of a pool and a seed unless it exists, and return its folder."""
    size = POOLS[pool].size
    folder = output / "tasks" / f"{pool}-s{seed}"
    if (folder / "heldout.jsonl").is_file():
        return folder
    whole = output / "tasks" / f"candidates-s{seed}"
    assets = tiny.prepare(whole, seed, tiny.Recipe(CANDIDATES, CANDIDATES))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(assets.model, folder / "model", dirs_exist_ok=True)
    candidates = _problems(assets.train)
    unseen = _problems(assets.heldout)
    if pool == "one":
        train = _first(_of_kind(candidates, TWO_DIGITS), size)
        heldout = _first(_of_kind(unseen, TWO_DIGITS), size)
    else:
        train = [
            *_mastered(whole, candidates, size // 4),
            *_first(_of_kind(candidates, THREE_DIGITS), size // 2),
            *_first(_of_kind(candidates, LEARNABLE), size // 4),
        ]
        heldout = _first(_of_kind(unseen, LEARNABLE), size)
    for name, problems in (("train", train), ("heldout", heldout)):
        lines = [json.dumps(problem) + "\n" for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _problems(path: Path) -> list[Problem]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _of_kind(problems: Iterable[Problem], kind: re.Pattern[str]) -> list[Problem]:
    return [problem for problem in problems if kind.fullmatch(problem["input"])]


def _first(problems: Sequence[Problem], size: int) -> Sequence[Problem]:
    if len(problems) < size:
        raise ValueError(f"{len(problems)} problems of a kind, not {size}; raise CANDIDATES")
    return problems[:size]


def _mastered(folder: Path, candidates: Sequence[Problem], size: int) -> list[Problem]:
    """Return candidates that sort: the first that the starting model masters, else those that it solves best."""
    task = exact.read(folder)
    right_P = task.probabilities(task.policy())
    sorting = [
        (problem, float(right))
        for problem, right in zip(candidates, right_P, strict=True)
        if problem["input"].startswith("s")
    ]
    mastered = [problem for problem, right in sorting if right >= MASTERED]
    if len(mastered) >= size:
        return mastered[:size]
    best = sorted(sorting, key=lambda pair: -pair[1])
    return [problem for problem, _ in best[:size]]


def train(
    folder: Path, pool: str, name: str, rate: float, seed: int, code: str
) -> list[ReturnsRow]:
    """Train one arm on the task in a folder, and return its curve. ``code`` is the commit that the rows name."""
    prompts = spend.Prompts(folder, rate, seed)
    texts = prompts.texts
    curve = spend.Curve(prompts.task.accuracy(prompts.policy))
    groups = [0]
    learnable = [0]
    mixed_rows = []
    budget = POOLS[pool].budget
    parts = [budget]
    if name == FIRST_PASS:  # a pass is over when every prompt has had its group
        parts = [ARMS[name].group * len(texts), budget]
    for part in parts:
        trained = min(POOLS[pool].trained, ARMS[name].group * len(prompts.rows))
        for step in spend.steps(
            prompts, ARMS[name], curve, trained=trained, budget=part, seed=seed
        ):
            in_reach = [is_learnable(texts[group.rollouts[0][0]]) for group in step.groups]
            groups.append(groups[-1] + len(step.groups))
            learnable.append(learnable[-1] + sum(in_reach))
            mixed_rows += [group.rollouts[0][0] for group in step.groups if spend.is_mixed(group)]
        prompts.rows = sorted(set(mixed_rows))
    points = []
    for rollouts in budget * _SHARES_E:
        row = ReturnsRow(
            pool=pool,
            seed=seed,
            arm=name,
            rate=rate,
            rollouts=int(rollouts),
            accuracy=float(curve.at(curve.accuracy, rollouts)),
            steps=len(groups) - 1,
            groups=float(curve.at(groups, rollouts)),
            mixed=float(curve.at(curve.mixed, rollouts)),
            learnable=float(curve.at(learnable, rollouts)),
            commit=code,
        )
        points.append(row)
    return points


def run(
    output: Path,
    pools: Iterable[str],
    seeds: Iterable[int],
    arms: Sequence[str],
    rates: Sequence[float],
) -> None:
    """Train what the pool's CSV file does not have yet; one line each. Without rates an arm has its own."""
    torch.set_num_threads(1)  # with a model this small a second thread mostly waits
    output.mkdir(parents=True, exist_ok=True)
    code = commit()  # later commits do not change what has been imported
    for pool in pools:
        path = output / f"{pool}.csv"
        for seed in seeds:
            folder = prepare(output, pool, seed)
            for name in arms:
                for rate in rates or [POOLS[pool].rates[name]]:
                    done = rows.read(path, ReturnsRow._fields)
                    of_arm = done[(done.seed == seed) & (done.arm == name)]
                    if np.isclose(of_arm.rate, rate).any():
                        continue
                    curve = train(folder, pool, name, rate, seed, code)
                    rows.append(path, ReturnsRow._fields, curve)
                    reached = f"{curve[0].accuracy:.2%} -> {curve[-1].accuracy:.2%}"
                    print(f"{pool} seed {seed} {name} at {rate:g}: {reached}", flush=True)


def report(folder: Path, figures: Path) -> list[cells.Table]:
    """Return the tables of the CSV files of the pools in a folder, and draw returns.png."""
    points = _points(folder)
    compared = points[points.seed.isin(SEEDS)]
    _draw(compared).savefig(figures / "returns.png", dpi=150)
    tables = [_arms(pool, compared[compared.pool == pool]) for pool in POOLS]
    return [*tables, _rates(points[~points.seed.isin(SEEDS)])]


def _points(folder: Path) -> Any:
    return pd.concat([rows.read(folder / f"{pool}.csv", ReturnsRow._fields) for pool in POOLS])


def second_half(points: Any, column: str) -> Any:
    """Return the share of a run's groups of the second half that are mixed or learnable, by seed."""
    budget = points.rollouts.max()
    half = points[points.rollouts == budget // 2].set_index("seed")
    end = points[points.rollouts == budget].set_index("seed")
    return (end[column] - half[column]) / (end.groups - half.groups)


def _arms(pool: str, points: Any) -> cells.Table:
    means, ends = spend.outcomes(points)
    tested = spend.minus_grpo(means, ends)
    shares = {"mixed": "mixed groups %, second half"}
    if pool == "parts":
        shares["learnable"] = "learnable prompts %, second half"
    lines = []
    for name, arm in ARMS.items():
        of_arm = points[points.arm == name]
        line = [
            arm.label,
            f"{POOLS[pool].rates[name]:g}",
            cells.percent(*analysis.mean_and_error(means[name])),
            cells.percent(*analysis.mean_and_error(ends[name])),
        ]
        line += tested.get(name, [""] * len(spend.MINUS_GRPO))
        for column in shares:
            line.append(f"{100 * second_half(of_arm, column).mean():.0f}")
        lines.append(line)
    header = [
        "arm",
        "rate",
        "mean over the run %",
        "at the end %",
        *spend.MINUS_GRPO,
        *shares.values(),
    ]
    unweighted = []
    for name in ("half", "none"):
        for outcome, values in (("mean", means), ("end", ends)):
            test = analysis.paired(values[name], values["draws"])
            difference = f"{cells.points(test.mean)} ({cells.interval(test)})"
            unweighted.append(f"{ARMS[name].label}, {outcome}: {difference}")
    start = points[points.rollouts == 0].groupby("seed").accuracy.first()
    grpo = points[(points.arm == GRPO) & (points.rollouts == POOLS[pool].budget)]
    equal = 1 - (grpo.mixed / grpo.groups).mean()
    note = (
        f"Exact held-out accuracy, {POOLS[pool].budget:,} rollouts, {len(means)} seeds, mean and standard error; "
        f"{100 * start.mean():.1f} % before training. "
        f"{100 * equal:.0f} % of GRPO's groups had equal rewards. "
        "Differences are in points with 95 % intervals, paired by seed. "
        f"Minus full weights: {'; '.join(unweighted)}. "
        f"Over seeds an arm's mean correlates with GRPO's by {means.corr()[GRPO].drop(GRPO).min():.2f} or more."
    )
    return cells.Table(POOLS[pool].label.capitalize(), header, lines, note)


def _rates(points: Any) -> cells.Table:
    """Return the mean over the run of the seeds on which rates were chosen, a column for each rate."""
    rates = sorted(points.rate.unique())
    lines = []
    for pool, facts in POOLS.items():
        for name, arm in ARMS.items():
            of_pool = points[points.pool == pool]
            lines.append([facts.label, arm.label, *spend.means_by_rate(of_pool, name, rates)])
    header = ["pool", "mean over the run %, at rate", *(f"{rate:g}" for rate in rates)]
    return cells.Table("Learning rates, seed 101", header, lines)


def _draw(points: Any) -> Any:
    """Return the figure of the arms' differences to GRPO, a panel for each pool."""
    from study.figures import _MORE, LOOKS, new_figure

    figure, (panels,) = new_figure(len(POOLS), 1, height=6.4)
    looks = [LOOKS["dbb"], LOOKS["auto"], *_MORE]
    for axes, (pool, facts) in zip(panels, POOLS.items(), strict=True):
        spend.draw_differences(axes, points[points.pool == pool], ARMS, looks)
        axes.set_title(facts.label)
    panels[0].set_ylabel("accuracy minus GRPO's, points")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3
    )
    return figure


def add_command(commands: Any) -> None:
    """Declare ``python -m study returns``."""
    parser = commands.add_parser(NAME, help="prompts that return in two pools, on the tiny model")
    parser.set_defaults(command=_command)
    spend.add_arguments(parser, "returns-runs", SEEDS, ARMS)
    parser.add_argument("--pools", default=",".join(POOLS), metavar="NAME,...", help="%(default)s")


def _command(arguments: argparse.Namespace) -> int:
    seeds, rates = spend.seeds_and_rates(arguments)
    pools = arguments.pools.split(",")
    run(arguments.output, pools, seeds, arguments.arms.split(","), rates)
    return 0
