"""Probes beside the training rollouts, and a run read as columns."""

import dataclasses

import numpy as np
import pytest

from storage import ProbeRows, StepRows, StoreError, log, read_log, read_posteriors, read_probes
from storage.inspection import progress


def _probes(ids, samples, successes, squares=None):
    successes = np.array(successes, dtype=float)
    return ProbeRows(np.array(ids), np.array(samples), successes, successes if squares is None else np.array(squares))


def _columns(log):
    return {name: values.tolist() for name, values in vars(log).items()}


def _types(log):
    return [values.dtype.name for values in vars(log).values()]


def test_the_log_is_ordered_by_step_then_prompt(store, fill):
    run, other = fill.run(store), fill.run(store, "other")
    a, b, c = sorted(fill.prompts(store, 3).tolist())
    fill.step(run, 1, [b, a], [1, 4])  # b (1.5, 3.5); a (4.5, 0.5)
    fill.step(other, 1, [a], [0])
    fill.step(run, 2, [c, a], [0, 2])  # c (0.5, 4.5); a (4.25, 2.25)
    log = read_log(store, run.record)
    assert _columns(log) == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "rollouts": [4, 4, 4, 4],
        "successes": [4.0, 1.0, 2.0, 0.0],
        "mean": [0.9, 0.3, 4.25 / 6.5, 0.1],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 4.25 / 6.5 * (1 - 4.25 / 6.5), 0.1 * (1 - 0.1)],
        "lag": [0.0] * 4,
    }
    assert _types(log) == ["int64"] * 3 + ["float64"] * 4


def test_a_run_without_steps_has_empty_logs(store, fill):
    run = fill.run(store)
    log, probes = read_log(store, run.record), read_probes(store, run.record)
    assert _types(log) == ["int64"] * 3 + ["float64"] * 4
    assert _types(probes) == ["int64"] * 3 + ["float64"] * 4
    assert {len(values) for values in (*vars(log).values(), *vars(probes).values())} == {0}


def test_a_log_of_many_chunks_loses_no_row(store, fill, monkeypatch):
    monkeypatch.setattr("storage.engine.CHUNK", 3)
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 8))
    for step in (1, 2):
        fill.step(run, step, ids, np.arange(8) % 5)
    log = read_log(store, run.record)
    assert log.step.tolist() == [1] * 8 + [2] * 8
    assert log.prompt_id.tolist() == ids.tolist() * 2
    assert log.successes.tolist() == [0, 1, 2, 3, 4, 0, 1, 2] * 2


def test_probes_come_with_the_estimate_of_their_step(store, fill):
    run, other = fill.run(store), fill.run(store, "other")
    a, b, c = sorted(fill.prompts(store, 3).tolist())
    fill.step(run, 1, [a, b], [4, 1], probes=_probes([b, a], [16, 8], [4, 7.5], [4, 7.25]))
    fill.step(other, 1, [a], [4], probes=_probes([a], [8], [8]))
    # c is probed but not trained on: there is no estimate to compare with.
    fill.step(run, 2, [a], [2], probes=_probes([c, a], [8, 8], [0, 5]))
    fill.step(run, 3, [a], [2])
    probes = read_probes(store, run.record)
    found = _columns(probes)
    assert np.isnan([found["mean"].pop(), found["variance"].pop()]).all()
    assert found == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "samples": [8, 16, 8, 8],
        "successes": [7.5, 4.0, 5.0, 0.0],
        "squares": [7.25, 4.0, 5.0, 0.0],
        "mean": [0.9, 0.3, 4.25 / 6.5],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 4.25 / 6.5 * (1 - 4.25 / 6.5)],
    }
    assert _types(probes) == ["int64"] * 3 + ["float64"] * 4


def test_the_view_of_probes(store, fill):
    run = fill.run(store)
    (a,) = fill.prompts(store, 1)
    fill.step(run, 1, [a], [4], probes=_probes([a], [8], [2]))
    assert store.query("SELECT run_id, step, prompt_id, samples, successes, mean FROM probes") == [
        (1, 1, a, 8, 2.0, 0.25)
    ]


def test_probes_are_no_training_rollouts(store, fill):
    probed, plain = fill.run(store, "probed"), fill.run(store, "plain")
    ids = fill.prompts(store, 2)
    for run, probes in ((probed, _probes(ids[:1], [128], [100])), (plain, None)):
        for step in (1, 2):
            fill.step(run, step, ids, [4, 1], probes=probes)
    a, b = progress(store, probed.record), progress(store, plain.record)
    assert (a.pop("probes"), a.pop("samples"), b.pop("probes"), b.pop("samples")) == (2, 256, 0, 0)
    del a["last_step_at"], b["last_step_at"]
    assert a == b
    assert probed.load(ids).state.tolist() == plain.load(ids).state.tolist()
    assert _columns(read_log(store, probed.record)) == _columns(read_log(store, plain.record))


def test_roll_back_drops_the_probes_of_undone_steps(store, fill):
    run, other = fill.run(store), fill.run(store, "other")
    ids = fill.prompts(store, 2)
    for step in (1, 2, 3):
        fill.step(run, step, ids, [4, 1], probes=_probes(ids, [8, 8], [1, 2]))
        fill.step(other, step, ids, [4, 1], probes=_probes(ids[:1], [8], [1]))
    run.roll_back(1)
    assert read_probes(store, run.record).step.tolist() == [1, 1]
    assert read_probes(store, other.record).step.tolist() == [1, 2, 3]
    run.roll_back(0)
    assert read_probes(store, run.record).step.tolist() == []


def test_probes_are_part_of_what_a_repeat_must_repeat(store, fill, dump):
    run = fill.run(store)
    a, b = fill.prompts(store, 2)
    rows = fill.step(run, 1, [a, b], [4, 1], probes=_probes([a, b], [8, 4], [3, 2]))
    before = dump(store)
    run.record_step(1, rows)
    run.record_step(1, dataclasses.replace(rows, probes=_probes([b, a], [4, 8], [2, 3])))
    others = [None, _probes([a], [8], [3]), _probes([a, b], [8, 4], [3, 1]), _probes([a, b], [8, 4], [3, 2], [3, 1.5])]
    for other in others:
        with pytest.raises(StoreError, match="step 1 of run 'run' is already recorded with different content"):
            run.record_step(1, dataclasses.replace(rows, probes=other))
    assert dump(store) == before


def test_no_probes_and_no_probed_prompts_are_the_same(store, fill):
    run = fill.run(store)
    rows = fill.step(run, 1, fill.prompts(store, 1), [4])
    run.record_step(1, dataclasses.replace(rows, probes=_probes(np.empty(0, dtype=int), [], [])))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt_ids", np.array([1, 1]), r"step 1: probes.prompt_ids holds prompt 1 more than once"),
        ("prompt_ids", np.array([1.0, 2.0]), r"probes.prompt_ids has type float64"),
        ("samples", np.array([8, 0]), r"step 1: probes.samples\[1\] must be at least 1, got 0"),
        ("samples", np.array([8]), r"step 1: probes.samples has shape \(1,\); it must be \(2,\)"),
        ("successes", np.array([np.nan, 1.0]), r"step 1: probes.successes of prompt 1 is nan"),
        ("squares", np.array([1.0, np.inf]), r"step 1: probes.squares of prompt 2 is inf"),
        ("squares", np.ones((2, 1)), r"step 1: probes.squares has shape \(2, 1\)"),
    ],
)
def test_bad_probes_are_refused_and_leave_nothing(store, fill, dump, name, value, message):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    assert set(ids.tolist()) == {1, 2}
    probes = dataclasses.replace(_probes([1, 2], [8, 8], [1, 2]), **{name: value})
    before = dump(store)
    with pytest.raises(StoreError, match=message):
        run.record_step(1, fill.rows(run, ids, [4, 1], probes=probes))
    assert dump(store) == before


def test_the_log_with_posteriors_and_with_texts(store, fill, monkeypatch):
    monkeypatch.setattr(log, "_ROWS_WITH_TEXT", 2)  # parts of two rows
    run = fill.run(store)
    a, b, c = sorted(int(i) for i in fill.prompts(store, 3))
    fill.step(run, 1, [c, a, b], [4, 0, 2])
    fill.step(run, 2, [b], [4])
    found = read_posteriors(store, run.record)
    assert found.prompt_id.tolist() == [a, b, c, b]
    assert found.alpha.tolist() == [0.5, 2.5, 4.5, 5.25] and found.beta.tolist() == [4.5, 2.5, 0.5, 1.25]
    parts = list(log.history_with_texts(store, run.record))
    assert [len(part) for part in parts] == [2, 2]
    texts = dict(store.query("SELECT prompt_id, prompt FROM prompts"))
    rows = [dict(zip(log.HISTORY_COLUMNS, row, strict=True)) for part in parts for row in part]
    assert [(row["step"], row["prompt_id"], row["alpha"], row["prompt"]) for row in rows] == [
        (1, a, 0.5, texts[a]), (1, b, 2.5, texts[b]), (1, c, 4.5, texts[c]), (2, b, 5.25, texts[b]),
    ]  # fmt: skip


def test_an_estimator_without_alpha_and_beta_has_none_in_the_log(store, fill):
    run = fill.run(store, fields=())
    ids, one, none = fill.prompts(store, 1), np.ones(1), np.empty((1, 0))
    run.record_step(1, StepRows(ids, np.array([4]), one, one / 4, one / 8, none, none, np.array([-1])))
    found = read_posteriors(store, run.record)
    assert np.isnan(found.alpha).tolist() == [True] and np.isnan(found.beta).tolist() == [True]
