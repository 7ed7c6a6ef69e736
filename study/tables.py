"""The study's tables, as Markdown by name, and the document that contains them between markers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.statistics import ALPHA, POWER, holm
from openrlhf_dbb.evaluation.formats import p_value, points
from study import analysis
from study.analysis import BASELINE, Paired
from study.data import ARMS, EXPERIMENTS, Error, Gradient, Study, is_pilot

OUTCOMES = {
    "accuracy": "final accuracy",
    "mean_accuracy": "accuracy, mean over evaluations",
    "reward_last": "training reward, last epoch",
    "exact": "exact accuracy (not preregistered)",
}
"""Outcomes of the contrasts, and how they are printed."""
REPEATED = {"long-n2": range(4, 9)}
"""Experiments whose last seeds were added when the first had been looked at, and these seeds, tested by themselves."""
_PLUS_MINUS, _ARROW = "\N{PLUS-MINUS SIGN}", "\N{RIGHTWARDS ARROW}"
_MARK = re.compile(r"(<!-- table ([\w-]+) -->\n)((?:(?!<!-- ).)*)(<!-- end -->)?", re.DOTALL)


class Table(NamedTuple):
    """A table under a title, with what its columns mean below; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def build(study: Study) -> dict[str, str]:
    """All tables that the study has data for, as Markdown by name; ``verdict`` is a list.

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
    from study import explanations  # which is written with what is here

    made: dict[str, Callable[[Study], Table]] = {
        f"arms-{name}": partial(_arms, experiment=name) for name in EXPERIMENTS
    }
    made |= {f"contrasts-{name}": partial(_contrasts, experiment=name) for name in EXPERIMENTS}
    made |= {f"repeated-{name}": partial(_contrasts, experiment=name, seeds=seeds) for name, seeds in REPEATED.items()}
    made["efficiency"] = _efficiency
    made |= {f"mechanism-{name}": partial(_mechanism, experiment=name) for name in ("n2", "n8")}
    made |= {"control": explanations.control, "masked": explanations.masked}
    return made | {"gradients": _gradients, "mse": _errors, "pilot": _pilot, "cost": _cost}


def markdown(table: Table) -> str:
    """Title, table and note."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{table.title}**", "", *lines, *(["", table.note] if table.note else [])])


def fill(path: Path, tables: dict[str, str]) -> bool:
    """Put the tables into a document: what stands between ``<!-- table NAME -->`` and ``<!-- end -->`` is replaced.

    A table that there are no data for becomes "Not measured."

    Returns:
        Whether the document changed.

    Raises:
        UsageError: a marker names no table, or has no end.
    """
    known = ["verdict", *_makers()]

    def replaced(mark: re.Match[str]) -> str:
        start, name, _, end = mark.groups()
        if name not in known:
            raise UsageError(f"{path}: no table is named {name!r}; tables are {', '.join(known)}")
        if end is None:
            raise UsageError(f"{path}: <!-- table {name} --> has no <!-- end -->; put one below the table")
        return f"{start}\n{tables.get(name, 'Not measured.')}\n\n{end}"

    before = path.read_text(encoding="utf-8")
    after = _MARK.sub(replaced, before)
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def difference(test: Paired) -> str:
    """Mean and standard error in percentage points; "-" without a pair."""
    if not test.n:
        return "-"
    return points(test.mean) + ("" if math.isnan(test.error) else f" {_PLUS_MINUS} {100 * test.error:.2f}")


def verdict(study: Study) -> list[str]:
    """What the study found, a line for each main comparison, with its n."""
    lines = [*_verdict_accuracy(study)]
    for n in _rollouts(study.gradients):
        found = analysis.alignments(study, n)
        if "dbb_0.5" in found and found["dbb_0.5"].less_point.n:
            test = found["dbb_0.5"].less_point
            lines.append(
                f"Gradients at a frozen policy, N = {n}: cosine {found['point'].cosine:.3f} with point, "
                f"{found['dbb_0.5'].cosine:.3f} with DBB 0.5 "
                f"({test.mean:+.3f}{_error(test.error)}, n = {test.n} batches)."
            )
    for n in _rollouts(study.mse):
        if "dbb" in (curves := analysis.errors(study, n)):
            least = analysis.best(curves["dbb"])
            lines.append(
                f"MSE of the estimates, N = {n}: DBB at its best discount {least.discount:g} has {least.ratio:.2f} "
                f"times that of point (n = {_runs(least.n)} with probes)."
            )
    return lines


def _verdict_accuracy(study: Study) -> Iterator[str]:
    added = {name: study.of_seeds(seeds) for name, seeds in REPEATED.items()}
    parts = [(study, experiment, title) for experiment, title in EXPERIMENTS.items()]
    parts += [(part, name, _repeated(name, REPEATED[name])) for name, part in added.items()]
    for part, experiment, title in parts:
        looked = part is study and experiment in added and added[experiment].arms(experiment)
        note = "; p does not allow for the look before seeds were added" if looked else ""
        for (arm, baseline), (test, corrected) in analysis.contrasts(part, experiment, "accuracy").items():
            if (arm, baseline) not in analysis.PRIMARY:
                continue
            found = f"{difference(test)} points ({_tested(test, corrected)}{note})"
            yield f"{title}: {ARMS[arm]} less {ARMS[baseline]} {found}."


def _repeated(experiment: str, seeds: range) -> str:
    return f"{EXPERIMENTS[experiment]}, seeds {seeds[0]} to {seeds[-1]} alone"


def _tested(test: Paired, corrected: float) -> str:
    if math.isnan(corrected):
        return f"n = {test.n}: no test"
    found = f"n = {test.n}, 95 % interval {interval(test)}, p (Holm) {p_value(corrected)}"
    if corrected < ALPHA:
        return f"{found}: {'better' if test.mean > 0 else 'worse'}"
    detectable = "" if math.isnan(test.detectable) else f" (detectable: {100 * test.detectable:.2f})"
    return f"{found}: no difference shown{detectable}"


def _arms(study: Study, experiment: str) -> Table:
    study = analysis.compared(study, experiment)
    arms = study.arms(experiment)
    tests = {arm: analysis.compare(study, experiment, arm, BASELINE) for arm in arms if arm != BASELINE}
    corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    rows = []
    for arm in arms:
        values = study.outcome(experiment, arm, "accuracy")
        mean, error = analysis.mean_and_error(list(values.values()))
        row = [ARMS[arm], _count(len(values), tests[arm].n if arm in tests else len(values)), percent(mean, error)]
        if arm in tests:
            row += _against(study, experiment, arm, BASELINE, p_value(corrected[arm]))
        else:
            row += ["-"] * 9
        rows.append(row)
    if {"dr_grpo", "dr_grpo-dbb"} <= set(arms):
        pairs = analysis.compare(study, experiment, "dr_grpo-dbb", "dr_grpo").n
        label = f"{ARMS['dr_grpo-dbb']} less {ARMS['dr_grpo']}"
        rows.append([label, str(pairs), "", *_against(study, experiment, "dr_grpo-dbb", "dr_grpo", "-")])
    header = (
        "arm", "n", "Acc@8 %", "less GRPO", "95 % interval", "p", "p (Holm)", "detectable",
        "Best@8", "OOD", "reward", "mean over evaluations",
    )  # fmt: skip
    note = (
        "n: seeds (in brackets the pairs, where they are fewer; seeds of GRPO alone are left out); mean "
        f"{_PLUS_MINUS} standard error over seeds. All columns from the fourth on are differences to GRPO in "
        "percentage points, paired by seed. p: two-sided paired t-test on final Acc@8, by Holm over the arms compared "
        f"with GRPO. Detectable: the true difference that gives p < {ALPHA:g} with probability {POWER:g}. Reward: "
        "training, last epoch. Mean over evaluations: of held-out Acc@8, during and after training."
    )
    return Table(f"{EXPERIMENTS[experiment]}: every arm against GRPO", header, rows, note)


def _against(study: Study, experiment: str, arm: str, baseline: str, corrected: str) -> list[str]:
    test = analysis.compare(study, experiment, arm, baseline)
    more = [
        difference(analysis.compare(study, experiment, arm, baseline, name))
        for name in ("best", "ood", "reward_last", "mean_accuracy")
    ]
    return [difference(test), interval(test), p_value(test.p), corrected, _detectable(test), *more]


def _contrasts(study: Study, experiment: str, seeds: range | None = None) -> Table:
    title = f"{EXPERIMENTS[experiment]}: the contrasts of the protocol"
    if seeds is not None:
        study, title = study.of_seeds(seeds), _repeated(experiment, seeds)
    rows = []
    primary, secondary = ("primary", "secondary") if experiment == "n2" else ("first two", "others")
    for name, label in OUTCOMES.items():
        for pair, (test, corrected) in analysis.contrasts(study, experiment, name).items():
            family = primary if pair in analysis.PRIMARY else secondary
            cells = [difference(test), interval(test), p_value(test.p), p_value(corrected), _detectable(test)]
            rows.append([label, f"{ARMS[pair[0]]} less {ARMS[pair[1]]}", family, str(test.n), *cells])
    header = ("outcome", "contrast", "family", "n", "difference", "95 % interval", "p", "p (Holm)", "detectable")
    note = (
        f"Percentage points, mean {_PLUS_MINUS} standard error over n paired seeds; two-sided paired t-tests, by Holm "
        "within a family and outcome."
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
            median, interval = f"not reached ({found.reached} of {found.n})", "-"
            if math.isfinite(found.median):
                median = f"{found.median:,.0f}"
                low, high = (_up_to(value, found.most) for value in (found.low, found.high))
                interval = f"{low} to {high}"
            row = [EXPERIMENTS[experiment], ARMS[arm], str(found.n), f"{found.reached} of {found.n}", median, interval]
            final = [
                difference(analysis.paired(study.outcome(experiment, arm, name), target))
                for name, target in targets.items()
            ]
            rows.append([*row, f"{found.most:,.0f}", *final])
    header = (
        "experiment", "arm", "n", "reached", "rollouts (median)", "95 % interval", "rollouts run", "final less target",
        "exact less target",
    )  # fmt: skip
    note = (
        "First crossing of each seed's accuracy curve (linear between evaluations); the target is the same seed's own "
        "GRPO run at N = 8, which began at the same model. Curves that do not get there count as more than was "
        "run; of an even number of seeds the lower median. Interval: bootstrap over seeds, "
        f"{analysis.DRAWS:,} draws of the median. Final less target: accuracy in percentage points, mean "
        f"{_PLUS_MINUS} standard error; exact: that of the saved policies."
    )
    return Table("Rollouts needed for the final accuracy of GRPO at N = 8", header, rows, note)


def _up_to(value: float, most: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else f"> {most:,.0f}"


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
                cells.append(f" {_ARROW} ".join(_number(factor * mean, digits) for mean in means))
            rows.append([ARMS[arm], str(len({row.seed for row in mine})), *cells])
    heads = ("zero variance %", "rescued %", "clipped %", "gradient norm", "entropy", "length")
    header = ("arm", "n", *(f"{head}, epoch 1 {_ARROW} {last}" for head in heads))
    note = (
        "Means over the steps of an epoch and over n seeds. Zero variance: rollouts in groups that agree wholly; "
        "rescued: those of them that still got an advantage; both as shares of all rollouts. Length in tokens."
    )
    return Table(f"{EXPERIMENTS[experiment]}: what the arms do in training", header, rows, note)


def _gradients(study: Study) -> Table:
    rows = []
    for n in _rollouts(study.gradients):
        for name, found in analysis.alignments(study, n).items():
            less = "-" if name == "point" else _plain_difference(found.less_point)
            cosine = f"{found.cosine:.3f}{_error(found.error)}"
            more = f"{found.cosine_normalised:.3f}", _number(found.mse, 4)
            rows.append([str(n), name, str(found.n), cosine, less, *more])
    header = ("N", "estimator", "n", "cosine", "less point", "cosine (normalised)", "MSE")
    note = (
        f"n: batches of all seeds, draws averaged first; mean {_PLUS_MINUS} standard error over batches, differences "
        "paired by batch. Cosine: with the gradient of the expected reward; normalised: with that of the objective "
        "divided by the exact standard deviation."
    )
    return Table("Gradients at a frozen policy", header, rows, note)


def _errors(study: Study) -> Table:
    rows = []
    for n in _rollouts(study.mse):
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
        "n: runs with probes, means over them. The discount is the best in hindsight of each family; the fixed 0.5 of "
        "dbb stands below it where that is another."
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
    header = ("experiment", "runs", "seconds a run (median)", "rollouts", "trained on")
    return Table("Cost", header, rows)


def _rollouts(rows: Sequence[Gradient] | Sequence[Error]) -> list[int]:
    return sorted({row.n for row in rows})


def _count(seeds: int, pairs: int) -> str:
    return str(seeds) if seeds == pairs else f"{seeds} ({pairs})"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def percent(mean: float, error: float) -> str:
    """Mean and standard error in percent."""
    return "-" if math.isnan(mean) else f"{100 * mean:.2f}" + ("" if math.isnan(error) else _error(100 * error, 2))


def _error(value: float, digits: int = 3) -> str:
    return "" if math.isnan(value) else f" {_PLUS_MINUS} {value:.{digits}f}"


def _plain_difference(test: Paired) -> str:
    return "-" if not test.n else f"{test.mean:+.3f}{_error(test.error)}"


def interval(test: Paired) -> str:
    """In percentage points."""
    return "-" if math.isnan(test.low) else f"{points(test.low)} to {points(test.high)}"


def _detectable(test: Paired) -> str:
    return "-" if math.isnan(test.detectable) else f"{100 * test.detectable:.2f}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
