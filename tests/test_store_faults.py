"""A transaction cut short at any statement, or at its commit, leaves the store as it was."""

import numpy as np
import pytest
from sqlalchemy import event

from storage import ProbeRows


class Killed(Exception):
    """Stands for the end of the process."""


def _probes(ids):
    return ProbeRows(ids[:1], np.array([8]), np.array([2.0]), np.array([2.0]))


def _record_step(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 3)
    fill.step(run, 1, ids, [4, 1, 0])
    rows = fill.rows(run, ids[:2], [2, 2], shared={"clock": np.ones(1)}, probes=_probes(ids))
    return lambda: run.record_step(2, rows)


def _roll_back(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 3)
    fill.step(run, 1, ids[:2], [4, 1])
    fill.step(run, 2, ids, [4, 1, 0], shared={"clock": np.ones(1)}, probes=_probes(ids))
    run.record_evaluation(2, "training", [fill.evaluation(ids, [4, 1, 0])], model="tiny", config={})
    return lambda: run.roll_back(1)


def _warm_start(store, fill, source_store=None):
    source_store = source_store or store
    source = fill.run(source_store, "old")
    fill.step(source, 1, fill.prompts(source_store, 3), [4, 1, 0], shared={"clock": np.ones(1)})
    run = fill.run(store, "new")
    ids = fill.prompts(store, 3)
    return lambda: run.warm_start(source_store, source.record, ids)


def _checkpoint(store, fill):
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, 1), [4])
    return lambda: run.record_checkpoint(1, "tag")


def _evaluate(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    run.record_evaluation(0, "training", [fill.evaluation(ids, [0, 0, 0])], model="tiny", config={})
    rows = [fill.evaluation(ids, [4, 1, 0]), fill.evaluation(ids[:1], [4], "one")]
    return lambda: run.record_evaluation(0, "training", rows, model="other", config={}, generated_total=12)


def _evaluate_without_owner(store, fill):
    run, rows = fill.run(store), [fill.evaluation(fill.prompts(store, 3), [4, 1, 0])]
    return lambda: store.record_evaluation("later", rows, model="tiny", config={}, run=run.record)


def _finish(store, fill):
    run = fill.run(store)
    return run.finish


# The least number of places to be cut at: the statements, and the commit.
@pytest.mark.parametrize(
    ("prepare", "least"),
    [
        (_record_step, 5),
        (_roll_back, 12),
        (_warm_start, 8),
        (_checkpoint, 4),
        (_finish, 4),
        (_evaluate, 6),
        (_evaluate_without_owner, 4),
    ],
)
def test_cut_at_every_statement(store, fill, dump, prepare, least):
    action = prepare(store, fill)
    _cut_everywhere(store, dump, action, least)


@pytest.mark.parametrize(("source", "target"), [("sqlite", "postgresql"), ("postgresql", "sqlite")])
def test_a_warm_start_from_another_database_cut_at_every_statement(open_new, fill, dump, source, target):
    store = open_new(target)
    _cut_everywhere(store, dump, _warm_start(store, fill, open_new(source)), 6)


def _cut_everywhere(store, dump, action, least):
    before = dump(store)
    engine, countdown, armed = store.database.engine, [0], [False]

    def statement(*_):
        if armed[0]:
            countdown[0] -= 1
            if countdown[0] < 0:
                raise Killed

    event.listen(engine, "before_cursor_execute", statement)
    event.listen(engine, "commit", statement)
    cuts = 0
    while True:
        countdown[0], armed[0] = cuts, True
        try:
            action()
            armed[0] = False
            break
        except Killed:
            armed[0] = False
        assert dump(store) == before
        cuts += 1
    assert cuts >= least
    assert dump(store) != before  # it was a change, and after all the cuts it could still be made


def test_a_reader_sees_no_half_step(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 4])
    seen = []
    from storage import open_store

    with open_store(store.url) as reader:

        def look(*_):
            posteriors = reader.query("SELECT DISTINCT alpha, step FROM posteriors")
            history = reader.query("SELECT max(step) FROM posterior_history")
            seen.append(([tuple(row) for row in posteriors], history[0][0]))

        event.listen(store.database.engine, "before_cursor_execute", look)
        rows = fill.rows(run, ids, [4, 4])
        seen.clear()
        run.record_step(2, rows)
        event.remove(store.database.engine, "before_cursor_execute", look)
        assert len(seen) >= 4
        assert set(map(str, seen)) == {str(([(4.5, 1)], 1))}
        look()
        assert seen[-1] == ([(6.25, 2)], 2)


def test_two_owners_writing_at_once_never_collide(url, fill):
    import threading

    from storage import open_store

    with open_store(url) as one, open_store(url) as two:
        ids = fill.prompts(one, 50)
        runs = [fill.run(one, "one"), fill.run(two, "two")]
        errors = []

        def work(run):
            try:
                for step in range(1, 21):
                    fill.step(run, step, ids, np.full(len(ids), step % 5))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert [record.last_step for record in one.runs()] == [20, 20]
        assert runs[0].load(ids).state.tolist() == runs[1].load(ids).state.tolist()
