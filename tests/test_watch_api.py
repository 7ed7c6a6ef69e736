"""What the page about runs is told: curves, prompts over their visits, details; read in parts or all at once."""

import base64
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta as beta_distribution
from sqlalchemy import text

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.storage import StepRows, StoreError
from openrlhf_dbb.watch import api as api_module
from openrlhf_dbb.watch import curves, history, queries
from openrlhf_dbb.watch.api import Api, NoSuchAnswer, encoded
from openrlhf_dbb.watch.curves import series
from openrlhf_dbb.watch.history import LEARNING, MASTERED, NO_VISITS, UNSOLVED, picture, summed

HOSTILE = "<script>alert(1)</script></script><!-- <img src=x onerror=alert(2)> {{DATA}} \x1b[2J\x07\u202e\u2028&amp;"


def asking(store, run):
    """Function: an answer about one run of a store, as of now."""
    api = Api(store)
    return lambda name: json.loads(
        api.ask(name if name == "state" else f"runs/{run.run_id}/{name}")
    )


@pytest.fixture(autouse=True)
def never_late(monkeypatch):
    """Read the list of runs again at every question."""
    monkeypatch.setattr(api_module, "EVERY_S", 1e-9)


def test_curves_of_four_steps_a_point(store, fill):
    """Five steps of 4 rollouts of 10 tokens, 4, 0, 2, 4, 1 of them right; three with a loss, the last filtered out."""
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    for step, successes in enumerate([4, 0, 2, 4], start=1):
        fill.step(run, step, ids, [successes])
    fill.step(run, 5, ids, [1], usage=fill.usage(ids, [1], trained=0, informative=0))
    for step, loss in ((1, 1.0), (2, 2.0), (3, 4.0)):
        run.record_metrics(step, {"loss": loss, "kl": float("nan")})
    # Steps 1 to 4 ended half an hour before the last
    with store.database.transaction(write=True) as connection:
        connection.exec_driver_sql(
            "UPDATE dbb_step SET created_at = '2026-01-01T08:00:00.000Z' WHERE step < 5"
        )
        connection.exec_driver_sql(
            "UPDATE dbb_step SET created_at = '2026-01-01T08:30:00.000Z' WHERE step = 5"
        )
    answer = json.loads(encoded(series(store, run.record, 2)))
    assert (answer["width"], answer["last"]) == (4, 5)
    assert answer["curves"] == {
        "step": [4, 5], "hours": [0, 0.5], "rollouts": [16, 20], "tokens": [160, 200], "length": [10, 10],
        "reward": [0.625, 0.25], "zero_variance": [0.75, 0], "given_advantage": [0.75, 0],
        "mixed": [1, 0], "given": [3, 0], "no_advantage": [0, 0], "filtered": [0, 4],
        "m:loss": [2.33333, None], "m:kl": [None, None],
    }  # fmt: skip
    totals = {
        "generated": 20, "generated_tokens": 200, "trained": 16, "filtered": 4, "skipped": 5,
        "groups": 5, "mixed_groups": 2, "rollouts_per_mixed_group": 10, "tokens_per_mixed_group": 100, "single": False,
        "unused_rollouts": 0, "parts": {"mixed": 4, "given": 12, "no_advantage": 0, "filtered": 4},
    }  # fmt: skip
    assert totals.items() <= answer["totals"].items()


def test_a_roll_back_is_seen(store, fill):
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 2))
    run.record_checkpoint(0, "start")
    fill.train(run, ids, range(1, 5))
    asked = asking(store, run.record)
    asked("series")
    run.roll_back(2)
    for step in (3, 4, 5):
        fill.step(run, step, ids, [4, 4])
    assert asked("series")["curves"]["reward"][2:] == [1, 1, 1]
    # (1.5, 3.5), (2.75, 3.75), (5.375, 1.875), (6.69, 0.94), (7.34, 0.47): above 0.9 at last, the other a step sooner
    assert asked("pool")["states"] == [[0, 2, 0, 0]] * 3 + [[1, 1, 0, 0], [2, 0, 0, 0]]


def test_one_rollout_a_prompt_and_steps_whose_usage_is_not_known(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    asked = asking(store, run.record)
    fill.step(run, 1, ids, [1, 0], rollouts=1, usage=None)
    assert asked("series")["totals"] is None and asked("state")["runs"][0]["rollouts"] is None
    fill.step(run, 2, ids, [1, 0], rollouts=1)
    found = asked("series")
    curves = found["curves"]
    # no axis of rollouts, since those of step 1 are not known
    assert curves["rollouts"] == [None, None] and (curves["mixed"], curves["given"]) == (
        [None, 0],
        [None, 2],
    )
    assert found["totals"]["single"] and curves["zero_variance"] == curves["given_advantage"] == [
        None,
        None,
    ]


def test_the_series_and_the_list_have_held_out_accuracy_once_it_is_measured(store, fill):
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 3))
    fill.train(run, ids, range(1, 4))
    asked = asking(store, run.record)
    assert asked("series")["held_out"] is None and asked("state")["runs"][0]["held_out"] is None
    for step, successes in ((0, [0, 1, 0]), (2, [4, 4, 4]), (3, [1, 2, 3])):
        run.record_evaluation(
            step, "training", [fill.evaluation(ids, successes)], model="", config={}
        )
    found = asked("series")["held_out"]
    expected = {"step": [0, 2, 3], "accuracy": [0.0833333, 1, 0.5], "prompts": 3, "samples": 4}
    assert (expected | {"rollouts": [0, 24, 36], "tokens": [0, 240, 360]}).items() <= found.items()
    # one that is written again keeps its id
    run.record_evaluation(3, "training", [fill.evaluation(ids, [4, 4, 0])], model="", config={})
    assert asked("series")["held_out"]["accuracy"][-1] == 0.666667


def test_the_list_of_runs_has_each_run_s_state_progress_and_reward_of_the_last_steps(store, fill):
    old = fill.run(store, "old")
    ids = fill.prompts(store, 1)
    old.finish()
    new = fill.run(store, "new", model="http://ann:geheim@host/model")
    asked = asking(store, new.record)
    for step, successes in enumerate([0] * 5 + [4] * 20, start=1):
        fill.step(new, step, ids, [successes])
    new.record_metrics(25, {"plan/steps": 100})
    first, second = asked("state")["runs"]
    assert (first["name"], first["state"], first["step"], first["planned"]) == (
        "new",
        "running",
        25,
        100,
    )
    assert (first["rollouts"], first["tokens"], first["reward"]) == (
        100,
        1000,
        1,
    )  # of the last 20 steps
    assert (
        first["model"] == "http://***@host/model"
        and first["age_s"] < 60
        and not first["keeps_rollouts"]
    )
    assert (second["name"], second["state"], second["planned"], second["reward"]) == (
        "old",
        "finished",
        None,
        None,
    )
    assert (
        first["version"] != second["version"]
        and asked("state")["runs"][0]["version"] == first["version"]
    )


# Step, prompt, successes of 4, mean. Prompt 8 is low, but solved at last; 9 falls 0.31 below its peak, then 0.29.
ROWS = [
    (1, 7, 4, 0.9), (1, 8, 0, 0.1), (1, 9, 3, 0.7), (2, 7, 4, 0.95), (2, 8, 0, 0.05), (2, 9, 0, 0.39),
    (3, 8, 1, 0.1), (3, 9, 0, 0.41),
]  # fmt: skip
ROW_VALUES = np.array(ROWS)


def cells(picture):
    found = zlib.decompress(base64.b64decode(picture["cells"]))
    return np.frombuffer(found, np.uint8).reshape(len(picture["id"]), -1).tolist()


@pytest.fixture
def visits():
    return summed(np.array([7, 8, 9]), np.zeros(3), ROW_VALUES, unit=True)


def test_a_prompt_s_visits_are_summed_up_in_its_state(visits):
    assert visits.prompt_id.tolist() == [7, 8, 9]
    assert visits.visits.tolist() == [2, 3, 3]
    assert visits.state.tolist() == [MASTERED, LEARNING, LEARNING]
    assert visits.last == 3
    assert visits.first.tolist() == [0.9, 0.1, 0.7]
    assert visits.mean.tolist() == [0.95, 0.1, 0.41]


def test_the_picture_has_a_row_a_prompt_and_a_column_a_step(visits):
    shown = picture(visits, ROW_VALUES)
    assert shown["id"].tolist() == [7, 9, 8]
    assert shown["state"].tolist() == [MASTERED, LEARNING, LEARNING]
    # 1 + 126 times the mean, rounded; 128 more where the prompt was drawn
    assert cells(shown) == [[242, 249, 121], [217, 178, 181], [142, 135, 142]]
    assert np.array(shown["states"]).tolist() == [[1, 1, 0, 1], [1, 0, 1, 1], [1, 2, 0, 0]]
    # at step 3, before which 8 and 9 had 0.05 and 0.39, and 7 had 0.95
    assert np.array(shown["beliefs"])[:, :, 2].tolist() == [
        [0.5, 0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0],
    ]


def test_a_picture_of_more_steps_than_columns_shows_the_last_of_each_column(visits, monkeypatch):
    monkeypatch.setattr(history, "MOST_COLUMNS", 2)
    shown = picture(visits, ROW_VALUES)
    assert shown["width"] == 2
    assert cells(shown) == [[249, 121], [178, 181], [135, 142]]


def test_a_picture_of_rewards_outside_0_and_1_has_their_range_and_a_later_prompt_begins_empty():
    rows = np.array([(1, 1, 20, 5.0), (2, 1, 12, 4.0), (2, 2, -4, -1.0)])
    visits = summed(np.array([1, 2]), np.zeros(2), rows, unit=False)
    assert visits.state.tolist() == [LEARNING, LEARNING]
    shown = picture(visits, rows)
    assert (shown["low"], shown["high"]) == (-1, 5)
    assert cells(shown) == [[128 + 127, 128 + 106], [0, 128 + 1]]


@pytest.fixture
def trained(store, fill):
    """Three prompts, two steps, discount 0.5 and groups of 4; a fourth prompt known from a warm start."""
    source = fill.run(store, "source")
    ids = np.sort(fill.prompts(store, 4))
    fill.step(source, 1, ids[3:], [4])  # (4.5, 0.5)
    run = fill.run(
        store, "run", config={"seed": 7, "reward.remote_url": ["http://ann:geheim@host/score"]}
    )
    run.warm_start(store, source.record, ids)
    for step, scores in ((1, [4.0, 0.0, 2.0]), (2, [2.0, 0.0, 4.0])):
        fill.step(run, step, ids[:3], scores)
    return store, run, ids


def test_the_table_of_prompts_and_the_posteriors(trained):
    store, run, ids = trained
    found = asking(store, run.record)("prompts")
    assert found["last"] == 2
    columns = found["columns"]
    assert columns["id"] == ids.tolist()
    assert columns["visits"] == [2, 2, 2, 0]
    assert columns["state"] == [LEARNING, UNSOLVED, LEARNING, NO_VISITS]
    # (4.5, 0.5), (0.5, 4.5), (2.5, 2.5), then (4.25, 2.25), (0.25, 6.25), (5.25, 1.25)
    assert columns["mean"] == [0.653846, 0.0384615, 0.807692, 0.9]
    assert columns["change"] == [-0.246154, -0.0615385, 0.307692, None]
    assert sorted(columns["text"]) == [f"prompt {i}" for i in range(4)]


def test_the_pool_is_ordered_by_the_mean_and_a_prompt_of_the_warm_start_has_no_visit(trained):
    store, run, ids = trained
    pool = asking(store, run.record)("pool")
    assert pool["unit"]
    assert pool["id"] == ids[[3, 2, 0, 1]].tolist()
    assert pool["state"] == [NO_VISITS, LEARNING, LEARNING, UNSOLVED]
    assert [row == [0, 0] for row in cells(pool)] == [True, False, False, False]


def test_a_prompt_s_answer_has_each_visit_with_its_posterior_and_interval(trained):
    store, run, ids = trained
    asked = asking(store, run.record)
    found = asked(f"prompts/{ids[0]}")
    assert found["state"] == LEARNING
    visits = found["visits"]
    assert (
        visits["step"] == [1, 2] and visits["successes"] == [4, 2] and visits["rollouts"] == [4, 4]
    )
    assert (
        visits["alpha"] == [4.5, 4.25]
        and visits["beta"] == [0.5, 2.25]
        and visits["kept"] == [0, 0]
    )
    assert visits["lag"] == [0, 0]
    np.testing.assert_allclose(
        visits["low"], beta_distribution.ppf(0.05, [4.5, 4.25], [0.5, 2.25]), 1e-5
    )
    unvisited = asked(f"prompts/{ids[3]}")
    assert (unvisited["state"], unvisited["mean"]) == (NO_VISITS, 0.9)
    with pytest.raises(NoSuchAnswer, match="run 'run' has no prompt 999"):
        asked("prompts/999")


def test_an_estimator_without_alpha_and_beta_shows_group_means_with_their_error(store, fill):
    run = fill.run(store, "point", fields=())
    ids = fill.prompts(store, 1)
    asked = asking(store, run.record)
    assert asked("pool")["states"] == asked("prompts")["columns"]["id"] == []
    none = np.empty((1, 0))
    one = np.array([1.0])
    run.record_step(
        1, StepRows(ids, np.array([4]), one, one / 4, np.array([0.25]), none, none, np.array([-1]))
    )
    assert asked("state")["runs"][0]["mean_name"] == "group mean"
    visits = asked(f"prompts/{ids[0]}")["visits"]
    assert (visits["high"], visits["alpha"]) == ([0.66125], [None])  # 0.25 + 1.645 sqrt(0.25 / 4)


def keep(fill, ids, texts):
    """Two samples of each prompt, the first right, the second missing."""
    rows = fill.rollouts(ids, [1] * len(ids))
    for missing in (rows.reward, rows.score, rows.log_prob):
        missing[1::2] = np.nan
    return replace(rows, text=texts, read=["\x07", None] * len(ids))


@pytest.fixture
def keeping(store, fill):
    """A run whose first two of three steps keep two rollouts of each of two prompts."""
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 2))
    for step in (1, 2):
        fill.step(run, step, ids, [1, 1], kept=keep(fill, ids, [f"{step} a", "b\x1b", "c", "d"]))
    fill.step(run, 3, ids, [1, 1])
    return asking(store, run.record), ids


def test_a_run_without_kept_rollouts_has_none_to_show(store, fill):
    asked = asking(store, fill.run(store).record)
    assert asked("rollouts/latest") == {"step": None, "rollouts": [], "prompts": {}}


def test_the_latest_kept_rollouts_come_with_all_their_values(keeping):
    asked, ids = keeping
    latest = asked("rollouts/latest")
    assert latest["step"] == 2
    assert list(latest["prompts"]) == [str(prompt_id) for prompt_id in ids]
    right, missing = latest["rollouts"][:2]
    assert right == {
        "prompt_id": ids[0], "sample": 0, "reward": 1, "score": 1, "advantage": 0.5, "length": 10, "truncated": 0,
        "missing": 0, "log_prob": -1.5, "lag": 0, "read": "\\x07", "text": "2 a", "cut_from": None,
        "baseline": 0.5, "scale": 1, "weight": 1,
    }  # fmt: skip
    assert missing == right | {
        "sample": 1, "reward": None, "score": None, "advantage": -0.5, "missing": 1, "log_prob": None, "read": "",
        "text": "b\\x1b",
    }  # fmt: skip
    counts = {"kept": 4, "generated": 8, "filtered": 0, "skipped": 2, "form": None}
    assert {name: latest[name] for name in counts} == counts


def test_a_group_comes_with_its_posterior_before_and_after(keeping):
    asked, ids = keeping
    # Four rollouts, one right: 0.5 * 1 + 1 of 0.5 * 2 + 4 in step 1, then 0.5 * 1.5 + 1 of 0.5 * 5 + 4.
    group = asked("rollouts/latest")["prompts"][str(ids[0])]["group"]
    low, high = beta_distribution.ppf([0.05, 0.95], 1.75, 4.75)
    expected = {
        "rollouts": 4,
        "successes": 1,
        "before": 0.3,
        "mean": 1.75 / 6.5,
        "low": low,
        "high": high,
    }
    assert group == pytest.approx(expected, rel=1e-5)


def test_rollouts_are_asked_for_by_step_and_prompt(keeping):
    asked, ids = keeping
    of_prompt = asked(f"rollouts/1/{ids[1]}")
    assert of_prompt["step"] == 1
    assert [rollout["text"] for rollout in of_prompt["rollouts"]] == ["c", "d"]
    assert asked("rollouts/3")["rollouts"] == []
    assert asked("state")["runs"][0]["keeps_rollouts"]
    assert asked(f"prompts/{ids[0]}")["visits"]["kept"] == [2, 2, 0]


def record_texts(fill, run, step, ids, texts):
    """Record a step of two rollouts a prompt, with their texts."""
    successes = [1] * len(ids)
    rows = replace(fill.rollouts(ids, successes), text=texts)
    fill.step(run, step, ids, successes, kept=rows)


def test_very_long_rollouts_of_a_step_are_cut_to_equal_shares(store, fill):
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 2))
    texts = ["a" * 2_500_000, "b", "c" * 1_000_000, "\u00e9" * 700_000]
    record_texts(fill, run, 1, ids, texts)
    asked = asking(store, run.record)
    whole = asked("rollouts/1")["rollouts"]
    # A share of 1,000,000 characters each.
    assert [len(each["text"]) for each in whole] == [1_000_000, 1, 1_000_000, 700_000]
    assert [each["cut_from"] for each in whole] == [2_500_000, None, None, None]
    # Of one group, the share is larger.
    group = asked(f"rollouts/1/{ids[0]}")["rollouts"]
    assert [len(each["text"]) for each in group] == [2_000_000, 1]
    assert [each["cut_from"] for each in group] == [2_500_000, None]


def test_a_step_of_very_many_rollouts_is_answered_in_part(store, fill, monkeypatch):
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 3))
    record_texts(fill, run, 1, ids, ["x"] * 6)
    monkeypatch.setattr(queries, "MOST_ROLLOUTS", 3)
    part = asking(store, run.record)("rollouts/1")
    assert [each["prompt_id"] for each in part["rollouts"]] == [ids[0], ids[0], ids[1]]
    assert part["kept"] == 6
    assert list(part["prompts"]) == [str(each) for each in ids[:2]]


def changed(store, statement, **values):
    with store.database.transaction(write=True) as connection:
        connection.execute(text(statement), values)


def test_runs_are_described_once_however_many_there_are(store, fill, monkeypatch):
    monkeypatch.setattr(api_module, "KEPT_ANSWERS", 2)
    runs = [fill.run(store, f"run {number}") for number in range(4)]
    described = []
    overview = api_module.overview

    def watched(store, run):
        described.append(run.name)
        return overview(store, run)

    monkeypatch.setattr(api_module, "overview", watched)
    asked = asking(store, runs[0].record)
    for _ in range(3):
        assert len(asked("state")["runs"]) == 4
    assert described == ["run 3", "run 2", "run 1", "run 0"]
    fill.step(runs[2], 1, fill.prompts(store, 1), [1])
    runs[0].finish()
    store.delete_run(runs[0].record)
    assert [run["name"] for run in asked("state")["runs"]] == ["run 3", "run 2", "run 1"]
    assert described[4:] == ["run 2"]


def test_the_answer_asked_for_last_stays(store, fill, monkeypatch):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1])
    monkeypatch.setattr(api_module, "KEPT_ANSWERS", 3)  # the list of runs is one of them
    made = []
    series_of = curves.series
    monkeypatch.setattr(curves, "series", lambda *of: made.append(1) or series_of(*of))
    asked = asking(store, run.record)
    for name in ("series", "about", "series", "rollouts/latest", "series"):
        asked(name)
    assert len(made) == 1


# Statements that put a value into the run "bad" which cannot be read.
DAMAGE = [
    "UPDATE dbb_step SET metrics = 'x' WHERE run_id = :bad",
    "UPDATE dbb_step SET metrics = '[1]' WHERE run_id = :bad",
    """UPDATE dbb_step SET metrics = '{"loss": "high"}' WHERE run_id = :bad""",
    "UPDATE dbb_step SET created_at = 'yesterday' WHERE run_id = :bad",
    "UPDATE dbb_step SET created_at = '2026-11-28T07:10:56' WHERE run_id = :bad",
    "UPDATE dbb_step SET shared = '7' WHERE run_id = :bad",
    "UPDATE dbb_run SET heartbeat_at = 'yesterday' WHERE run_id = :bad",
    "UPDATE dbb_run SET heartbeat_at = '2026-11-28T07:10:56' WHERE run_id = :bad",
    "UPDATE dbb_run SET created_at = '' WHERE run_id = :bad",
    "UPDATE dbb_event SET detail = 'x' WHERE run_id = :bad",
    "UPDATE dbb_event SET detail = '[]' WHERE run_id = :bad",
    "UPDATE dbb_event SET created_at = '' WHERE run_id = :bad",
    "DELETE FROM dbb_prompt WHERE prompt_id = :prompt",
    "DELETE FROM dbb_step WHERE run_id = :bad",
    "DELETE FROM dbb_history WHERE run_id = :bad",
    "UPDATE dbb_history SET rollouts = 0 WHERE run_id = :bad",
    "UPDATE dbb_history SET alpha = 0, beta = 0 WHERE run_id = :bad",
    "UPDATE dbb_run SET last_step = 0 WHERE run_id = :bad",
    "UPDATE dbb_run SET last_step = -1 WHERE run_id = :bad",
]
DAMAGE += [  # SQLite takes a text for a number
    f"UPDATE {table} SET {column} = '{value}' WHERE run_id = :bad"
    for table, column, value in (
        ("dbb_step", "rollouts", "x"), ("dbb_step", "generated", "x"), ("dbb_history", "successes", "x"),
        ("dbb_history", "rollouts", "x"), ("dbb_history", "alpha", "x"), ("dbb_rollout", "score", "x"),
        ("dbb_rollout", "length", "x"), ("dbb_posterior", "visits", "x"), ("dbb_run", "last_step", "x"),
        ("dbb_event", "from_step", "x"),
    )
]  # fmt: skip


@pytest.fixture
def damaged(open_new, fill):
    """Function: a store with the runs "good" and "bad", the second one damaged by a statement, and their prompts."""
    store = open_new("sqlite")
    ids = {"bad": store.register_prompts(["gone"], [""]), "good": fill.prompts(store, 1)}
    numbers = {}
    for name in ("bad", "good"):
        run = fill.run(store, name)
        fill.step(run, 1, ids[name], [1], kept=fill.rollouts(ids[name], [1]))
        run.record_metrics(1, {"loss": 1.0})
        run.finish()
        numbers[name] = run.record.run_id

    def damage(statement):
        values = {"bad": numbers["bad"], "prompt": int(ids["bad"][0])}
        changed(
            store,
            statement,
            **{name: value for name, value in values.items() if f":{name}" in statement},
        )
        return store, numbers, ids

    return damage


def paths_of(number, prompt_id):
    """The addresses of all answers about a run."""
    names = (
        "series",
        "pool",
        "prompts",
        "about",
        "rollouts/latest",
        "rollouts/1",
        f"prompts/{prompt_id}",
    )
    return [f"runs/{number}/{name}" for name in names]


@pytest.mark.parametrize("statement", DAMAGE)
def test_a_damaged_value_of_a_run_hides_no_other_run(damaged, tmp_path, statement):
    store, numbers, ids = damaged(statement)
    api = Api(store)
    assert [run["name"] for run in json.loads(api.ask("state"))["runs"]] == ["good", "bad"]
    for path in paths_of(numbers["good"], ids["good"][0]):
        api.ask(path)
    for path in paths_of(numbers["bad"], ids["bad"][0]):
        try:
            api.ask(path)
        except StoreError as error:
            assert re.fullmatch(".*(bad|prompt|no longer).*", str(error))
    assert "good" in reported(store, tmp_path, "good")


@pytest.mark.parametrize("statement", DAMAGE)
def test_the_report_of_a_damaged_run_is_written_or_refused_in_one_line(
    damaged, tmp_path, capsys, statement
):
    store, _, _ = damaged(statement)
    code = main(["report", "bad", "-o", str(tmp_path / "bad.html"), "--store.url", store.url])
    assert code in (0, 2)
    assert capsys.readouterr().err.count("\n") == (1 if code else 0)


STEPPED = {  # by table: answers that read its steps
    "dbb_history": ("pool", "prompts", "prompts/{prompt}"),
    "dbb_step": ("series",),
    "dbb_rollout": ("rollouts/latest",),
}


@pytest.mark.parametrize("step", [-(2**63), 0, 2, 1.5, 2**63 - 1])
@pytest.mark.parametrize("table", STEPPED)
def test_a_step_out_of_range_is_refused_in_one_line_that_names_its_row(
    damaged, tmp_path, capsys, table, step
):
    statement = f"UPDATE {table} SET step = {step} WHERE run_id = :bad"
    if table == "dbb_history":  # the walk back over a prompt's visits begins here
        damaged(f"UPDATE dbb_posterior SET step = {step} WHERE run_id = :bad")
    store, numbers, ids = damaged(statement)
    prompt = int(ids["bad"][0])
    api = Api(store)
    for path in paths_of(numbers["good"], ids["good"][0]):
        api.ask(path)
    for name in STEPPED[table]:
        with pytest.raises(StoreError) as refused:
            api.ask(f"runs/{numbers['bad']}/{name.format(prompt=prompt)}")
        line = str(refused.value)
        assert re.match(f"step of a row in {table} of run 'bad'", line)
        assert "a whole number from 1 to 1;" in line and "report this line" not in line
        assert table == "dbb_step" or f"prompt {prompt}" in line
    assert main(["report", "bad", "-o", str(tmp_path / "b.html"), "--store.url", store.url]) == 2
    assert re.search(f"{table} of run 'bad'", capsys.readouterr().err)
    assert main(["report", "good", "-o", str(tmp_path / "g.html"), "--store.url", store.url]) == 0


def test_a_damaged_run_is_listed_with_what_is_wrong_until_it_is_corrected(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1])
    run.record_metrics(1, {"loss": 1.0})
    asked = asking(store, run.record)
    changed(store, "UPDATE dbb_step SET metrics = 'x\x1b[31m'")
    (listed,) = asked("state")["runs"]
    assert (listed["name"], listed["step"]) == ("run", 1)
    assert (
        "run 'run'" in listed["error"]
        and "x\\x1b[31m" in listed["error"]
        and "JSON object" in listed["error"]
    )
    with pytest.raises(StoreError, match="metrics"):
        asked("series")
    assert asked("pool")["states"] == [[0, 1, 0, 0]]
    changed(store, "UPDATE dbb_step SET metrics = '{}'")
    assert "error" not in asked("state")["runs"][0]
    asked("series")


def test_a_run_whose_own_row_is_damaged_hides_no_other_run(store, fill, monkeypatch, tmp_path):
    for name in ("good", "bad"):
        run = fill.run(store, name)
        ids = fill.prompts(store, 1)
        fill.step(run, 1, ids, [1])
    damage = "config of run 'bad' is 'x', not a JSON object"
    of_store = type(store).runs

    def runs(of):
        return [
            replace(each, damage=damage) if each.name == "bad" else each for each in of_store(of)
        ]

    monkeypatch.setattr(type(store), "runs", runs)
    asked = asking(store, run.record)
    bad, good = asked("state")["runs"]
    assert bad["error"] == damage and bad["name"] == "bad" and "error" not in good
    for name in ("series", "pool", "about", f"prompts/{ids[0]}"):
        with pytest.raises(StoreError, match="config of run 'bad'"):
            asked(name)
    assert "good" in reported(store, tmp_path, "good")


def test_hours_stand_still_where_the_clock_goes_back(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.train(run, ids, (1, 2, 3))
    for step, at in ((1, "08:00"), (2, "07:00"), (3, "09:00")):
        values = {"at": f"2026-01-01T{at}:00.000Z", "step": step}
        changed(store, "UPDATE dbb_step SET created_at = :at WHERE step = :step", **values)
    assert asking(store, run.record)("series")["curves"]["hours"] == [0, 0, 1]


def test_a_run_that_is_deleted_while_it_is_read_is_said_to_be_gone(store, fill, monkeypatch):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1])
    run.finish()
    asked = asking(store, run.record)

    def read(*_):
        store.delete_run(run.record)
        raise ZeroDivisionError

    monkeypatch.setattr(api_module, "facts", read)
    with pytest.raises(NoSuchAnswer, match="run 'run' was deleted"):
        asked("about")


def scored(fill, run, step, ids, scores, **more):
    """Record a step of groups of these scores, with the mean and the variance of each group as ``point`` has them."""
    scores = np.array(scores, dtype=float)
    rows = fill.rows(run, ids, np.zeros(len(ids)), scores.shape[1], **more)
    variance = scores.var(axis=1) * scores.shape[1] / max(scores.shape[1] - 1, 1)
    own = {"successes": scores.sum(axis=1), "mean": scores.mean(axis=1), "variance": variance}
    run.record_step(step, replace(rows, **own))


@pytest.mark.parametrize(
    ("estimator", "memory", "scores", "kept", "unit"),
    [
        (
            "point",
            "dbb",
            [-1, -1, 1, 1],
            None,
            False,
        ),  # the sum of half right is 0, as of all wrong
        ("point", "dbb", [-1, 1], None, False),
        ("point", "dbb", [-1, 1, 1, 1], None, False),
        ("point", "dbb", [-1, -1, -1, 1], None, False),
        ("point", "dbb", [0, 0, 0, 1], None, True),
        ("point", "dbb", [0, 0, 0, 0], None, True),
        ("point", "dbb", [0.25, 0.5, 0, 0], None, True),
        ("point", "dbb", [0], None, True),
        ("point", "dbb", [0, 2, 0, 0], None, False),
        ("point", "gaussian", [0, 0, 1, 1], None, True),
        ("gaussian", "", [0, 0, 1, 1], None, False),  # not known
        ("gaussian", "", [0, 0, 1, 1], [0, 1], True),
        ("gaussian", "", [-1, -1, 1, 1], [-1, 1], False),
        ("dbb", "", [-1, -1, 1, 1], [-1, 1], False),
        ("dbb", "", [0, 0, 1, 1], None, True),
    ],
)
def test_prompts_have_states_where_scores_are_known_to_lie_between_0_and_1(
    store, fill, estimator, memory, scores, kept, unit
):
    parameters = {"memory": memory} if memory else {}
    run = fill.run(store, estimator=estimator, parameters=parameters)
    ids = fill.prompts(store, 1)
    more = {}
    if kept is not None:
        rows = fill.rollouts(ids, [1])
        more["kept"] = replace(
            rows, score=np.array(kept, dtype=float), reward=np.array(kept, dtype=float)
        )
    scored(fill, run, 1, ids, [scores], **more)
    asked = asking(store, run.record)
    assert asked("pool")["unit"] == asked("prompts")["unit"] == unit
    assert (asked(f"prompts/{ids[0]}")["state"] is None) == (not unit)
    if not unit:
        assert asked("pool")["state"] == [LEARNING] and asked("pool")["states"] == [[0, 1, 0, 0]]


def in_file(page):
    return json.loads(
        page.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    )["answers"]


def reported(store, folder, *arguments):
    path = folder / "report.html"
    assert main(["report", *arguments, "-o", str(path), "--store.url", store.url]) == 0
    return path.read_text(encoding="utf-8")


def test_the_file_holds_what_a_server_answers(trained, tmp_path):
    store, run, ids = trained
    found = in_file(reported(store, tmp_path))
    asked = asking(store, run.record)
    names = ["series", "pool", "prompts", *(f"prompts/{each}" for each in ids)]
    base = f"runs/{run.record.run_id}"
    assert found.keys() == {"state", f"{base}/about", *(f"{base}/{name}" for name in names)}
    for name in names:
        assert found[f"{base}/{name}"] == asked(name)
    assert [run["name"] for run in found["state"]["runs"]] == ["run"]


def test_the_file_has_the_facts_of_its_run_and_no_password(trained, tmp_path):
    store, run, _ = trained
    about = in_file(reported(store, tmp_path))[f"runs/{run.record.run_id}/about"]
    assert dict(about["facts"])["status"] == "running, step 2"
    assert [row[1] for row in about["events"]] == ["warm_start"]
    assert "geheim" not in json.dumps(about)
    assert "http://***@host" in json.dumps(about["config"])


def test_what_a_file_holds_is_printed(trained, tmp_path, capsys):
    store, _, _ = trained
    reported(store, tmp_path)
    said = capsys.readouterr().out
    assert re.search(r" MB: 4 prompts\b.* 0 steps with rollouts", said)
    assert "left out" not in said


@pytest.fixture
def two_runs(store, fill):
    """Two runs of three steps, each of which keeps 8 rollouts of 1,000 characters."""
    runs = [fill.run(store, name) for name in ("one", "two")]
    ids = np.sort(fill.prompts(store, 4))
    for run in runs:
        for step in (1, 2, 3):
            fill.step(run, step, ids, [0, 1, 2, 4], kept=keep(fill, ids, [str(step) * 1_000] * 8))
    return runs


def test_a_file_of_several_runs_and_of_a_given_size(store, two_runs, tmp_path, capsys):
    found = in_file(reported(store, tmp_path, "one", "two", "--size", "0.05"))
    assert [run["name"] for run in found["state"]["runs"]] == ["two", "one"]
    # A step fits in half of a run's 25 kB, and the rest holds all prompts
    paths = sorted(path for path in found if "/rollouts" in path)
    assert paths == [f"runs/{run.record.run_id}/rollouts/3" for run in two_runs]
    said = capsys.readouterr().out
    assert re.search(r" MB: 8 prompts\b.* 2 steps with rollouts.*--size 0.05 left out", said)


def test_no_text_can_leave_its_place(store, fill, tmp_path):
    run = fill.run(store, config={HOSTILE: HOSTILE}, model=HOSTILE)
    ids = store.register_prompts([HOSTILE, "x" * 100_000], [HOSTILE, ""])
    fill.step(run, 1, ids, [1, 2], kept=keep(fill, np.sort(ids), [HOSTILE] * 4))
    run.record_metrics(1, {HOSTILE: 1.0})
    page = reported(store, tmp_path)
    assert page.lower().count("</script") == 2 and page.count("<!--") == 0 and "<img" not in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", page)
    found = in_file(page)
    columns = found[f"runs/{run.record.run_id}/prompts"]["columns"]
    hostile = columns["id"].index(ids[0])
    text = columns["text"][hostile]
    assert text.startswith("<script>alert(1)</script>") and text.endswith(
        "{{DATA}} \\x1b[2J\\x07\\u202e\\u2028&amp;"
    )
    assert len(columns["text"][1 - hostile]) == 500
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
