"""Warm starts within a database and between databases, and what is refused."""

import numpy as np
import pytest

from openrlhf_dbb.storage import StoreError

PAIRS = [("sqlite", None), ("postgresql", None), ("sqlite", "postgresql"), ("postgresql", "sqlite")]


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1] or 'itself'}")
def two_stores(request, open_new):
    """Source and target store; the same one if the pair names no target."""
    source = open_new(request.param[0])
    return source, open_new(request.param[1]) if request.param[1] else source


def test_shared_prompts_take_over_their_posteriors(two_stores, fill):
    source_store, store = two_stores
    source = fill.run(source_store, "old", dataset="A")
    a, b, _ = source_store.register_prompts(["p", "q", "r"], ["1", "2", "3"])
    fill.step(source, 1, [a, b], [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    fill.step(source, 2, [a], [4])  # (6.25, 0.25)
    run = fill.run(store, "new", dataset="B")
    # Another order and other ids; "q" with another label is another prompt; "r" was never trained on.
    ids = store.register_prompts(["new", "r", "q", "q", "p"], ["0", "3", "other", "2", "1"])
    outcome = run.warm_start(source_store, source.record, ids, weight=0.5)
    assert (outcome.matched, outcome.unmatched) == (2, 3)
    assert outcome.source.name == "old" and outcome.source.last_step == 2
    table = run.load(ids)
    nan = np.nan
    np.testing.assert_array_equal(table.state, [[nan, nan], [nan, nan], [nan, nan], [0.75, 1.75], [3.125, 0.125]])
    assert table.step.tolist() == [-1, -1, -1, 0, 0]
    assert table.visits.tolist() == [0] * 5
    parent = {"name": "old", "uuid": source.record.uuid, "step": 2, "weight": 0.5, "database": source_store.location}
    assert run.record.parent == parent
    assert store.find_run("new").parent == parent
    (event,) = store.query("SELECT kind, detail FROM dbb_event WHERE run_id = :run", run=run.record.run_id)
    assert event.kind == "warm_start" and '"matched": 2, "unmatched": 3' in event.detail
    # the source is as it was
    assert source_store.find_run("old").parent is None
    assert source.load(np.array([a])).state.tolist() == [[6.25, 0.25]]


def test_the_run_wide_state_comes_along_and_a_roll_back_to_the_start_restores_the_warm_start(two_stores, fill):
    source_store, store = two_stores
    source = fill.run(source_store, "old")
    fill.step(source, 1, fill.prompts(source_store, 1), [4], shared={"prior": np.array([0.1 + 0.2, 2.0])})
    fill.step(source, 2, fill.prompts(source_store, 1), [4], shared={"prior": np.array([5e-324, 3.0])})
    run = fill.run(store, "new")
    ids = fill.prompts(store, 2)
    run.warm_start(source_store, source.record, ids)
    assert _plain(run.load_shared()) == {"prior": [5e-324, 3.0]}
    third = fill.run(store, "third")
    third.warm_start(store, run.record, ids)  # of a source that never changed it
    assert _plain(third.load_shared()) == {"prior": [5e-324, 3.0]}
    # 4 of 4 twice: (4.5, 0.5), (6.25, 0.25); then none: (3.125, 4.125), and (0.5, 4.5) from the prior
    fill.step(run, 1, ids, [0, 0], shared={"prior": np.array([1.0, 1.0])})
    assert run.load(ids).state.tolist() == [[3.125, 4.125], [0.5, 4.5]]
    assert _plain(run.load_shared()) == {"prior": [1.0, 1.0]}
    assert run.roll_back(0) == 2
    table = run.load(ids)
    np.testing.assert_array_equal(table.state, [[6.25, 0.25], [np.nan, np.nan]])
    assert (table.step.tolist(), table.visits.tolist()) == ([0, -1], [0, 0])
    assert _plain(run.load_shared()) == {"prior": [5e-324, 3.0]}


def _plain(shared):
    return {name: values.tolist() for name, values in shared.items()}


def test_only_a_new_run_can_be_warm_started(store, fill):
    source = fill.run(store, "old")
    ids = fill.prompts(store, 2)
    fill.step(source, 1, ids, [4, 4])
    run = fill.run(store, "new")
    run.warm_start(store, source.record, ids)
    with pytest.raises(StoreError, match=r"'new' has posteriors \(step 0\); only a new run"):
        run.warm_start(store, source.record, ids)
    trained = fill.run(store, "trained")
    fill.step(trained, 1, ids, [1, 1])
    with pytest.raises(StoreError, match=r"'trained' has posteriors \(step 1\)"):
        trained.warm_start(store, source.record, ids)


def test_states_that_do_not_fit_are_refused(store, fill):
    ids = fill.prompts(store, 1)
    dbb, value = fill.run(store, "dbb"), fill.run(store, "value", fields=("value",))
    with pytest.raises(StoreError, match=r"'dbb' keeps \['alpha', 'beta'\] .*'value' needs \['value'\]"):
        value.warm_start(store, dbb.record, ids)
    with pytest.raises(StoreError, match="only alpha and beta can be weighted; use weight 1"):
        fill.run(store, "value 2", fields=("value",)).warm_start(store, value.record, ids, weight=0.5)
    newer = fill.run(store, "newer", estimator_version=2)
    with pytest.raises(StoreError, match=r"version 1\), run 'newer' needs .*, version 2\); name a run with"):
        newer.warm_start(store, dbb.record, ids)
