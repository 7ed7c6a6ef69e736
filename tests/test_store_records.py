"""What goes with a step: probes, run-wide state, kept rollouts, metrics, usage, lags; and a run read as columns."""

import dataclasses

import numpy as np
import pytest

from openrlhf_dbb.storage import ProbeRows, RolloutRows, StoreError, open_store, read_log, read_probes
from openrlhf_dbb.storage.read import current_means, kept_rollouts, progress, prompt_history

NAN = float("nan")
HOSTILE = "NUL \0, </script><b>HTML</b>, \u202e and \u00fcnicode \U0001f600"


@pytest.fixture
def run(store, fill):
    return fill.run(store)


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 3))


def _probes(ids):
    return ProbeRows(ids[:2], np.array([8, 4]), np.array([3.0, 2.0]), np.array([3.0, 2.0]))


def _kept(ids):
    """Two of prompt 1, one of prompt 0 that could not be verified; not in order."""
    return RolloutRows(
        prompt_ids=ids[[1, 0, 1]],
        sample=np.array([3, 0, 1]),
        reward=np.array([0.5, NAN, 1.0]),
        score=np.array([1.0, NAN, 1.0]),
        advantage=np.array([-0.25, 0.0, 0.75]),
        length=np.array([7, 0, 9]),
        truncated=np.array([1.0, NAN, 0.0]),
        log_prob=np.array([-3.5, NAN, -2.25]),
        text=["long", "", HOSTILE],
        read=["7", None, HOSTILE],
    )


def _read(store, run, step):
    query = "SELECT * FROM rollouts WHERE run_id = :run AND step = :step ORDER BY prompt_id, sample"
    return [row._mapping for row in store.query(query, run=run.record.run_id, step=step)]


def _lists(log):
    return {name: values.tolist() for name, values in vars(log).items()}


def test_the_log_is_ordered_by_step_then_prompt(store, run, ids, fill, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.CHUNK", 3)
    other, (a, b, c) = fill.run(store, "other"), ids.tolist()
    fill.step(run, 1, [b, a], [1, 4])  # b (1.5, 3.5); a (4.5, 0.5)
    fill.step(other, 1, [a], [0])
    fill.step(run, 2, [c, a], [0, 2], policy_version=np.array([NAN, 0.25]))  # c (0.5, 4.5); a (4.25, 2.25)
    log = read_log(store, run.record)
    assert _lists(log) == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "rollouts": [4, 4, 4, 4],
        "successes": [4.0, 1.0, 2.0, 0.0],
        "mean": [0.9, 0.3, 4.25 / 6.5, 0.1],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 4.25 / 6.5 * (1 - 4.25 / 6.5), 0.1 * (1 - 0.1)],
        "lag": [0.0, 0.0, 0.75, 0.0],
        "alpha": [4.5, 1.5, 4.25, 0.5],
        "beta": [0.5, 3.5, 2.25, 4.5],
    }
    assert [values.dtype.name for values in vars(log).values()] == ["int64"] * 3 + ["float64"] * 6
    assert [(row["step"], row["alpha"], row["lag"]) for row in prompt_history(store, run.record, a)] == [
        (1, 4.5, 0.0), (2, 4.25, 0.75),
    ]  # fmt: skip
    prompt_ids, means = current_means(store, run.record)
    assert prompt_ids.tolist() == [a, b, c] and means.tolist() == [4.25 / 6.5, 0.3, 0.1]


def test_a_run_without_steps_has_empty_logs(store, run):
    logs = [read(store, run.record) for read in (read_log, read_probes)]
    assert {len(values) for log in logs for values in vars(log).values()} == {0}


def test_probes_come_with_the_estimate_of_their_step_and_are_no_training_rollouts(store, run, ids, fill):
    plain, (a, b, c) = fill.run(store, "plain"), ids.tolist()
    # c is probed but not trained on: there is no estimate to compare with.
    probes = [fill.probes([b, a], [16, 8], [4, 7.5], [4, 7.25]), fill.probes([c, a], [8, 8], [0, 5])]
    for step, trained in ((1, [a, b]), (2, [a])):
        fill.step(run, step, trained, [4, 1][: len(trained)], probes=probes[step - 1])
        fill.step(plain, step, trained, [4, 1][: len(trained)])
    found = _lists(read_probes(store, run.record))
    assert np.isnan([found["mean"].pop(), found["variance"].pop()]).all()
    assert found == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "samples": [8, 16, 8, 8],
        "successes": [7.5, 4.0, 5.0, 0.0],
        "squares": [7.25, 4.0, 5.0, 0.0],
        "mean": [0.9, 0.3, 6.25 / 6.5],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 6.25 / 6.5 * (1 - 6.25 / 6.5)],
    }
    totals = [progress(store, each.record) for each in (run, plain)]
    assert [(one.pop("probes"), one.pop("samples"), one.pop("last_step_at")[:2]) for one in totals] == [
        (4, 40, "20"), (0, 0, "20"),
    ]  # fmt: skip
    assert totals[0] == totals[1]
    assert run.load(ids[:2]).state.tolist() == plain.load(ids[:2]).state.tolist()


def test_kept_rollouts_are_read_as_written(store, run, ids, fill):
    kept = dataclasses.replace(_kept(ids), policy_version=np.array([0.0, NAN, 0.5]))
    fill.step(run, 1, ids, [1, 2, 3])
    fill.step(run, 2, ids, [1, 2, 3], kept=kept)
    names = ("prompt_id", "sample", "reward", "score", "advantage", "length", "truncated", "missing", "log_prob", "lag")
    found = _read(store, run, 2)
    assert [tuple(row[name] for name in names) for row in found] == [
        (ids[0], 0, None, None, 0.0, 0, None, 1, None, 0.0),
        (ids[1], 1, 1.0, 1.0, 0.75, 9, 0, 0, -2.25, 0.5),
        (ids[1], 3, 0.5, 1.0, -0.25, 7, 1, 0, -3.5, 1.0),
    ]
    assert [row["text"] for row in found] == ["", HOSTILE.replace("\0", "\ufffd"), "long"]
    assert [row["read"] for row in found] == [None, HOSTILE.replace("\0", "\ufffd"), "7"]


def test_kept_rollouts_come_with_the_posterior_before_and_after(store, run, ids, fill):
    fill.step(run, 1, ids[:1], [4])  # (4.5, 0.5)
    fill.step(run, 2, ids[:2], [2, 0], kept=fill.rollouts(ids[:2], [1, 0]))  # (4.25, 2.25), (0.5, 4.5)
    rows = kept_rollouts(store, run.record, 2, limit=3)
    assert list(rows[0]) == [
        "prompt", "label", "response", "read", "score", "reward", "advantage", "visits", "alpha_before", "beta_before",
        "mean_before", "alpha", "beta", "mean",
    ]  # fmt: skip
    again, first = (2, 4.5, 0.5, 0.9, 4.25, 2.25, 4.25 / 6.5), (1, None, None, None, 0.5, 4.5, 0.1)
    assert [tuple(row.values())[2:] for row in rows] == [
        ("answer 0", None, 1, 1, 0.5, *again), ("answer 1", None, 0, 0, -0.5, *again),
        ("answer 0", None, 0, 0, -0.5, *first),
    ]  # fmt: skip


def test_usage_is_stored_step_by_step_and_summed(store, run, ids, fill):
    fill.step(run, 1, ids, [4, 0, 2], usage=fill.usage(ids, [4, 0, 2], trained=4, trained_tokens=40))
    fill.step(run, 2, ids, [1, 1, 1], usage=None)
    fill.step(run, 3, ids[:1], [1])
    columns = "step, generated, generated_total, trained, filtered, zero_variance, replayed, groups"
    assert store.query(f"SELECT {columns} FROM steps ORDER BY step") == [
        (1, 12, 12, 4, 8, 8, 6, 3), (2, None, 12, None, None, None, None, None), (3, 4, 16, 4, 0, 0, 1, 1),
    ]  # fmt: skip
    run.finish(unused_rollouts=3)
    totals = progress(store, run.record)
    assert [totals[name] for name in ("generated", "trained", "filtered", "zero_variance", "replayed", "groups")] == [
        16, 8, 8, 8, 7, 4,
    ]  # fmt: skip
    assert totals["unused_rollouts"] == 3


def test_run_wide_state_comes_back_bit_for_bit(url, fill):
    values = np.array([5e-324, 0.1, 0.1 + 0.2, 1e308, np.finfo(float).max, -0.0, 0.0, 1 / 3, 2.0**53 + 2])
    shared = {"prior": values, "clock": np.array([7.0]), "nothing": np.empty(0)}
    with open_store(url) as store:
        run = fill.run(store)
        assert run.load_shared() is None
        fill.step(run, 1, fill.prompts(store, 1), [1], shared=shared)
        fill.step(run, 2, fill.prompts(store, 1), [1])  # a step without leaves it as it was
    with open_store(url) as store:
        found = store.claim_run(store.find_run("run").run_id).load_shared()
    assert {name: vector.tobytes() for name, vector in found.items()} == {
        name: vector.tobytes() for name, vector in shared.items()
    }


CONTENT = {
    "probes": (_probes, lambda ids: dataclasses.replace(_probes(ids), squares=np.array([3.0, 1.5]))),
    "kept": (_kept, lambda ids: dataclasses.replace(_kept(ids), text=["long", "", "other"])),
    "shared": (lambda ids: {"a": np.array([2.0])}, lambda ids: {"a": np.array([np.nextafter(2, 3)])}),
    "policy_version": (lambda ids: np.array([0.0, 0.0, 0.0]), lambda ids: np.array([0.0, 0.0, NAN])),
}


@pytest.mark.parametrize("name", CONTENT)
def test_a_repeat_writes_nothing_twice_and_must_repeat_everything(store, run, ids, fill, dump, name):
    same, other = (make(ids) for make in CONTENT[name])
    rows = fill.step(run, 1, ids, [1, 2, 3], **{name: same})
    before = dump(store)
    run.record_step(1, rows)
    for changed in (other, {} if name == "shared" else None):
        with pytest.raises(StoreError, match=r"step 1 of run 'run' is already recorded with different content"):
            run.record_step(1, dataclasses.replace(rows, **{name: changed}))
    assert dump(store) == before


def test_metrics_are_numbers_with_seven_digits(store, run, ids, fill):
    with pytest.raises(StoreError, match="metrics are of step 1, run 'run' is at step 0; record the step first"):
        run.record_metrics(1, {"kl": 0.1})
    fill.step(run, 1, ids, [1, 2, 3])
    metrics = {"z": np.float32(1 / 3), "a": 12345678, "bad": float("inf"), "text": "no", "none": None, "flag": True}
    for _ in range(2):  # the acknowledgement may be lost
        run.record_metrics(1, metrics)
    assert store.query("SELECT metrics FROM steps") == [
        ('{"a": 12345680.0, "bad": null, "flag": 1.0, "z": 0.3333333}',)
    ]
