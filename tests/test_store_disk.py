"""A disk that is full, over a quota or read-only: one clear line, and a database that resumes exactly."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from storage import StoreError, open_store

ROOT = Path(__file__).parents[1]
PROMPTS = 200


def train_until_refused(fill, run, ids):
    """The step that was refused, and why."""
    for step in range(run.record.last_step + 1, 100_000):
        try:
            fill.train(run, ids, [step])
        except StoreError as error:
            return step, str(error)
    raise AssertionError("the disk was never full")


@pytest.mark.parametrize("limit_kib", [*range(200, 240, 5), 400, 1000, 4200])
def test_a_file_over_its_quota(tmp_path, fill, limit_kib):
    """The limit is on each of SQLite's files; a process of its own, since it cannot be raised again."""
    url = f"sqlite:///{tmp_path}/quota.db"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with open_store(url) as store:
                run, ids = fill.run(store), fill.prompts(store, PROMPTS)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib * 1024, limit_kib * 1024))
                os.write(write, "{} {}".format(*train_until_refused(fill, run, ids)).encode())
        except BaseException as error:
            os.write(write, f"0 {error!r}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        step, _, message = pipe.read().partition(" ")
    assert message.startswith(str(tmp_path)) and message.endswith("the transaction was rolled back, make room")
    with open_store(url) as store:
        run, ids = store.claim_run(1), fill.prompts(store, PROMPTS)
        fill.check_trained(store, run, ids, int(step) - 1)
        fill.train(run, ids, range(int(step), int(step) + 3))
        fill.check_trained(store, run, ids, int(step) + 2)


@pytest.fixture
def small_disk(tmp_path):
    """Function: a folder on a file system of some MiB of its own."""
    mounted = []

    def mount(size_mib):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount a file system here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(folder, leave):
    """A file that takes all the space but ``leave`` bytes."""
    free = shutil.disk_usage(folder).free
    (folder / "ballast").write_bytes(b"0" * max(free - leave, 0))
    return folder / "ballast"


@pytest.mark.parametrize("leave", [0, 20_000, 300_000])
def test_a_full_disk_below_sqlite(small_disk, fill, leave):
    folder = small_disk(8)
    with open_store(f"sqlite:///{folder}/x.db") as store:
        run, ids = fill.run(store), fill.prompts(store, PROMPTS)
        fill.train(run, ids, [1, 2])
        ballast = fill_up(folder, leave)
        step, message = train_until_refused(fill, run, ids)
        assert message.startswith(f"{folder}/x.db: ") and "\n" not in message
        ballast.unlink()
        # the same process goes on
        fill.check_trained(store, run, ids, step - 1)
        fill.train(run, ids, range(step, step + 3))
    with open_store(f"sqlite:///{folder}/x.db") as store:
        run = store.claim_run(1)
        fill.check_trained(store, run, ids, step + 2)


def test_a_full_disk_below_postgresql(small_disk, own_postgres, fill):
    import psycopg

    folder = small_disk(24)
    for parent in [folder, *folder.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o711)
    shutil.chown(folder, own_postgres.socket_folder.owner())
    url = own_postgres.new_url()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
        connection.execute("CREATE DATABASE small TABLESPACE small")
    url = url.replace(url.split("?")[0].rpartition("/")[2], "small")
    try:
        with open_store(url) as store:
            run, ids = fill.run(store), fill.prompts(store, PROMPTS)
            fill.train(run, ids, [1, 2])
            ballast = fill_up(folder, 300_000)
            step, message = train_until_refused(fill, run, ids)
            assert "No space left on device" in message and "\n" not in message
            ballast.unlink()
            fill.check_trained(store, run, ids, step - 1)
            fill.train(run, ids, range(step, step + 3))
            fill.check_trained(store, run, ids, step + 2)
    finally:
        with psycopg.connect(own_postgres.new_url(), autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS small")
            connection.execute("DROP TABLESPACE small")


READ_ONLY = """
import os, sys
from storage import StoreError, open_store
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    with open_store(sys.argv[1]) as store:
        store.claim_run(1).finish()
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_read_only_file_or_folder_is_one_line_and_changes_nothing(tmp_path, fill, dump, what):
    import tempfile

    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder, path = Path(name), Path(name) / "x.db"
        with open_store(f"sqlite:///{path}") as store:
            run, ids = fill.run(store), fill.prompts(store, 3)
            fill.train(run, ids, [1])
            before = dump(store)
        folder.chmod(0o555 if what == "folder" else 0o777)
        path.chmod(0o444 if what == "file" else 0o666)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, f"sqlite:///{path}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{path} cannot be written: the file or its folder is read-only; name another file\n"
        folder.chmod(0o755)
        path.chmod(0o644)
        with open_store(f"sqlite:///{path}") as store:
            assert dump(store) == before
            fill.train(store.claim_run(1), ids, [2])


def test_a_connection_that_may_only_read(tmp_path, fill):
    """SQLite opens what it may not write as read-only, and says so at the first write."""
    with open_store(f"sqlite:///{tmp_path}/x.db") as store:
        run, ids = fill.run(store), fill.prompts(store, 3)
        fill.train(run, ids, [1])
        rows = fill.rows(run, ids, [1, 2, 3])
        with store.database.engine.connect() as connection:
            connection.connection.dbapi_connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match="the file or its folder is read-only; make both writable or name another"):
            run.record_step(2, rows)
        with store.database.engine.connect() as connection:
            connection.connection.dbapi_connection.execute("PRAGMA query_only = OFF")
        fill.train(run, ids, [2])
        fill.check_trained(store, run, ids, 2)
