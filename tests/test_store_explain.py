"""Query plans: resume, latest posterior and history of one prompt never scan the history, however long it is."""

from contextlib import contextmanager

import numpy as np
import pytest
from sqlalchemy import text

from storage import read_evaluations, read_usage
from storage.held_out import held_out, held_out_prompts
from storage.inspection import prompt_history

STEPS, BATCH, PROMPTS = 200, 100, 1000


@pytest.fixture
def filled(store, fill):
    """20,000 rows of history; and what the planner knows of them."""
    run, ids = fill.run(store), np.sort(fill.prompts(store, PROMPTS))
    for step in range(1, STEPS + 1):
        fill.step(run, step, ids[(np.arange(BATCH) + step * BATCH) % PROMPTS], np.full(BATCH, step % 5))
    with store.database.transaction(write=True) as connection:
        connection.execute(text("ANALYZE"))
    return store, run, ids


@contextmanager
def plans(store):
    """Collects the accesses to tables that the plans of all statements in the block hold.

    An access is (table or its alias, how: "scan" or the conditions of the look-up).
    """
    accesses, statements = [], []
    with store.database.engine.connect() as connection:
        driver = connection.connection.driver_connection
    if store.database.is_sqlite:
        driver.set_trace_callback(statements.append)  # gets them with their parameters filled in
        yield accesses
        driver.set_trace_callback(None)
        accesses += _sqlite_accesses(driver, filter(_is_planned, statements))
    else:
        _note_statements(driver, statements)
        yield accesses
        accesses += _postgresql_accesses(driver, filter(_is_planned, statements))


def _is_planned(statement):
    return statement.lstrip().startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE"))


def _sqlite_accesses(driver, statements):
    """Of plan lines such as "SEARCH h USING PRIMARY KEY (run_id=? AND step=?)"."""
    for statement in statements:
        for *_, line in driver.execute(f"EXPLAIN QUERY PLAN {statement}"):
            kind, _, rest = line.partition(" ")
            table, _, how = rest.partition(" USING ")
            if kind in ("SCAN", "SEARCH"):
                yield table, "scan" if kind == "SCAN" else how


def _note_statements(driver, statements):
    import psycopg

    def filled_in(query, parameters):
        return psycopg.ClientCursor(driver).mogrify(query, parameters)

    class Cursor(psycopg.Cursor):
        def execute(self, query, params=None, **options):
            statements.append(filled_in(query, params))
            return super().execute(query, params, **options)

    class ServerCursor(psycopg.ServerCursor):
        def execute(self, query, params=None, **options):
            statements.append(filled_in(query, params))
            return super().execute(query, params, **options)

    driver.cursor_factory, driver.server_cursor_factory = Cursor, ServerCursor


def _postgresql_accesses(driver, statements):
    def walk(node):
        if "Relation Name" in node and node["Node Type"] not in ("ModifyTable", "Bitmap Heap Scan"):
            yield node["Relation Name"], node.get("Index Cond", "scan")
        for below in node.get("Plans", []):
            yield from walk(below)

    for statement in list(statements):
        (((plan,),),) = driver.execute(f"EXPLAIN (FORMAT JSON) {statement}").fetchall()
        yield from walk(plan["Plan"])
    driver.rollback()


def of_history(accesses):
    """How the history is accessed; "h" is its alias in the statements here."""
    return [how for table, how in accesses if table in ("dbb_history", "h")]


def test_a_scan_is_recognised(filled):
    store, _, _ = filled
    with plans(store) as accesses:
        store.query("SELECT count(*) FROM posterior_history WHERE successes = 3")
    assert of_history(accesses) == ["scan"]


def test_a_resume_does_not_look_into_the_history(filled):
    store, run, ids = filled
    with plans(store) as accesses:
        run.load(ids)
        run.load(ids[:50])
        run.load_shared()
    assert "dbb_posterior" in dict(accesses)
    assert of_history(accesses) == []


def test_the_latest_posterior_of_one_prompt_is_looked_up_by_keys(filled):
    store, run, ids = filled
    with plans(store) as accesses:
        query = "SELECT * FROM posteriors WHERE run_id = :run AND prompt_id = :prompt"
        (row,) = store.query(query, run=run.record.run_id, prompt=int(ids[7]))
    assert row.visits == STEPS * BATCH // PROMPTS
    (how,) = of_history(accesses)
    assert all(key in how for key in ("run_id", "step", "prompt_id"))
    assert "scan" not in dict(accesses).values()


def test_the_history_of_one_prompt_is_looked_up_by_keys(filled):
    store, run, ids = filled
    with plans(store) as accesses:
        assert len(prompt_history(store, run.record, int(ids[7]))) == STEPS * BATCH // PROMPTS
    assert of_history(accesses)
    for how in of_history(accesses):
        assert all(key in how for key in ("run_id", "step", "prompt_id"))


def of_usage(accesses):
    return [how for table, how in accesses if table == "dbb_usage"]


def test_the_usage_of_a_step_and_of_a_run_are_looked_up_by_their_key(filled, fill):
    store, run, ids = filled
    other = fill.run(store, "other")
    fill.step(other, 1, ids, np.ones(PROMPTS))
    with plans(store) as accesses:
        query = "SELECT * FROM usage WHERE run_id = :run AND step = :step"
        assert len(store.query(query, run=run.record.run_id, step=7)) == BATCH
        assert len(read_usage(store, other.record).step) == PROMPTS
    of_step, of_run = of_usage(accesses)
    assert "run_id" in of_step and "step" in of_step
    assert "run_id" in of_run


def test_a_step_and_a_roll_back_of_the_last_step_read_only_their_rows(filled, fill):
    store, run, ids = filled
    rows = fill.rows(run, ids[:BATCH], np.ones(BATCH))
    with plans(store) as accesses:
        run.record_step(STEPS + 1, rows)
        run.roll_back(STEPS)
    assert len(of_history(accesses)) >= 4 and len(of_usage(accesses)) == 1
    for how in of_history(accesses) + of_usage(accesses):
        assert "run_id" in how and "step" in how


def test_an_evaluation_is_replaced_read_and_undone_by_its_key(filled, fill):
    store, run, ids = filled
    rows = [fill.evaluation(ids, np.zeros(PROMPTS))]
    for step in range(STEPS):
        run.record_evaluation(step, "training", rows[:1], model="tiny", config={})
    other = fill.run(store, "other")
    other.record_evaluation(0, "training", rows, model="tiny", config={})
    with store.database.transaction(write=True) as connection:
        connection.execute(text("ANALYZE"))
    with plans(store) as accesses:
        other.record_evaluation(0, "training", rows, model="tiny", config={})
        assert len(read_evaluations(store, other.record)) == 1
        assert len(store.query("SELECT * FROM evaluations WHERE run_id = :run", run=other.record.run_id)) == 1
        assert held_out(store, other.record).prompts == PROMPTS
        assert len(held_out_prompts(store, other.record, 0)["sums"][0]) == PROMPTS
        run.roll_back(STEPS - 2)
    of_results = [how for table, how in accesses if table in ("dbb_evaluation_result", "r")]
    assert len(of_results) == 6
    for how in of_results:
        assert "evaluation_id" in how
