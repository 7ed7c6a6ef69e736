"""A SQLite store that this process may not write can be read."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openrlhf_dbb import Posteriors
from openrlhf_dbb.storage import StoreError, open_store

# Run as a user whom permission bits bind, unlike root.
READ = """
import os, sys
path, create = sys.argv[1], sys.argv[2] == "create"
from openrlhf_dbb.storage import StoreError, open_store
from openrlhf_dbb.storage.read import progress
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    with open_store(path, create=create) as store:
        print("steps", progress(store, store.find_run("run"))["steps"])
        store.create_run("other", estimator="dbb", estimator_version=1, parameters={}, state_fields=(), model="",
                         dataset="", dataset_digest="", reward="", config={})
except StoreError as error:
    print("refused", error)
"""

WARM_START = """
import os, sys, tempfile
from openrlhf_dbb import Posteriors
def begin(**more):
    with tempfile.TemporaryDirectory() as folder:
        with Posteriors.create(f"{folder}/new.db", "new", ["a"], ["1"], estimator="dbb", **more) as new:
            return new.warm_start
begin()  # loads what another user may not
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print("matched", begin(warm_start="old", warm_start_store=sys.argv[1]).matched)
"""


def read(path, *, create=False):
    """Lines that a process without the right to write prints of a store that it opens, reads and writes."""
    command = [sys.executable, "-c", READ, str(path), "create" if create else ""]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def closed(fill):
    """A store of three steps that nobody has open, in a folder that every user may enter (pytest's are private)."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with open_store(f"{folder}/a.db") as store:
            fill.train(fill.run(store), fill.prompts(store, 5), [1, 2, 3])
        yield Path(folder) / "a.db"
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("mode", [0o444, 0o644])
def test_a_store_in_a_folder_that_is_read_only_is_read_and_not_written(closed, mode):
    closed.chmod(mode)
    closed.parent.chmod(0o555)
    steps, refused = read(closed)
    assert steps == "steps 3"
    assert re.match(rf"refused {closed}: .*read-only.*; make ", refused)
    assert os.listdir(closed.parent) == ["a.db"]


def test_a_store_in_a_folder_that_may_not_be_entered_is_refused_in_one_line(closed):
    closed.parent.chmod(0o700)
    (refused,) = read(closed)
    assert re.match(rf"refused .*no store at {closed}; check the path", refused)


def test_a_training_on_a_read_only_store_is_refused_in_one_line(closed):
    closed.chmod(0o444)
    closed.parent.chmod(0o555)
    (refused,) = read(closed, create=True)
    assert "is read-only here; make the file and its folder writable" in refused


def test_a_run_begins_with_the_posteriors_of_a_store_that_it_may_not_write(closed):
    with Posteriors.create(str(closed), "old", ["a"], ["1"], estimator="dbb") as old:
        old.observe(1, ["a", "a"], ["1", "1"], [1, 0])
        old.finish()
    closed.chmod(0o444)
    closed.parent.chmod(0o555)
    command = [sys.executable, "-c", WARM_START, str(closed)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert (done.stdout, done.stderr) == ("matched 1\n", "")
    assert os.listdir(closed.parent) == ["a.db"]


def test_a_read_only_store_is_read_while_another_user_writes_it(closed, fill):
    with open_store(str(closed)) as store:
        run = store.claim_run(1)
        fill.train(run, fill.prompts(store, 5), [4])
        closed.parent.chmod(0o555)
        assert read(closed)[0] == "steps 4"
        fill.train(run, fill.prompts(store, 5), [5])
        assert read(closed)[0] == "steps 5"


def test_a_wal_that_cannot_be_read_without_the_right_to_write_is_named(closed, fill):
    with open_store(str(closed)) as store:
        fill.train(store.claim_run(1), fill.prompts(store, 5), [4])
        for end in ("", "-wal"):
            shutil.copy(f"{closed}{end}", f"{closed.parent}/copy.db{end}")
    closed.parent.chmod(0o555)
    (refused,) = read(closed.parent / "copy.db")
    assert f"its last steps are in {closed.parent}/copy.db-wal; make " in refused


def test_a_reader_without_the_right_to_write_sees_what_a_writer_adds_later(closed, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.is_writable", lambda path: False)
    with open_store(str(closed), read_only=True) as store:  # opened before there is a WAL
        assert store.runs()[0].model == "tiny"
        assert os.listdir(closed.parent) == ["a.db"]
        with contextlib.closing(sqlite3.connect(closed)) as writer:
            writer.execute("UPDATE dbb_run SET model = 'large'")
            writer.commit()
            assert store.runs()[0].model == "large"


def test_a_reader_that_writes_is_told_that_it_is_a_reader(closed):
    with (
        open_store(str(closed), read_only=True) as store,
        pytest.raises(StoreError, match="was opened read-only"),
    ):
        store.delete_run(store.find_run("run"))


PUT_BACK = {
    "moved": lambda file, kept: file.rename(kept),
    "deleted": lambda file, kept: [shutil.copy(file, kept), file.unlink()],
    "deleted with its logs": lambda file, kept: [
        shutil.copy(file, kept),
        *(Path(f"{file}{end}").unlink() for end in ("", "-wal", "-shm")),
    ],
    "emptied": lambda file, kept: [shutil.copy(file, kept), os.truncate(file, 0)],
    "overwritten": lambda file, kept: [
        shutil.copy(file, kept),
        file.write_text("no database" * 999),
    ],
}


@pytest.mark.parametrize("loss", PUT_BACK)
def test_a_reader_goes_on_with_a_file_that_was_lost_and_put_back(closed, loss):
    with open_store(str(closed), read_only=True) as store:
        assert len(store.runs()) == 1
        PUT_BACK[loss](closed, closed.with_name("kept"))
        for _ in range(2):
            with pytest.raises(
                StoreError, match=rf"{closed}: .*(restore a backup|name another file|or a backup)$"
            ):
                store.runs()
        shutil.copy(closed.with_name("kept"), closed)
        assert len(store.runs()) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_a_reader_sees_another_store_that_was_put_in_the_place_of_its_file(closed, fill, in_place):
    other = closed.with_name("other.db")
    shutil.copy(closed, other)
    with open_store(str(other)) as store:
        fill.run(store, "newer")
    with open_store(str(closed), read_only=True) as store:
        assert len(store.runs()) == 1
        if in_place:
            shutil.copy(other, closed)
        else:
            other.replace(closed)
        assert [run.name for run in store.runs()] == ["run", "newer"]
