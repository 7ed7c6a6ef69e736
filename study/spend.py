"""Ways to spend equal rollouts on the tiny model: whole groups, two stages, draws, n from the posterior.

    python -m study spend --seeds 101 --rates 4e-4,8e-4,1.6e-3    the rates
    python -m study spend --seeds 1,2,3,4,5,6                     the comparison, at the chosen rates
    python -m study draw                                          tables and figure of study/results/spend

Protocol, fixed before any run:

- Task and model are those of the tiny preset with 512 training and 512 held-out prompts. The starting
  model has had 270 supervised steps, which gives about 10 % right responses. A seed fixes model,
  problems and order.
- One run of grpo with 32,768 rollouts on seed 901, before this protocol, told how long a run takes. Budget
  and seeds follow from that.
- A run generates 16,384 rollouts. Every rollout counts, also those of groups that are not trained on.
  A step trains on 512 rollouts, in two optimizer steps. The loop is ``openrlhf_dbb.Loop`` with plain
  PyTorch, one thread, float32.
- All arms have GRPO's advantages of a group by itself (``point``, whose memory is ``auto``) and GRPO's
  clip range. "grpo": groups of 8. "dynamic": DAPO's, groups of 8, those of equal rewards replaced.
  "two-stage": --method two_stage, 2 rollouts and 14 more where these differ. "pilot": 8 rollouts and 24
  more where these differ. "draws": --method draws, groups of 4 of prompts drawn by the memory. "both":
  two-stage, with the draws of "draws". "allocate": --method allocate, 2 to 32 rollouts of a prompt, 8 in
  the mean.
- "pilot" stands for Pilot-Commit (arXiv 2605.26606): a quarter of a group as pilot, and the rest where
  its mean is neither near 0 nor near 1. Published are thresholds of 1/8 and 3/4 (1/4 and 3/4 in the
  defaults of its code); here a mixed pilot passes, from 1/8 to 7/8. Published groups are completed with
  the next batch and buffered, here in the same step.
- Learning rates: 4e-4, 8e-4 and 1.6e-3 for every arm on seed 101. An arm gets the rate with the highest
  mean over the run. Where the highest or the lowest rate is the best, the one beyond it, a factor of 2,
  is tried once. Nothing else is read from this seed. (Done before the runs of seeds 1 to 6: 3.2e-3 was
  tried for five arms and was worse for all; pilot and draws have 8e-4, the others 1.6e-3.)
- Outcome, on seeds 1 to 6: the exact probability of the right answer to the held-out prompts, at 17
  points from 0 to 16,384 rollouts on the straight line between steps. First its mean over the run, second
  its end. Each arm minus grpo, paired by seed (arms correlate by 0.96 and more over seeds that fix the
  model), Holm's correction over the six arms within each outcome. Beside it the share of GRPO's rollouts
  at which the mean curve of an arm reaches the end of GRPO's: Pilot-Commit's measure.
- By the deviation of such differences in study/results/rare, 0.3 to 0.6 points, six seeds show 0.4 to
  0.9 points.
- Expected: most groups of 8 are equal at the start. So two-stage, pilot, draws and both end above grpo by
  one to four points in the mean over the run, dynamic near grpo, allocate between grpo and two-stage.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats

from openrlhf_dbb import Posteriors, tiny
from openrlhf_dbb.core.filling import Answer, Group, Request
from openrlhf_dbb.core.loop import Loop, Step
from openrlhf_dbb.evaluation.metrics import p_value
from study import analysis, cells, control, rows
from study.exact import read
from study.sampling import sample

TITLE = "Where to spend equal rollouts"
NAME = "spend"
START = 270  # supervised steps
BUDGET = 16_384  # rollouts of a run
TRAINED = 512  # rollouts that a step trains on
SEEDS = range(1, 7)
GRPO = "grpo"
_GRID_E = np.linspace(0, BUDGET, 17)
_CLIP = control.Arm("point", control.NARROW)


@dataclass(frozen=True)
class Arm:
    """A way to spend rollouts.

    Attributes:
        label: printed name.
        strategy: rollout strategy, with its parameters.
        group: rollouts of a prompt in a step that trains on it.
    """

    label: str
    strategy: str
    group: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


ARMS = {
    GRPO: Arm("GRPO, N = 8", "plain", 8),
    "dynamic": Arm("DAPO's filter, N = 8", "dynamic", 8),
    "two-stage": Arm("two stages, 2 + 14", "two_stage", 16, {"first": 2}),
    "pilot": Arm("two stages, 8 + 24", "two_stage", 32, {"first": 8}),
    "draws": Arm("drawn by the memory, N = 4", "posterior", 4),
    "both": Arm("drawn, 2 + 14", "two_stage", 16, {"first": 2, "draw": "posterior"}),
    "allocate": Arm("n by the memory, 2 to 32", "allocate", 8, {"min": 2, "max": 32}),
}
RATES = dict.fromkeys(ARMS, 1.6e-3) | {"pilot": 8e-4, "draws": 8e-4}
"""Learning rate of each arm, by the rule of the protocol."""


class SpendRow(NamedTuple):
    """A row of spend.csv: a point of a run's curve.

    Attributes:
        rollouts: generated so far.
        accuracy: exact, held out, in [0, 1], on the straight line between the steps around this number.
        steps: of the whole run.
        mixed: groups with different rewards so far, on the same kind of line.
    """

    seed: int
    arm: str
    rate: float
    rollouts: int
    accuracy: float
    steps: int
    mixed: float


class Prompts:
    """The training prompts of a task: as texts for the loop, as tokens for the policy, which it trains.

    Attributes:
        rows: (P,) of the task, to which the loop's rows refer.
    """

    def __init__(self, folder: Path, rate: float, seed: int) -> None:
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        problems = [json.loads(line) for line in lines]
        self._texts = [problem["input"] for problem in problems]
        self._labels = [problem["label"] for problem in problems]
        self.task = read(folder)
        self.rows = list(range(len(problems)))
        self.policy = self.task.policy()
        self._optimizer = control.adamw(self.policy, rate)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def texts(self) -> list[str]:
        """The prompts of the rows, (P,)."""
        return [self._texts[row] for row in self.rows]

    @property
    def labels(self) -> list[str]:
        """The right answers of the rows, (P,)."""
        return [self._labels[row] for row in self.rows]

    def generate(self, requests: Sequence[Request[int]]) -> list[Answer[tuple[int, torch.Tensor]]]:
        """Answer each request; a rollout is its prompt's row of the task and its tokens (L,)."""
        rows_R = [
            self.rows[request.prompt] for request in requests for _ in range(request.rollouts)
        ]
        batch = self.task.train.batch(np.array(rows_R))
        responses_R_1_L = sample(self.policy, batch, 1, self._generator)
        right_R = self.task.right(responses_R_1_L, batch)[:, 0].double().numpy()
        answers = []
        first = 0
        for request in requests:
            end = first + request.rollouts
            row = self.rows[request.prompt]
            rollouts = [(row, tokens_L) for tokens_L in responses_R_1_L[first:end, 0]]
            answers.append(Answer(rollouts, right_R[first:end]))
            first = end
        return answers

    def update(self, step: Step[tuple[int, torch.Tensor]]) -> None:
        """Train on a step, in two optimizer steps."""
        batch = self.task.train.batch(np.array([row for row, _ in step.rollouts]))
        responses_R_1_L = torch.stack([tokens_L for _, tokens_L in step.rollouts])[:, None]
        advantages_R = torch.from_numpy(step.advantages).float()
        half = -(-len(step.rollouts) // 2)
        control.update(
            self.policy,
            self._optimizer,
            batch,
            responses_R_1_L,
            advantages_R,
            _CLIP,
            half,
            self._generator,
        )


class Curve:
    """A run so far: rollouts, exact held-out accuracy and mixed groups, before training and after each step."""

    def __init__(self, start: float) -> None:
        self.generated = [0]
        self.accuracy = [start]
        self.mixed = [0]

    def at(self, values: Sequence[float], rollouts: Any) -> Any:
        """Return values of the steps on the straight lines between them: at one number of rollouts, or at (E,)."""
        return np.interp(rollouts, self.generated, values)


def steps(
    prompts: Prompts, arm: Arm, curve: Curve, *, trained: int, budget: int, seed: int
) -> Iterator[Step[tuple[int, torch.Tensor]]]:
    """Train an arm on the rows of the prompts, ``trained`` rollouts a step, until the curve has ``budget`` rollouts."""
    before = curve.generated[-1]
    with (
        tempfile.TemporaryDirectory() as stored,
        Posteriors.create(
            f"sqlite:///{stored}/spend.db",
            "run",
            prompts.texts,
            prompts.labels,
            estimator="point",
            parameters={"memory": "auto"},
        ) as posteriors,
    ):
        loop = Loop(
            posteriors,
            prompts.texts,
            prompts.labels,
            prompts.generate,
            groups=trained // arm.group,
            rollouts=arm.group,
            strategy=arm.strategy,
            strategy_parameters=arm.parameters,
            seed=seed,
            max_rollouts=budget - before,
        )
        for step in loop:
            prompts.update(step)
            curve.generated.append(before + loop.generated)
            curve.accuracy.append(prompts.task.accuracy(prompts.policy))
            curve.mixed.append(curve.mixed[-1] + sum(map(is_mixed, step.groups)))
            yield step


def is_mixed(group: Group[int, Any]) -> bool:
    """Return whether a group has right and wrong rollouts."""
    return group.scores is not None and len(set(group.scores)) > 1


def train(folder: Path, name: str, rate: float, seed: int) -> list[SpendRow]:
    """Train one arm on the task in a folder, and return its curve."""
    prompts = Prompts(folder, rate, seed)
    curve = Curve(prompts.task.accuracy(prompts.policy))
    for _ in steps(prompts, ARMS[name], curve, trained=TRAINED, budget=BUDGET, seed=seed):
        pass
    accuracy_E = curve.at(curve.accuracy, _GRID_E)
    mixed_E = curve.at(curve.mixed, _GRID_E)
    last = len(curve.generated) - 1
    return [
        SpendRow(seed, name, rate, int(rollouts), value, last, groups)
        for rollouts, value, groups in zip(_GRID_E, accuracy_E, mixed_E, strict=True)
    ]


def run(output: Path, seeds: Iterable[int], arms: Iterable[str], rates: Sequence[float]) -> None:
    """Train what spend.csv does not have yet; one line each. Without rates an arm has its own."""
    torch.set_num_threads(1)  # with a model this small a second thread mostly waits
    output.mkdir(parents=True, exist_ok=True)
    path = output / "spend.csv"
    recipe = tiny.Recipe(train_prompts=512, heldout_prompts=512, warmup_steps=START)
    for seed in seeds:
        folder = output / "tasks" / f"{START}-s{seed}"
        tiny.prepare(folder, seed, recipe)
        for name in arms:
            for rate in rates or [RATES[name]]:
                done = rows.read(path, SpendRow._fields)
                if ((done.seed == seed) & (done.arm == name) & np.isclose(done.rate, rate)).any():
                    continue
                curve = train(folder, name, rate, seed)
                rows.append(path, SpendRow._fields, curve)
                line = f"seed {seed} {name} at {rate:g}: {curve[0].accuracy:.2%} -> {curve[-1].accuracy:.2%}"
                print(f"{line} in {curve[-1].steps} steps", flush=True)


def report(folder: Path, figures: Path) -> list[cells.Table]:
    """Return the tables of the spend.csv in a folder, and draw spend.png."""
    points = rows.read(folder / "spend.csv", SpendRow._fields)
    compared = points[points.seed.isin(SEEDS)]
    _draw(compared).savefig(figures / "spend.png", dpi=150)
    return [_arms(compared), _rates(points[~points.seed.isin(SEEDS)])]


def outcomes(points: Any) -> tuple[Any, Any]:
    """Return the mean over the run and the end of each run, as frames of seeds by arms, in [0, 1].

    The points of a run have equal distances in rollouts.
    """
    curves = points.pivot_table(index=["seed", "rollouts"], columns="arm", values="accuracy")
    means = curves.groupby("seed").agg(
        lambda accuracy_E: np.trapezoid(accuracy_E, np.linspace(0, 1, len(accuracy_E)))
    )
    return means, curves.groupby("seed").last()


def minus_grpo(means: Any, ends: Any) -> dict[str, list[str]]:
    """Return cells of each arm but GRPO: difference in the mean and its p (Holm), then at the end."""
    made: dict[str, list[str]] = {}
    for values in (means, ends):
        others = [name for name in values if name != GRPO]
        tests = {name: analysis.paired(values[name], values[GRPO]) for name in others}
        for name, (test, corrected) in analysis.with_holm(tests).items():
            difference = f"{cells.points(test.mean)} ({cells.interval(test)})"
            made.setdefault(name, []).extend([difference, p_value(corrected)])
    return made


MINUS_GRPO = ("mean - GRPO's", "p (Holm)", "end - GRPO's", "p (Holm)")
"""Headings of the cells of :func:`minus_grpo`."""


def means_by_rate(points: Any, name: str, rates: Iterable[float]) -> list[str]:
    """Return a cell for each learning rate: an arm's mean over the run, "-" where it was not tried."""
    made = []
    for rate in rates:
        tried = points[(points.arm == name) & (points.rate == rate)]
        means = outcomes(tried)[0] if len(tried) else pd.DataFrame({name: []})
        made.append(cells.percent(*analysis.mean_and_error(means[name])))
    return made


def draw_differences(axes: Any, points: Any, arms: Mapping[str, Arm], looks: Iterable[Any]) -> None:
    """Draw each arm's difference to GRPO over the rollouts, with 95 % intervals over seeds."""
    curves = points.pivot_table(index=["seed", "rollouts"], columns="arm", values="accuracy")
    axes.axhline(0, color="black", linewidth=1, label=arms[GRPO].label)
    others = [name for name in arms if name != GRPO]
    for look, name in zip(looks, others, strict=False):
        difference = 100 * (curves[name] - curves[GRPO]).unstack("rollouts")
        rollouts_E = difference.columns.to_numpy()
        mean_E = difference.mean().to_numpy()
        half_E = difference.sem().to_numpy() * stats.t.ppf(0.975, len(difference) - 1)
        axes.plot(rollouts_E, mean_E, label=arms[name].label, markevery=2, **look)
        axes.fill_between(
            rollouts_E, mean_E - half_E, mean_E + half_E, alpha=0.12, color=look["color"]
        )
    axes.set_xlabel("rollouts")


def _arms(points: Any) -> cells.Table:
    means, ends = outcomes(points)
    curves = {name: _curves(points[points.arm == name]) for name in ARMS}
    tested = minus_grpo(means, ends)
    lines = []
    for name, arm in ARMS.items():
        of_arm = points[(points.arm == name) & (points.rollouts == BUDGET)]
        line = [
            arm.label,
            f"{RATES[name]:g}",
            f"{of_arm.steps.mean():.0f}",
            f"{of_arm.mixed.mean():.0f}",
            cells.percent(*analysis.mean_and_error(means[name])),
            cells.percent(*analysis.mean_and_error(ends[name])),
        ]
        if name == GRPO:
            line += ["", "", "", "", "1"]
        else:
            line += tested[name]
            line.append(
                " (".join(cells.needed(analysis.share_needed(curves[name], curves[GRPO]))) + ")"
            )
        lines.append(line)
    header = [
        "arm",
        "rate",
        "steps",
        "mixed groups trained on",
        "mean over the run %",
        "at the end %",
        *MINUS_GRPO,
        "rollouts to GRPO's end",
    ]
    correlation = means.corr()[GRPO].drop(GRPO).min()
    note = (
        f"Exact held-out accuracy, {BUDGET:,} rollouts, {len(means)} seeds, mean and standard error. "
        "Differences are in points with 95 % intervals, paired by seed. The last column is a share of "
        "GRPO's rollouts with its 95 % interval. "
        f"Over seeds an arm's mean correlates with GRPO's by {correlation:.2f} or more."
    )
    return cells.Table("Equal rollouts", header, lines, note)


def _curves(points: Any) -> dict[int, analysis.Curve]:
    return {
        int(seed): (of_seed.rollouts.to_numpy(dtype=np.float64), of_seed.accuracy.to_numpy())
        for seed, of_seed in points.groupby("seed")
    }


def _rates(points: Any) -> cells.Table:
    """Return the mean over the run of the seeds on which rates were chosen, a column for each rate."""
    rates = sorted(points.rate.unique())
    lines = [[arm.label, *means_by_rate(points, name, rates)] for name, arm in ARMS.items()]
    header = ["mean over the run %, at rate", *(f"{rate:g}" for rate in rates)]
    return cells.Table("Learning rates, seed 101", header, lines)


def _draw(points: Any) -> Any:
    from study.figures import _MORE, LOOKS, new_figure

    figure, ((axes,),) = new_figure(1, 1, height=5.6)
    draw_differences(axes, points, ARMS, [LOOKS["auto"], LOOKS["dbb"], *_MORE])
    axes.set_ylabel("accuracy minus GRPO's, points")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3
    )
    return figure


def add_command(commands: Any) -> None:
    """Declare ``python -m study spend``."""
    parser = commands.add_parser(NAME, help="ways to spend equal rollouts, on the tiny model")
    parser.set_defaults(command=_command)
    add_arguments(parser, "spend-runs", SEEDS, ARMS)


def add_arguments(
    parser: argparse.ArgumentParser, output: str, seeds: Iterable[int], arms: Iterable[str]
) -> None:
    """Declare folder, seeds, arms and learning rates, with these defaults."""
    parser.add_argument(
        "--output", type=Path, default=Path(output), metavar="DIR", help="folder (%(default)s)"
    )
    shown = ",".join(map(str, seeds))
    parser.add_argument("--seeds", default=shown, metavar="K,...", help="%(default)s")
    parser.add_argument("--arms", default=",".join(arms), metavar="NAME,...", help="%(default)s")
    parser.add_argument(
        "--rates", default="", metavar="RATE,...", help="learning rates (each arm's own)"
    )


def seeds_and_rates(arguments: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Return the numbers of :func:`add_arguments`; no rate where none is given."""
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rates = [float(rate) for rate in arguments.rates.split(",") if rate]
    return seeds, rates


def _command(arguments: argparse.Namespace) -> int:
    seeds, rates = seeds_and_rates(arguments)
    run(arguments.output, seeds, arguments.arms.split(","), rates)
    return 0
