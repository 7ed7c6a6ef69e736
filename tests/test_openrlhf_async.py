"""``--estimator none --train.async_enable``: OpenRLHF's own asynchronous trainer, without a GPU.

OpenRLHF does not count policy versions. A batch's lag shows in ``vllm_kl``: the mean log-prob of its tokens when they
were sampled, less that of the policy that trains on them. It is 0 if no training step was between, but for rounding and
for vLLM, which OpenRLHF does not let end a response at once: in the first four steps of synchronous runs, 9e-4 at most.
"""

import re
import subprocess
import sys
import time

import psutil
import pytest

from openrlhf_dbb.platform import cpu

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not cpu.active(), reason="with CUDA the engines need a GPU of their own"),
]
# 64 prompts, 16 a step: 4 steps an episode.
FLAGS = [
    "--preset", "tiny", "--estimator", "none", "--run_name", "run", "--reward.remote_url", "exact_match",
    "--data.max_samples", "64", "--rollout.batch_size", "16", "--train.batch_size", "64", "--train.num_episodes", "1",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32", "--actor.adam.lr", "1e-3",
    "--algo.advantage.is_correction_level", "token", "--eval.steps", "-1", "--ckpt.save_steps", "-1",
    "--train.async_enable",
]  # fmt: skip
AHEAD = [
    "--train.async_queue_size", "2", "--rollout.vllm_generate_batch_size", "32", "--train.partial_rollout_enable",
]  # fmt: skip
ON_POLICY, OFF_POLICY = 1e-3, 5e-3  # at most, at least


def logged(folder):
    """Each tag's values, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_batches_are_generated_while_the_policy_trains(train, tmp_path):
    result = train(tmp_path, *FLAGS, "--eval.steps", "2")
    assert result.returncode == 0, result.stderr[-4000:]
    tags = logged(tmp_path / "runs/run/tensorboard")
    assert tags["train/rollout/num_samples"] == dict.fromkeys([1, 2, 3, 4], 16 * 8)
    first, *others = (abs(tags["train/vllm_kl"][step]) for step in (1, 2, 3, 4))
    assert first < ON_POLICY
    assert max(others) > OFF_POLICY
    assert list(tags["eval/eval_default_pass8"]) == [2]  # between two batches, so not after the last
    assert (tmp_path / "runs/run/model/model.safetensors").is_file()


@pytest.mark.long
def test_all_of_its_flags_together_and_a_resume(train, tmp_path):
    flags = [*FLAGS, *AHEAD, "--eval.steps", "2", "--ckpt.save_steps", "3"]
    result = train(tmp_path, *flags, "--train.num_episodes", "2")
    assert result.returncode == 0, result.stderr[-4000:]
    tags = logged(tmp_path / "runs/run/tensorboard")
    assert list(tags["train/vllm_kl"]) == list(range(1, 9))
    again = ["--train.num_episodes", "3", "--resume", "--logger.tensorboard_dir", str(tmp_path / "again")]
    result = train(tmp_path, *flags, *again)
    assert result.returncode == 0, result.stderr[-4000:]
    tags = logged(tmp_path / "again")
    assert list(tags["train/vllm_kl"]) == list(range(7, 13))  # from the checkpoint of step 6


@pytest.mark.long
def test_dynamic_filtering_keeps_groups_of_different_rewards(train, tmp_path):
    result = train(tmp_path, *FLAGS, "--algo.dynamic_filtering_enable", "--train.partial_rollout_enable")
    assert result.returncode == 0, result.stderr[-4000:]
    tags = logged(tmp_path / "runs/run/tensorboard")
    assert tags["train/rollout/num_samples"][1] == 16 * 8
    assert len(tags["train/dynamic_filtering_pass_rate"]) == len(tags["train/rollout/num_samples"])
    # One right response of 8, or one wrong: the least deviation that is not 0, sqrt(1/8 x 7/8).
    assert min(tags["train/group_reward_std"].values()) > 0.33


@pytest.mark.long
@pytest.mark.parametrize("actor", ["GenerateSamples", "Training", "Rollout", "PolicyModel", "VLLMLock"])
def test_a_killed_actor_ends_the_run_in_one_line(tmp_path, actor):
    command = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *FLAGS, "--train.num_episodes", "500"]
    with open(tmp_path / "log", "w") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    while "Global step 3:" not in (tmp_path / "log").read_text():
        assert driver.poll() is None, (tmp_path / "log").read_text()[-4000:]
        time.sleep(0.1)
    started = psutil.Process(driver.pid).children(recursive=True)
    (part,) = [process for process in started if re.match(rf"ray::\w*{actor}", process.cmdline()[0])]
    part.kill()
    assert driver.wait(timeout=60) == 1
    [line] = re.findall(r"^error: .*", (tmp_path / "log").read_text(), re.M)
    assert re.match(
        rf"error: \w*{actor}\w* \(process {part.pid}\) has died: its process was killed or has crashed", line
    )
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
