"""The study's statistics, tables, figures and page, on numbers worked out by hand and on a synthetic study."""

import math
import re

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from study import analysis, cells, files, tables, verdict
from study.data import ARMS, ControlRow, EpochRow, ErrorRow, GradientRow, MaskedRow, RunRow, Study
from study.draw import FOLDER, draw

PROMPTS = 2048


def run(arm, seed, accuracy, *, experiment="n2", n=2, **more):
    """A row of runs.csv; only its accuracy matters."""
    values = {name: math.nan for name in RunRow._fields} | {"rollouts": 4.0 * PROMPTS * n, "trained": 4.0 * PROMPTS * n}
    values |= {"run": f"{experiment}-{arm}-s{seed}", "experiment": experiment, "arm": arm, "n": n, "seed": seed}
    return RunRow(**(values | {"learning_rate": 2e-4, "accuracy": accuracy} | more))


def epoch(arm, seed, number, accuracy, *, experiment="n2", n=2, **more):
    """A row of epochs.csv; only its accuracy and rollouts matter."""
    values = {name: math.nan for name in EpochRow._fields}
    values |= {"run": f"{experiment}-{arm}-s{seed}", "experiment": experiment, "arm": arm, "n": n, "seed": seed}
    values |= {"epoch": number, "rollouts": float(number * PROMPTS * n), "accuracy": accuracy}
    return EpochRow(**(values | more))


def made_up(seeds=8):
    """A whole study: at N = 2, DBB and auto are 1.1 and 1.5 points above GRPO; at N = 8 all arms are about equal."""
    rng = np.random.default_rng(1)
    runs, epochs = [], []
    gain = {"n2": 0.011, "n4": 0.006, "n8": 0.001, "hard": -0.002}
    share = {"dbb": 1.0, "auto": 1.4, "dr_grpo-dbb": 1.0, "grpo-wide": 0.2}
    for experiment, n in (("n2", 2), ("n4", 4), ("n8", 8), ("hard", 2)):
        arms = [arm for arm in ARMS if experiment == "n8" or arm not in ("dapo", "greso", "repo")]
        effect = {seed: rng.normal(0, 0.004) for seed in range(1, seeds + 1)}
        for arm in arms if experiment != "hard" else ("grpo", "dbb", "auto"):
            history = arm in ("laplace", "dbb", "auto", "dr_grpo-dbb")
            for seed in range(1, seeds + 1):
                rate = 1 - np.exp(-0.8 * np.arange(5))
                final = 0.055 + 0.008 * math.log2(n) + gain[experiment] * share.get(arm, 0) + effect[seed]
                accuracy = 0.47 + rate * (final + rng.normal(0, 0.006)) / rate[-1]
                ood = 0.15 + 0.02 * rate + rng.normal(0, 0.01, 5)
                seconds, more = 20 + 5 * n + rng.random(), {"experiment": experiment, "n": n}
                reward = 0.41 + 0.13 * rate[-1] + gain[experiment] * share.get(arm, 0) + rng.normal(0, 0.003)
                outcomes = {"start_accuracy": 0.47, "best": accuracy[-1] + 0.07, "ood": ood[-1], "reward_last": reward}
                runs.append(run(arm, seed, accuracy[-1], start_ood=0.15, seconds=seconds, **outcomes, **more))
                for number in range(5):
                    agree = 0.86 - 0.06 * math.log2(n) + 0.02 * number
                    measured = {
                        "reward": 0.41 + 0.13 * rate[number],
                        "zero_variance": agree,
                        "rescued": (0.9 * agree if arm != "laplace" else agree) * history,
                        "clip_fraction": 0.002 * (arm == "grpo"),
                        "grad_norm": (0.5 + 0.3 * history) * rng.uniform(0.95, 1.05),
                        "entropy": 0.5 - 0.04 * number + rng.normal(0, 0.004),
                        "length": 4.42 + 0.02 * history * number + rng.normal(0, 0.01),
                    }
                    row = {"ood": ood[number]} | (measured if number else {})
                    epochs.append(epoch(arm, seed, number, accuracy[number], **row, **more))
    for rate, accuracy in ((1e-4, 0.52), (2e-4, 0.53), (4e-4, 0.5)):
        for seed in (101, 102):
            place = {"experiment": "pilot-n2", "learning_rate": rate, "run": f"pilot-n2-grpo-lr{rate:g}-s{seed}"}
            runs.append(run("grpo", seed, accuracy + seed / 1e5, **place))
    level = {
        "point": 0.48, "laplace": 0.5, "dbb_0.25": 0.58, "dbb_0.5": 0.6, "dbb_1": 0.59, "auto": 0.61,
        "dr_point": 0.5, "dr_dbb_0.5": 0.62, "dr_auto": 0.62, "exact_sigma": 0.49, "exact": 0.63,
    }  # fmt: skip
    gradients = [
        GradientRow(seed, n, name, batch, draw, *(0.03 * n + value + rng.normal(0, 0.02, 2)), 0.06 / n)
        for n in (2, 4, 8) for seed in (1, 2) for name, value in level.items() for batch in range(5) for draw in (0, 1)
    ]  # fmt: skip
    mse = [
        ErrorRow(f"probe-n{n}-grpo-s{seed}", n, seed, name, discount, least + slope * (discount - at) ** 2, 0.064 / n)
        for n in (2, 8) for seed in (1, 2)
        for name, at, least, slope in (
            ("dbb", 0.4, 0.05 / n, 0.02), ("ema", 0.35, 0.052 / n, 0.02), ("laplace", 0.3, 0.06 / n, 0.02)
        )
        for discount in np.linspace(0, 1, 21).round(2).tolist()
    ]  # fmt: skip
    for n, seed in ((2, 1), (2, 2), (8, 1), (8, 2)):
        for name, value in (("point", 0.064 / n), ("empirical_bayes", 0.059 / n), ("auto", 0.049 / n)):
            mse.append(ErrorRow(f"probe-n{n}-grpo-s{seed}", n, seed, name, math.nan, value, 0.064 / n))
    return Study(tuple(runs), tuple(epochs), tuple(gradients), tuple(mse))


def write(study, folder):
    """The study as CSV files."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"runs": RunRow, "epochs": EpochRow, "gradients": GradientRow, "mse": ErrorRow}
    for name, kind in kinds.items():
        files.write(folder / f"{name}.csv", kind._fields, [row._asdict() for row in getattr(study, name)])


def row_of(markdown, label):
    """The cells of the first row with the label in its first or second cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line[:1] == "|"]
    return next(row for row in rows if label in row[:2])


def test_a_paired_test_by_hand():
    found = analysis.paired({1: 0.51, 2: 0.53, 3: 0.55, 9: 0.9}, {1: 0.50, 2: 0.51, 3: 0.52, 8: 0.1})
    assert found.n == 3  # seeds 8 and 9 are unpaired
    assert found.difference_R == pytest.approx([0.01, 0.02, 0.03])
    assert found.mean == pytest.approx(0.02)
    assert found.error == pytest.approx(0.01 / math.sqrt(3))
    assert found.p == pytest.approx(0.0742, abs=5e-5)  # t = 3.464, 2 degrees of freedom
    # the 97.5 % point of t with 2 degrees of freedom is 4.3027, the 80 % point 1.0607
    assert (found.low, found.high) == pytest.approx((0.02 - 4.3027 * 0.0057735, 0.02 + 4.3027 * 0.0057735), rel=1e-4)
    assert found.detectable == pytest.approx((4.3027 + 1.0607) * 0.0057735, rel=1e-4)


@pytest.mark.parametrize(
    ("differences", "p"),
    [([0.01, 0.01, 0.01], 0.25), ([-0.01, -0.01, -0.01], 0.25), ([0.0, 0.0, 0.0], 1.0)],
)
def test_with_zero_variance_the_sign_flip_test_is_used(differences, p):
    found = analysis.paired(dict(enumerate(differences)), {0: 0.0, 1: 0.0, 2: 0.0})
    assert (found.error, found.p) == (0.0, p)
    assert math.isnan(found.detectable)


def test_with_too_few_seeds_there_is_no_error():
    one, none = analysis.paired({1: 0.6}, {1: 0.5}), analysis.paired({1: 0.6}, {2: 0.5})
    assert (one.n, one.mean, none.n) == (1, pytest.approx(0.1), 0)
    assert all(map(math.isnan, (one.error, one.low, one.p, one.detectable, none.mean, none.p)))
    assert (cells.difference(one), cells.difference(none)) == ("+10.00", "-")


def test_holm_is_within_each_family_of_contrasts():
    accuracy = {
        "grpo": [0.50, 0.50, 0.50],
        "dbb": [0.51, 0.52, 0.53],  # - GRPO 1, 2, 3 points: p 0.0742
        "auto": [0.50, 0.52, 0.53],  # 0, 2, 3 points: mean 5/3, SE 0.8819, t 1.890, p 0.1994
    }
    study = Study(tuple(run(arm, seed, value) for arm, values in accuracy.items() for seed, value in enumerate(values)))
    found = analysis.contrasts(study, "n2", "accuracy")
    assert list(found) == [("dbb", "grpo"), ("auto", "grpo"), ("auto", "dbb")]
    assert found["dbb", "grpo"][0].p == pytest.approx(0.0742, abs=5e-5)
    assert found["dbb", "grpo"][1] == pytest.approx(2 * 0.0742, abs=1e-4)  # the smaller one of two
    assert found["auto", "grpo"][1] == pytest.approx(0.1994, abs=5e-5)
    # auto - DBB: -1, 0, 0 points, t = -1, p 0.4226; the only one of its family
    assert found["auto", "dbb"][1] == found["auto", "dbb"][0].p == pytest.approx(0.4226, abs=5e-5)


def test_the_mean_over_epochs_excludes_the_start():
    study = Study((run("dbb", 1, 0.6),), tuple(epoch("dbb", 1, k, v) for k, v in enumerate([0.1, 0.4, 0.5, 0.5, 0.6])))
    assert study.outcome("n2", "dbb", "mean_accuracy") == {1: pytest.approx(0.5)}


def test_a_run_that_misses_an_evaluation_has_no_mean_over_epochs():
    curves = {"grpo": [0.1, 0.4, 0.6], "dapo": [0.1, math.nan, 0.6]}
    rows = tuple(epoch(arm, 1, k, v) for arm, curve in curves.items() for k, v in enumerate(curve))
    study = Study((run("grpo", 1, 0.6), run("dapo", 1, 0.6)), rows)
    assert study.outcome("n2", "grpo", "mean_accuracy") == {1: pytest.approx(0.5)}
    assert study.outcome("n2", "dapo", "mean_accuracy") == {}


@pytest.mark.parametrize(
    ("target", "rollouts"),
    [(0.525, 5120), (0.52, 4096), (0.45, 0), (0.56, math.inf)],
    # 0.52 at 4096, 0.53 at 6144; at 8192 0.55, the highest
)
def test_rollouts_needed_by_hand(target, rollouts):
    rollouts_E, accuracy_E = np.array([0, 2048, 4096, 6144, 8192.0]), np.array([0.47, 0.5, 0.52, 0.53, 0.55])
    assert analysis.rollouts_needed(rollouts_E, accuracy_E, target) == pytest.approx(rollouts)


def crossing(final, *, seeds=(1, 2)):
    """GRPO at N = 8 rises from 0.46 to 0.54 and 0.56, DBB at N = 2 to ``final`` on every seed, both linearly."""
    epochs = []
    for seed in seeds:
        for epoch_ in range(5):
            target = 0.46 + epoch_ * (0.52 + 0.02 * seed - 0.46) / 4
            epochs.append(epoch("grpo", seed, epoch_, target, experiment="n8"))
            epochs.append(epoch("dbb", seed, epoch_, 0.46 + epoch_ * (final - 0.46) / 4))
    return Study((), tuple(epochs))


def test_the_share_of_rollouts_compares_mean_curves_by_one_rule():
    # GRPO's mean ends at 0.55, nine points up; DBB has risen as much after 9/18 of its rollouts, a quarter of GRPO's
    found = analysis.efficiency(crossing(0.64), "n2", "dbb")
    whole = {arm: max(row.rollouts for row in crossing(0.64).epochs if row.arm == arm) for arm in ("grpo", "dbb")}
    assert found.n == 2
    assert found.share == pytest.approx(0.5 * whole["dbb"] / whole["grpo"])
    # by seed alone: 8/18 and 10/18
    assert (found.low, found.high) == pytest.approx([k / 18 * whole["dbb"] / whole["grpo"] for k in (8, 10)])


def test_a_curve_that_never_gets_there():
    found = analysis.efficiency(crossing(0.54), "n2", "dbb")
    assert found.share == math.inf and found.high == math.inf


def test_draws_of_a_batch_are_averaged_first():
    cosines = {("point", 0): [0.4, 0.6], ("point", 1): [0.7, 0.7], ("dbb_0.5", 0): [0.6, 0.8], ("dbb_0.5", 1): [0.8, 1]}
    rows = [
        GradientRow(1, 2, name, batch, draw, value, value / 2, 0.01)
        for (name, batch), values in cosines.items() for draw, value in enumerate(values)
    ]  # fmt: skip
    found = analysis.alignments(Study(gradients=tuple(rows)), 2)["dbb_0.5"]
    assert (found.n, found.cosine, found.error) == (2, pytest.approx(0.8), pytest.approx(0.1))  # of 0.7 and 0.9
    assert found.cosine_normalised == pytest.approx(0.4)
    assert found.minus_point.difference_R == pytest.approx([0.2, 0.2])


def test_the_best_discount_is_that_of_the_mean_over_runs():
    values = {
        (0.0, 1): 0.02,
        (0.0, 2): 0.04,
        (0.5, 1): 0.03,
        (0.5, 2): 0.01,
    }  # means 0.03, 0.02; point 0.04, 0.02
    rows = [ErrorRow(f"r{s}", 2, s, "dbb", discount, mse, 0.06 - 0.02 * s) for (discount, s), mse in values.items()]
    found = analysis.best(analysis.errors(Study(mse=tuple(rows)), 2)["dbb"])
    assert (found.n, found.discount, found.mse) == (2, 0.5, pytest.approx(0.02))
    assert found.ratio == pytest.approx((0.75 + 0.5) / 2)


def test_a_row_of_the_arms_table_by_hand():
    runs = [run("grpo", s, 0.50, best=0.6, ood=0.2) for s in (1, 2, 3)]
    runs += [run("dbb", s, 0.50 + s / 100, best=0.6 + s / 100, ood=0.2) for s in (1, 2, 3, 4)]
    row = row_of(tables.build(Study(tuple(runs)))["arms-n2"], "DBB 0.5")
    # four runs, of which three are paired; 0.51 to 0.54 has a standard deviation of 1.29 points
    assert row == [
        "DBB 0.5", "4 (3)", "52.50 \u00b1 0.65", "+2.00 \u00b1 0.58", "-0.48 to +4.48", "0.0742", "0.0742", "3.10",
        "+2.00 \u00b1 0.58", "+0.00 \u00b1 0.00", "-", "-",
    ]  # fmt: skip


def test_seeds_that_only_grpo_has_do_not_change_the_means_of_the_tables():
    # At N = 8 they set the target for other experiments; they have their own models, here a much worse one.
    runs = [run("grpo", seed, accuracy, experiment="n8") for seed, accuracy in ((1, 0.5), (2, 0.5), (3, 0.1))]
    runs += [run("dbb", seed, 0.51, experiment="n8") for seed in (1, 2)]
    epochs = [epoch(row.arm, row.seed, 1, 0.0, experiment="n8", length=10.0 * row.seed) for row in runs]
    built = tables.build(Study(tuple(runs), tuple(epochs)))
    assert row_of(built["arms-n8"], "GRPO")[1:3] == ["2", "50.00 ± 0.00"]
    assert row_of(built["mechanism-n8"], "GRPO")[-1] == "15.00 → 15.00"
    alone = Study(tuple(row for row in runs if row.arm == "grpo"))
    assert row_of(tables.build(alone)["arms-n8"], "GRPO")[1:3] == ["3", "36.67 ± 13.33"]


def test_the_learning_rate_with_the_best_mean_is_marked_as_chosen():
    rows = [(1e-4, 1, 0.5), (1e-4, 2, 0.51), (2e-4, 1, 0.49), (2e-4, 2, 0.55)]
    runs = [run("grpo", s, value, experiment="pilot-n2", learning_rate=rate) for rate, s, value in rows]
    made = tables.build(Study(tuple(runs)))["pilot"]
    assert row_of(made, "0.0001") == ["2", "0.0001", "2", "50.50 \u00b1 0.50", ""]
    assert row_of(made, "0.0002") == ["2", "0.0002", "2", "52.00 \u00b1 3.00", "chosen"]


def test_the_verdict_says_better_or_no_difference_shown():
    lines = verdict.verdict(made_up())
    assert re.match(r"N = 2: auto - GRPO \+1\.\d\d ± 0\.\d\d points \(n = 8, .*: better\)", lines[1])
    tie = next(line for line in lines if line.startswith("N = 8: DBB"))
    assert re.search(r"no difference shown \(detectable: \d\.\d\d\)", tie)


def test_seeds_added_later_are_also_tested_alone():
    gains = {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.01, 5: 0.02, 6: 0.03, 7: 0.04, 8: 0.05}
    runs = [run("grpo", seed, 0.4, experiment="long-n2") for seed in gains]
    runs += [run("dbb", seed, 0.4 + gain, experiment="long-n2") for seed, gain in gains.items()]
    study = Study(tuple(runs))
    # 1 to 5 points: mean 3, standard error sqrt(2.5 / 5), t = 4.243 with 4 degrees of freedom
    row = "| final accuracy | DBB 0.5 - GRPO | first two | 5 | +3.00 ± 0.71 | +1.04 to +4.96 | 0.0132 | 0.0132 |"
    assert row in tables.build(study)["repeated-long-n2"]
    before, alone = verdict.verdict(study)
    assert before.startswith("N = 2, 16 passes: DBB 0.5 - GRPO +5.62 ")  # 45 / 8
    assert before.endswith("; p does not allow for the look before seeds were added).")
    assert alone.startswith("N = 2, 16 passes, seeds 4 to 8 alone: DBB 0.5 - GRPO +3.00 ± 0.71 points (n = 5, ")
    first = study.of_seeds((1, 2, 3))
    (line,) = verdict.verdict(first)
    assert "look" not in alone + line
    assert "repeated-long-n2" not in tables.build(first)


def test_tables_and_figures_are_written(tmp_path):
    write(made_up(seeds=3), tmp_path)
    names = {path.name for path in draw(tmp_path, tmp_path)}
    assert names == {"tables.md", "study_differences.png"}  # the test of fewer rollouts needs points.csv
    text = (tmp_path / "tables.md").read_text()
    for name in (
        "verdict",
        "arms-n2",
        "contrasts-n8",
        "efficiency",
        "mechanism-n8",
        "gradients",
        "mse",
        "pilot",
        "cost",
    ):
        assert f"\n## {name}\n" in text


@pytest.mark.parametrize("only", ["runs", "epochs", "gradients", "mse", "one seed", "no baseline"])
def test_whatever_was_not_run_is_left_out(tmp_path, only):
    study = made_up(seeds=1 if only == "one seed" else 2)
    if only == "no baseline":
        study = Study(tuple(row for row in study.runs if row.arm == "dbb"))
    elif only != "one seed":
        study = Study(**{only: getattr(study, only)})
    write(study, tmp_path / "study")
    drawn = {path.stem for path in draw(tmp_path / "study", tmp_path / "study") if path.suffix == ".png"}
    assert drawn == ({"study_differences"} if only in ("runs", "one seed") else set())
    made = tables.build(study)
    assert ("arms-n2" in made) == (only in ("runs", "one seed", "no baseline"))
    assert ("gradients" in made) == (only in ("gradients", "one seed"))
    assert not re.search(r"\bnan\b", "\n".join(made.values()))


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path):
    draw(FOLDER, tmp_path)
    assert (tmp_path / "tables.md").read_text() == (FOLDER / "tables.md").read_text(), "run python -m study.draw"


def test_the_control_is_paired_by_seed_and_shows_the_largest_probability_of_ending_at_once():
    rows = [ControlRow("n2", "grpo", 2, s, 2e-4, 0, 0.4, 0.45, 0.50, 0.001) for s in (1, 2, 3)]
    rows += [ControlRow("n2", "dbb", 2, s, 2e-4, 0, 0.4, 0.45, 0.50 + s / 100, s / 100) for s in (1, 2, 3)]
    text = tables.build(Study(control=tuple(rows)))["control"]
    # Differences 1, 2, 3: mean 2, standard error 0.577, t = 3.464 with 2 degrees of freedom
    row = next(line for line in text.splitlines() if "DBB" in line)
    assert [cell.strip() for cell in row.split("|")[4:-1]] == [
        "3", "52.00 \u00b1 0.58", "+2.00 \u00b1 0.58", "-0.48 to +4.48", "0.0742", "3",
    ]  # fmt: skip


def test_runs_that_may_and_may_not_end_at_once_are_shown_side_by_side():
    rows = (
        MaskedRow("laplace", 1, 1, 0.3433, 0.3093, 0.662),
        MaskedRow("laplace", 1, 0, 0.5344, 0.5390, 0.0002),
        MaskedRow("laplace", 2, 1, 0.3433, 0.3093, 0.662),  # unpaired
    )
    found = tables.build(Study(masked=rows))["masked"]
    assert row_of(found, "Laplace") == ["Laplace", "1", "34.3", "30.9", "66", "53.4", "53.9", "0.02"]
    assert found.count("Laplace") == 1
