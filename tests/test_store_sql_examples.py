"""The SQL of examples/sql on both databases, and the views it reads."""

import re
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import inspect

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/api/storage.md"
FILES = sorted((ROOT / "examples/sql").glob("*.sql"))

# Posterior means of the latest run; see _fill.
P0_1 = 3.125 / 7.25
P0_2 = 5.5625 / 7.625
P3_2 = 4.25 / 6.5


def _variance(mean):
    return mean * (1 - mean)


def _fill(store, fill):
    """Two runs, discount 0.5, prior (1, 1), groups of 4; returns the ids of prompts 0 to 3."""
    p0, p1, p2, p3 = ids = [int(i) for i in fill.prompts(store, 4)]
    first = fill.run(store, "first")
    fill.step(first, 1, [p0, p1], [4, 1])  # p0 (4.5, 0.5); p1 (1.5, 3.5)
    fill.step(first, 2, [p0, p2], [4, 0])  # p0 (6.25, 0.25); p2 (0.5, 4.5)
    first.finish()
    second = fill.run(store, "second", method="dapo")
    second.warm_start(store, first.record, store.register_prompts(
        ["prompt 0", "prompt 1", "prompt 3"], ["0", "1", "3"]))  # fmt: skip
    # p0 (3.125, 4.125); p3 (4.5, 0.5); probes: 2 of 5, 1 of 1, which alone says nothing of its noise
    fill.step(
        second, 1, [p0, p3], [0, 4], shared={"discount": np.array([0.5])}, probes=fill.probes([p0, p3], [5, 1], [2, 1]),
    )  # fmt: skip
    # p0 (5.5625, 2.0625); p3 (4.25, 2.25); of p0, generated twice, a group is filtered out and the other worth nothing
    usage = fill.usage(
        [p0, p3], [4, 2], generated=12, generated_tokens=120, informative=4, rescued=0
    )
    kept = fill.rollouts([p0, p3], [4, 1])  # the second response to p3 is wrong
    probes = fill.probes([p0, p3], [5, 5], [3, 5])
    lags = {"policy_version": np.array([0.0, 1.0])}  # p0 is one step late
    fill.step(second, 2, [p0, p3], [4, 2], kept=kept, probes=probes, usage=usage, **lags)
    return ids


def _expected(p0, p1, p2, p3):
    first_p0 = 6.25 / 6.5
    return {
        "01_learning_curve": [(1, 2, 0.5, (P0_1 + 0.9) / 2), (2, 2, 0.75, (P0_2 + P3_2) / 2)],
        "02_hardest_prompts": [(p1, 0.3, 0, "prompt 1"), (p3, P3_2, 2, "prompt 3"), (p0, P0_2, 2, "prompt 0")],
        "03_zero_variance_groups": [(1, 2, 2, (_variance(P0_1) + 0.09) / 2), (2, 2, 1, _variance(P0_2))],
        "04_most_informative_prompts": [
            (p3, _variance(P3_2), P3_2, 2, "prompt 3"), (p1, 0.21, 0.3, 0, "prompt 1"),
            (p0, _variance(P0_2), P0_2, 2, "prompt 0"),
        ],
        "05_learnt_prompts": [(p0, P0_1, P0_2, P0_2 - P0_1, "prompt 0")],
        "06_forgotten_prompts": [(p3, 0.9, P3_2, 0.9 - P3_2, "prompt 3")],
        "07_prediction_error": [(2, 2, ((P0_1 - 1) ** 2 + (0.9 - 0.5) ** 2) / 2)],
        "08_evidence": [(0, 1, 5.0, 5.0, 5.0), (2, 2, 7.0625, 6.5, 7.625)],
        "09_compare_runs": [(p0, first_p0, P0_2, P0_2 - first_p0, "prompt 0"), (p1, 0.3, 0.3, 0.0, "prompt 1")],
        "10_runs_and_coverage": [
            ("first", "finished", 2, 3, 0, 4, None), ("second", "running", 2, 3, 1, 4, "first"),
        ],
        # noise of a probe: 0.4 * 0.6 / 4, 0.6 * 0.4 / 4, and 1 * 0 / 4
        "11_error_against_probes": [
            (1, 1, (P0_1 - 0.4) ** 2 - 0.06), (2, 2, ((P0_2 - 0.6) ** 2 - 0.06 + (P3_2 - 1) ** 2) / 2),
        ],
        "12_run_wide_state": [(1, 0.5, '{"discount": [0.5]}')],
        # "first": 1 of 4 groups is mixed; "second": none at step 1, at step 2 8 of 12 rollouts of 2 prompts
        "13_cost_per_mixed_group": [("first", None, 16, 1, 16, 160), ("second", "dapo", 20, 4 / 3, 15, 150)],
        "14_success_rate_over_rollouts": [(2, 8, 0.5), (2, 20, 0.75)],
        "15_long_wrong_responses": [(2, p3, 0, -0.5, 10, 0, "prompt 3", "3", "answer 1")],
        "16_lag": [(1, 8, 0, 0.0, 0.0), (2, 8, 4, 0.5, 1.0)],
        "17_why_an_advantage": [
            (2, prompt, sample, None, reward, mean, _variance(mean), 0.5, 1, 1, reward - 0.5, reward - 0.5)
            for prompt, mean, rewards in sorted([(p0, P0_2, (1, 1)), (p3, P3_2, (1, 0))])
            for sample, reward in enumerate(rewards)
        ],
    }  # fmt: skip


def _plain(rows):
    """Rows with numbers only as float, since PostgreSQL sums integers to decimals."""
    return [
        tuple(
            value if value is None or isinstance(value, str) else pytest.approx(float(value))
            for value in row
        )
        for row in rows
    ]


def test_every_query_gives_the_rows_worked_out_by_hand(store, fill):
    expected = _expected(*_fill(store, fill))
    assert [path.stem for path in FILES] == list(expected)
    for path in FILES:
        rows = store.query(path.read_text(encoding="ascii"))
        assert _plain(rows) == expected[path.stem], path.stem


def test_the_views_hold_the_columns_that_the_documents_name(store):
    inspector = inspect(store.database.engine)
    documented = re.findall(
        r"^\| `(\w+)` \| ([\w, ]+) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert {view for view, *_ in documented} == set(inspector.get_view_names())
    for view, key, columns in documented:
        found = {column["name"] for column in inspector.get_columns(view)}
        named = {name for name in f"{key}, {columns}".split(", ") if name.isidentifier()}
        # Of these two it names some
        assert named < found if view in ("runs", "steps") else named == found, view
        assert "writer_token" not in found
