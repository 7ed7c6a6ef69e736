"""The protocol ``rival``: tables and figure from rows with known numbers, and the memory with other prompts' texts."""

import itertools

import numpy as np
import pandas as pd
import pytest

from openrlhf_dbb.core.posteriors import Posteriors
from study import __main__ as command
from study import other_texts, rival
from study.rows import COLUMNS, write

SEEDS = range(21, 31)
ENDS = {"even8": 0.20, "learns": 0.30, "own-counts": 0.20, "two-stage": 0.30}
"""Held-out values at the end, the mean over an arm's seeds; all runs begin with 0.10."""
SECONDS = {"even8": 10.0, "learns": 9.0, "own-counts": 10.0, "two-stage": 15.0}
"""Seconds of a run, times its seed."""


def write_rows(folder, runs):
    """Rows of these (arm, seed). Even seeds end 0.02 above their arm's mean, odd ones 0.02 below it."""
    made = {"runs": [], "epochs": [], "forced": []}
    for arm, seed in runs:
        own = {"run": f"rival-{arm}-s{seed}", "experiment": "rival", "arm": arm, "seed": seed}
        made["runs"].append(
            own | {"steps": 24, "accuracy": ENDS[arm] + 0.1, "seconds": SECONDS[arm] * seed}
        )
        for epoch, equal in enumerate((0.9, 0.8, 0.7), 1):
            made["epochs"].append(own | {"epoch": epoch, "zero_variance": equal})
        end = ENDS[arm] + (0.02 if seed % 2 == 0 else -0.02)
        for step, heldout in ((0, 0.10), (12, (0.10 + end) / 2), (24, end)):
            values = {"step": step, "rollouts": 64 * step, "heldout": heldout, "pool": end / 10}
            made["forced"].append(own | values)
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_name in made.items():
        write(folder / f"{name}.csv", pd.DataFrame(of_name).reindex(columns=list(COLUMNS[name])))


def every_run():
    return list(itertools.product(rival.ARMS, SEEDS))


def test_the_tables_of_known_rows_and_the_figure(tmp_path):
    write_rows(tmp_path, every_run())
    arms, mean, end, whole = rival.report(tmp_path, tmp_path, "rival")
    by_arm = {row[0]: dict(zip(arms.header, row, strict=True)) for row in arms.rows}
    learns = by_arm[rival.ARMS["learns"]]
    # Ten runs, each 2 points from their mean: deviation 2 sqrt(10 / 9), divided by sqrt(10).
    assert learns["at the end %"] == "30.00 \u00b1 0.67"
    # A straight line from 10 % to its end: the mean is half-way, its error a half.
    assert learns["mean over the run %"] == "20.00 \u00b1 0.33"
    # A third of the way from 10 to 30 %, its error a third.
    assert learns["after a third of the rollouts %"] == "16.67 \u00b1 0.22"
    assert learns["seconds / GRPO's, mean over seeds"] == "0.90"
    assert learns["whole range, at the end %"] == "3.00 \u00b1 0.07"
    assert learns["sampled at the end %"] == "40.00 \u00b1 0.00"
    assert learns["mixed groups %, by thirds"] == "10, 20, 30"
    assert (learns["seeds"], learns["steps"]) == ("10", "24")
    for table, gain in ((mean, 5.0), (end, 10.0), (whole, 1.0)):
        tests = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        differences = [test["difference"].split()[0] for test in tests]
        rise = f"+{gain:.2f}"
        assert differences == [rise, "+0.00", rise, rise, "+0.00"]
        corrected = [test["p (Holm)"] for test in tests]
        assert corrected == ["<0.0001", "1.0000", "<0.0001", "", ""]
    # The error of a difference is 2 sqrt(10 / 9) sqrt(2 / 10) = 0.9428; t(36 degrees) = 2.0281.
    assert dict(zip(end.header, end.rows[0], strict=True))["95 % interval"] == "+8.09 to +11.91"
    # Nine of GRPO's runs, without one that ends 2 points below the mean 20: (200 - 18) / 9 = 20.22.
    lowest = [
        dict(zip(end.header, row, strict=True))["without GRPO's lowest run"] for row in end.rows
    ]
    assert lowest == ["+9.78", "-0.22", "+9.78", "", ""]
    assert (tmp_path / "rival.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_before_the_last_run_is_measured(tmp_path, monkeypatch, capsys):
    for name in ("RESULTS", "TABLES", "FIGURES"):
        monkeypatch.setattr(command, name, tmp_path)
    asked = []
    monkeypatch.setattr(rival, "report", lambda *given: asked.append(given) or [])
    folder = tmp_path / "rival"
    command._draw_rival()
    assert "0 of 40" in capsys.readouterr().out
    write_rows(folder, every_run())
    forced = pd.read_csv(folder / "forced.csv")
    write(folder / "forced.csv", forced[:-1])  # the last policy of the last run is missing
    command._draw_rival()
    assert "39 of 40" in capsys.readouterr().out
    assert not asked
    write(folder / "forced.csv", forced)
    command._draw_rival()
    assert asked == [(folder, tmp_path, "rival")]
    assert "rival-half: 0 of 40" in capsys.readouterr().out


@pytest.fixture
def pool(monkeypatch):
    """Features of four texts, of which the first two are alike, as those of sums with equally many digits are."""
    features_P_D = np.zeros((4, 129))
    features_P_D[[0, 1], 0] = 1
    features_P_D[2, 1] = 1
    features_P_D[3, 2] = 1
    monkeypatch.setattr(other_texts, "pool_features", lambda: features_P_D)
    return features_P_D


def test_texts_are_permuted_among_the_prompts_and_counts_are_not(pool):
    memory = other_texts.OtherTexts()
    state = memory.initial_state(4) | {"features": pool}
    assert sorted(state["text"]) == [0, 1, 2, 3]
    seen = other_texts._with_other_texts(state)
    np.testing.assert_array_equal(seen["features"], pool[state["text"].astype(int)])
    memory.observe_at(state, np.array([2]), [[1.0, 1.0, 0.0]])
    assert state["successes_1"].tolist() == [0, 0, 2, 0]
    assert state["rollouts_1"].tolist() == [0, 0, 3, 0]


def test_a_prompt_keeps_its_other_text_after_a_visit_and_a_resume(pool, tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    prompts = [f"{number} + 1 =" for number in range(4)]
    labels = ["1", "2", "3", "4"]
    estimator = "study.other_texts:OwnCounts"
    with Posteriors.create(url, "run", prompts, labels, estimator=estimator) as made:
        first = made._state["text"].copy()
        made.observe(1, [prompts[2]] * 4, [labels[2]] * 4, [1.0, 1.0, 0.0, 0.0])
        np.testing.assert_array_equal(made._state["text"], first)
    with Posteriors.resume(url, "run", prompts, labels) as resumed:
        np.testing.assert_array_equal(resumed._state["text"], first)
        assert resumed._state["successes_1"].tolist() == [0, 0, 2, 0]


def test_a_kind_of_text_tells_nothing_of_its_prompts_that_were_not_visited():
    """Every second kind of the pool's texts succeeds always, the others never; half of the prompts are visited."""
    memory = other_texts.OtherTexts()
    features_P_D = other_texts.pool_features()
    kinds = np.unique(features_P_D, axis=0, return_inverse=True)[1].ravel()
    right_P = (kinds % 2).astype(float)
    state = memory.initial_state(len(kinds)) | {"features": features_P_D}
    order = np.random.default_rng(1).permutation(len(kinds))
    seen, unseen = np.split(order, [len(order) // 2])
    for rows in np.array_split(seen, 16):
        memory.observe_at(state, rows, np.repeat(right_P[rows, None], 4, axis=1))
    state["forecasts"] = np.where(np.arange(9) == 3, 0.0, -1e3)  # one that reads texts
    alpha, beta = memory.predictive(state)
    told = np.corrcoef((alpha / (alpha + beta))[unseen], right_P[unseen])[0, 1]
    assert abs(told) < 0.2
