"""Does it pay to draw prompts by what is known of them? Tables and figure of ``study/protocols/draws.toml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from openrlhf_dbb.evaluation.paired_tests import p_value
from study import analysis, figures, rows
from study.cells import PLUS_MINUS, Table, percent, tested
from study.rows import Study

TITLE = "Draws by what is known of prompts"
NAME, OUTCOME = "draws", "mean_accuracy"
ARMS = {
    "even8": "even draws, N = 8 (GRPO)",
    "even4": "even draws, N = 4",
    "oracle": "by measured rates",
    "oracle-unweighted": "by measured rates, no weights",
    "memory": "by the memory",
    "memory-unweighted": "by the memory, no weights",
}
"""Printed names of the protocol's arms; the first two draw evenly."""
COMPARED = (("oracle", "memory"), ("even8", "even4"))
"""Each of the first is tested against each of the second; Holm within one of the first."""
_NUMBER = re.compile(r"\d+")


def report(folder: Path, drawn: Path) -> list[Table]:
    """Return the tables of the rows in a folder, and draw ``draws.png`` into another one."""
    study = rows.load(folder)
    for frame in (study.runs, study.epochs):  # the arms without weights came as an experiment of their own
        frame.experiment = NAME
    tables = [_gate(study.gate), _arms(study), _tests(study)]
    if set(COMPARED[0] + COMPARED[1]) <= set(study.runs.arm):  # before, single seeds would look like a result
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
    cells = gate.assign(terms=numbers.map(len), digits=numbers.map(lambda found: max(map(len, found))))
    cells["mixed"] = (cells.successes > 0) & (cells.successes < cells.samples)
    means = cells.groupby(["digits", "terms"]).agg(
        prompts=("run", "size"), right=("successes", "sum"), asked=("samples", "sum"), mixed=("mixed", "mean")
    )
    made = [
        [str(digits), str(terms), f"{row.prompts:.0f}", f"{100 * row.right / row.asked:.1f}", f"{100 * row.mixed:.0f}"]
        for (digits, terms), row in means.iterrows()
    ]
    samples = int(gate.samples.max())
    every = [f"{100 * cells.successes.sum() / cells.samples.sum():.1f}", f"{100 * cells.mixed.mean():.1f}"]
    made.append(["all", "", str(len(cells)), *every])
    note = f"Lift of draws in proportion to p (1 - p): {lift(gate.successes.to_numpy(), samples):.1f}."
    return Table(
        f"The gate: {samples} samples of each prompt", ("digits", "terms", "prompts", "right %", "mixed %"), made, note
    )


def _arms(study: Study) -> Table:
    made = []
    for arm, label in ARMS.items():
        runs = study.runs[(study.runs.experiment == NAME) & (study.runs.arm == arm)]
        if not len(runs):
            continue
        epochs = study.epochs[study.epochs.run.isin(runs.run) & (study.epochs.epoch > 0)]
        mixed = 100 * (1 - epochs.zero_variance.groupby(epochs.epoch).mean())
        curve, final = (
            percent(*analysis.mean_and_error(study.outcome(NAME, arm, name))) for name in (OUTCOME, "accuracy")
        )
        shares = ", ".join(f"{share:.0f}" for share in mixed)
        made.append([label, str(len(runs)), curve, final, shares, f"{runs.seconds.mean():.0f}"])
    header = ("arm", "seeds", "mean of the curve %", "last %", "mixed groups %, by thirds", "seconds")
    note = f"Held-out accuracy, mean {PLUS_MINUS} standard error. Seconds were taken beside other work."
    return Table("The arms", header, made, note)


def _tests(study: Study) -> Table:
    def outcome(experiment: str, arm: str) -> Any:
        return study.outcome(experiment, arm, OUTCOME)

    made = []
    for first in COMPARED[0]:
        tests = {arm: analysis.compare(study, (NAME, first), (NAME, arm), outcome) for arm in COMPARED[1]}
        for arm, (test, corrected) in analysis.with_holm({key: test for key, test in tests.items() if test.n}).items():
            made.append([f"{ARMS[first]} - {ARMS[arm]}", test.runs, *tested(test, p_value(corrected))])
    header = ("mean of the curve", "n", "difference", "95 % interval", "p", "p (Holm)", "detectable")
    return Table("The tests of the protocol", header, made, "Points; unpaired, with the deviation within all arms.")


def _curves(study: Study) -> Any:
    figure, ((axes,),) = figures.new_figure(1, 1, height=4.6)
    looks = [figures.LOOKS["point"], *figures._MORE[:1], figures.LOOKS["dbb"], figures._MORE[4], figures.LOOKS["auto"]]
    for look, (arm, label) in zip([*looks, figures._MORE[1]], ARMS.items(), strict=True):
        runs = analysis.curves(study.epochs, NAME, arm)
        if runs:
            accuracy = pd.concat([pd.Series(100 * accuracy_E, rollouts_E) for rollouts_E, accuracy_E in runs.values()])
            mean = accuracy.groupby(level=0).mean()
            axes.plot(mean.index, mean, label=f"{label}, n = {len(runs)}", **look)
    axes.set_ylabel("right held-out answers, %")
    axes.set_xlabel("rollouts")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3)
    return figure
