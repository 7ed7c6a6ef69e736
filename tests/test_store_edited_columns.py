"""Every column of every table, edited by hand in SQLite and PostgreSQL: whoever reads the run is told so in one line.

The columns come from the schema, so that a new one is tried too. Each run of a store has another damaged column.
"""

import contextlib
import json
import math
import shutil

import filler
import numpy as np
import pytest
import sqlalchemy
from conftest import execute

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Probes, Responses, StepExtras
from openrlhf_dbb.lab import replay
from openrlhf_dbb.storage import StoreError, open_store, read, schema
from openrlhf_dbb.watch.api import Api

TABLES = [table for table in schema.metadata.sorted_tables if table is not schema.schema_version]
RUNS = 1 + max(len(table.columns) for table in TABLES)  # the first one stays as it is

# Values that both databases take, then those that only SQLite does.
BAD = {
    int: ([-1, 2**63 - 1, -(2**63)], ["x", 1.5, b"\xff", ""]),
    float: ([math.nan, math.inf, -1e308, None], ["x", b"\xff"]),
    str: (["x", "", "[1]", '{"a": "b"}', "0001-01-01T00:00:00Z", "infinity", "a\nb", "[" * 100_000], [5]),
    bytes: ([b"", b"\0" * 17], ["x"]),
}  # fmt: skip

ANSWERS = ("series", "about", "pool", "prompts", "prompts/{prompt}", "rollouts/latest",
           "rollouts/1/{prompt}", "compare/1")  # fmt: skip
COMMANDS = (
    ("show", "{run}"),
    ("history", "{prompt}", "{run}"),
    ("explain", "{run}", "2", "{prompt}"),
    ("prompts", "{run}"),
    ("compare", "1", "{run}"),
    ("report", "{run}", "-o", "{folder}/page.html"),
    ("lab", "replay", "{run}", "--estimators", "dbb"),
    ("show", "{run}", "--json"),
)


def prompts_of(number):
    """The texts and labels of run ``number``, whose ids are 2 number - 1 and 2 number."""
    return [f"run {number}: {a} + 1" for a in range(2)], ["1", "2"]


def trained(store, number):
    """A run of two steps that leaves few columns NULL."""
    texts, labels = prompts_of(number)
    rates = [[2, 4], [1, 4]]
    of_rollouts = {"prompts": np.repeat(texts, 4).tolist(), "labels": np.repeat(labels, 4).tolist()}
    with Posteriors.create(
        store, f"run-{number}", texts, labels, estimator="auto", pass_rates=rates, method="grpo"
    ) as posteriors:
        for step in (1, 2):
            extras = StepExtras(
                tokens=[5] * 8,
                probes=Probes([*zip(texts, labels, strict=True)], np.array([[1.0, 0.0]] * 2)),
                responses=Responses(["text"] * 8, truncated=[0] * 8, log_probs=[-1.0] * 8),
                policy_versions=[0] * 8,
                inclusion=[0.5] * 8,
                weights=[1.0] * 8,
                read=["1"] * 8,
            )
            rewards = [1, 0, 0, 0, 1, 1, 0, 0]
            posteriors.observe(step, **of_rollouts, rewards=rewards, extras=extras)
            posteriors.record_metrics(step, {"loss": 1.0})
        posteriors.checkpoint(2, "tag")
        ids = np.array([*posteriors.prompt_ids.values()])
        for step in (0, 2):
            rows = [filler.evaluation(ids, [2, 1])]
            evaluated = {"model": "m", "config": {"n": 1}, "generated_total": 8 * step}
            posteriors.run.record_evaluation(step, "training", rows, **evaluated)
        posteriors.run.release()


def fill(url):
    with open_store(url) as store:
        for number in range(1, RUNS + 1):
            trained(store, number)
        with store.database.transaction(write=True) as connection:
            # As of a warm start, and of a run that has finished; "resume" still continues it.
            connection.exec_driver_sql(
                "UPDATE dbb_run SET parent_name = 'p', parent_uuid = 'u', parent_step = 2, "
                "parent_weight = 1.0, parent_database = 'd'"
            )
            connection.exec_driver_sql(
                "INSERT INTO dbb_event (run_id, created_at, kind, from_step, to_step, detail) SELECT run_id, "
                "created_at, 'finish', 2, 2, '{\"unused_rollouts\": 4}' FROM dbb_run"
            )


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def copies(request, tmp_path_factory):
    """Function: the URL of a fresh copy of one store."""
    folder = tmp_path_factory.mktemp("copies")
    if request.param == "sqlite":
        fill(folder / "base.db")
        return lambda: shutil.copy(folder / "base.db", folder / "copy.db")
    server = request.getfixturevalue("postgres")
    execute(server, "CREATE DATABASE dbb_base")
    fill(server.replace("/postgres?", "/dbb_base?"))

    def copy():
        drop = "DROP DATABASE IF EXISTS dbb_copy WITH (FORCE)"
        execute(server, drop, "CREATE DATABASE dbb_copy TEMPLATE dbb_base")
        url = server.replace("/postgres?", "/dbb_copy?")
        return f"{url}&options=-cstatement_timeout%3D20s"  # a query without end would fill the disk

    return copy


@pytest.fixture
def opened(copies, monkeypatch):
    """A copy of the store, which every command uses."""
    with open_store(copies()) as store:
        shared = lambda *_, **__: contextlib.nullcontext(store)  # noqa: E731
        monkeypatch.setattr("openrlhf_dbb.storage.open_store", shared)
        monkeypatch.setattr(replay, "open_store", shared)
        yield store


def edit(store, sql, **values):
    """Return whether the database accepts the edit and a row changes."""
    try:
        with store.database.transaction(write=True) as connection:
            return connection.execute(sqlalchemy.text(sql), values).rowcount > 0
    except StoreError:  # a constraint of the table, or the type of the column
        return False


def rows_of(table, number):
    """SQL that is true in the rows of a run."""
    if "run_id" in table.c:
        return f"run_id = {number}"
    if "evaluation_id" in table.c:
        return (
            f"evaluation_id IN (SELECT evaluation_id FROM dbb_evaluation WHERE run_id = {number})"
        )
    return f"prompt_id IN ({2 * number - 1}, {2 * number})"


def damage(store, table, turn):
    """Let each run but the first have another bad column of the table; return the columns by run."""
    damaged = {}
    for number, column in enumerate(table.columns, start=2):
        everywhere, sqlite_only = BAD[column.type.python_type]
        values = [*everywhere, *(sqlite_only if store.database.is_sqlite else [])]
        of_run = rows_of(table, number)
        if column.primary_key or column.unique:
            key = ", ".join(each.name for each in table.primary_key)
            of_run = (
                f"({key}) IN (SELECT {key} FROM {table.name} WHERE {of_run} ORDER BY {key} LIMIT 1)"
            )
        sql = f"UPDATE {table.name} SET {column.name} = :value WHERE {of_run}"
        value = values[(turn + number) % len(values)]
        if edit(store, sql, value=value):
            damaged[number] = (column.name, value)
    return damaged


class Faults(list):
    """The faults that a test has seen; it reports them all at its end."""

    @contextlib.contextmanager
    def of(self, *what):
        try:
            yield
        except StoreError as error:
            self.check(str(error), *what)
        except ValueError as error:  # as Posteriors.resume documents
            self.check(str(error), *what)
        except Exception as error:
            self.append((*what, repr(error)))

    def check(self, line, *what):
        if line.count("\n") > line.endswith("\n") or "report this line" in line:
            self.append((*what, line[:300]))


def ask_all(store, number, faults, what, folder, capsys, turn=None):
    """Ask for all that is known of a run; with ``turn`` by two of the commands only."""
    names = {"run": f"run-{number}", "prompt": 2 * number, "folder": folder}
    found = store.query("SELECT name FROM runs WHERE run_id = :number", number=number)
    if found:
        names["run"] = number
    api = Api(store, only={1, number})
    for answer in ANSWERS:
        path = answer.format(**names)
        with faults.of(what, path):
            json.loads(api.ask(f"runs/{number}/{path}"))
    places = range(len(COMMANDS)) if turn is None else (turn, turn + 3)
    for place in places:
        command = COMMANDS[place % len(COMMANDS)]
        with faults.of(what, command[0]):
            code = main([part.format(**names) for part in command])
            if code not in (0, 2):
                faults.append((what, command, code))
            faults.check(capsys.readouterr().err, what, command)
    with faults.of(what, "resume"):
        resumed(store, str(names["run"]), number)


def resumed(store, ref, number):
    texts, labels = prompts_of(number)
    with Posteriors.resume(store, ref, texts, labels) as posteriors:
        posteriors.predictive()
        scored = posteriors.observe(
            posteriors.step + 1,
            np.repeat(texts, 4).tolist(),
            np.repeat(labels, 4).tolist(),
            [1, 0, 0, 0, 1, 1, 0, 0],
        )
        assert np.isfinite(scored.advantages).all()
        posteriors.roll_back(1)
        posteriors.run.release()


def check_lists(store, faults, what, capsys):
    """Every run is in every list."""
    with faults.of(what, "runs"):
        if main(["runs"]):
            faults.append((what, "runs", capsys.readouterr().err))
        if len(capsys.readouterr().out.splitlines()) != RUNS + 1:
            faults.append((what, "runs", "not all"))
    with faults.of(what, "state"):
        if len(json.loads(Api(store).ask("state"))["runs"]) != RUNS:
            faults.append((what, "state", "not all"))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 12))]
)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_an_edited_column_is_told_in_one_line_and_harms_no_other_run(
    opened, table, turn, tmp_path, capsys
):
    faults = Faults()
    damaged = damage(opened, table, turn)
    assert damaged
    check_lists(opened, faults, (table.name, turn), capsys)
    for number, (column, value) in damaged.items():
        what = f"{table.name}.{column} = {value!r:.30}"
        ask_all(opened, number, faults, what, tmp_path, capsys, turn=number + turn)
    assert faults == []
    ask_all(opened, 1, faults, table.name, tmp_path, capsys, turn=turn)
    assert faults == []


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_that_are_gone_or_there_twice_are_told_in_one_line(opened, tmp_path, capsys):
    results = "dbb_evaluation_result WHERE evaluation_id IN (SELECT evaluation_id FROM dbb_evaluation WHERE run_id = 6)"
    edits = {
        2: "DELETE FROM dbb_posterior WHERE run_id = 2",
        3: "DELETE FROM dbb_history WHERE run_id = 3",
        4: "DELETE FROM dbb_step WHERE run_id = 4",
        5: "DELETE FROM dbb_prompt WHERE prompt_id = 10",
        6: f"DELETE FROM {results}",
        7: "UPDATE dbb_evaluation SET step = 2 WHERE run_id = 7",  # there twice
        8: "UPDATE dbb_history SET prev_step = step WHERE run_id = 8",  # a walk back without end
        9: "DELETE FROM dbb_event WHERE run_id = 9",
        10: "DELETE FROM dbb_checkpoint WHERE run_id = 10",
    }
    faults = Faults()
    for sql in edits.values():
        assert edit(opened, sql)
    check_lists(opened, faults, "rows", capsys)
    for number, sql in edits.items():
        ask_all(opened, number, faults, sql, tmp_path, capsys)
    assert faults == []


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        (
            "UPDATE dbb_step SET generated = -1 WHERE run_id = 2",
            r"generated of a row in dbb_step of run 'run-2', step 1 is -1; it must be a whole number from 0 ",
        ),
        (
            "UPDATE dbb_history SET rollouts = 0 WHERE run_id = 2 AND step = 2",
            r"rollouts of a row in dbb_history of run 'run-2', step 2, prompt 3 is 0; ",
        ),
        (
            "UPDATE dbb_posterior SET alpha = NULL WHERE run_id = 2 AND prompt_id = 4",
            "alpha of prompt 4 in run 'run-2' is nan; it must be a finite number",
        ),
        (
            "UPDATE dbb_posterior SET beta = -2 WHERE run_id = 2 AND prompt_id = 4",
            "beta of prompt 4 in run 'run-2' is -2.0; it must be a number above 0",
        ),
        (
            "UPDATE dbb_step SET shared = '{\"moments\": [1.0]}' WHERE run_id = 2",
            "run-wide state of run 'run-2' .*it must be vectors of the shapes",
        ),
        (
            "UPDATE dbb_run SET status = 'done' WHERE run_id = 2",
            "status of run 'run-2' .*is 'done'",
        ),
        (
            "UPDATE dbb_run SET last_step = -1 WHERE run_id = 2",
            "last_step of run 'run-2' .*is -1; ",
        ),
        (
            "UPDATE dbb_run SET config = '[]' WHERE run_id = 2",
            "config of run 'run-2' .*JSON object",
        ),
    ],
)
def test_the_line_names_table_row_column_and_value(opened, sql, line):
    assert edit(opened, sql)
    with pytest.raises(StoreError, match=line):
        run = opened.find_run("run-2")
        read.progress(opened, run)
        read.read_log(opened, run)
        resumed(opened, "run-2", 2)


def test_rows_of_the_version_that_no_release_has_written_are_refused(copies):
    with open_store(copies()) as store:
        assert edit(store, "DELETE FROM dbb_version")
        with pytest.raises(StoreError, match="0 rows in dbb_version; it must have one"):
            open_store(store.url)
