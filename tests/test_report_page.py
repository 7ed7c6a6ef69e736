"""The report page: what it is told, and that no text in it breaks it."""

import base64
import json
import re

import numpy as np
import pytest
from scipy.stats import beta as beta_distribution

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.inspect.report import gather
from openrlhf_dbb.inspect.trajectories import (
    FORGOTTEN,
    IMPOSSIBLE,
    LEARNING,
    MASTERED,
    NO_VISITS,
    epochs,
    trajectories,
)  # fmt: skip
from storage import PosteriorLog, ProbeRows, StepRows, UsageLog, prune

HOSTILE = "<script>alert(1)</script></script><!-- <img src=x onerror=alert(2)> {{DATA}} \x1b[2J\x07\u202e\u2028&amp;"


def unpack(column):
    return np.frombuffer(base64.b64decode(column["data"]), dtype="<" + column["type"])


def _log(rows):
    """Rows of step, prompt, successes of 4, mean."""
    step, prompt, successes, mean = (np.array(column) for column in zip(*rows, strict=True))
    alpha = np.full(len(rows), np.nan)
    return PosteriorLog(
        step, prompt, np.full(len(rows), 4), successes.astype(float), mean, mean * (1 - mean), alpha, alpha
    )


NO_USAGE = UsageLog(*[np.empty(0, dtype=np.int64)] * 12)


def test_states_and_epochs():
    log = _log([
        (1, 7, 4, 0.9), (1, 8, 0, 0.1), (1, 9, 3, 0.7),
        (2, 7, 4, 0.95), (2, 8, 0, 0.05), (2, 9, 0, 0.39),
        (3, 8, 1, 0.1), (3, 9, 0, 0.41),
    ])  # fmt: skip
    found = trajectories(log, {}, NO_USAGE)
    assert found.prompt_id.tolist() == [7, 8, 9] and found.start.tolist() == [0, 2, 5, 8]
    assert found.step.tolist() == [1, 2, 1, 2, 3, 1, 2, 3] and found.epoch.tolist() == [1, 2, 1, 2, 3, 1, 2, 3]
    assert found.state.tolist() == [
        MASTERED, MASTERED,
        IMPOSSIBLE, IMPOSSIBLE, LEARNING,  # low, but solved once
        LEARNING, FORGOTTEN, LEARNING,  # 0.3 below its peak of 0.7; then less than that
    ]  # fmt: skip
    by_epoch = epochs(found)
    assert by_epoch.prompts.tolist() == [3, 3, 2]
    assert by_epoch.success_rate.tolist() == [7 / 12, 4 / 12, 1 / 8]
    np.testing.assert_allclose(by_epoch.mean, [1.7 / 3, 1.39 / 3, 0.255])
    np.testing.assert_allclose(by_epoch.zero_variance, [2 / 3, 1, 1 / 2])
    np.testing.assert_allclose(by_epoch.rescued, by_epoch.zero_variance)  # each has a variance above 0
    assert by_epoch.states.tolist() == [[1, 1, 0, 1], [1, 0, 1, 1], [0, 2, 0, 0]]
    assert by_epoch.histogram[2].nonzero()[0].tolist() == [2, 8]  # 0.1 and 0.41 in bins of 0.05


def test_pruned_visits_count_as_epochs():
    found = trajectories(_log([(5, 7, 4, 0.9), (6, 7, 4, 0.9), (6, 8, 4, 0.9)]), {7: 4, 8: 1}, NO_USAGE)
    assert found.epoch.tolist() == [3, 4, 1]


def test_the_usage_log_says_what_was_rescued():
    # step 1: zero variance both; prompt 7 was filtered out, 8 was rescued; step 2: usage of another prompt only
    log = _log([(1, 7, 4, 0.9), (1, 8, 0, 0.1), (2, 7, 4, 0.9)])
    columns = dict.fromkeys(vars(NO_USAGE), np.array([0, 0, 0])) | {
        "step": np.array([1, 1, 2]), "prompt_id": np.array([7, 8, 9]),
        "zero_variance": np.array([4, 4, 0]), "rescued": np.array([0, 4, 0]),
    }  # fmt: skip
    found = trajectories(log, {}, UsageLog(**columns))
    assert (found.prompt_id.tolist(), found.step.tolist()) == ([7, 8], [1, 2, 1])
    assert found.zero_variance.tolist() == [True, True, True]
    assert found.rescued.tolist() == [False, True, True]


@pytest.fixture
def trained(store, fill):
    """Three prompts, two steps, discount 0.5 and groups of 4; a fourth prompt known from a warm start."""
    source = fill.run(store, "source")
    ids = np.sort(fill.prompts(store, 4))
    fill.step(source, 1, ids[3:], [4])  # (4.5, 0.5)
    run = fill.run(store, "run", config={"seed": 7, "reward.remote_url": ["http://ann:geheim@host/score"]})
    run.warm_start(store, source.record, ids)
    scores = [4.0, 0.0, 2.0]
    for step in (1, 2):
        probes = ProbeRows(ids[:2], np.array([5, 5]), np.array([5.0, 2.0]), np.array([5.0, 2.0]))
        fill.step(run, step, ids[:3], scores, probes=probes, shared={"discount": np.array([0.5]), "v": np.ones(2)})
        scores = [2.0, 0.0, 4.0]
    return store, run.record, ids


def test_what_the_page_is_told(trained):
    store, run, ids = trained
    data = gather(store, run)
    steps = data["steps"]
    assert unpack(steps["step"]).tolist() == [1, 2] and steps["span"] == 1
    np.testing.assert_allclose(unpack(steps["success_rate"]), [0.5, 0.5])
    # (4.5, 0.5), (0.5, 4.5), (2.5, 2.5), then (4.25, 2.25), (0.25, 6.25), (5.25, 1.25)
    np.testing.assert_allclose(unpack(steps["mean"]), [1.5 / 3, (4.25 + 0.25 + 5.25) / 6.5 / 3], rtol=1e-6)
    np.testing.assert_allclose(unpack(steps["zero_variance"]), [2 / 3, 2 / 3])
    assert (steps["groups"], steps["zero_variance_groups"], steps["rescued_groups"]) == (6, 4, 4)
    assert data["state_counts"] == [0, 2, 0, 1, 1] and data["all_prompts"] == 4
    prompts = data["prompts"]
    assert unpack(prompts["id"]).tolist() == ids.tolist()
    assert unpack(prompts["state"]).tolist() == [LEARNING, IMPOSSIBLE, LEARNING, NO_VISITS]
    assert unpack(prompts["count"]).tolist() == [2, 2, 2, 0] and unpack(prompts["visits"]).tolist() == [2, 2, 2, 0]
    np.testing.assert_allclose(unpack(prompts["mean"]), [4.25 / 6.5, 0.25 / 6.5, 5.25 / 6.5, 0.9], rtol=1e-6)
    np.testing.assert_allclose(
        unpack(prompts["change"]), [4.25 / 6.5 - 0.9, 0.25 / 6.5 - 0.1, 5.25 / 6.5 - 0.5, np.nan], rtol=1e-6
    )
    assert data["improved"] == [ids[2]] and data["regressed"] == [ids[0], ids[1]]
    visits = data["visits"]
    assert unpack(visits["step"]).tolist() == [1, 2] * 3
    assert unpack(visits["successes"]).tolist() == [4, 2, 0, 0, 2, 4]
    assert unpack(visits["alpha"]).tolist() == [4.5, 4.25, 0.5, 0.25, 2.5, 5.25]
    assert unpack(visits["beta"]).tolist() == [0.5, 2.25, 4.5, 6.25, 2.5, 1.25]
    np.testing.assert_allclose(unpack(visits["low"])[:2], beta_distribution.ppf(0.05, [4.5, 4.25], [0.5, 2.25]), 1e-5)
    assert [series["name"] for series in data["shared"]] == ["discount"]  # the longer vector is not drawn
    # probes of 5: 5 and 2, their noise 0 and 0.4 * 0.6 / 4; estimates 0.9 and 0.1, groups 1 and 0 in step 1
    np.testing.assert_allclose(unpack(data["probes"]["estimate"])[0], (0.1**2 + 0.3**2 - 0.06) / 2, rtol=1e-5)
    np.testing.assert_allclose(unpack(data["probes"]["group"])[0], (0 + 0.4**2 - 0.06) / 2, rtol=1e-5)
    assert [row[:2] for row in data["lineage"]] == [["ancestor", "source"], ["this run", "run"]]
    assert "geheim" not in json.dumps(data) and "ann:***@host" in json.dumps(data["config"])


def test_where_the_rollouts_went(trained):
    store, run, _ = trained
    store.claim_run(run.run_id).finish(unused_rollouts=5, unused_tokens=50)
    data = gather(store, run)
    # step 1: S = 4, 0, 2 of 4, all trained on with an advantage; replayed: the successes; each skipped once
    usage = data["usage"]
    assert usage["totals"] == {
        "generated": 24, "generated_tokens": 240, "trained": 24, "trained_tokens": 240, "filtered": 0, "replayed": 12,
        "replayed_tokens": 120, "skipped": 6, "zero_variance": 16, "informative": 24, "rescued": 16, "groups": 6,
        "informative_groups": 6, "unused_rollouts": 5,
    }  # fmt: skip
    assert (usage["rollouts_per_group"], usage["tokens_per_group"]) == (4, 40)
    assert {name: unpack(usage[name]).tolist() for name in ("step", "steps", "replayed", "skipped")} == {
        "step": [1, 2], "steps": [1, 1], "replayed": [6, 6], "skipped": [3, 3],
    }  # fmt: skip
    parts = ("mixed", "rescued", "no_advantage", "filtered")
    assert [unpack(usage[name]).tolist() for name in parts] == [[4, 4], [8, 8], [0, 0], [0, 0]]
    assert unpack(data["generated_total"]).tolist() == [12, 24]
    prompts = data["prompts"]
    found = [unpack(prompts[name]).tolist() for name in ("generated", "trained", "replayed", "skipped")]
    assert found == [[8, 8, 8, 0], [8, 8, 8, 0], [6, 0, 6, 0], [2, 2, 2, 0]]  # the last: warm start alone


def test_held_out_accuracy(trained, fill):
    store, run, ids = trained
    assert gather(store, run)["held_out"] is None
    for step, successes in ((0, [0, 1, 0]), (2, [1, 2, 3])):
        rows = [fill.evaluation(ids[:3], successes)]
        store.record_evaluation("training", rows, model="", config={}, run=run, step=step)
    found = gather(store, run)["held_out"]
    assert (unpack(found["step"]).tolist(), found["prompts"], found["samples"]) == ([0, 2], 3, 4)
    np.testing.assert_allclose(unpack(found["accuracy"]), [1 / 12, 6 / 12], rtol=1e-6)


def test_a_long_held_out_curve_keeps_its_best_point(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 1)
    for step in range(500):
        if step:
            fill.step(run, step, ids, [1])
        run.record_evaluation(step, "training", [fill.evaluation(ids, [step == 251])], model="", config={})
    found = gather(store, run.record)["held_out"]
    steps, accuracy = unpack(found["step"]), unpack(found["accuracy"])
    assert len(steps) <= 201 and (steps[0], steps[-1], steps[accuracy.argmax()]) == (0, 499, 251)


def test_filtered_rollouts_and_those_without_an_advantage(store, fill):
    run = fill.run(store, method="dapo")
    ids = np.sort(fill.prompts(store, 3))
    trained = {"trained": [0, 4, 4], "trained_tokens": [0, 40, 40]}
    usage = fill.usage(ids, [4, 0, 2], informative=[0, 0, 4], rescued=[0, 0, 0], **trained)
    fill.step(run, 1, ids, [4, 0, 2], usage=usage)
    data = gather(store, run.record)
    parts = ("mixed", "rescued", "no_advantage", "filtered")
    assert [unpack(data["usage"][name]).tolist() for name in parts] == [[4], [0], [4], [4]]
    assert data["usage"]["rollouts_per_group"] == 12 and data["method"] == "dapo"
    assert (data["steps"]["zero_variance_groups"], data["steps"]["rescued_groups"]) == (2, 0)


def test_a_run_with_usage_of_some_steps_or_of_none(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1], usage=None)
    data = gather(store, run.record)
    assert data["usage"] is None and data["generated_total"] is None and data["method"] == ""
    fill.step(run, 2, ids, [1])
    data = gather(store, run.record)
    # no axis of rollouts, since those of step 1 are not known
    assert data["usage"]["recorded_steps"] == 1 and data["generated_total"] is None
    assert unpack(data["usage"]["steps"]).tolist() == [0, 1]


def test_a_run_whose_history_is_pruned_keeps_its_totals(trained):
    store, run, _ = trained
    store.claim_run(run.run_id).finish()
    prune(store, run, before=3)
    data = gather(store, run)
    assert data["steps"]["groups"] == 0
    assert unpack(data["usage"]["mixed"]).tolist() == [4, 4] and data["usage"]["totals"]["generated"] == 24


def test_a_large_run_shows_some_prompts_and_totals_of_all(trained):
    store, run, ids = trained
    data = gather(store, run, most_prompts=2)
    # every second one, and those listed as improved or regressed
    assert unpack(data["prompts"]["id"]).tolist() == [ids[0], ids[1], ids[2]]
    assert data["all_prompts"] == 4 and sum(data["state_counts"]) == 4


def test_a_run_without_steps_and_one_without_alpha_and_beta(store, fill, tmp_path):
    run = fill.run(store, "point", fields=())
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    ids = fill.prompts(store, 1)
    none = np.empty((1, 0))
    one = np.array([1.0])
    run.record_step(1, StepRows(ids, np.array([4]), one, one / 4, np.array([0.25]), none, none, np.array([-1])))
    data = gather(store, run.record)
    assert data["beta"] is False
    half = 1.645 * np.sqrt(0.25 / 4)
    np.testing.assert_allclose(unpack(data["visits"]["high"]), [0.25 + half], rtol=1e-6)


def test_no_text_can_leave_its_place(store, fill, tmp_path):
    run = fill.run(store, config={HOSTILE: HOSTILE}, model=HOSTILE)
    ids = store.register_prompts([HOSTILE, "x" * 100_000], [HOSTILE, ""])
    fill.step(run, 1, ids, [1, 2])
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    page = path.read_text(encoding="utf-8")
    assert page.lower().count("</script") == 2 and page.count("<!--") == 0 and "<img" not in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", page)
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    text = data["prompts"]["text"][0]
    assert text.startswith("<script>alert(1)</script>") and text.endswith("{{DATA}} \\x1b[2J\\x07\\u202e\\u2028&amp;")
    assert len(data["prompts"]["text"][1]) == 4_000 and unpack(data["prompts"]["cut"]).tolist() == [0, 100_000]
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_a_page_that_cannot_be_written(store, fill, tmp_path, capsys):
    fill.run(store)
    assert main(["report", "-o", str(tmp_path / "no" / "report.html"), "--store.url", store.url]) == 2
    error = capsys.readouterr().err
    assert "No such file or directory; name a file that can be written" in error and error.count("\n") == 1
