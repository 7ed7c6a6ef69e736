"""Rows that somebody edited by hand: one error line for the run that is asked for, and no harm to the others."""

import contextlib
import re
import shutil
import sqlite3

import numpy as np
import pytest
import sqlalchemy

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.storage import (
    StepRows,
    StoreError,
    open_store,
    read,
    read_log,
    read_probes,
)
from openrlhf_dbb.storage.owner import NOBODY, Owner
from openrlhf_dbb.watch import queries
from openrlhf_dbb.watch.api import Api, NoSuchAnswer

ANSWERS = ("series", "about", "rollouts/latest")


def with_other_state(run, ids):
    """Two steps of an estimator that keeps a third field in ``state``, and a vector for the whole run."""
    for step in (1, 2):
        before = run.load(ids)
        columns = {"mean": 0.5, "variance": 0.25, "successes": 2.0}
        run.record_step(
            step,
            StepRows(
                prompt_ids=ids,
                rollouts=np.full(len(ids), 4),
                state=np.full((len(ids), 3), 1.5 + step),
                previous_state=before.state,
                previous_step=before.step,
                shared={"weights": np.array([1.0, 2.0])},
                **{name: np.full(len(ids), value) for name, value in columns.items()},
            ),
        )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A store with the runs "edited", "other", and "auto", which keeps its state in texts."""
    import filler

    path = tmp_path_factory.mktemp("base") / "base.db"
    with open_store(str(path)) as store:
        ids = filler.prompts(store, 4)
        for name in ("edited", "other"):
            run = filler.run(store, name)
            for step in (1, 2):
                successes = filler.successes(step, 4)
                kept = filler.rollouts(ids, successes)
                filler.step(
                    run,
                    step,
                    ids,
                    successes,
                    kept=kept,
                    probes=filler.probes(ids[:2], [4, 4], [1, 2]),
                )
                run.record_metrics(step, {"plan/steps": 10, "loss": 1.0})
            run.record_evaluation(
                2, "training", [filler.evaluation(ids, [2, 1, 0, 4])], model="m", config={"n": 1}
            )
            run.record_checkpoint(2, "tag")
            run.finish(3)
        run = filler.run(store, "auto", fields=("alpha", "beta", "slow"))
        with_other_state(run, ids)
        run.release()
    return path


@pytest.fixture
def edited(base, tmp_path):
    """Function: the path of a copy of the store after these statements."""

    def edit(sql, *values):
        path = tmp_path / "edited.db"
        shutil.copy(base, path)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(sql, values)
            connection.commit()
        return path

    return edit


def read_all(store, ref):
    run = store.find_run(ref)
    ids = np.arange(1, 5)
    read_log(store, run)
    read_probes(store, run)
    read.held_out(store, run)
    read.held_out_prompts(store, run, 2)
    read.progress(store, run)
    read.shared_state(store, run)
    read.kept_rollouts(store, run, 2, limit=5)
    read.extremes(store, run, hardest=True)
    read.find_prompts(store, run, "2")
    read.prompt_history(store, run, 2)
    read.prompt_rates(store, run, 0, 1)
    read.unverified_visits(store, run)
    read.kept_scores(store, run)
    read.kept_group(store, run, 2, 2)
    read.prompt_texts(store, ids)
    store.checkpoints(run)


@contextlib.contextmanager
def refused_in_one_line():
    """What may be refused, with nothing but a StoreError of one line."""
    try:
        yield
    except StoreError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "UPDATE dbb_run SET config = 'x'",
            "config of run 'edited' .*is 'x'.*must be a JSON object; correct it",
        ),
        ("UPDATE dbb_run SET parent_uuid = 'x'", "parent_.* of run 'edited' .*complete"),
        (
            "UPDATE dbb_run SET config = hex(zeroblob(9999))",
            r"config of run 'edited' .{,120}\.\.\.; it must be",
        ),
        (
            "UPDATE dbb_run SET state_fields = '[1]'",
            r"state_fields of run 'edited' .*is '\[1\]'.*list of texts",
        ),
        (
            "UPDATE dbb_run SET created_at = '2026-01-01T00:00:00'",
            "created_at of run 'edited' .*must be a time in UTC",
        ),
        ("UPDATE dbb_run SET last_step = 'two'", "last_step of run 'edited' .*is 'two'.*type int"),
        ("UPDATE dbb_run SET owner_pid = 'me'", "owner_pid of run 'edited' .*is 'me'.*type int"),
        ("UPDATE dbb_event SET detail = '[]'", r"detail of the finish of run 'edited' is '\[\]'"),
        ("UPDATE dbb_step SET created_at = 'x'", "created_at of run 'edited' is 'x'"),
        (
            "UPDATE dbb_history SET mean = 'x'",
            "mean of a row in dbb_history of run 'edited', step 1, prompt 1 is 'x'; it must be a number",
        ),
        ("UPDATE dbb_history SET variance = 'x'", "variance of .* is 'x'; it must be a number"),
        (
            "UPDATE dbb_evaluation SET step = 'x'",
            "step of a row in dbb_evaluation of run 'edited', evaluation 1 is 'x'",
        ),
        ("UPDATE dbb_step SET created_at = x'ff'", "last_step_at of .* run 'edited' is b'.xff'"),
        (
            "UPDATE dbb_run SET shared_start = '{\"a\": 1}'",
            "run-wide state of run 'edited' .*lists of numbers",
        ),
        ("DELETE FROM dbb_prompt WHERE prompt_id = 2", "prompt 2 is not in .*restore a backup"),
    ],
)
def test_the_error_names_the_run_the_column_and_the_value(edited, sql, message):
    with (
        open_store(str(edited(sql)), create=False) as store,
        pytest.raises(StoreError, match=message),
    ):
        read_all(store, "edited")


@pytest.mark.parametrize("value", ["x", "[1, 2]", '["a", "b", "c"]', "", "[1, 2, 1e999]"])
def test_a_state_that_cannot_be_read_names_prompt_and_run(edited, fill, value):
    path = edited("UPDATE dbb_posterior SET state = ? WHERE run_id = 3 AND prompt_id = 2", value)
    with open_store(str(path)) as store:
        run = store.claim_run(3)
        with pytest.raises(
            StoreError, match=r"state of prompt 2 in run 'auto' is .*list of 3 numbers"
        ):
            run.load(np.arange(1, 5))


def test_metrics_that_cannot_be_read_name_their_step(edited):
    with open_store(
        str(edited("UPDATE dbb_step SET metrics = '[1]' WHERE step = 2")), create=False
    ) as store:
        api = Api(store)
        api.ask("state")
        with pytest.raises(StoreError, match=r"metrics of step 2 of run 'edited' is '\[1\]'"):
            api.ask("runs/1/series")


def test_a_number_of_a_step_that_is_none_harms_no_other_run(edited):
    for sql in (
        "UPDATE dbb_step SET rollouts = 'x', successes = 'x' WHERE run_id = 1",
        "UPDATE dbb_evaluation SET step = 'x' WHERE run_id = 1",
    ):
        path = edited(sql)
        with open_store(str(path), create=False) as store:
            api = Api(store)
            api.ask("state")
            assert len(api.runs) == 3
        assert main(["runs", "--store.url", str(path)]) == 0


def test_a_damaged_run_is_listed_as_such_and_cannot_be_resumed(edited, capsys):
    path = edited("UPDATE dbb_run SET parameters = 'x', heartbeat_at = 'never' WHERE name = 'auto'")
    with open_store(str(path), create=False) as store:
        edited_run = store.runs()[2]
        assert (edited_run.name, edited_run.parameters, edited_run.last_step) == ("auto", {}, 2)
        assert edited_run.damage.startswith("parameters of run 'auto'")
        assert edited_run.owner == Owner(NOBODY.host, NOBODY.pid, NOBODY.started)
        for ask in (store.latest_run, lambda: store.claim_run(3)):
            with pytest.raises(StoreError, match="parameters of run 'auto'"):
                ask()
        store.delete_run(edited_run)
        assert len(store.runs()) == 2
    path = edited("UPDATE dbb_run SET parameters = 'x' WHERE name = 'auto'")
    assert main(["runs", "--store.url", str(path)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_hours_stand_still_while_the_clock_is_behind(edited):
    path = edited(
        "UPDATE dbb_step SET created_at = '2020-01-01T00:00:00.000Z' WHERE run_id = 1 AND step = 2"
    )
    with open_store(str(path), create=False) as store:
        api = Api(store)
        api.refresh()
        assert api.answer("runs/1/series")["curves"]["hours"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE dbb_run SET name = CAST(x'ff41' AS TEXT) WHERE run_id = 1",
        "UPDATE dbb_run SET model = CAST(x'ff41' AS TEXT) WHERE run_id = 1",
        "UPDATE dbb_step SET generated = 1 << 62 WHERE run_id = 1",
        "UPDATE dbb_step SET created_at = CAST(x'ff41' AS TEXT) WHERE run_id = 1",
        "UPDATE dbb_prompt SET prompt = x'ff41' WHERE prompt_id = 2",
        "UPDATE dbb_prompt SET prompt = CAST(x'ff41' AS TEXT) WHERE prompt_id = 2",
        "UPDATE dbb_rollout SET text = x'ff41', read = x'ff41' WHERE run_id = 1",
    ],
)
def test_bytes_and_huge_numbers_end_in_one_line_by_every_command(edited, sql, tmp_path, capsys):
    page = str(tmp_path / "page.html")
    commands = (
        ["show", "1"],
        ["history", "2", "1"],
        ["explain", "1", "2", "2"],
        ["prompts", "1"],
        ["compare", "1", "2"],
        ["report", "1", "-o", page],
        ["lab", "replay", "1"],
    )
    url = str(edited(sql))
    assert main(["runs", "--store.url", url]) == 0
    assert "other" in capsys.readouterr().out
    for command in commands:
        assert main([*command, "--store.url", url]) in (0, 2)
        assert capsys.readouterr().err.count("\n") <= 1
    with open_store(url, create=False) as store:
        api = Api(store)
        assert api.ask("runs/2/series")
        for answer in ANSWERS:
            with refused_in_one_line():
                api.ask(f"runs/1/{answer}")


def test_a_number_with_a_leading_zero_is_no_way_around_the_check_of_a_run(edited):
    with open_store(
        str(edited("UPDATE dbb_step SET zero_variance = x'ff'")), create=False
    ) as store:
        api = Api(store)
        with pytest.raises(NoSuchAnswer):
            api.ask("runs/01/about")


@pytest.mark.parametrize("count", ["samples", "verified", "tokens", "truncated"])
@pytest.mark.parametrize("value", [2**62, -(2**63), 0])
def test_counts_of_one_run_that_cannot_be_summed_harm_no_other_run(store, fill, count, value):
    ids = fill.prompts(store, 3)
    for name in ("edited", "other"):
        run = fill.run(store, name)
        run.record_evaluation(
            0, "training", [fill.evaluation(ids, [2, 1, 0])], model="m", config={}
        )
    edit = sqlalchemy.text(
        f"UPDATE dbb_evaluation_result SET {count} = :value WHERE evaluation_id = 1"
    )
    with store.database.transaction(write=True) as connection:
        connection.execute(edit, {"value": value})
    assert read.held_out(store, store.find_run("other")).accuracy.tolist() == [0.25]
    columns = "accuracy, length, truncated, missing"
    assert store.query(f"SELECT {columns} FROM evaluations WHERE run_id = 2") == [
        (0.25, 10.0, 0.0, 0.0)
    ]
    with refused_in_one_line():
        read.held_out(store, store.find_run("edited"))


@pytest.mark.parametrize("step", [-(2**63), 2**63 - 1])
def test_a_last_step_out_of_range_harms_no_other_run(store, fill, step):
    ids = fill.prompts(store, 3)
    for name in ("edited", "other"):
        fill.train(fill.run(store, name), ids, [1, 2])
    with store.database.transaction(write=True) as connection:
        connection.execute(
            sqlalchemy.text("UPDATE dbb_run SET last_step = :step WHERE run_id = 1"), {"step": step}
        )
    api = Api(store)
    assert api.ask("runs/2/series")
    assert [run.numbers.get("error") for run in api.runs if run.name == "other"] == [None]
    with refused_in_one_line():
        api.ask("runs/1/series")


@pytest.mark.parametrize("ask", [read.kept_scores, queries.has_unit_scores])
def test_a_score_that_is_no_number_is_named_where_only_the_range_is_asked_for(edited, ask):
    path = edited("UPDATE dbb_rollout SET score = 'x' WHERE sample = 0")
    with open_store(str(path), create=False) as store:
        named = "score of a row in dbb_rollout of run 'edited', .* is 'x'; it must be a number"
        with pytest.raises(StoreError, match=named):
            ask(store, store.find_run("edited"))


@pytest.mark.parametrize(
    ("sql", "printed"),
    [
        ("UPDATE dbb_history SET prev_beta = NULL", r"known before: +alpha [\d.]+, beta NULL"),
        ("UPDATE dbb_history SET variance = -1", "deviation: +none: .* variance -1 is negative"),
    ],
)
def test_an_edited_group_is_explained_with_what_is_stored(edited, capsys, sql, printed):
    path = edited(sql)
    assert main(["explain", "edited", "2", "1", "--store.url", f"sqlite:///{path}"]) == 0
    assert re.search(printed, capsys.readouterr().out)
