"""Verifier processes that hang, die or cannot start, and parents that die."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from trainings import until

pytest.importorskip("math_verify")

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

NEVER_FINISHES = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture
def pool():
    with_short_limit = VerifierPool(size=1, time_limit_s=2.0)
    yield with_short_limit
    with_short_limit.close()


@pytest.fixture
def workers(pool):
    """Function: process ids of the verifiers that this test has started; other tests' pools have their own."""
    before = verifiers_of(os.getpid())
    return lambda: sorted(verifiers_of(os.getpid()) - before)


def running(word):
    # One that has ended has no command line
    found = psutil.process_iter(["pid", "ppid", "cmdline"])
    return [each.info for each in found if word in " ".join(each.info["cmdline"] or ())]


def verifiers_of(parent):
    """Ids of the running verifier processes of a process."""
    return {info["pid"] for info in running("verifier_pool") if info["ppid"] == parent}


def test_expression_that_never_finishes_is_missing_and_the_next_one_works(pool, workers):
    assert pool.verify(r"\boxed{1/2}", r"\boxed{0.5}") is True
    assert pool.verify(NEVER_FINISHES, r"\boxed{5}") is None
    assert workers() == []
    assert pool.verify(r"\boxed{1/2}", r"\boxed{0.5}") is True
    assert pool.verify(r"\boxed{1/3}", r"\boxed{0.5}") is False


def test_worker_that_dies_on_an_answer_is_replaced_and_the_answer_is_missing(pool, workers):
    assert pool.verify("1", "1") is True
    (pid,) = workers()
    pool.time_limit_s = 60.0
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    assert pool.verify(NEVER_FINISHES, r"\boxed{5}") is None
    assert pool.verify("1", "1") is True
    assert workers() != [pid]


def test_worker_is_started_when_needed_then_reused_and_replaced_where_it_was_killed_while_idle(
    workers,
):
    pool = VerifierPool(size=4)
    assert workers() == []
    assert [pool.verify("1", str(label)) for label in range(3)] == [False, True, False]
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.verify("2", "2") is True  # the kill costs no verdict
    pool.close()
    assert workers() == []


RESETS = "import signal\n    signal.setitimer(signal.ITIMER_PROF, 0)"
FORKS = "import os\n    if os.fork() == 0: time.sleep(1000)"
DOUBLES = "import os\n    os.fork()\n    return {'correct': os.getppid() == parent}"


@pytest.mark.parametrize(
    ("trick", "seconds", "verdict"),
    [(RESETS, 0.5, None), (FORKS, 0.5, None), (DOUBLES, 60.0, True)],
)
def test_a_verifier_without_its_alarm_or_with_children_does_not_hold_the_caller(
    tmp_path, monkeypatch, trick, seconds, verdict
):
    (tmp_path / "worker.py").write_text(
        "import os, sys, time\nfrom openrlhf_dbb.rewards import verifier_pool\nparent = os.getppid()\n"
        f"def reply_to(label, answer):\n    {trick}\n    time.sleep(1000)\n"
        "verifier_pool.serve(float(sys.argv[1]), 'json', reply_to)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = VerifierPool(size=1, time_limit_s=seconds, worker="worker")
    assert [pool.verify("a", "b"), pool.verify("a", "b")] == [verdict, verdict]
    pool.close()
    # The kernel takes a killed child away later than it ends the process that was waited for.
    until(lambda: not running("-m worker"))


def test_the_limit_is_cpu_time_so_that_a_busy_machine_loses_no_answer(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(
        "import sys, time\nfrom openrlhf_dbb.rewards import verifier_pool\n"
        "def reply_to(label, answer):\n    time.sleep(1.0)\n    return {'correct': True}\n"
        "verifier_pool.serve(float(sys.argv[1]), 'json', reply_to)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = VerifierPool(size=1, time_limit_s=0.3, worker="worker")
    assert pool.verify("a", "b") is True
    pool.close()


def test_a_worker_that_cannot_start_raises_every_time(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = VerifierPool(size=1)
    for _ in range(2):  # the second call must not wait for the slot of the first
        with pytest.raises(
            UsageError, match=r"verifier_pool 5\.0 did not start.*is its package installed\?"
        ):
            pool.verify("1", "1")


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_when_the_parent_is_killed(busy):
    program = textwrap.dedent(f"""
        from openrlhf_dbb.rewards.verifier_pool import VerifierPool
        pool = VerifierPool(size=1, time_limit_s=1.5)
        pool.verify("1", "1")
        print("verified", flush=True)
        if {busy}:
            pool.verify({NEVER_FINISHES!r}, "5")
        input()
    """)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes)
    assert parent.stdout.readline() == "verified\n"
    (worker,) = verifiers_of(parent.pid)
    time.sleep(0.3)
    assert verifiers_of(parent.pid) == {worker}
    parent.kill()
    parent.communicate()
    until(lambda: worker not in {info["pid"] for info in running("verifier_pool")})


def test_the_environment_sets_the_time_limit(monkeypatch):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_SECONDS", "0.5")
    assert VerifierPool().time_limit_s == 0.5
