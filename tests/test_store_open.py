"""Opening a store: addresses, creation, versions, refusals, and no password anywhere."""

import os
import sqlite3
import sys
import threading
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import inspect

from openrlhf_dbb.storage import URL_VARIABLE, StoreError, open_store
from openrlhf_dbb.storage.address import NETWORK_FS_VARIABLE, file_system, parse_url
from openrlhf_dbb.storage.engine import Database


def test_a_new_sqlite_file_is_opened_when_its_writer_is_done(new_url):
    url = new_url("sqlite")
    other = sqlite3.connect(parse_url(url).path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    later = threading.Timer(1, other.execute, ["COMMIT"])
    later.start()
    with open_store(url) as store:
        assert store.query("PRAGMA journal_mode") == [("wal",)]
    later.join()


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE runs (x INTEGER)", "CREATE VIEW prompts AS SELECT 1 AS x"]
)
def test_a_table_of_another_program_is_refused_and_left_alone(kind, new_url, statement):
    name = statement.split()[2]
    url = new_url(kind)
    engine = Database(parse_url(url)).engine
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    with pytest.raises(StoreError, match=rf"table or view '{name}' .*not openrlhf-dbb's"):
        open_store(url)
    with pytest.raises(StoreError, match="holds no posteriors"):
        open_store(url, create=False)
    assert [*inspect(engine).get_table_names(), *inspect(engine).get_view_names()] == [name]
    engine.dispose()


def test_the_url_comes_from_the_argument_then_the_variable_then_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with open_store() as store:
        # absolute, so that it means the same in a process with another working directory
        assert store.url == f"sqlite:///{tmp_path}/openrlhf_dbb.db"
    monkeypatch.setenv(URL_VARIABLE, "sqlite:///from_variable.db")
    with open_store() as store:
        assert store.location == str(tmp_path / "from_variable.db")
    with open_store("sqlite:///from_argument.db") as store:
        assert store.location == str(tmp_path / "from_argument.db")


@pytest.mark.parametrize(
    "folder", ["what?", "per%20cent", "a#b", "a b", "\u00fc\u6f22", "%3F", "mode?a=b&c", "x@y:z"]
)
def test_a_store_and_its_url_name_the_same_file_whatever_its_path(tmp_path, monkeypatch, folder):
    inside = tmp_path / folder
    inside.mkdir()
    monkeypatch.chdir(inside)
    for name in (
        "sqlite:///a.db",
        "a.db",
        f"{inside}/a.db",
        f"sqlite:///{quote(str(inside))}/a.db",
    ):
        with open_store(name) as store:
            assert store.location == str(inside / "a.db")
        with open_store(store.url, create=False) as again:
            assert again.location == store.location
    assert {path.name for path in tmp_path.rglob("*")} == {folder, "a.db"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////tmp/what?/a.db", "[?]: write %3F"),
        ("runs", "store URL cannot be parsed; .*not shown.*name of a file"),
        ("mysql://u:secret@h/db", "'mysql' is not a supported database"),
        ("sqlite:///:memory:", "a SQLite store is one file"),
        ("sqlite:////nowhere/at/all.db", "/nowhere/at/all.db: .*cannot be opened; .*folder"),
        ("/tmp", "/tmp: .*folder; name a file"),
        ("\ud800.db", r"not '\\ud800.db'; memory"),
        ("notes.db", "notes.db: .*not a SQLite database"),
    ],
)  # fmt: skip
def test_addresses_that_cannot_work_are_refused_in_one_line(url, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.db").write_text("not a database, but longer than the header of one " * 20)
    with pytest.raises(StoreError, match=message) as refusal:
        open_store(url)
    assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


def test_a_network_file_system_is_recognised():
    mounts = (
        "/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/vdb /data/local xfs rw 0 0\n"
        "//win/share /my\\040share cifs rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nsrv /tmp lustre rw 0 0\n"
    )
    assert file_system("/home/x.db", mounts) == "ext4"
    assert file_system("/data/x.db", mounts) == "nfs4"
    assert file_system("/data/local/x.db", mounts) == "xfs"
    assert file_system("/my share/x.db", mounts) == "cifs"
    assert file_system("/tmp/x.db", mounts) == "lustre"  # mounted over the tmpfs


def test_a_network_file_system_is_refused_unless_allowed(tmp_path, monkeypatch):
    # The real file system of the test plays the network one: only its name is put on the list.
    kind = file_system(os.path.realpath(tmp_path), Path("/proc/mounts").read_text())
    monkeypatch.setattr("openrlhf_dbb.storage.address.NETWORK_FILE_SYSTEMS", {kind})
    monkeypatch.delenv(NETWORK_FS_VARIABLE, raising=False)
    url = f"sqlite:///{tmp_path}/x.db"
    with pytest.raises(
        StoreError, match=rf"network file system \({kind}\).*set {NETWORK_FS_VARIABLE}=1 if only"
    ):
        open_store(url)
    monkeypatch.setenv(NETWORK_FS_VARIABLE, "1")
    open_store(url).close()


def test_a_missing_driver_for_postgresql_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError) as refusal:
        open_store("postgresql://u:hidden@h/db")
    assert str(refusal.value).startswith("postgresql://h:5432/db needs the driver psycopg; run: ")


SECRET_URLS = [
    "postgresql://ann:p%40ss@127.0.0.1:1/rl",
    "postgresql://127.0.0.1:1/rl?user=ann&password=p%40ss&sslpassword=p%40ss",
    "postgresql://ann:p@ss@127.0.0.1:1/rl",  # not escaped
    "postgresql://ann:p@ss:notaport/rl",
    "postgresql:///host=127.0.0.1 password=p@ss",
    "postgresql://127.0.0.1:1/host%3D127.0.0.1%20password%3Dp%40ss",
    "postgresql://127.0.0.1:1/rl?dbname=rl%20password%3Dp%40ss",
    "postgresql://127.0.0.1:1/rl?port=password%3Dp%40ss",
    "postgresql://127.0.0.1:1/rl#password=p%40ss",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_password_is_in_no_message_and_no_traceback(url):
    with pytest.raises(StoreError) as refusal:
        open_store(url)
    shown = "".join(traceback.format_exception(refusal.value)) + repr(refusal.value)
    # Source lines quote the code of this test, which holds no password.
    assert "p%40ss" not in shown and "@ss" not in shown and "\n" not in str(refusal.value)


def test_an_open_store_and_its_errors_do_not_show_the_password_or_values(new_url):
    url = new_url("postgresql").replace("postgres:@", "postgres:p%40ss@")
    value = " ".join(["private", "text"])  # in two, since a traceback quotes this source
    with open_store(url) as store:
        shown = [
            repr(store),
            store.location,
            repr(store.database.engine),
            repr(vars(store.database)),
        ]
        with pytest.raises(StoreError) as refusal:
            store.query("SELECT nothing FROM nowhere WHERE x = :x", x=value)
        shown += traceback.format_exception(refusal.value)
        with store.database.engine.connect() as connection:
            assert connection.connection.dbapi_connection.info.password == "p@ss"
    assert not any(secret in line for line in shown for secret in ("p@ss", "p%40ss", value))


def test_a_database_of_another_schema_version_is_refused_in_one_line_and_left_as_it_is(store):
    with store.database.transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE dbb_version SET version = 99, library_version = '0.0.9'")
    with pytest.raises(StoreError, match=r"has schema version 99 of openrlhf-dbb .0.0.9.*$"):
        open_store(store.url)
    assert store.query("SELECT version FROM dbb_version") == [(99,)]
