"""The study's tables by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from openrlhf_dbb.evaluation.formats import p_value
from openrlhf_dbb.evaluation.statistics import ALPHA, POWER
from study import analysis, explanations, fewer
from study.analysis import BASELINE
from study.cells import (
    ARROW,
    PLUS_MINUS,
    Table,
    count,
    difference,
    markdown,
    number,
    percent,
    plain_difference,
    rollouts_needed,
    tested,
    with_error,
)
from study.data import ARMS, EXPERIMENTS, Study, is_pilot
from study.verdict import REPEATED, repeated_title, verdict

OUTCOMES = {
    "accuracy": "final accuracy",
    "mean_accuracy": "accuracy, mean over evaluations",
    "reward_last": "training reward, last epoch",
    "exact": "exact accuracy (not preregistered)",
}
"""Outcomes of the contrasts, and their printed names."""


def build(study: Study) -> dict[str, str]:
    """All tables that the study has data for, as Markdown by name; ``verdict`` is a bulleted list.

    Raises:
        UsageError: scipy is not installed.
    """
    found = {name: markdown(table) for name, table in sections(study).items()}
    lines = verdict(study)
    return ({"verdict": "\n".join(f"- {line}" for line in lines)} if lines else {}) | found


def sections(study: Study) -> dict[str, Table]:
    """All tables that the study has data for, by name, in order."""
    return {name: table for name, make in _makers().items() if (table := make(study)).rows}


def _makers() -> dict[str, Callable[[Study], Table]]:
    made: dict[str, Callable[[Study], Table]] = {
        f"arms-{name}": partial(_arms, experiment=name) for name in EXPERIMENTS
    }
    made |= {f"contrasts-{name}": partial(_contrasts, experiment=name) for name in EXPERIMENTS}
    made |= {f"repeated-{name}": partial(_contrasts, experiment=name, seeds=seeds) for name, seeds in REPEATED.items()}
    made["efficiency"] = _efficiency
    made |= {f"mechanism-{name}": partial(_mechanism, experiment=name) for name in ("n2", "n8")}
    made |= fewer.makers()
    made |= {"control": explanations.control, "masked": explanations.masked}
    return made | {"gradients": _gradients, "mse": _errors, "pilot": _pilot, "cost": _cost}


def _arms(study: Study, experiment: str) -> Table:
    study = analysis.compared(study, experiment)
    arms = study.arms(experiment)
    tests = analysis.against_baseline(study, experiment, arms)
    rows = []
    for arm in arms:
        values = list(study.outcome(experiment, arm, "accuracy").values())
        mean, pairs, against = percent(*analysis.mean_and_error(values)), len(values), ["-"] * 9
        if arm in tests:
            test, corrected = tests[arm]
            pairs = test.n
            against = tested(test, p_value(corrected)) + _secondary(study, experiment, arm, BASELINE)
        rows.append([ARMS[arm], count(len(values), pairs), mean, *against])
    first, second = "dr_grpo-dbb", "dr_grpo"
    if {first, second} <= set(arms):
        test = analysis.compare(study, experiment, first, second)
        against = tested(test, "-") + _secondary(study, experiment, first, second)
        rows.append([f"{ARMS[first]} - {ARMS[second]}", str(test.n), "", *against])
    header = (
        "arm", "n", "Acc@8 %", "vs. GRPO", "95 % interval", "p", "p (Holm)", "detectable",
        "Best@8", "OOD", "reward", "mean over evaluations",
    )  # fmt: skip
    note = (
        "n: seeds (pairs in brackets where they are fewer; seeds that GRPO alone has are left out); mean "
        f"{PLUS_MINUS} standard error over seeds. All columns from the fourth on are about the difference to GRPO in "
        "percentage points, paired by seed. p: two-sided paired t-test on final Acc@8; Holm over the arms compared "
        f"with GRPO. Detectable: the true difference that gives p < {ALPHA:g} with probability {POWER:g}. Reward: "
        "training, last epoch. Mean over evaluations: of held-out Acc@8, during and after training."
    )
    return Table(f"{EXPERIMENTS[experiment]}: every arm against GRPO", header, rows, note)


def _secondary(study: Study, experiment: str, arm: str, baseline: str) -> list[str]:
    outcomes = ("best", "ood", "reward_last", "mean_accuracy")
    return [difference(analysis.compare(study, experiment, arm, baseline, name)) for name in outcomes]


def _contrasts(study: Study, experiment: str, seeds: range | None = None) -> Table:
    title = f"{EXPERIMENTS[experiment]}: the contrasts of the protocol"
    if seeds is not None:
        study, title = study.of_seeds(seeds), repeated_title(experiment)
    rows = []
    primary, secondary = ("primary", "secondary") if experiment == "n2" else ("first two", "others")
    for name, label in OUTCOMES.items():
        for pair, (test, corrected) in analysis.contrasts(study, experiment, name).items():
            family = primary if pair in analysis.PRIMARY else secondary
            contrast = f"{ARMS[pair[0]]} - {ARMS[pair[1]]}"
            rows.append([label, contrast, family, str(test.n), *tested(test, p_value(corrected))])
    header = ("outcome", "contrast", "family", "n", "difference", "95 % interval", "p", "p (Holm)", "detectable")
    note = (
        f"Percentage points, mean {PLUS_MINUS} standard error over n paired seeds; two-sided paired t-tests, Holm "
        "within each family and outcome."
    )
    return Table(title, header, rows, note)


def _efficiency(study: Study) -> Table:
    rows = []
    targets = {name: study.outcome(analysis.TARGET, BASELINE, name) for name in ("accuracy", "exact")}
    for experiment in ("n2", "long-n2", "n4", "n8"):
        for arm in study.arms(experiment):
            found = analysis.efficiency(study, experiment, arm)
            if found is None:
                continue
            row = [EXPERIMENTS[experiment], ARMS[arm], str(found.n), *rollouts_needed(found)]
            final = [
                difference(analysis.paired(study.outcome(experiment, arm, name), target))
                for name, target in targets.items()
            ]
            rows.append([*row, *final])
    header = (
        "experiment", "arm", "n", "share of rollouts", "95 % interval", "final vs. target", "exact vs. target",
    )  # fmt: skip
    note = (
        "Share of rollouts: where the arm's mean curve (linear between evaluations) first reaches GRPO's mean final "
        "accuracy at N = 8, over where GRPO's own mean curve does; paired seeds, bootstrap over them. Final vs. "
        f"target: accuracy in percentage points, mean {PLUS_MINUS} standard error; exact: of the saved policies."
    )
    return Table("Rollouts needed for the final accuracy of GRPO at N = 8", header, rows, note)


def _mechanism(study: Study, experiment: str) -> Table:
    columns = (
        ("zero_variance", 100, 1), ("rescued", 100, 1), ("clip_fraction", 100, 2), ("grad_norm", 1, 3),
        ("entropy", 1, 3), ("length", 1, 2),
    )  # fmt: skip
    rows = []
    study = analysis.compared(study, experiment)
    epochs = [row for row in study.epochs if row.experiment == experiment and row.epoch > 0]
    last = max((row.epoch for row in epochs), default=0)
    for arm in ARMS:
        mine = [row for row in epochs if row.arm == arm]
        if mine:
            cells = []
            for name, factor, digits in columns:
                means = (
                    analysis.mean_and_error(
                        [value for row in mine if row.epoch == epoch and not math.isnan(value := getattr(row, name))]
                    )[0]
                    for epoch in (1, last)
                )
                cells.append(f" {ARROW} ".join(number(factor * mean, digits) for mean in means))
            rows.append([ARMS[arm], str(len({row.seed for row in mine})), *cells])
    heads = ("zero variance %", "rescued %", "clipped %", "gradient norm", "entropy", "length")
    header = ("arm", "n", *(f"{head}, epoch 1 {ARROW} {last}" for head in heads))
    note = (
        "Means over the steps of an epoch and over n seeds. Zero variance: rollouts in groups whose rewards are all "
        "equal; rescued: those of them that still got an advantage; both as shares of all rollouts. Length in tokens."
    )
    return Table(f"{EXPERIMENTS[experiment]}: what the arms do in training", header, rows, note)


def _gradients(study: Study) -> Table:
    rows = []
    for n in study.rollouts_of_gradients():
        for name, found in analysis.alignments(study, n).items():
            against = "-" if name == "point" else plain_difference(found.minus_point)
            cosine = with_error(f"{found.cosine:.3f}", found.error, 3)
            more = f"{found.cosine_normalised:.3f}", number(found.mse, 4)
            rows.append([str(n), name, str(found.n), cosine, against, *more])
    header = ("N", "estimator", "n", "cosine", "vs. point", "cosine (normalised)", "MSE")
    note = (
        f"n: batches of all seeds, draws averaged first; mean {PLUS_MINUS} standard error over batches, differences "
        "paired by batch. Cosine: with the gradient of the expected reward; normalised: with the gradient of the "
        "objective divided by the exact standard deviation."
    )
    return Table("Gradients at a frozen policy", header, rows, note)


def _errors(study: Study) -> Table:
    rows = []
    for n in study.rollouts_of_errors():
        for name, curve in analysis.errors(study, n).items():
            chosen = [analysis.best(curve)]
            if name == "dbb" and 0.5 in curve and chosen[0].discount != 0.5:
                chosen.append(curve[0.5])
            for entry in chosen:
                where = "-" if math.isnan(entry.discount) else f"{entry.discount:g}"
                fixed = " (fixed)" if entry is not chosen[0] else ""
                relative = "-" if name == "point" else f"{100 * (entry.ratio - 1):+.1f} %"
                rows.append([str(n), name + fixed, str(entry.n), where, f"{entry.mse:.5f}", relative])
    header = ("N", "estimator", "n", "discount", "MSE", "relative to point")
    note = (
        "n: runs with probes, means over them. The discount is each family's best in hindsight; for dbb the fixed 0.5 "
        "follows if it is not the best."
    )
    return Table("Error of the estimated success probabilities, at the best discount", header, rows, note)


def _pilot(study: Study) -> Table:
    rows = []
    pilots = [run for run in study.runs if is_pilot(run) and not math.isnan(run.accuracy)]
    for experiment in sorted({run.experiment for run in pilots}):
        runs = [run for run in pilots if run.experiment == experiment]
        found = {
            rate: [run.accuracy for run in runs if run.learning_rate == rate]
            for rate in sorted({run.learning_rate for run in runs})
        }
        chosen = max(found, key=lambda rate: float(np.mean(found[rate])))
        for rate, values in found.items():
            mark = "chosen" if rate == chosen else ""
            mean = percent(*analysis.mean_and_error(values))
            rows.append([str(runs[0].n), f"{rate:g}", str(len(values)), mean, mark])
    header = ("N", "learning rate", "n", "Acc@8 %", "")
    return Table("Learning rates, GRPO alone", header, rows, "n: seeds; chosen: the best mean.")


def _cost(study: Study) -> Table:
    rows = []
    for experiment in dict.fromkeys(run.experiment for run in study.runs):
        runs = [run for run in study.runs if run.experiment == experiment]
        seconds = [run.seconds for run in runs if not math.isnan(run.seconds)]
        median = f"{np.median(seconds):.0f}" if seconds else "-"
        totals = [f"{np.nansum([getattr(run, name) for run in runs]):,.0f}" for name in ("rollouts", "trained")]
        rows.append([experiment, str(len(runs)), median, *totals])
    header = ("experiment", "runs", "seconds per run (median)", "rollouts", "trained on")
    return Table("Cost", header, rows)
