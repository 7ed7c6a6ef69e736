"""What the tests of trainings share: flags of a small run, and readers of what it has left behind."""

import sqlite3
import time

import psutil
from filler import check

from openrlhf_dbb.storage import open_store

# 32 prompts, 16 a step: 2 steps an epoch; 8 rollouts a prompt, 2 optimizer steps a step.
SMALL = [
    "--preset", "tiny", "--data.max_samples", "32", "--rollout.batch_size", "16", "--train.batch_size", "64",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32",
]  # fmt: skip
DISCOUNT = 0.5  # of the preset


def until(condition):
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kill_tree(process):
    """SIGKILL to the driver, Ray's daemons, every actor: all at once, as an out-of-memory machine would."""
    root = psutil.Process(process.pid)
    for member in [root, *root.children(recursive=True)]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def rows(folder, sql, database="openrlhf_dbb.db"):
    """The rows of a query to the run's SQLite database."""
    with sqlite3.connect(f"file:{folder}/{database}?mode=ro", uri=True, timeout=10) as connection:
        return connection.execute(sql).fetchall()


def last_step(folder, database="openrlhf_dbb.db"):
    """The last step that is stored; 0 where the database or its tables are still being made."""
    try:
        return max((step for (step,) in rows(folder, "SELECT last_step FROM dbb_run", database)), default=0)
    except sqlite3.OperationalError:
        return 0


def wait_for_step(folder, step, process, database="openrlhf_dbb.db"):
    """Wait until a run has stored a step. Its process, which writes into the folder's ``log``, must not end before."""
    deadline = time.monotonic() + 600
    while last_step(folder, database) < step:
        late = time.monotonic() > deadline
        assert process.poll() is None and not late, f"no step {step}: {(folder / 'log').read_text()[-4000:]}"
        time.sleep(0.02)


def change(folder, *statements):
    """Run statements on the run's SQLite database."""
    with sqlite3.connect(folder / "openrlhf_dbb.db") as connection:
        for statement in statements:
            connection.execute(statement)


def unfinish(folder):
    """Make a finished run look like one whose process was killed after the last step, before it saved the model."""
    change(folder, "UPDATE dbb_run SET status = 'running', owner_host = '', owner_pid = 0, owner_started = NULL")


def logged(folder):
    """Each tag in a folder of TensorBoard, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def check_store(folder):
    """The tables agree, and a posterior of DBB is what Algorithm 1 makes of the one before."""
    with open_store(f"sqlite:///{folder}/openrlhf_dbb.db", create=False) as store:
        assert check(store) == []


def check_posteriors(folder, steps):
    """Steps 1 to ``steps`` are whole."""
    check_store(folder)
    groups = rows(folder, "SELECT step, count(*) FROM posterior_history GROUP BY step ORDER BY step")
    assert groups == [(step, 16) for step in range(1, steps + 1)]
