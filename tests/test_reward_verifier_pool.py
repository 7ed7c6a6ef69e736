"""Verifier processes that hang, die or cannot start, and parents that die."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

pytest.importorskip("math_verify")

from openrlhf_dbb.rewards.verifier_pool import VerifierPool, VerifierStartError

NEVER_FINISHES = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture
def pool():
    with_short_limit = VerifierPool(size=1, time_limit_s=2.0)
    yield with_short_limit
    with_short_limit.close()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def test_expression_that_never_finishes_is_missing_and_the_next_one_works(pool):
    assert pool.verify(r"\boxed{1/2}", r"\boxed{0.5}") is True
    (pid,) = pool.worker_pids()
    assert pool.verify(NEVER_FINISHES, r"\boxed{5}") is None
    assert not is_running(pid)
    assert pool.verify(r"\boxed{1/2}", r"\boxed{0.5}") is True
    assert pool.verify(r"\boxed{1/3}", r"\boxed{0.5}") is False


def test_worker_that_dies_on_an_answer_is_replaced_and_the_answer_is_missing(pool):
    assert pool.verify("1", "1") is True
    (pid,) = pool.worker_pids()
    pool.time_limit_s = 60.0
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    assert pool.verify(NEVER_FINISHES, r"\boxed{5}") is None
    assert pool.verify("1", "1") is True
    assert pool.worker_pids() != [pid]


def test_worker_killed_while_idle_costs_no_verdict(pool):
    assert pool.verify("1", "1") is True
    (pid,) = pool.worker_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert pool.verify("2", "2") is True


def test_worker_is_started_when_needed_and_then_reused():
    pool = VerifierPool(size=4)
    assert pool.worker_pids() == []
    assert [pool.verify("1", str(label)) for label in range(3)] == [False, True, False]
    assert len(pool.worker_pids()) == 1
    pool.close()
    assert pool.worker_pids() == []


def test_worker_memory_is_limited(pool):
    pool.verify("1", "1")
    with open(f"/proc/{pool.worker_pids()[0]}/limits") as file:
        limits = {line[:26].strip(): line[26:].split()[0] for line in file}
    assert limits["Max address space"] == str(4 * 1024**3)


def test_worker_that_cannot_start_raises_with_what_it_wrote_every_time(tmp_path):
    script = tmp_path / "broken_worker.py"
    script.write_text("import no_such_module_anywhere")
    pool = VerifierPool(size=1, worker_script=script)
    for _ in range(2):  # the second call must not wait for the slot of the first
        with pytest.raises(VerifierStartError, match="ModuleNotFoundError: No module named 'no_such_module_anywhere'"):
            pool.verify("1", "1")


def test_replies_survive_a_library_that_prints_and_nothing_reaches_our_stdout(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        textwrap.dedent("""
        from openrlhf_dbb.rewards.verifier_pool import VerifierPool
        pool = VerifierPool(size=1)
        assert pool.verify("1", "1") is True
        assert pool.verify("1", "2") is False
        """)
    )
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(
        "import atexit, sys\nimport math_verify.parser as p\n"
        "original = p.extract_target_from_pred\n"
        "def loud(*args, **options):\n    print('hello from a library', flush=True)\n"
        "    return original(*args, **options)\n"
        "p.extract_target_from_pred = loud\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(library), *sys.path])}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_when_the_parent_is_killed(tmp_path, busy):
    program = tmp_path / "parent.py"
    program.write_text(
        textwrap.dedent(f"""
        from openrlhf_dbb.rewards.verifier_pool import VerifierPool
        pool = VerifierPool(size=1, time_limit_s=1.5)
        pool.verify("1", "1")
        print(pool.worker_pids()[0], flush=True)
        if {busy}:
            pool.verify({NEVER_FINISHES!r}, "5")
        input()
        """)
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_running(worker)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(worker))


@pytest.mark.parametrize(
    ("processes", "seconds", "message"),
    [("0", "5", "0 verifier processes"), ("two", "5", "two"), ("2", "0", "0.0 s"), ("2", "nan", "nan s")],
)
def test_environment_out_of_range_is_refused_by_name(monkeypatch, processes, seconds, message):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_PROCESSES", processes)
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_SECONDS", seconds)
    with pytest.raises(ValueError, match="OPENRLHF_DBB_VERIFIER_PROCESSES") as error:
        VerifierPool.from_environment()
    assert message in str(error.value)


def test_environment_sets_size_and_limit(monkeypatch):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_PROCESSES", "3")
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_SECONDS", "0.5")
    pool = VerifierPool.from_environment()
    assert (pool.size, pool.time_limit_s) == (3, 0.5)
