"""Where history helps and where it harms: GRPO and estimators with history from starts of 0.3 to 60 % right responses.

    python -m study rare [--output rare-runs] [--n 8] [--seeds 1,2,3,4] [--arms point,dbb] [--starts 60,110]
    python -m study draw                     the tables and the figure of study/results/rare

Protocol, fixed before the runs of seeds 1 to 4:

- Task and model are those of the tiny preset with 512 training and 512 held-out prompts. A start is the number of
  supervised steps that the model has had: 60, 110, 170, 270, 500 and 800 give about 0.3, 1, 4, 13, 30 and 60 % right.
- A run has 32 steps of 512 rollouts, 512 / N prompts a step, two optimizer steps a batch, learning rate 3e-4 (the tiny
  preset's) in all arms. Plain PyTorch, as in ``control``.
- Outcome: exact held-out accuracy after training, minus that of ``point`` (GRPO) with the same seed and start, in
  percentage points; means over seeds with 95 % intervals. At N = 1, where GRPO does not exist, minus that of GRPO at
  N = 8.
- An arm does no harm at a start if the lower end of the one-sided 95 % interval is above -1 point or above minus a
  tenth of GRPO's accuracy, whichever is less.
- Seeds 101 and 102 were used to choose the arms and for nothing else. Seeds 1 to 4 find the cause: all arms at N = 8.
- Confirmation, fixed when seeds 1 and 2 were complete: the arms of ``CONFIRMED`` at N = 8 (seeds 11 to 16), 4, 2 and 1
  (seeds 11 to 15). When ``dbb-not-divided-centred`` was ahead on seeds 11 to 14, ``point-not-divided`` was added, which
  has no history. Before any run at N = 4, 2 and 1, ``dbb-not-divided-centred``, the default by then, took the place of
  ``dbb-centred`` there. Before any run at N = 1, ``batch-mean`` was added: without history, X minus the step's mean.
- Its runs at N = 1 were repeated with discount 1: with 0.5 its prior of 1e9 is gone after 30 visits. At N = 2 to 8,
  with 16 visits at most, p stays within 0.001 of one half, and the rows are those with 0.5.
- ``batch-mean`` was ahead at N = 1, and then at 2, 8 and 4. So, on seeds 21 to 26 that nothing has used: it ends above
  ``dbb-not-divided-centred`` and ``point`` at the starts 170 and 270, N = 8 and 2 (eight one-sided tests, Holm).

Axes: P prompts of a batch, G rollouts of a prompt, R = P * G, T training prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import stats

from openrlhf_dbb import estimators, tiny
from openrlhf_dbb.estimators import FORMS, Estimate
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import holm
from study import analysis, cells, control, rows
from study.control import NARROW, WIDE
from study.exact import Task, read
from study.sampling import sample

TITLE = "Where history helps and where it harms"
STARTS = (60, 110, 170, 270, 500, 800)
STEPS, ROLLOUTS, RATE = 32, 512, 3e-4


@dataclass(frozen=True)
class Arm(control.Arm):
    """An arm of the control, with one thing changed.

    Attributes:
        change: "centred": the batch's mean advantage is subtracted. "run prior": the prior has the mean of the start's
            exact success probabilities, with weight 2. "exact": the exact success probability takes the estimate's
            place. "before": the estimate is read before the group is observed. "hopeful": prompts without any success
            so far get no advantage. "": nothing.
        slower: factor on the learning rate.
    """

    change: str = ""
    slower: float = 1.0


DBB = {"discount": 0.5}
ARMS = {
    "point": Arm("point", NARROW),
    "point-wide": Arm("point", WIDE),
    "dbb": Arm("dbb", WIDE, DBB),
    "dbb-narrow": Arm("dbb", NARROW, DBB),
    "auto": Arm("auto", WIDE),
    "empirical-bayes": Arm("empirical_bayes", WIDE),
    "dbb-centred": Arm("dbb", NARROW, DBB, change="centred"),
    "dbb-centred-wide": Arm("dbb", WIDE, DBB, change="centred"),
    "auto-centred": Arm("auto", NARROW, change="centred"),
    "dbb-run-prior": Arm("dbb", WIDE, DBB, change="run prior"),
    "exact": Arm("point", WIDE, change="exact"),
    "dbb-before": Arm("dbb", WIDE, DBB, change="before"),
    "dbb-hopeful": Arm("dbb", WIDE, DBB, change="hopeful"),
    "dbb-without-itself": Arm("dbb", WIDE, DBB, form="rloo"),
    "dbb-not-divided": Arm("dbb", WIDE, DBB, form="dr_grpo"),
    "dbb-slower": Arm("dbb", WIDE, DBB, slower=0.3),
    "point-not-divided": Arm("point", NARROW, form="dr_grpo"),
    "dbb-not-divided-centred": Arm("dbb", NARROW, DBB, form="dr_grpo", change="centred"),
    "batch-centred": Arm("dbb", NARROW, DBB, form="batch_centered"),  # the same with GRPO's loss
    "single": Arm("auto", WIDE, form="rloo"),
    "single-centred": Arm("auto", NARROW, form="rloo", change="centred"),
    "batch-mean": Arm(
        "dbb",
        NARROW,
        {"discount": 1.0, "prior_alpha": 1e9, "prior_beta": 1e9},
        form="dr_grpo",
        change="centred",
    ),
}
CONFIRMED = {
    8: ("point", "dbb", "dbb-centred", "auto-centred", "dbb-not-divided-centred"),
    4: ("point", "dbb", "dbb-not-divided-centred"),
    2: ("point", "dbb", "dbb-not-divided-centred"),
    1: ("single", "single-centred", "dbb-not-divided-centred", "batch-mean"),
}
"""Arms of the confirmation by N."""
CONFIRMATION, FRESH = range(11, 17), range(21, 27)  # seeds
NOTE = (
    "Held-out accuracy after training minus GRPO's of the same seed, percentage points ± standard "
    'error. "harm": the one-sided 95 % interval lies below 0. "no harm": its lower end is above minus one point and '
    "above minus a tenth of GRPO's accuracy. In brackets: seeds; no verdict on two."
)


class RareRow(NamedTuple):
    """A row of rare.csv. Accuracies are exact and in [0, 1]; the others are means over the first four steps.

    Attributes:
        advantages: sum of a step's 512 advantages.
        all_wrong: their sum over groups without a success.
        drift: change of the log-probability of the wrong responses by the step's update, nats a response.
        last_entropy: minus the mean log-probability of a response in the last step, nats.
    """

    start: int
    seed: int
    arm: str
    n: int
    before: float
    after: float
    advantages: float
    all_wrong: float
    drift: float
    last_entropy: float
    last_successes: int


class Learner:
    """The estimator of a run, its state and the arm's change."""

    def __init__(self, arm: Arm, task: Task, policy: Any) -> None:
        self._arm, self._task, self._policy = arm, task, policy
        parameters = dict(arm.parameters)
        if arm.change == "run prior":
            mean = float(task.probabilities(policy).mean())
            parameters |= {"prior_alpha": 2 * mean, "prior_beta": 2 * (1 - mean)}
        self._estimator = estimators.build(arm.estimator, **parameters)
        self._state = self._estimator.initial_state(len(task.train.prompts))
        self._form = FORMS.build(arm.form)
        self._solved_T = np.zeros(len(task.train.prompts), dtype=bool)

    def advantages(self, members: NDArray[np.int64], rewards_P_G: Floats) -> Floats:
        """Advantages of one batch, (P, G)."""
        before = self._estimator.predictive(self._state) if self._arm.change == "before" else None
        estimate = self._estimator.observe_at(
            self._state, members, rewards_P_G, leave_one_out=self._form.leave_one_out
        )
        if before is not None:
            estimate = _bernoulli(before[0][members] / (before[0] + before[1])[members])
        if self._arm.change == "exact":
            estimate = _bernoulli(
                self._task.probabilities(self._policy)[members].clip(1e-4, 1 - 1e-4)
            )
        advantages_P_G = self._form.advantages(rewards_P_G, estimate)
        self._solved_T[members] |= (rewards_P_G > 0).any(axis=1)
        if self._arm.change == "hopeful":
            advantages_P_G = np.where(self._solved_T[members, None], advantages_P_G, 0.0)
        if self._arm.change == "centred":
            advantages_P_G = advantages_P_G - advantages_P_G.mean()
        return np.asarray(advantages_P_G)


def train(task: Task, start: int, name: str, n: int, seed: int) -> RareRow:
    """Train one arm with n rollouts a prompt."""
    arm, policy = ARMS[name], task.policy()
    learner, prompts = Learner(arm, task, policy), ROLLOUTS // n
    optimizer = control.adamw(policy, RATE * arm.slower)
    generator, order = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    before, batches, logged = task.accuracy(policy), control.in_turn(task, prompts, order), []
    for _ in range(STEPS):
        members = next(batches)
        batch = task.train.batch(members)
        responses_P_G_L = sample(policy, batch, n, generator)
        rewards_P_G = task.right(responses_P_G_L, batch).double().numpy()
        advantages_P_G = learner.advantages(members, rewards_P_G)
        advantages_R = torch.from_numpy(advantages_P_G.ravel()).float()
        old_R = control.update(
            policy, optimizer, batch, responses_P_G_L, advantages_R, arm, ROLLOUTS // 2, generator
        )
        new_R = control.response_log_probabilities(policy, batch, responses_P_G_L)
        wrong_R = torch.from_numpy(rewards_P_G.ravel() == 0)
        logged.append((
            advantages_P_G.sum(), advantages_P_G[rewards_P_G.max(axis=1) == 0].sum(),
            float((new_R - old_R)[wrong_R].mean()), float(-old_R.mean()), int(rewards_P_G.sum()),
        ))  # fmt: skip
    early = np.mean([row[:3] for row in logged[:4]], axis=0)
    first, second, third = map(float, early)
    entropy, successes = logged[-1][3:]
    return RareRow(
        start,
        seed,
        name,
        n,
        before,
        task.accuracy(policy),
        first,
        second,
        third,
        entropy,
        successes,
    )


def run(
    output: Path, n: int, seeds: Iterable[int], arms: Iterable[str], starts: Iterable[int]
) -> None:
    """Train what rare.csv does not have yet; one line each."""
    torch.set_num_threads(1)  # with a model this small a second thread mostly waits
    output.mkdir(parents=True, exist_ok=True)
    path = output / "rare.csv"
    done = {
        (row.start, row.seed, row.arm, row.n)
        for row in rows.read(path, RareRow._fields).itertuples()
    }
    for seed in seeds:
        for start in starts:
            recipe = tiny.Recipe(train_prompts=512, heldout_prompts=512, warmup_steps=start)
            folder = output / "tasks" / f"{start}-s{seed}"
            tiny.prepare(folder, seed, recipe)
            task = read(folder)
            for arm in arms:
                if (start, seed, arm, n) not in done:
                    row = train(task, start, arm, n, seed)
                    rows.append(path, RareRow._fields, [row])
                    print(
                        f"start {start} seed {seed} N {n} {arm}: {row.before:.2%} -> {row.after:.2%}",
                        flush=True,
                    )


def report(folder: Path, figures: Path) -> list[cells.Table]:
    """Return the tables of the rare.csv in a folder, and draw the confirmation at N = 8 as start_rate.png."""
    found = rows.read(folder / "rare.csv", RareRow._fields)
    confirmed, fresh = found.seed.isin(CONFIRMATION), found[found.seed.isin(FRESH)]
    _draw(found[confirmed & (found.n == 8)]).savefig(figures / "start_rate.png", dpi=150)
    early = found[found.seed < CONFIRMATION.start]
    tables = {"Every factor, N = 8": early}
    tables |= {f"Confirmation, N = {n}": found[confirmed & (found.n == n)] for n in CONFIRMED}
    compared = [_table(title, shown, found) for title, shown in tables.items() if len(shown)]
    added = [_added(found[confirmed & (found.n == n)], n) for n in CONFIRMED]
    return [*compared, *added, _fresh(fresh), _first_steps(early)]


def _fresh(found: pd.DataFrame) -> cells.Table:
    """Return the tests of the step's mean on fresh seeds."""
    wide = found.pivot_table(index=["n", "start", "seed"], columns="arm", values="after")
    tests = {
        (n, start, other): analysis.paired(of["batch-mean"], of[other])
        for (n, start), of in wide.groupby(["n", "start"])
        for other in ("point", "dbb-not-divided-centred")
    }
    corrected = holm([test.p / 2 if test.mean > 0 else 1 - test.p / 2 for test in tests.values()])
    lines = [
        [
            f"N = {n}, start {start}: batch-mean minus {other}",
            cells.difference(test),
            str(test.n),
            f"{p:.2g}",
        ]
        for ((n, start, other), test), p in zip(tests.items(), corrected, strict=True)
    ]
    return cells.Table(
        "The step's mean, fresh seeds", ["", "points", "seeds", "one-sided p (Holm)"], lines
    )


def _added(found: pd.DataFrame, n: int) -> cells.Table:
    """Return what history and Dr.GRPO's loss add: the centred arm minus those without, a column for each start."""
    wide = found.pivot_table(index=["start", "seed"], columns="arm", values="after")
    starts = [(start, of.droplevel("start")) for start, of in wide.groupby("start")]
    header = [
        "",
        *(f"{100 * found.before[found.start == start].mean():.1f} %" for start, _ in starts),
    ]
    first, lines = "dbb-not-divided-centred", []
    for other in wide.columns.intersection(["point-not-divided", "batch-mean", "batch-centred"]):
        tests = [analysis.paired(of[first], of[other]) for _, of in starts]
        lines.append([f"{first} minus {other}", *map(cells.difference, tests)])
    return cells.Table(
        f"What history and the loss add, N = {n}, the confirmation's seeds", header, lines
    )


def _first_steps(found: pd.DataFrame) -> cells.Table:
    """Return means over the seeds at the rarest start, a line for each arm."""
    means = found[found.start == STARTS[0]].groupby("arm", sort=False)[
        ["advantages", "last_entropy", "last_successes"]
    ]
    lines = [[str(arm), *(f"{value:.1f}" for value in row)] for arm, row in means.mean().iterrows()]
    header = [
        "arm",
        "sum of a step's advantages",
        "entropy at the end, nats",
        "successes of the last step",
    ]
    return cells.Table("At the rarest start", header, lines)


def _table(title: str, shown: pd.DataFrame, found: pd.DataFrame) -> cells.Table:
    """Return each arm's differences to GRPO, a column for each start. N = 1 is compared with GRPO at N = 8."""
    n = shown.n.iloc[0]
    grpo = found[
        (found.arm == "point") & (found.n == (n if n > 1 else 8)) & found.seed.isin(shown.seed)
    ]
    # Another machine may make another starting model of the same seed.
    shown = shown.join(
        grpo.set_index(["start", "seed"]).before.rename("begun"), on=["start", "seed"]
    )
    shown = shown[(shown.before - shown.begun).abs() < 2e-4]
    targets = [(start, of.set_index("seed").after) for start, of in grpo.groupby("start")]
    lines = []
    for arm, mine in shown[shown.arm != "point"].groupby("arm", sort=False):
        after = mine.set_index(["start", "seed"]).after
        lines.append([str(arm), *(_cell(after.get(start), target) for start, target in targets)])
    begun = [f"{100 * of.before.mean():.1f} %" for _, of in grpo.groupby("start")]
    ended = ["GRPO, after", *(f"{100 * target.mean():.1f} %" for _, target in targets)]
    return cells.Table(title, ["start", *begun], [ended, *lines], NOTE)


def _cell(after: pd.Series[float] | None, grpo: pd.Series[float]) -> str:
    if after is None or (test := analysis.paired(after, grpo)).n < 2:
        return "-"
    reach = float(stats.t.ppf(0.95, test.n - 1)) * test.error
    allowed = min(0.01, 0.1 * grpo.mean())
    verdict = (
        " harm" if test.mean + reach < 0 else " no harm" if test.mean - reach > -allowed else ""
    )
    verdict *= test.n > 2
    return f"{cells.difference(test)} ({test.n}){verdict}"


def _draw(found: pd.DataFrame) -> Any:
    """Draw each arm's final accuracy as a share of GRPO's, over the accuracy at the start."""
    from study.figures import LOOKS, new_figure

    figure, ((axes,),) = new_figure(1, 1, height=4.6)
    axes.axhline(1, color="black", linewidth=1)
    wide = found.pivot_table(index=["start", "seed"], columns="arm", values="after")
    begun = 100 * found[found.arm == "point"].groupby("start").before.mean()
    shown = {
        "dbb": ("the paper's dbb", "dbb"),
        "point-not-divided": ("Dr.GRPO", "laplace"),
        "batch-mean": ("--method reinforce", "ema"),
        "dbb-not-divided-centred": ("--method centered", "auto"),
    }
    for place, (arm, (label, look)) in enumerate(shown.items()):
        share = (wide[arm] / wide["point"]).groupby("start")
        beside = begun * 1.04 ** (place - 1)  # so that the bars of arms do not hide each other
        axes.errorbar(beside, share.mean(), 2 * share.sem(), label=label, capsize=3, **LOOKS[look])
    axes.set(
        xscale="log",
        xlabel="right responses before training, %",
        ylabel="final accuracy / GRPO's",
        ylim=(0, None),
    )
    axes.set_xticks(begun, [f"{value:.2g}" for value in begun])
    axes.minorticks_off()
    axes.legend()
    return figure


def _bernoulli(mean_P: Floats) -> Estimate:
    return Estimate(mean_P, mean_P * (1 - mean_P))


def add_command(commands: Any) -> None:
    """Declare ``python -m study rare``."""
    parser = commands.add_parser(
        "rare", help="GRPO and history from starts of 0.3 to 60 %% right responses"
    )
    parser.set_defaults(command=_command)
    parser.add_argument(
        "--output", type=Path, default=Path("rare-runs"), metavar="DIR", help="folder (%(default)s)"
    )
    parser.add_argument(
        "--n", type=int, default=8, choices=(1, 2, 4, 8), help="rollouts a prompt (%(default)s)"
    )
    parser.add_argument("--seeds", default="1,2,3,4,5", metavar="K,...", help="%(default)s")
    parser.add_argument(
        "--arms", default="point,dbb", metavar="NAME,...", help=f"of {', '.join(ARMS)}"
    )
    parser.add_argument(
        "--starts", default=",".join(map(str, STARTS)), metavar="W,...", help="%(default)s"
    )


def _command(arguments: argparse.Namespace) -> int:
    seeds, starts = (
        [int(text) for text in value.split(",")] for value in (arguments.seeds, arguments.starts)
    )
    run(arguments.output, arguments.n, seeds, arguments.arms.split(","), starts)
    return 0
