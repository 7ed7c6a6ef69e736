"""Protocols of the study: their runs and the arguments of these."""

from pathlib import Path

import pytest

import openrlhf_dbb
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from study import protocol, tasks
from study import run as study_run
from study.collect import NAMES, Name
from study.data import EVERY_ARM

PACKAGE = Path(openrlhf_dbb.__file__).parent
SMALL = """
description = "two arms"
preset = "tiny"
task = "tiny"
[flags]
"train.num_episodes" = 4
[arms.grpo]
"estimator" = "point"
[arms.dbb]
"estimator" = "dbb"
"actor.eps_clip_low_high" = [0.5, 0.5]
[experiments.n2]
n = 2
arms = ["grpo", "dbb"]
seeds = [1, 2]
more_seeds = { grpo = [3] }
[experiments.n2.flags]
"data.drop_duplicates" = true
[experiments.pilot-n2]
n = 2
arms = ["grpo"]
seeds = [7]
learning_rates = [1e-4, 2e-4]
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"

    def write(text=SMALL):
        path.write_text(text)
        return str(path)

    return write


def test_runs_come_seed_by_seed_and_seeds_of_one_arm_come_last(small):
    assert [run.name for run in protocol.load(small()).runs] == [
        "n2-grpo-s1", "n2-dbb-s1", "n2-grpo-s2", "n2-dbb-s2", "n2-grpo-s3",
        "pilot-n2-grpo-lr0.0001-s7", "pilot-n2-grpo-lr0.0002-s7",
    ]  # fmt: skip


def test_arguments_come_from_the_protocol_the_arm_the_experiment_and_the_sizes(small):
    plan = protocol.load(small())
    run = next(run for run in plan.runs if run.name == "n2-dbb-s2")
    assert protocol.argv(run, plan, "sqlite:///a.db", {"eval.dataset": "e.jsonl"}, resume=False) == [
        "--preset", "tiny", "--store.url", "sqlite:///a.db", "--train.seed", "2", "--eval.dataset", "e.jsonl",
        "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "128", "--train.micro_batch_size", "128",
        "--rollout.micro_batch_size", "128", "--train.num_episodes", "4", "--estimator", "dbb",
        "--actor.eps_clip_low_high", "0.5", "0.5", "--data.drop_duplicates", "--run_name", "n2-dbb-s2",
    ]  # fmt: skip


def test_the_task_with_steps_brings_its_start_its_verifier_and_its_length(small, tmp_path, monkeypatch):
    plan = protocol.load(small(SMALL.replace('task = "tiny"', 'task = "steps"')))
    assert {run.start for run in plan.runs} == {"steps"}
    monkeypatch.setattr(
        tasks, "prepare", lambda folder, seed, start: tasks.StudyTask(folder, folder / "t", folder / "e")
    )
    given = study_run._prepare((tmp_path, "steps", 1))
    assert given["reward.remote_url"] == "last_result" and given["rollout.max_new_tokens"] == "16"
    settings = arguments.parse(protocol.argv(plan.runs[0], plan, f"sqlite:///{tmp_path}/a.db", given, resume=False))
    assert settings.args.reward.remote_url == [str(PACKAGE / "rewards" / "last_result.py")]
    assert settings.args.rollout.max_new_tokens == 16
    assert settings.args.actor.model_name_or_path == str(tmp_path / "tasks" / "steps-s1")
    mixed = protocol.load(small(SMALL.replace("n = 2\n", 'n = 2\nstart = "steps"\n', 1)))
    assert {run.experiment: run.start for run in mixed.runs} == {"n2": "steps", "pilot-n2": "medium"}


def test_policies_for_the_gradients_are_refused_for_the_task_with_steps(small):
    text = SMALL.replace('task = "tiny"', 'task = "steps"').replace("[experiments.pilot-n2]", "[experiments.frozen-n2]")
    with pytest.raises(UsageError, match=r"frozen-n2 is for measuring gradients, .* 'steps' are not; leave it out"):
        protocol.load(small(text))


def test_an_experiment_takes_what_it_does_not_say_from_the_one_it_is_like(small):
    more = '[experiments.n4]\nlike = "n2"\nn = 4\nseeds = [5]\n[experiments.n4.flags]\n"train.num_episodes" = 9\n'
    runs = {run.name: run for run in protocol.load(small(SMALL + more)).runs if run.experiment == "n4"}
    assert list(runs) == ["n4-grpo-s5", "n4-dbb-s5", "n4-grpo-s3"]
    flags = runs["n4-dbb-s5"].flags
    assert (flags["rollout.n_samples_per_prompt"], flags["train.num_episodes"]) == (4, 9)
    assert flags["data.drop_duplicates"] is True
    with pytest.raises(UsageError, match="n4 is like 'n9', which is none of its experiments: n2, pilot-n2, n4"):
        protocol.load(small(SMALL + more.replace('"n2"', '"n9"')))


def test_a_started_run_is_resumed(small):
    plan = protocol.load(small())
    argv = protocol.argv(plan.runs[0], plan, "sqlite:///a.db", {}, resume=True)
    assert argv[-2:] == ["--resume", "n2-grpo-s1"]


def test_choosing_takes_whole_seeds(small):
    plan = protocol.load(small())
    assert [run.name for run in plan.choose(["n2"], seeds=1)] == ["n2-grpo-s1", "n2-dbb-s1"]
    assert plan.choose([]) == plan.runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('arms = ["grpo", "dbb"]', 'arms = ["ppo"]'), "n2 has the unknown arm 'ppo'; available: grpo, dbb"),
        (("n = 2\n", 'n = 2\nstart = "easy"\n'), "n2 has start = 'easy'; allowed: medium, hard, small, steps$"),
        (('task = "tiny"', 'task = "big"'), "has task = 'big'; allowed: tiny, steps, or none"),
        (("n = 2\n", "n = 2\nrate = 1\n"), "n2 sets rate; allowed: "),
    ],
)
def test_an_invalid_protocol_is_refused_with_the_cause(small, change, message):
    with pytest.raises(UsageError, match=message):
        protocol.load(small(SMALL.replace(*change, 1)))


def test_unknown_protocols_and_experiments_are_refused_with_those_available(small):
    with pytest.raises(UsageError, match="--protocol big: no such protocol; available: cpu, fewer, gpu, paper, smoke"):
        protocol.load("big")
    with pytest.raises(UsageError, match="has no experiment 'n3'; available: n2, pilot-n2"):
        protocol.load(small()).choose(["n3"])


@pytest.mark.parametrize("name", protocol.names())
def test_every_run_of_the_shipped_protocols_can_be_parsed_checked_and_collected(name, tmp_path):
    plan = protocol.load(name)
    for run in plan.runs:
        found = Name.parse(run.name)
        assert (found.experiment, found.arm, found.seed) == (run.experiment, run.arm, run.seed)
        assert run.experiment in NAMES and run.arm in EVERY_ARM
    for arm in {run.arm: run for run in plan.runs}.values():
        settings = arguments.parse(protocol.argv(arm, plan, f"sqlite:///{tmp_path}/a.db", {}, resume=False))
        if plan.task:  # the presets of others need what a machine without CUDA does not have
            checks.check(settings)
        assert settings.args.rollout.n_samples_per_prompt == arm.n


def test_the_primary_experiment_is_the_one_in_the_document():
    runs = [run for run in protocol.load("cpu").runs if run.experiment == "n2"]
    assert len(runs) == 7 * 8
    assert {run.seed for run in runs} == set(range(1, 9))
    assert {run.flags["train.num_episodes"] for run in runs} == {4}
    assert {run.flags["rollout.batch_size"] for run in runs} == {128}
