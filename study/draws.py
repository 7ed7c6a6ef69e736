"""Does it pay to draw prompts by what is known of them? Tables and figure of ``study/protocols/draws.toml``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from openrlhf_dbb.evaluation.metrics import p_value
from study import analysis, figures, rows
from study.cells import PLUS_MINUS, Table, percent, points, tested
from study.rows import Study

TITLE = "Draws by what is known of prompts"
NAME, OUTCOME = "draws", "mean_accuracy"
ARMS = {
    "even8": "even draws, N = 8 (GRPO)",
    "even4": "even draws, N = 4",
    "oracle": "by measured rates alone",
    "oracle-unweighted": "by measured rates alone, no weights",
    "memory": "by the first memory",
    "memory-unweighted": "by the first memory, no weights",
    "learns": "by the memory",
    "warm": "by an earlier memory",
    "rates": "memory, measured rates",
    "learns-unweighted": "by the memory, no weights",
    "rates-unweighted": "memory, measured rates, no weights",
}
"""Printed names of the protocol's arms; the first two draw evenly."""
EVEN = ("even8", "even4")
FIRST_PART = ("oracle", "memory")
SECOND_PART = ("learns", "warm", "rates")
"""Arms that are tested against even draws: Holm over one arm's two in the first part, over the arms in the second."""
FIRST_SEEDS = range(1, 6)
SECOND_SEEDS = range(6, 11)
"""Seeds of the runs of either part. All runs of a part are of nearly the same code."""
STRATA = {
    "both memories from nothing": ("memory", "learns"),
    "measured rates, frozen and as a memory": ("oracle", "rates"),
}
"""Arms of the first and of the second part that are tested together, each against GRPO of its own part."""
PILOTS = "rate"  # the experiment of other learning rates
UNWEIGHTED = (("learns-unweighted", "learns"), ("rates-unweighted", "rates"))
DRAWN = ("even8", "even4", "learns", "warm", "rates")
"""Arms of the figure."""
SHARE_OF_GAIN = 0.9
_NUMBER = re.compile(r"\d+")


def report(folder: Path, drawn: Path) -> list[Table]:
    """Return the tables of the rows in a folder, and draw ``draws.png`` into another one."""
    study = rows.load(folder)
    seeds = set(study.runs.seed[study.runs.experiment == PILOTS])
    pilots, study = study.of_seeds(seeds), study.of_seeds(set(study.runs.seed) - seeds)
    for frame in (
        study.runs,
        study.epochs,
    ):  # the arms without weights came as an experiment of their own
        frame.experiment = NAME
    first = study.of_seeds(set(FIRST_SEEDS))
    second = study.of_seeds(set(SECOND_SEEDS))
    by_arm = [[(arm, even) for even in EVEN] for arm in FIRST_PART]
    by_even = [[(arm, even) for arm in SECOND_PART] for even in EVEN]
    tables = [
        _gate(study.gate),
        _arms(study),
        _tests("The tests of the first part", first, by_arm),
        _tests("The tests of the second part", study, by_even),
        _tests("The last evaluation", study, by_even, "accuracy", "last evaluation"),
        _together(study, first, second),
        _equal_seconds(second),
        _tests("Without weights", study, [[pair] for pair in UNWEIGHTED]),
        _pilots(pilots),
    ]
    if set(DRAWN) <= set(study.runs.arm):  # before, single seeds would look like a result
        _curves(study).savefig(drawn / "draws.png", dpi=150)
        print(drawn / "draws.png")
    return tables


def lift(successes_P: Any, samples: int) -> float:
    """Return E[v^2] / E[v]^2 over prompts, v = p (1 - p), from ``samples`` >= 4 rollouts of each.

    Both moments are unbiased: the chance that two rollouts without replacement are right and wrong estimates v, that
    four are right, right, wrong and wrong estimates v^2.

    Example:
        >>> lift(np.array([4, 0, 0, 0]), 8) > lift(np.array([4, 4, 4, 4]), 8)
        True
    """
    right, wrong = successes_P, samples - successes_P
    v_P = right * wrong / (samples * (samples - 1))
    falling = samples * (samples - 1) * (samples - 2) * (samples - 3)
    squares_P = right * (right - 1) * wrong * (wrong - 1) / falling
    return float(squares_P.mean() / v_P.mean() ** 2)


def _gate(gate: Any) -> Table:
    """Return success by terms and digits before training, and what decides whether the arms are run."""
    numbers = gate.prompt.map(_NUMBER.findall)
    cells = gate.assign(
        terms=numbers.map(len), digits=numbers.map(lambda found: max(map(len, found)))
    )
    cells["mixed"] = (cells.successes > 0) & (cells.successes < cells.samples)
    means = cells.groupby(["digits", "terms"]).agg(
        prompts=("run", "size"),
        right=("successes", "sum"),
        asked=("samples", "sum"),
        mixed=("mixed", "mean"),
    )
    made = [
        [
            str(digits),
            str(terms),
            f"{row.prompts:.0f}",
            f"{100 * row.right / row.asked:.1f}",
            f"{100 * row.mixed:.0f}",
        ]
        for (digits, terms), row in means.iterrows()
    ]
    samples = int(gate.samples.max())
    every = [
        f"{100 * cells.successes.sum() / cells.samples.sum():.1f}",
        f"{100 * cells.mixed.mean():.1f}",
    ]
    made.append(["all", "", str(len(cells)), *every])
    note = (
        f"Lift of draws in proportion to p (1 - p): {lift(gate.successes.to_numpy(), samples):.1f}."
    )
    return Table(
        f"The gate: {samples} samples of each prompt",
        ("digits", "terms", "prompts", "right %", "mixed %"),
        made,
        note,
    )


def _arms(study: Study) -> Table:
    made, even = [], analysis.curves(study.epochs, NAME, EVEN[0])
    for arm, label in ARMS.items():
        runs = study.runs[(study.runs.experiment == NAME) & (study.runs.arm == arm)]
        if not len(runs):
            continue
        epochs = study.epochs[study.epochs.run.isin(runs.run) & (study.epochs.epoch > 0)]
        mixed = 100 * (1 - epochs.zero_variance.groupby(epochs.epoch).mean())
        curve, final = (
            percent(*analysis.mean_and_error(study.outcome(NAME, arm, name)))
            for name in (OUTCOME, "accuracy")
        )
        shares = ", ".join(f"{share:.0f}" for share in mixed)
        needed = "{:.2f} ({:.2f} to {:.2f})".format(
            *share(analysis.curves(study.epochs, NAME, arm), even)
        )
        made.append(
            [label, str(len(runs)), curve, final, shares, needed, f"{runs.seconds.mean():.0f}"]
        )
    header = (
        "arm",
        "seeds",
        "mean of the curve %",
        "last %",
        "mixed groups %, by thirds",
        "share",
        "seconds",
    )
    note = (
        f"Held-out accuracy, mean {PLUS_MINUS} standard error. Share: of the rollouts with which the first arm makes "
        f"{100 * SHARE_OF_GAIN:.0f} % of its gain. Seconds were taken beside other work."
    )
    return Table("The arms", header, made, note)


def _tests(
    title: str,
    study: Study,
    families: Sequence[Sequence[tuple[str, str]]],
    column: str = OUTCOME,
    name: str = "mean of the curve",
) -> Table:
    """Return the tests of pairs of arms in an outcome, with Holm's correction in each family."""

    def outcome(experiment: str, arm: str) -> Any:
        return study.outcome(experiment, arm, column)

    made = []
    for family in families:
        tests = {
            pair: analysis.compare(study, (NAME, pair[0]), (NAME, pair[1]), outcome)
            for pair in family
        }
        done = {pair: test for pair, test in tests.items() if test.n}
        for (first, second), (test, corrected) in analysis.with_holm(done).items():
            made.append(
                [f"{ARMS[first]} - {ARMS[second]}", test.runs, *tested(test, p_value(corrected))]
            )
    header = (name, "n", "difference", "95 % interval", "p", "p (Holm)", "detectable")
    return Table(title, header, made, "Points; unpaired, with the deviation within all arms.")


def _together(study: Study, first: Study, second: Study) -> Table:
    """Return the tests of both parts together: the mean of the two parts' differences to GRPO."""
    made = []
    for column, name in ((OUTCOME, "mean of the curve"), ("accuracy", "last evaluation")):
        arms = [study.outcome(NAME, arm, column) for arm in ARMS]
        for label, (earlier, later) in STRATA.items():
            pairs = [
                (part.outcome(NAME, arm, column), part.outcome(NAME, EVEN[0], column))
                for part, arm in ((first, earlier), (second, later))
            ]
            if any(len(outcomes) == 0 for pair in pairs for outcomes in pair):
                continue
            test = analysis.stratified(pairs, arms)
            *cells, _, visible = tested(test, "")
            made.append([f"{label} - {ARMS[EVEN[0]]}", name, test.runs, *cells, visible])
    header = ("arms", "outcome", "n", "difference", "95 % interval", "p", "detectable")
    note = "The mean of two differences, each within one part, that is within nearly the same code."
    return Table("Both parts together", header, made, note)


def _equal_seconds(second: Study) -> Table:
    """Return the second part's differences to GRPO when a run has taken as many seconds as GRPO's."""
    seconds = second.runs.groupby("arm").seconds.mean()
    made = []
    for arm in SECOND_PART:
        if not {arm, EVEN[0]} <= set(seconds.index):
            continue
        ratio = seconds[arm] / seconds[EVEN[0]]
        rollouts_E, accuracy_E = _mean_curve(second, arm)
        even_rollouts_E, even_accuracy_E = _mean_curve(second, EVEN[0])
        in_time_E = np.interp(even_rollouts_E / ratio, rollouts_E, accuracy_E)
        gain_E = (in_time_E - even_accuracy_E)[1:]  # the first is before training
        made.append([ARMS[arm], f"{ratio:.2f}", points(gain_E.mean()), points(gain_E[-1])])
    header = ("arm", "seconds / GRPO's", "mean of the curve", "last")
    note = "Points; the arms' mean curves, interpolated. Seconds were taken beside other work."
    return Table("At equal seconds, second part", header, made, note)


def _mean_curve(study: Study, arm: str) -> tuple[Any, Any]:
    """Return the rollouts and the mean accuracy over seeds of an arm's evaluations, (E,) each."""
    curves = analysis.curves(study.epochs, NAME, arm)
    rollouts_E, accuracy_E = np.mean(list(curves.values()), axis=0)
    return rollouts_E, accuracy_E


def _pilots(pilots: Study) -> Table:
    curve = pilots.epochs[pilots.epochs.epoch > 0].groupby("run").accuracy.mean()
    ordered = pilots.runs.sort_values(["arm", "learning_rate"]).itertuples()
    made = [
        [
            ARMS[r.arm],
            f"{r.learning_rate:g}",
            f"{100 * curve[r.run]:.1f}",
            f"{100 * r.accuracy:.1f}",
        ]
        for r in ordered
    ]
    return Table(
        "Other learning rates, a seed each", ("arm", "rate", "mean of the curve %", "last %"), made
    )


def share(arm: analysis.Curves, even: analysis.Curves) -> tuple[float, float, float]:
    """Return the rollouts to 90 % of the gain of even draws over theirs, with a 95 % bootstrap interval over both arms.

    The curves are means over seeds, which the two arms need not share; infinite if the arm does not get there.
    """
    start = np.mean([accuracy_E[0] for _, accuracy_E in [*arm.values(), *even.values()]])
    random = np.random.default_rng(0)

    def found(arm: Any, even: Any) -> Any:
        """Return the shares of mean curves, (..., 2, E) each."""
        level = start + SHARE_OF_GAIN * (even[..., 1, -1] - start)
        needed, needed_even = (
            analysis.rollouts_needed(of[..., 0, :], of[..., 1, :], level) for of in (arm, even)
        )
        return needed / needed_even

    every = [np.array(list(curves.values())) for curves in (arm, even)]  # (R, 2, E)
    means_B = [
        [curves[random.integers(0, len(curves), len(curves))].mean(axis=0) for curves in every]
        for _ in range(analysis.DRAWS)
    ]
    shares_B = found(*map(np.array, zip(*means_B, strict=True)))
    low, high = np.nanquantile(shares_B, [0.025, 0.975], method="inverted_cdf")
    return float(found(*(curves.mean(axis=0) for curves in every))), float(low), float(high)


def _curves(study: Study) -> Any:
    figure, ((axes,),) = figures.new_figure(1, 1, height=5.2)
    looks = [
        figures.LOOKS["point"],
        figures._MORE[0],
        figures.LOOKS["dbb"],
        figures._MORE[4],
        figures._MORE[1],
    ]
    for look, arm in zip(looks, DRAWN, strict=True):
        runs = analysis.curves(study.epochs, NAME, arm)
        accuracy = pd.concat(
            [pd.Series(100 * accuracy_E, rollouts_E) for rollouts_E, accuracy_E in runs.values()]
        )
        mean = accuracy.groupby(level=0).mean()
        axes.plot(mean.index, mean, label=f"{ARMS[arm]}, n = {len(runs)}", **look)
    axes.set_ylabel("right held-out answers, %")
    axes.set_xlabel("rollouts")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=1, handlelength=3
    )
    return figure
