"""Many rows at once: bulk columns, streamed reads and ids with gaps give what single rows would."""

import numpy as np
import pytest
from sqlalchemy import text

from storage import StepRows
from storage.bulk import insert_columns
from storage.engine import chunks

NAN = np.nan


def test_columns_become_rows_with_null_for_nan(store):
    columns = {
        "run_id": 7,
        "prompt_id": np.array([1, 2, 2**62]),
        "alpha": np.array([0.1 + 0.2, NAN, 5e-324]),
        "state": np.array([[1.0, -2.0], [NAN, NAN], [3.0, 1e300]]),
        "visits": 0,
        "step": np.array([-1, 0, 3]),
    }
    with store.database.transaction(write=True) as connection:
        insert_columns(connection, "dbb_posterior", columns)
    with store.database.transaction() as connection:
        rows = connection.execute(text("SELECT * FROM dbb_posterior ORDER BY prompt_id")).all()
    packed = [np.array([1.0, -2.0], "<f8").tobytes(), np.array([3.0, 1e300], "<f8").tobytes()]
    assert [tuple(row) for row in rows] == [
        (7, 1, 0.30000000000000004, None, packed[0], 0, -1),
        (7, 2, None, None, None, 0, 0),
        (7, 2**62, 5e-324, None, packed[1], 0, 3),
    ]


def test_no_rows_are_no_statement(store):
    with store.database.transaction(write=True) as connection:
        insert_columns(connection, "dbb_probe", {"run_id": 1, "prompt_id": np.empty(0, dtype=np.int64)})
    assert store.query("SELECT count(*) FROM dbb_probe") == [(0,)]


def test_a_result_comes_in_parts(store, fill, monkeypatch):
    monkeypatch.setattr("storage.engine.CHUNK", 3)
    fill.prompts(store, 7)
    query = "SELECT prompt_id FROM dbb_prompt WHERE prompt_id <> :out ORDER BY prompt_id"
    with store.database.transaction() as connection:
        parts = [[row[0] for row in rows] for rows in chunks(connection, query, {"out": 2})]
        # Two at a time on one connection, and one that is left early.
        both = list(zip(*(chunks(connection, query, {"out": out}) for out in (1, 7)), strict=True))
        next(chunks(connection, query, {"out": 2}))
    assert parts == [[1, 3, 4], [5, 6, 7]]
    assert [[row[0] for rows in pair for row in rows] for pair in both] == [[2, 3, 4, 1, 2, 3], [5, 6, 7, 4, 5, 6]]


@pytest.mark.parametrize(
    ("asked", "sql"),
    [
        ([3, 4, 5], "BETWEEN"),
        ([3, 5], "ids"),
        ([], "ids"),
    ],
)
def test_ids_without_gaps_are_a_range(store, fill, asked, sql):
    fill.prompts(store, 6)
    ids = np.array(asked, dtype=np.int64)
    among, parameters = store.database.among("prompt_id", ids)
    assert sql in among
    found = store.query(f"SELECT prompt_id FROM dbb_prompt WHERE {among} ORDER BY prompt_id", **parameters)
    assert [row[0] for row in found] == asked


@pytest.mark.parametrize(
    "asked",
    [
        [5, 1, 1, 9, 3],  # twice, out of order, a range with gaps
        [1, 3, 5, 7, 9],
        [12, 400, 2],  # far apart; 400 does not exist
        [11, 12],  # without posteriors
        [],
    ],
)
def test_any_prompts_load_in_the_order_asked_for(store, fill, monkeypatch, asked):
    monkeypatch.setattr("storage.engine.CHUNK", 2)
    run = fill.run(store, fields=("value", "alpha", "speed"))
    ids = fill.prompts(store, 12)[:10]
    ids = np.sort(ids)
    # The posterior of prompt i is (i, 10 i, 100 i).
    state = np.outer(ids, [1.0, 10.0, 100.0])
    one, before = np.ones(len(ids)), run.load(ids)
    run.record_step(1, StepRows(ids, one.astype(int), one, one, one, state, before.state, before.step))
    table = run.load(np.array(asked, dtype=np.int64))
    known = [i in ids for i in asked]
    expected = [[i, 10.0 * i, 100.0 * i] if there else [NAN] * 3 for i, there in zip(asked, known, strict=True)]
    np.testing.assert_array_equal(table.state, np.array(expected).reshape(-1, 3))
    assert table.visits.tolist() == [int(there) for there in known]
    assert table.step.tolist() == [1 if there else -1 for there in known]


def test_a_warm_start_in_parts_loses_nothing(open_new, kind, fill, monkeypatch):
    source_store, store = open_new("sqlite"), open_new(kind)
    fill.prompts(store, 1)  # so that the same prompts have other ids
    source = fill.run(source_store, "old")
    ids = source_store.register_prompts([f"p{i}" for i in range(20)], [""] * 20)
    fill.step(source, 1, ids, np.arange(20) % 5)
    # Every second one, and five that the source does not know.
    wanted = store.register_prompts([f"p{i}" for i in range(0, 30, 2)], [""] * 15)
    run = fill.run(store, "new")
    monkeypatch.setattr("storage.engine.CHUNK", 3)
    monkeypatch.setattr("storage.warm_start.CHUNK", 4)
    outcome = run.warm_start(source_store, source.record, wanted, weight=0.5)
    assert (outcome.matched, outcome.unmatched) == (10, 5)
    table = run.load(wanted)
    # Prior (1, 1), discount 0.5, S of 4: (0.5 + S, 4.5 - S), then half of it.
    successes = np.arange(0, 20, 2) % 5
    np.testing.assert_array_equal(table.state[:10], np.stack([0.5 + successes, 4.5 - successes], axis=1) / 2)
    assert np.isnan(table.state[10:]).all()


def test_a_warm_start_without_prompts_is_refused(open_new, fill):
    from storage import StoreError

    source_store, store = open_new("sqlite"), open_new("sqlite")
    source = fill.run(source_store, "old")
    fill.step(source, 1, fill.prompts(source_store, 1), [4])
    with pytest.raises(StoreError, match="none of the 0 prompts of run 'new'"):
        fill.run(store, "new").warm_start(source_store, source.record, np.empty(0, dtype=np.int64))


def test_reading_a_whole_run_needs_the_memory_of_a_part(store, fill, monkeypatch):
    import tracemalloc

    monkeypatch.setattr("storage.engine.CHUNK", 500)
    store.register_prompts([f"{i:0100d}" for i in range(20_000)], [""] * 20_000)
    query = "SELECT prompt FROM dbb_prompt ORDER BY prompt_id"
    with store.database.transaction() as connection:
        tracemalloc.start()
        rows = sum(len(part) for part in chunks(connection, query, {}))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # 20,000 texts of 149 bytes are 3 MB; a part is 500 of them and their tuples.
    assert rows == 20_000 and peak < 500_000
