"""Ctrl-C and SIGTERM end the training command at every moment of its start."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [
    sys.executable,
    "-m",
    "openrlhf_dbb.cli.train_grpo",
    "--preset",
    "tiny",
    "--train.num_episodes",
    "50",
]
WITHIN_S = 60  # an idle machine needs less than one


def ended(process, sent):
    """Send a signal; return the exit code and the lines on stderr that the interrupt printed."""
    process.send_signal(sent)
    _, written = process.communicate(timeout=WITHIN_S)
    assert "Traceback" not in written
    return process.returncode, [
        line for line in written.splitlines() if line.startswith("interrupted: ")
    ]


def wait_for_handlers(pid):
    """Wait until a process handles SIGTERM. Python itself handles SIGINT alone."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught & (1 << (signal.SIGTERM - 1)):
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} does not handle SIGTERM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after_s", "sent", "code"), [(0, signal.SIGINT, 130), (4, signal.SIGTERM, 143)]
)
def test_the_start_ends_at_once_with_one_line(tmp_path, after_s, sent, code):
    process = subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_handlers(process.pid)
    time.sleep(after_s)
    returned, lines = ended(process, sent)
    assert returned == code
    assert len(lines) == 1


# The main thread is in SQLite's own wait, which no exception interrupts.
LOCKED = """
import sqlite3, sys
from openrlhf_dbb.driver import interrupt
interrupt.install()
interrupt.say(lambda: "it waited")
connection = sqlite3.connect(sys.argv[1], timeout=60)
print("waits", flush=True)
connection.execute("BEGIN IMMEDIATE")
"""


def test_code_in_c_does_not_hold_it_up(tmp_path):
    path = str(tmp_path / "locked.db")
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", LOCKED, path], **pipes)
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.5)
        assert ended(process, signal.SIGINT) == (130, ["interrupted: it waited"])


TRAINING = """
import os, sys, time
from openrlhf_dbb.driver import interrupt
interrupt.END_S = 0.5
interrupt.install()
interrupt.raise_from_now_on()
try:
    print(os.getpid(), flush=True)  # in here: the signal may come at once
    time.sleep(60)
except KeyboardInterrupt as error:
    print("orderly", *error.args, flush=True)
    time.sleep(60 if sys.argv[1:] else 0)
    os._exit(error.args[0])
"""


@pytest.mark.parametrize("stuck", [[], ["stuck"]])
def test_a_training_ends_in_order_but_not_later_than_that(stuck):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, *stuck], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == f"{process.pid}\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=WITHIN_S)[0] == "orderly 143\n"
    assert process.returncode == 143


# A thread finds out that an engine has died; the main thread takes longer than a signal would let it.
FOUND = """
import os, threading, time
from openrlhf_dbb.driver import interrupt
interrupt.END_S = 0.2
interrupt.install()
try:
    threading.Timer(0.1, interrupt.raise_in_main).start()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("rank 1 has died", flush=True)
    os._exit(7)
"""


def test_a_thread_that_ends_a_training_leaves_time_to_say_why():
    command = [sys.executable, "-c", FOUND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout, done.stderr) == (7, "rank 1 has died\n", "")


# As LOCKED, but a thread of the training finds out that an engine has died.
STUCK = """
import sqlite3, sys, threading
from openrlhf_dbb.driver import interrupt, watching
watching._STUCK_S = 1
interrupt.install()
watch = watching._Watch(None, None, 1)
died = RuntimeError("a traceback\\nValueError: no room for the cache")
connection = sqlite3.connect(sys.argv[1], timeout=60)
threading.Thread(target=watch._end, args=(died,), daemon=True).start()
connection.execute("BEGIN IMMEDIATE")
"""


def test_a_training_whose_main_thread_is_stuck_ends_with_the_reason(tmp_path):
    path = str(tmp_path / "locked.db")
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        command = [sys.executable, "-c", STUCK, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stderr) == (1, "error: ValueError: no room for the cache\n")
