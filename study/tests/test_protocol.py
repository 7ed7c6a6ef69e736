"""Protocols of the study: their runs, the arguments of these, and what is trained and measured of them."""

import subprocess
from types import SimpleNamespace

import pytest

from openrlhf_dbb import storage
from openrlhf_dbb.cli.main import build
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from study import exact, measure, protocol, rows, run
from study.collect import name_parts
from study.protocol import PlannedRun

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
[experiments.n4]
like = "n2"
n = 4
seeds = [5]
[experiments.n4.flags]
"train.num_episodes" = 9
"""


@pytest.fixture
def small(tmp_path):
    def write(text=SMALL):
        (tmp_path / "small.toml").write_text(text)
        return str(tmp_path / "small.toml")

    return write


def test_runs_come_seed_by_seed_and_an_experiment_can_be_like_another(small):
    plan = protocol.load(small())
    assert [each.name for each in plan.runs] == [
        "n2-grpo-s1", "n2-dbb-s1", "n2-grpo-s2", "n2-dbb-s2", "n2-grpo-s3",
        "pilot-n2-grpo-lr0.0001-s7", "pilot-n2-grpo-lr0.0002-s7", "n4-grpo-s5", "n4-dbb-s5", "n4-grpo-s3",
    ]  # fmt: skip
    assert [each.name for each in plan.choose(["n2"], seeds=1)] == ["n2-grpo-s1", "n2-dbb-s1"]
    flags = plan.runs[-2].flags
    assert (flags["rollout.n_samples_per_prompt"], flags["train.num_episodes"]) == (4, 9)
    assert flags["data.drop_duplicates"] is True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (('arms = ["grpo", "dbb"]', 'arms = ["ppo"]'), "'ppo'; allowed: grpo, dbb"),
        (("n = 2\n", 'n = 2\nstart = "easy"\n'), "'easy'; allowed: medium, hard, small"),
        (("n = 2\n", "n = 2\nrate = 1\n"), "'rate'"),
    ],
)
def test_an_invalid_protocol_is_refused_with_the_cause(small, change, named):
    with pytest.raises(UsageError, match=named):
        protocol.load(small(SMALL.replace(*change, 1)))


@pytest.mark.parametrize("name", sorted(path.stem for path in protocol.FOLDER.glob("*.toml")))
def test_every_run_of_the_shipped_protocols_can_be_parsed_checked_and_collected(name, tmp_path):
    plan = protocol.load(name)
    for each in plan.runs:
        assert name_parts(each.name) == (each.experiment, each.arm, each.seed)
    for arm in {each.arm: each for each in plan.runs}.values():
        settings = arguments.parse(
            protocol.argv(arm, plan, f"sqlite:///{tmp_path}/a.db", {}, resume=False)
        )
        if plan.task:  # the presets of others need what a machine without CUDA does not have
            checks.check(settings)
        assert settings.args.rollout.n_samples_per_prompt == arm.n


def test_a_finished_runs_model_is_evaluated_and_a_failure_is_named(fill, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda words, **_: commands.append(words) or SimpleNamespace(returncode=1),
    )
    gpu = protocol.load("gpu")
    first, second = gpu.runs[:2]
    with storage.open_store(run.store_url(tmp_path)) as store:
        config = {"ckpt.output_dir": f"runs/{first.name}/model", "rollout.max_new_tokens": 4096}
        made = fill.run(store, first.name, config=config)
        fill.step(made, 1, fill.prompts(store, 2), (1, 0), 2)
        made.finish()
    # The second is not finished
    assert list(measure.evaluate([first, second], gpu, tmp_path)) == [first.name]
    [[_, _, package, *argv]] = commands  # python -m
    parsed = build(["evaluate"]).parse_args(argv)
    assert (package, parsed.model, parsed.run) == ("openrlhf_dbb", f"runs/{first.name}", first.name)


def test_each_policy_that_a_run_saved_is_measured_once(tmp_path, fill, monkeypatch):
    name, checkpoints, seen = "few-n1-single-s21", "runs/few-n1-single-s21/checkpoints", []
    with storage.open_store(run.store_url(tmp_path)) as store:
        made = fill.run(store, name, config={"ckpt.path": checkpoints, "actor.adam.lr": 2e-4})
        ids = fill.prompts(store, 2)
        for step in range(1, 5):
            fill.step(made, step, ids, [1, 2], usage=fill.usage(ids, [4, 4]))
        made.finish()
    for step in (2, 4):
        (tmp_path / checkpoints / f"global_step{step}_hf").mkdir(parents=True)
    task = SimpleNamespace(policy=seen.append, accuracy=lambda _: 0.1 * len(seen))
    monkeypatch.setattr(exact, "read", lambda folder: task)
    monkeypatch.setattr(
        measure, "_side_by_side", lambda each, jobs, *_: (each(*given) for given in jobs)
    )
    planned = [
        PlannedRun(f"few-n1-single-s{seed}", "few-n1", "single", 1, seed, "medium", {})
        for seed in (21, 22)
    ]
    for _ in range(2):
        measure.measure_points(planned, tmp_path, 1)  # the second run is not finished
    assert [model and model.name for model in seen] == [None, "global_step2_hf", "global_step4_hf"]
    measured = rows.read(tmp_path / "points.csv", rows.COLUMNS["points"])
    assert measured[["step", "rollouts", "accuracy"]].to_numpy().tolist() == [
        [0, 0, 0.1],
        [2, 16, 0.2],
        [4, 32, 0.3],
    ]
