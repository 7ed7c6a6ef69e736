"""What the tests of trainings share: flags of a small run, and readers of what it has left behind."""

import sqlite3
import time

import psutil
import pytest

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


def wait_for_step(folder, step, process, database="openrlhf_dbb.db", within_s=300):
    """Wait until a run has stored a step. Its process, which writes into the folder's ``log``, must not end before."""
    deadline = time.monotonic() + within_s
    while last_step(folder, database) < step:
        late = time.monotonic() > deadline
        assert process.poll() is None and not late, f"no step {step}: {(folder / 'log').read_text()[-4000:]}"
        time.sleep(0.02)


def change(folder, *statements):
    """Run statements on the run's SQLite database."""
    with sqlite3.connect(folder / "openrlhf_dbb.db") as connection:
        for statement in statements:
            connection.execute(statement)


def logged(folder):
    """Each tag in a folder of TensorBoard, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def check_posteriors(folder, steps, run=1):
    """Steps 1 to ``steps`` are whole, and a posterior is what Algorithm 1 makes of the one before."""
    history = rows(
        folder,
        "SELECT step, prompt_id, rollouts, successes, alpha, beta, mean, variance FROM posterior_history "
        f"WHERE run_id = {run} ORDER BY step",
    )
    assert [step for step, *_ in history] == [step for step in range(1, steps + 1) for _ in range(16)]
    posterior = {}
    for _, prompt, rollouts, successes, alpha, beta, mean, variance in history:
        before = posterior.get(prompt, (1.0, 1.0))
        assert (alpha, beta) == (DISCOUNT * before[0] + successes, DISCOUNT * before[1] + rollouts - successes)
        assert mean == pytest.approx(alpha / (alpha + beta), rel=1e-12)
        assert variance == pytest.approx(alpha * beta / (alpha + beta) ** 2, rel=1e-12)
        posterior[prompt] = (alpha, beta)
    current = rows(folder, f"SELECT prompt_id, alpha, beta FROM posteriors WHERE run_id = {run}")
    assert {prompt: (alpha, beta) for prompt, alpha, beta in current} == posterior
