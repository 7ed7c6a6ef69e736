"""SIGKILL of the whole process tree at random moments; every resume continues with exact posteriors.

``OPENRLHF_DBB_KILLS`` sets how often the run is killed (2 here, to keep the suite short).
"""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.e2e

KILLS = int(os.environ.get("OPENRLHF_DBB_KILLS", "2"))
SEED = int(os.environ.get("OPENRLHF_DBB_KILL_SEED", "1"))
DISCOUNT = 0.75
# 32 prompts, 16 a step, 2 x EPOCHS steps, a checkpoint every third step
EPOCHS = max(8, 2 * KILLS)
STEPS = 2 * EPOCHS
COMMAND = [
    sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--estimator", "dbb", "--dbb.discount", str(DISCOUNT),
    "--preset", "tiny", "--data.max_samples", "32", "--rollout.batch_size", "16", "--train.batch_size", "64",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32", "--train.num_episodes", str(EPOCHS),
    "--ckpt.save_steps", "3", "--eval.steps", "-1", "--dbb.forgetting", "updates",
    "--probe.fraction", "0.25", "--probe.samples", "4",
]  # fmt: skip


def query(folder, sql):
    database = folder / "openrlhf_dbb.db"
    if not database.exists():
        return []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as connection:
        return connection.execute(sql).fetchall()


def last_step(folder):
    try:
        return max([step for (step,) in query(folder, "SELECT last_step FROM dbb_run")], default=0)
    except sqlite3.OperationalError:  # the tables are being made
        return 0


def kill_tree(process):
    """SIGKILL to the driver, Ray's daemons, every actor: all at once, as an out-of-memory machine would."""
    root = psutil.Process(process.pid)
    for member in [root, *root.children(recursive=True)]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def tail(log):
    log.seek(0)
    return log.read()[-4000:]


def run_until(folder, arguments, log, target, delay):
    """Start the command and kill it ``delay`` seconds after step ``target`` is stored."""
    process = subprocess.Popen([*COMMAND, *arguments], cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while last_step(folder) < target:
        assert process.poll() is None, f"ended by itself before step {target}: {tail(log)}"
        assert time.monotonic() < deadline, f"step {target} was not reached"
        time.sleep(0.02)
    time.sleep(delay)
    kill_tree(process)


def check_history(folder):
    """No step missing or half there, and alpha' = discount ^ epochs * alpha + S along every prompt's rows."""
    steps = query(
        folder,
        "SELECT step, count(*), count(DISTINCT prompt_id) FROM posterior_history GROUP BY step ORDER BY step",
    )
    assert steps == [(step, 16, 16) for step in range(1, len(steps) + 1)]
    assert len(steps) == last_step(folder)
    posterior = {}
    for step, prompt, rollouts, successes, alpha, beta in query(
        folder, "SELECT step, prompt_id, rollouts, successes, alpha, beta FROM posterior_history ORDER BY step"
    ):
        before = posterior.get(prompt, (1.0, 1.0, step - 2))
        kept = DISCOUNT ** ((step - before[2]) / 2)  # two steps are an epoch
        assert alpha == pytest.approx(kept * before[0] + successes, rel=1e-14)
        assert beta == pytest.approx(kept * before[1] + rollouts - successes, rel=1e-14)
        posterior[prompt] = (alpha, beta, step)
    current = query(folder, "SELECT prompt_id, alpha, beta, step FROM posteriors")
    assert {prompt: values for prompt, *values in current} == {p: list(values) for p, values in posterior.items()}
    check_what_belongs_to_steps(folder)


def check_what_belongs_to_steps(folder):
    """The run-wide count of updates is the step; the same prompts are probed at each of their visits."""
    updates = query(folder, "SELECT step, shared FROM steps ORDER BY step")
    assert [json.loads(shared) for _, shared in updates] == [{"updates": [step]} for step, _ in updates]
    probed = query(folder, "SELECT step, prompt_id FROM probes")
    visits = query(
        folder,
        "SELECT step, prompt_id FROM posterior_history WHERE prompt_id IN (SELECT prompt_id FROM probes)",
    )
    assert sorted(probed) == sorted(visits)
    assert query(folder, "SELECT DISTINCT samples FROM probes") in ([], [(4,)])


def test_a_run_killed_at_random_moments_ends_with_exact_posteriors(tmp_path):
    moments = random.Random(SEED)
    targets = sorted(moments.randint(0, STEPS - 2) for _ in range(KILLS))
    with open(tmp_path / "log", "w+") as log:
        arguments = ["--run_name", "killed"]
        for target in targets:
            # Before the first step any moment of the start-up will do; later any moment of a step.
            delay = moments.uniform(3, 20) if target == 0 else moments.uniform(0, 1)
            run_until(tmp_path, arguments, log, target, delay)
            check_history(tmp_path)
            if query(tmp_path, "SELECT count(*) FROM runs") == [(1,)]:
                arguments = ["--resume"]
        ended = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, stdout=log, stderr=log, timeout=400, check=False)
        assert ended.returncode == 0, tail(log)
    check_history(tmp_path)
    assert query(tmp_path, "SELECT status, last_step FROM runs") == [("finished", STEPS)]
    visits = query(tmp_path, "SELECT count(*), min(visits), max(visits) FROM posteriors")
    assert visits == [(32, EPOCHS, EPOCHS)]  # every prompt once an epoch, whatever was killed and redone
    events = query(tmp_path, "SELECT count(*) FROM dbb_event WHERE kind = 'roll_back'")
    assert events[0][0] <= KILLS
