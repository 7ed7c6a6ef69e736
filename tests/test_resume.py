"""Never a wrong resume, on the real pipeline: the right older step, or one line."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trainings import SMALL, change, check_posteriors, last_step, rows, unfinish, wait_for_step

from openrlhf_dbb.saved import best_model, checkpoints

pytestmark = pytest.mark.e2e

FLAGS = [
    "--estimator", "dbb", *SMALL, "--ckpt.save_steps", "2", "--actor.adam.lr", "1e-3", "--eval.steps", "6",
    "--eval.n_samples_per_prompt", "1", "--ckpt.best_metric_key", "",
]  # fmt: skip
DATABASE = "openrlhf_dbb.db"
FILES_OF_DATABASE = {DATABASE, f"{DATABASE}-shm", f"{DATABASE}-wal"}


@pytest.fixture(scope="module")
def killed(lane, tmp_path_factory):
    """A run at step 6 that has not finished, with checkpoints of steps 2, 4 and 6, and the best model, of step 6."""
    folder = tmp_path_factory.mktemp("killed")
    result = lane.train(folder, *FLAGS, "--run_name", "mine", "--train.num_episodes", "3")
    assert result.error is None, result.output[-4000:]
    unfinish(folder)
    return folder


@pytest.fixture
def copied(killed, tmp_path):
    """A copy of that run; its folder and the flags to resume it there."""
    # The lane may close the database meanwhile, and delete its -shm and -wal
    shutil.copytree(killed, tmp_path, ignore=lambda *_: FILES_OF_DATABASE, dirs_exist_ok=True)
    of_lane = sqlite3.connect(killed / DATABASE)
    of_copy = sqlite3.connect(tmp_path / DATABASE)
    with contextlib.closing(of_lane), contextlib.closing(of_copy):
        of_lane.backup(of_copy)
    return tmp_path, ["--resume", "mine", "--ckpt.path", str(tmp_path / "runs/mine/checkpoints")]


def check_best_of(folder, best, steps):
    """The best model is that of the best of these evaluated steps, and no other one is left."""
    evaluated = dict(
        rows(folder, "SELECT step, accuracy FROM evaluations WHERE step > 0 ORDER BY step")
    )
    assert list(evaluated) == steps
    assert best.is_symlink()
    found = best_model.read(best)
    assert found.step == max(evaluated, key=evaluated.get)
    assert found.value == max(evaluated.values())
    assert len(list((folder / "runs/mine/best_models").iterdir())) == 1


def test_a_damaged_checkpoint_is_named_and_the_run_continues_from_the_one_before(copied, lane):
    import torch

    folder, flags = copied
    actor = folder / "runs/mine/checkpoints/_actor"
    shard = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(actor / "global_step4" / shard, actor / "global_step6" / shard)
    best = folder / "runs/mine/best"
    assert best_model.read(best).step == 6
    result = lane.train(folder, *FLAGS, *flags, "--train.num_episodes", "4")
    assert result.error is None, result.output[-4000:]
    [note] = [line for line in result.output.splitlines() if line.startswith("note: checkpoint")]
    assert re.search(r"global_step6 is damaged.*continuing from global_step4$", note)
    assert str(actor / "global_step6" / shard) in note
    # Step 6 was undone, and its best model with it; the last step, 8, is evaluated at the end.
    check_best_of(folder, best, [6, 8])
    events = rows(folder, "SELECT from_step, to_step FROM dbb_event WHERE kind = 'roll_back'")
    assert events == [(6, 4)]
    check_posteriors(folder, steps=8)
    ((run,),) = rows(folder, "SELECT uuid FROM dbb_run")
    assert checkpoints.newest_whole(actor.parent, run, 8) == ("global_step8", [])
    states = torch.load(
        actor / "global_step8/mp_rank_00_model_states.pt", map_location="cpu", weights_only=False
    )
    # Ours, and DeepSpeed's: two optimizer steps each
    assert (states["global_step"], states["global_steps"]) == (8, 16)


def test_without_any_whole_checkpoint_the_resume_is_refused_and_nothing_is_lost(copied, lane):
    folder, flags = copied
    for manifest in (folder / "runs/mine/checkpoints/_actor").glob("*/manifest.json"):
        manifest.write_bytes(b"")
    result = lane.train(folder, *FLAGS, *flags, "--train.num_episodes", "4")
    assert re.match("--resume mine: .*global_step6 is damaged.*manifest.json", result.error)
    recorded = ", ".join(f"global_step{step} (step {step})" for step in (2, 4, 6))
    assert recorded in result.error
    assert "--warm_start mine" in result.error
    check_posteriors(folder, steps=6)


@pytest.mark.parametrize(
    ("actor", "line"),
    [
        ("Rollout", "error: vLLM engine 0 (process "),
        pytest.param("Policy", "error: rank 0 of the policy (process ", marks=pytest.mark.long),
    ],
)
def test_a_killed_part_is_named_with_the_way_on_and_nothing_is_left(copied, actor, line):
    """And the evaluation after the checkpoint's step, which a kill had cut short, is made up for."""
    folder, flags = copied
    change(folder, "DELETE FROM dbb_evaluation_result", "DELETE FROM dbb_evaluation")
    for name in ("best", "best_models"):
        shutil.rmtree(folder / "runs/mine" / name)
    with open(folder / "log", "w") as log:
        command = [
            sys.executable,
            "-m",
            "openrlhf_dbb.cli.train_grpo",
            *FLAGS,
            *flags,
            "--train.num_episodes",
            "100",
        ]
        driver = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    wait_for_step(folder, 9, driver)
    started = psutil.Process(driver.pid).children(recursive=True)
    # Ray names a process after its class, or after the class and the method that is at work.
    (part,) = [
        process for process in started if re.match(rf"ray::\w*{actor}", process.cmdline()[0])
    ]
    part.kill()
    assert driver.wait(timeout=300) == 1
    last = (folder / "log").read_text().splitlines()[-1]
    assert last.startswith(f"{line}{part.pid} on host ")
    assert "has died: killed or crashed" in last
    [trace] = re.findall(
        r"run mine .*checkpoint .*global_step\d+; .*--resume mine; .* (/\S+)$", last
    )
    assert "Traceback" in Path(trace).read_text()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert alive == []
    evaluated = [step for (step,) in rows(folder, "SELECT step FROM evaluations ORDER BY step")]
    assert evaluated[0] == 6 and best_model.read(folder / "runs/mine/best").step in evaluated
    check_posteriors(folder, steps=last_step(folder))


def disturb_the_raylet(folder, disturb, *flags, environment=None):
    """Start a run, and call ``disturb(raylet)`` when the run is planned; the ended run's exit code and output."""
    log = folder / "log"
    command = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *FLAGS, *flags]
    with open(log, "w") as output:
        driver = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env=os.environ | (environment or {})
        )
    try:
        deadline = time.monotonic() + 600
        while "\nlook  " not in log.read_text():
            assert driver.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        started = psutil.Process(driver.pid).children(recursive=True)
        [raylet] = [process for process in started if process.name() == "raylet"]
        disturb(raylet)
        code = driver.wait(timeout=300)
        psutil.wait_procs(started, timeout=120)  # the one that prints what the driver cannot
        return code, log.read_text()
    finally:
        driver.kill()


def hold_for(seconds):
    """Return a function that holds a process for so many seconds."""

    def hold(process):
        process.suspend()
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()

    return hold


def test_a_run_whose_only_host_ray_gives_up_ends_and_says_so(tmp_path):
    """Its policy is not made yet, and would wait for a host for ever."""
    # Quick, but not so quick that Ray gives a busy host up by itself
    checks = {"timeout_ms": 3000, "period_ms": 500, "failure_threshold": 2, "initial_delay_ms": 0}
    environment = {f"RAY_health_check_{name}": str(value) for name, value in checks.items()}
    code, output = disturb_the_raylet(
        tmp_path, hold_for(15), "--run_name", "mine", environment=environment
    )
    assert code == 1, output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"no host is left ({os.uname().nodename})" in line
    assert "run mine has not finished" in line and "--resume mine" in line


def test_a_run_whose_raylet_is_killed_says_so(tmp_path):
    """Ray's own code ends the driver then, at once and without a word."""
    code, output = disturb_the_raylet(tmp_path, psutil.Process.kill, "--run_name", "mine")
    assert code == 1, output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    # Where Python sees it first, that is said
    assert "Ray" in line and "--resume mine" in line


@pytest.mark.long
def test_a_host_that_does_not_answer_for_minutes_is_waited_for(tmp_path):
    """By Ray's own settings a host is given up after 65 seconds."""
    code, output = disturb_the_raylet(tmp_path, hold_for(100), "--train.num_episodes", "1")
    assert code == 0, output


@pytest.mark.long
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_two_ranks_resume_with_every_zero_stage(stage, train, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    flags = [
        *FLAGS,
        "--ds.zero_stage",
        stage,
        "--actor.num_gpus_per_node",
        "2",
        "--vllm.num_engines",
        "2",
    ]
    first = train(tmp_path, *flags, "--run_name", "mine", "--train.num_episodes", "3")
    assert first.returncode == 0, first.stderr[-4000:]
    unfinish(tmp_path)
    actor = tmp_path / "runs/mine/checkpoints/_actor"
    best, last = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "runs/mine" / each)
        for each in ("best", "model")
    )
    # Both are of step 6
    assert all(map(torch.equal, best.state_dict().values(), last.state_dict().values()))
    os.truncate(sorted((actor / "global_step6").glob("*.pt"))[0], 1000)
    second = train(tmp_path, *flags, "--resume", "mine", "--train.num_episodes", "4")
    assert second.returncode == 0, second.stderr[-4000:]
    assert second.stdout.count("; continuing from global_step4") == 1
    check_posteriors(tmp_path, steps=8)
