"""The study's tables, by name."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from openrlhf_dbb.evaluation.metrics import p_value
from study import analysis, fewer
from study.analysis import ALPHA, BASELINE, FIXED, PAIRED, POWER
from study.cells import PLUS_MINUS, Table, difference, interval, needed, percent, tested
from study.rows import ARMS, EXPERIMENTS, TASKS, THINNED, Study

OUTCOMES = {
    "accuracy": "final accuracy",
    "mean_accuracy": "accuracy, mean over evaluations",
    "reward_last": "training reward, last epoch",
    "exact": "exact accuracy (not preregistered)",
}
"""Outcomes of the contrasts, and their printed names."""
REPEATED = {"long-n2": range(4, 9), "pairs": range(2, 6), "real": range(4, 6)}
"""Experiments to which seeds were added after a look at the first ones. The added seeds are also tested alone."""

TESTED = {
    True: "paired by seed; p of two-sided t-tests",
    False: "not paired, with the deviation within all arms (n: runs of both arms); p of two-sided t-tests",
}
"""How arms are compared, by whether their seeds are pairs."""
HERE = ("real", "real-here")
"""An experiment, and the one that repeats its GRPO on the machine of these arms."""
HERE_ARMS = ("dbb", "auto", "single", "single-text", "spo", "max_rl", "max_rl-auto", "dapo")

ACROSS = (
    (
        "GRPO, pairs: two rollouts of many prompts - eight of a quarter",
        ("many", BASELINE),
        ("pairs", BASELINE),
    ),
    ("DAPO at its best rate - GRPO", ("real-tuned", "dapo"), ("real", BASELINE)),
    ("GRPO, the second machine - the first", ("real-here", BASELINE), ("real", BASELINE)),
)
"""Differences between experiments: a label, and experiment and arm of both sides."""


def tables(study: Study) -> dict[str, Table]:
    """Return all tables that the study has data for, by name, in order."""
    made = {f"arms-{name}": _arms(study, name) for name in EXPERIMENTS}
    made |= {
        f"contrasts-{name}": _contrasts(study, name, EXPERIMENTS[name]) for name in EXPERIMENTS
    }
    for name, seeds in REPEATED.items():
        title = f"{EXPERIMENTS[name]}, seeds {seeds[0]} to {seeds[-1]} alone"
        made[f"repeated-{name}"] = _contrasts(study.of_seeds(seeds), name, title)
    made |= fewer.tables(study)
    made |= {
        "control": _control(study),
        "estimates": _estimates(study),
        "estimates-tested": _estimates_tested(study),
    }
    made |= {"transfer": _transfer(study), "across": _across(study)}
    made |= {"seconds": _seconds(study), "power": _power(study)}
    made |= {"thinning": _thinning(study), "steps": _steps(study), "pilot": _pilot(study)}
    return {name: table for name, table in made.items() if table.rows}


def _arms(study: Study, experiment: str) -> Table:
    study = analysis.compared(study, experiment)
    arms = study.arms(experiment)
    tests, on_the_way = (
        analysis.against_baseline(study, experiment, arms, name)
        for name in ("accuracy", "mean_accuracy")
    )
    target = analysis.curves(study.epochs, experiment, BASELINE)
    rows = []
    for arm in arms:
        values = study.outcome(experiment, arm, "accuracy")
        count, cells = str(len(values)), ["-"] * 12
        if arm in tests:
            test, corrected = tests[arm]
            count = (
                f"{count} ({test.n})" if test.n < len(values) and experiment in PAIRED else count
            )
            cells = tested(test, p_value(corrected)) + _secondary(study, experiment, arm, BASELINE)
            mine = analysis.curves(study.epochs, experiment, arm)
            share = (
                analysis.share_needed(mine, target) if test.n > 1 and experiment in PAIRED else None
            )
            cells += [p_value(on_the_way[arm][1]), *needed(share)]
        rows.append([ARMS[arm], count, percent(*analysis.mean_and_error(values)), *cells])
    first, second = "dr_grpo-dbb", "dr_grpo"
    if {first, second} <= set(arms):
        outcome = partial(study.outcome, name="accuracy")
        test = analysis.compare(study, (experiment, first), (experiment, second), outcome)
        cells = [*tested(test, "-"), *_secondary(study, experiment, first, second), *["-"] * 3]
        rows.append([f"{ARMS[first]} - {ARMS[second]}", test.runs, "", *cells])
    header = (
        "arm", "n", "Acc@8 %", "vs. GRPO", "95 % interval", "p", "p (Holm)", "detectable",
        "Best@8", "OOD", "reward", "mean over evaluations", "p (Holm)", "rollouts needed", "95 % interval",
    )  # fmt: skip
    note = (
        "n: seeds (pairs in brackets where they are fewer; seeds that GRPO alone has are left out); mean "
        f"{PLUS_MINUS} standard error over seeds. From the fourth column on: the difference to GRPO in percentage "
        f"points, {TESTED[experiment in PAIRED]}, Holm over the arms compared with GRPO, for each outcome. "
        f"Detectable: the true difference that gives p < {ALPHA:g} with probability {POWER:g}. Reward: training, last "
        "epoch, which is a smaller part of the run at N = 1. Mean over evaluations: of held-out Acc@8, during and "
        "after training. Rollouts needed: where the arm's mean curve first reaches GRPO's mean final accuracy, over "
        "where GRPO's does; bootstrap over pairs."
    )
    return Table(f"{EXPERIMENTS[experiment]}: every arm against GRPO", header, rows, note)


def _secondary(study: Study, experiment: str, arm: str, baseline: str) -> list[str]:
    outcomes = ("best", "ood", "reward_last", "mean_accuracy")
    sides = (experiment, arm), (experiment, baseline)
    return [
        difference(analysis.compare(study, *sides, partial(study.outcome, name=name)))
        for name in outcomes
    ]


def _contrasts(study: Study, experiment: str, title: str) -> Table:
    rows = []
    primary, secondary = ("primary", "secondary") if experiment == "n2" else ("first two", "others")
    for name, label in OUTCOMES.items():
        for pair, (test, corrected) in analysis.contrasts(study, experiment, name).items():
            family = primary if pair in analysis.PRIMARY else secondary
            contrast = f"{ARMS[pair[0]]} - {ARMS[pair[1]]}"
            rows.append([label, contrast, family, test.runs, *tested(test, p_value(corrected))])
    header = (
        "outcome",
        "contrast",
        "family",
        "n",
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
        "detectable",
    )
    note = (
        f"Percentage points, mean {PLUS_MINUS} standard error, {TESTED[experiment in PAIRED]}, Holm within each "
        "family and outcome."
    )
    return Table(f"{title}: the contrasts of the protocol", header, rows, note)


def _control(study: Study) -> Table:
    rows = []
    for experiment, title in EXPERIMENTS.items():
        mine = study.control[study.control.experiment == experiment]
        accuracy = {arm: mine[mine.arm == arm].set_index("seed").accuracy for arm in ARMS}
        for arm, values in accuracy.items():
            if values.empty:
                continue
            ends = mine.ends_at_once[mine.arm == arm].max()
            test = analysis.paired(values, accuracy[BASELINE])
            cells = (
                ["-"] * 3
                if arm == BASELINE
                else [difference(test), interval(test), p_value(test.p)]
            )
            mean = percent(*analysis.mean_and_error(values))
            rows.append([title, ARMS[arm], str(len(values)), mean, *cells, f"{100 * ends:.2g}"])
    header = (
        "experiment",
        "arm",
        "n",
        "exact %",
        "vs. GRPO",
        "95 % interval",
        "p",
        "ends at once, most %",
    )
    note = (
        "Plain PyTorch in float32, exact held-out accuracy; differences in percentage points, paired by seed; p "
        "uncorrected. Ends at once: probability that the trained policy's first token is the end token, on the seed "
        "where it is largest."
    )
    return Table("The control: the same training without the pipeline", header, rows, note)


def _estimates(study: Study) -> Table:
    rows = []
    for (task, n), part in analysis.by_task(study).groupby(["task", "n"], sort=False):
        means = (
            part.groupby(["estimator", "discount"], dropna=False)[["ratio"]].mean().reset_index()
        )
        cells = [TASKS[task], str(n), str(part.run.nunique()), f"{part.mse_point.mean():.4f}"]
        for name in analysis.FAMILIES[1:]:
            best = means.loc[means.ratio[means.estimator == name].idxmin()]
            cells.append(
                f"{best.ratio:.2f}" + ("" if math.isnan(best.discount) else f" ({best.discount:g})")
            )
        fixed = means.ratio[(means.estimator == "dbb") & (means.discount == FIXED)].item()
        rows.append([*cells, f"{fixed:.2f}"])
    header = ("task", "N", "n", "MSE of point", *analysis.FAMILIES[1:], f"dbb {FIXED:g}")
    note = "n: runs, means over them. MSE divided by point's; in brackets the discount, the best in hindsight."
    return Table("SmolLM2: error of the estimates against probes", header, rows, note)


def _estimates_tested(study: Study) -> Table:
    rows = []
    for (n, name), (test, corrected) in analysis.errors_tested(study).items():
        ratio, low, high = (f"{math.exp(x):.2f}" for x in (test.mean, test.low, test.high))
        rows.append(
            [
                str(n),
                name,
                str(test.n),
                ratio,
                f"{low} to {high}",
                p_value(test.p),
                p_value(corrected),
            ]
        )
    header = ("N", "estimator", "n", "MSE / point's", "95 % interval", "p", "p (Holm)")
    note = "n: tasks, means of two runs each; geometric mean. Two-sided t-tests of the logarithm, Holm over the rows."
    return Table(
        "SmolLM2: do dbb and auto estimate better than the group's mean?", header, rows, note
    )


def _transfer(study: Study) -> Table:
    """Tabulate trained models on other tasks: dbb minus GRPO with the same seed."""
    found = study.transfer.pivot_table(index="run", columns="benchmark", values="accuracy")
    rows = []
    for experiment, baseline in (("pairs", "pairs"), HERE):
        seeds = (study.outcome(*key, "run") for key in ((experiment, "dbb"), (baseline, BASELINE)))
        dbb, grpo = (
            found.reindex(runs).set_axis(runs.index).dropna(axis=1, how="all") for runs in seeds
        )
        start = found.reindex(["start"])[grpo.columns]
        for part in (dbb, grpo, start):
            part["mean"] = part.mean(axis=1, skipna=False)
        for name in grpo if len(grpo.columns) > 1 else []:
            first, second = dbb[name].dropna(), grpo[name].dropna()
            test = analysis.unpaired(first, second, (first, second))
            means = percent(start[name].item(), math.nan), percent(*analysis.mean_and_error(second))
            rows.append(
                [EXPERIMENTS[experiment], name, test.runs, *means, difference(test), interval(test)]
            )
    header = (
        "trained on",
        "task",
        "n",
        "before training %",
        "GRPO %",
        "dbb vs. GRPO",
        "95 % interval",
    )
    return Table(
        "SmolLM2: trained models on other tasks",
        header,
        rows,
        f"Percentage points, {TESTED[False]}.",
    )


def _seconds(study: Study) -> Table:
    """Compare arms with GRPO at equal seconds, in the experiments whose runs one machine made."""
    rows = []
    for (experiment, baseline), compared in ((HERE, HERE_ARMS), (("many", "many"), tuple(ARMS))):
        grpo, of_grpo = (baseline, BASELINE), study.outcome(baseline, BASELINE, "seconds")
        arms = {
            arm: (experiment, arm)
            for arm in study.arms(experiment)
            if arm in compared and arm != BASELINE
        }
        found = {arm: analysis.at_equal_seconds(study, key, grpo) for arm, key in arms.items()}
        found = {arm: both for arm, both in found.items() if len(both[0]) > 1}
        runs = [*(first for first, _ in found.values()), study.outcome(*grpo, "accuracy")]
        tests = {
            arm: analysis.unpaired(first, second, runs) for arm, (first, second) in found.items()
        }
        for arm, (test, corrected) in analysis.with_holm(tests).items():
            final = analysis.compare(
                study, arms[arm], grpo, partial(study.outcome, name="accuracy")
            )
            ratio = (study.outcome(*arms[arm], "seconds") / of_grpo).mean()
            cells = [f"{ratio:.2f}", difference(final), *tested(test, p_value(corrected))[:4]]
            rows.append([EXPERIMENTS[experiment], ARMS[arm], test.runs, *cells])
    header = (
        "experiment",
        "arm",
        "n",
        "seconds",
        "vs. GRPO",
        "at equal seconds",
        "95 % interval",
        "p",
        "p (Holm)",
    )
    note = (
        f"Seconds: divided by GRPO's. Differences in percentage points, {TESTED[False]}. At equal seconds: where the "
        "faster run of a seed ends, accuracy interpolated between evaluations. Holm over the arms of an experiment. "
        "Two runs at a time, one on each core."
    )
    return Table("SmolLM2: arms against GRPO of the same machine", header, rows, note)


def _across(study: Study) -> Table:
    """Compare arms of different experiments."""
    rows = []
    for label, first, second in ACROSS:
        test = analysis.compare(study, first, second, partial(study.outcome, name="accuracy"))
        if test.n:
            rows.append([label, test.runs, difference(test), interval(test), p_value(test.p)])
    header = ("", "n", "difference", "95 % interval", "p")
    return Table(
        "SmolLM2: differences across experiments",
        header,
        rows,
        f"Percentage points, {TESTED[False]}.",
    )


def _power(study: Study) -> Table:
    """Tabulate the differences that tests of unpaired experiments can show, and what a perfect memory could give."""
    rows = []
    for experiment, title in EXPERIMENTS.items():
        runs = list(analysis.curves(study.epochs, experiment, BASELINE).values())
        if experiment in PAIRED or not runs:
            continue
        arms = analysis.outcomes(study, [experiment], partial(study.outcome, name="accuracy"))
        deviation, degrees = analysis.pooled(arms)
        tests = ((3, degrees), (5, degrees), (3, 2), (5, 4))
        shown = [analysis.detectable(deviation * math.sqrt(2 / n), of_test) for n, of_test in tests]
        rollouts_E, accuracy_E = np.mean(runs, axis=0)
        n = study.runs.n[study.runs.experiment == experiment].max()
        late = accuracy_E[-1] - np.interp((1 - 1 / n) * rollouts_E[-1], rollouts_E, accuracy_E)
        rows.append(
            [title, str(n), *(f"{100 * x:.1f}" for x in (deviation, *shown, late)), str(degrees)]
        )
    header = (
        "experiment",
        "N",
        "deviation",
        "n = 3",
        "n = 5",
        "3 pairs",
        "5 pairs",
        "last 1/N",
        "degrees of freedom",
    )
    note = (
        "Points. Deviation: within arms, of final accuracy. n: the difference that a test of two arms with n seeds "
        f"shows with probability {POWER:g}. Last 1/N: what GRPO gained with the last 1/N of its rollouts."
    )
    return Table("SmolLM2: what the tests can show", header, rows, note)


def _thinning(study: Study) -> Table:
    """Compare ``dbb`` with and without the rollouts that have small advantages."""
    rows = []
    for arm, c in THINNED.items():
        for name, title in (
            ("exact", "exact accuracy"),
            ("mean_reward", "training reward, all epochs"),
        ):
            test = analysis.compare(
                study, ("thin", arm), ("thin", "dbb"), partial(study.outcome, name=name)
            )
            if test.n:
                rows.append(
                    [c, title, str(test.n), difference(test), interval(test), p_value(test.p)]
                )
    header = ("C", "outcome", "n", "thinned - all", "95 % interval", "p")
    note = f"Percentage points, {TESTED[True]}. Only the exact accuracy with C = 1 was fixed before the runs."
    return Table("dbb with --train.thin C, N = 8", header, rows, note)


def _steps(study: Study) -> Table:
    """Tabulate by experiment and arm what the training logged and how long it took."""
    rows = []
    for experiment, title in EXPERIMENTS.items():
        for arm in study.arms(experiment):
            shares = [
                study.outcome(experiment, arm, f"mean_{name}")
                for name in ("zero_variance", "clip_fraction")
            ]
            shares.append(study.outcome(experiment, arm, "reward_last"))
            seconds = study.outcome(experiment, arm, "seconds")
            timed = f"{seconds.median():.0f}" if len(seconds) else "-"
            count = len(study.outcome(experiment, arm, "accuracy"))
            cells = [percent(float(share.mean()), math.nan) for share in shares]
            rows.append([title, ARMS[arm], str(count), *cells, timed])
    header = (
        "experiment", "arm", "n", "groups with equal rewards %", "clipped tokens %", "reward, last epoch %", "seconds",
    )  # fmt: skip
    note = (
        "n: seeds. The first two shares are means over all steps. Seconds: median of the runs, which were made beside "
        "others and not all on one machine."
    )
    return Table("What the runs logged", header, rows, note)


def _pilot(study: Study) -> Table:
    """Learning rates, by experiment and arm."""
    rows = []
    pilots = study.runs[study.runs.experiment.str.startswith("pilot")].dropna(subset=["accuracy"])
    for (_, arm), runs in pilots.groupby(["experiment", "arm"]):
        rates = runs.groupby("learning_rate").accuracy
        chosen = rates.mean().idxmax()
        for rate, values in rates:
            cells = [str(runs.n.iloc[0]), ARMS[arm], f"{rate:g}", str(len(values))]
            cells += [percent(*analysis.mean_and_error(values)), "chosen" if rate == chosen else ""]
            rows.append(cells)
    header = ("N", "arm", "learning rate", "n", "accuracy %", "")
    return Table("Learning rates", header, rows, "n: seeds; chosen: the best mean.")
