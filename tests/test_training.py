"""The real pipeline, end to end: Ray actors, DeepSpeed engine, vLLM engine, a small model."""

import json
import os
import re
import subprocess
import sys
from statistics import median

import pytest
import safetensors.torch
import torch
from trainings import DISCOUNT, check_posteriors, logged, rows
from trainings import SMALL as FLAGS

from openrlhf_dbb import storage, tiny

pytestmark = pytest.mark.e2e

SMALL = [*FLAGS, "--train.num_episodes", "3", "--ckpt.save_steps", "2", "--eval.steps", "-1"]
# So wide that it corrects nothing; vLLM's log-probs are then compared with the policy's at every step.
CORRECTED = [
    "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "0", "1e9",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    """A run called "first", trained to its end through the launcher that users type.

    Its policy moves far and its embeddings are not tied. Two ranks, engines and ZeRO 3: test_several_hosts.py.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("finished")
    source = tiny.prepare(tiny.default_folder()).model
    policy = AutoModelForCausalLM.from_pretrained(source)
    policy.config.tie_word_embeddings = False
    policy.lm_head.weight = type(policy.lm_head.weight)(policy.lm_head.weight.detach().clone())
    policy.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "model")
    result = train(
        folder, "--estimator", "dbb", "--run_name", "first", *SMALL, "--train.num_episodes", "2",
        "--actor.model_name_or_path", str(folder / "model"), *CORRECTED, "--actor.adam.lr", "1e-3",
        "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1", launcher=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return folder, result


def test_a_run_leaves_its_posteriors_rollouts_and_metrics_in_the_database(finished):
    folder, result = finished
    check_posteriors(folder, steps=4)
    assert rows(folder, "SELECT name, status, last_step FROM runs") == [("first", "finished", 4)]
    counts = rows(
        folder, "SELECT step, count(*), count(log_prob), sum(missing) FROM rollouts GROUP BY step"
    )
    assert counts == [(step, 64, 64, 0) for step in range(1, 5)]
    # The answer is the response, or the right side of an equation in it: "67=245789".
    wrong = "SELECT text, label FROM rollouts JOIN prompts USING (prompt_id) WHERE score = 1"
    assert (
        rows(
            folder,
            f"{wrong} AND trim(text, ' =') <> label AND rtrim(text, ' =') NOT LIKE '%=' || label",
        )
        == []
    )
    metrics = [json.loads(text) for (text,) in rows(folder, "SELECT metrics FROM steps")]
    assert all(
        of_step["plan/steps"] == 4 and of_step["timing/step_total"] > 0 for of_step in metrics
    )
    assert f"rollouts     {32 * 2 * 8} generated, {32 * 2 * 8} trained on" in result.stdout
    scalars = logged(folder / "runs/first/tensorboard/first")
    stored = dict(rows(folder, "SELECT step, avg(mean) FROM posterior_history GROUP BY step"))
    assert scalars["train/estimator/mean"] == pytest.approx(stored, rel=1e-5)


def test_vllm_samples_from_the_weights_that_were_trained(finished):
    """After every sync vLLM's log-probs are the actor's, up to bfloat16 rounding, though the policy moves far."""
    from transformers import AutoModelForCausalLM

    folder, _ = finished
    divergence = list(logged(folder / "runs/first/tensorboard/first")["train/vllm_kl"].values())
    assert len(divergence) == 4
    # bfloat16 rounding alone gives about 0.001; weights of the step before some 0.02, in every step but the first. One
    # step may lie apart: a single token of very small probability can dominate the estimate.
    assert median(map(abs, divergence)) < 0.005, divergence
    models = ("model", "runs/first/model")
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder / model).state_dict() for model in models
    )
    moved = sum(
        (after[name].float() - value.float()).square().sum() for name, value in before.items()
    )
    size = sum(value.float().square().sum() for value in before.values())
    assert (moved / size).sqrt() > 0.01


# An engine that has no weights any more once it has slept.
FORGETFUL = """
from openrlhf_dbb.actors.vllm_actor import StrictRolloutActor

def forget(worker):
    for weight in worker.model_runner.model.parameters():
        weight.data.zero_()

class Forgetful(StrictRolloutActor):
    async def sleep(self):
        await self.llm.collective_rpc(forget)

    async def wake_up(self, tags=None):
        pass
"""

# A training whose trainer takes the machine for one with CUDA, and notes what it does. With the word "sleep" its
# engines sleep.
TRIED = """
import sys
from types import SimpleNamespace
from openrlhf_dbb import upstream
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()
with upstream.imports_for_driver():
    from openrlhf_dbb.actors import trainer, vllm_actor
    from forgetful import Forgetful
SLEEPS = sys.argv.pop(1) == "sleep"

def note(*event):
    with open("events", "a") as events:
        print(*event, file=events)

class Trainer(trainer.PosteriorTrainer):
    def __init__(self, model, strategy, *groups, **options):
        strategy.args.vllm.enable_sleep = SLEEPS
        super().__init__(model, strategy, *groups, **options)

    def broadcast_to_vllm(self):
        super().broadcast_to_vllm()
        note("sent", self.progress.step)

    def _evaluate(self, step):
        super()._evaluate(step)
        note("evaluated", step)

trainer.PosteriorTrainer = Trainer
vllm_actor.StrictRolloutActor = Forgetful
trainer.cpu = SimpleNamespace(active=lambda: False)
sys.exit(train_grpo.main(sys.argv[1:]))
"""


def run_script(folder, script, *words, **modules):
    """Run a script in a folder; it and Ray's actors can import these modules."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
        capture_output=True,
        timeout=900,
    )


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("awake", ["sent 0", "evaluated 0", "sent 0", "sent 1", "evaluated 2"]),
        # No update follows an evaluation. After the last one the generator wakes them to find the data at its end.
        ("sleep", ["sent 0", "evaluated 0", "sent 0", "sent 0", "sent 1", "evaluated 2", "sent 2"]),
    ],
)
def test_weights_are_sent_before_the_first_evaluation_and_to_engines_that_slept(
    tmp_path, engines, expected
):
    """With CUDA, so that a fault on their way ends the run before an evaluation has taken an hour."""
    flags = [
        "--estimator",
        "dbb",
        *FLAGS,
        "--train.num_episodes",
        "1",
        "--eval.steps",
        "2",
        "--ckpt.save_steps",
        "-1",
        "--train.batch_size",
        "128",
    ]
    done = run_script(tmp_path, TRIED, engines, *flags, forgetful=FORGETFUL)
    assert done.returncode == 0, done.stderr[-4000:]
    events = (tmp_path / "events").read_text().splitlines()
    assert events == expected  # of steps that are done
    check_posteriors(tmp_path, steps=2)
    metrics = [json.loads(text) for (text,) in rows(tmp_path, "SELECT metrics FROM steps")]
    differences = [of_step["vllm/log_prob_difference"] for of_step in metrics]
    assert len(differences) == 2 and max(differences) < 0.01


BROKEN = """
import sys
from openrlhf_dbb import upstream
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()
with upstream.imports_for_driver():
    from openrlhf_dbb.actors import vllm_actor
    from broken import Broken

vllm_actor.StrictRolloutActor = Broken
train_grpo.command(sys.argv[1:])
"""
BROKEN_ENGINE = """
from openrlhf_dbb.actors.vllm_actor import StrictRolloutActor

class Broken(StrictRolloutActor):
    async def __init__(self, *args, **kwargs):
        raise ValueError("no room for the cache")
"""


def test_an_engine_that_cannot_be_made_is_the_reason_although_the_policy_waits_for_it(tmp_path):
    done = run_script(tmp_path, BROKEN, "--run_name", "mine", *FLAGS, broken=BROKEN_ENGINE)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "ValueError: no room for the cache" in done.stderr
    assert "run mine has not finished" in done.stderr


@pytest.fixture(scope="module")
def once(lane, tmp_path_factory):
    """The folder of a run with one optimizer step a step."""
    folder = tmp_path_factory.mktemp("once")
    result = lane.train(
        folder, "--estimator", "dbb", "--run_name", "once", *SMALL, "--train.batch_size", "128"
    )
    assert result.error is None, result.output[-4000:]
    return folder


def test_one_update_a_step_takes_the_log_probs_in_the_training_pass(once):
    check_posteriors(once, steps=6)
    # The engines' log-probs are stored in place of the policy's.
    assert rows(once, "SELECT count(*) - count(log_prob) FROM rollouts WHERE run_id = 1") == [(0,)]
    metrics = [
        json.loads(text) for (text,) in rows(once, "SELECT metrics FROM steps WHERE run_id = 1")
    ]
    assert max(of_step["vllm/log_prob_difference"] for of_step in metrics) < 0.01
    assert [(of_step["ppo_kl"], of_step["ppo_clip_ratio"]) for of_step in metrics[1:]] == [
        (0, 0)
    ] * 5
    assert all(of_step["actor_grad_norm"] > 0 for of_step in metrics)


def test_a_warm_start_begins_with_the_other_runs_posteriors_and_missing_rewards_are_no_failures(
    once, lane
):
    folder = once
    (folder / "sometimes.py").write_text(UNVERIFIABLE)
    result = lane.train(
        folder, "--estimator", "dbb", "--run_name", "second", "--warm_start", "once", "--warm_start_weight", "0.5",
        *SMALL, "--train.num_episodes", "1", "--reward.remote_url", str(folder / "sometimes.py"),
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    pairs = rows(
        folder,
        "SELECT a.alpha, a.beta, b.rollouts, b.successes, b.alpha, b.beta FROM posteriors a "
        "JOIN posterior_history b USING (prompt_id) WHERE a.run_id = 1 AND b.run_id = 2",
    )
    assert len(pairs) == 32
    for alpha, beta, rollouts, successes, new_alpha, new_beta in pairs:
        assert new_alpha == pytest.approx(DISCOUNT * 0.5 * alpha + successes, rel=1e-12)
        assert new_beta == pytest.approx(DISCOUNT * 0.5 * beta + rollouts - successes, rel=1e-12)
    # the reward function cannot verify one rollout in four
    missing = 1 - sum(pair[2] for pair in pairs) / (32 * 8)
    assert 0.1 < missing < 0.4


def test_adapters_are_trained_merged_for_vllm_and_saved_as_a_plain_model(lane, tmp_path):
    result = lane.train(
        tmp_path, "--estimator", "dbb", "--run_name", "lora", *SMALL, "--train.num_episodes", "2", "--eval.steps", "4",
        "--eval.n_samples_per_prompt", "1", "--ckpt.best_metric_key", "", "--ds.lora.rank", "4",
        "--actor.adam.lr", "1e-2", *CORRECTED,
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    check_posteriors(tmp_path, steps=4)
    differences = logged(tmp_path / "runs/lora/tensorboard/lora")["train/vllm/log_prob_difference"]
    # float32: a rounding apart at every step
    assert len(differences) == 4 and max(differences.values()) < 1e-5
    base, saved, best = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (
            tiny.default_folder() / "model",
            tmp_path / "runs/lora/model",
            tmp_path / "runs/lora/best",
        )
    )
    assert base.keys() == saved.keys()
    moved = {name for name in base if not torch.equal(base[name], saved[name])}
    assert moved == {name for name in base if "_proj" in name}  # the linear layers
    assert all(torch.equal(best[name], saved[name]) for name in base)


def check_probes(folder, output):
    """16 more rollouts of each chosen prompt are stored at each of its visits, and train nothing."""
    visits = rows(folder, "SELECT step, prompt_id FROM posterior_history")
    probes = rows(folder, "SELECT step, prompt_id, samples FROM probes")
    chosen = {prompt for _, prompt, _ in probes}
    assert 0 < len(chosen) < 32
    assert sorted(probes) == sorted((*visit, 16) for visit in visits if visit[1] in chosen)
    counts = rf"{3 * 16 * len(chosen)} extra rollouts of {3 * len(chosen)} groups"
    assert re.search(rf"probes +{counts}\b.*not trained on", output)
    assert rows(folder, "SELECT DISTINCT rollouts FROM posterior_history") == [(8,)]
    assert rows(folder, "SELECT DISTINCT generated, trained FROM steps") == [(16 * 8, 16 * 8)]


def check_logged_shared(folder, scalars):
    """Run-wide numbers are logged as they are stored."""
    stored = rows(folder, "SELECT step, shared FROM steps")
    shared = {step: json.loads(text) for step, text in stored}
    assert shared[6]["prompts"] == [32]
    for field in ("discount", "weight", "prompts"):
        expected = {step: state[field][0] for step, state in shared.items()}
        assert scalars[f"train/estimator/{field}"] == pytest.approx(expected)


def test_the_chosen_prompts_are_probed_at_every_visit_and_probes_train_nothing(lane, tmp_path):
    """Probed is a quarter of the 32 prompts."""
    probes = ["--probe.fraction", "0.25", "--probe.samples", "16"]
    result = lane.train(tmp_path, "--estimator", "auto", "--run_name", "probed", *SMALL, *probes)
    assert result.error is None, result.output[-4000:]
    check_probes(tmp_path, result.output)
    scalars = logged(tmp_path / "runs/probed/tensorboard/probed")
    check_logged_shared(tmp_path, scalars)
    groups = dict(rows(tmp_path, "SELECT step, count(*) FROM probes GROUP BY step"))
    assert scalars["train/probe/groups"] == groups
    assert scalars["train/probe/mse"].keys() == groups.keys()


def test_posteriors_in_postgresql_and_no_password_anywhere(lane, new_url, tmp_path):
    # The server asks for none
    url = new_url("postgresql").replace("postgres:@", "postgres:hunter2@")
    assert "hunter2" in url
    flags = [
        "--estimator",
        "dbb",
        "--run_name",
        "pg",
        *SMALL,
        "--train.num_episodes",
        "1",
        "--store.url",
        url,
    ]
    result = lane.train(tmp_path, *flags)
    assert result.error is None, result.output[-4000:]
    with storage.open_store(url) as store:
        steps = store.query(
            "SELECT step, count(*), sum(rollouts) FROM posterior_history GROUP BY step ORDER BY step"
        )
        assert [tuple(row) for row in steps] == [(step, 16, 128) for step in (1, 2)]
        stored = repr(store.query("SELECT * FROM dbb_run") + store.query("SELECT * FROM dbb_event"))
    assert not (tmp_path / "openrlhf_dbb.db").exists()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for place in (result.output, stored, repr(written)):
        assert "hunter2" not in place


UNVERIFIABLE = """
import itertools
calls = itertools.count()

def reward_func(queries, prompts, labels):
    if next(calls) % 4 == 0:
        return {"rewards": [None]}
    return {"rewards": [float(queries[0].startswith(prompts[0] + labels[0]))]}
"""


def test_a_broken_reward_function_stops_the_run(lane, tmp_path):
    in_actors = "import sys\ndef reward_func(*_):\n    return {'rewards': [1.0 / ('ray' not in sys.modules)]}\n"
    (tmp_path / "broken.py").write_text(in_actors)  # the start tries it in a process without Ray
    result = lane.train(
        tmp_path, "--estimator", "dbb", *SMALL, "--reward.remote_url", str(tmp_path / "broken.py")
    )
    assert "reward_func of broken.py failed: ZeroDivisionError: " in result.error
    assert "(broken.py, line 3); on prompt '" in result.error
    assert rows(tmp_path, "SELECT status, last_step FROM runs") == [("running", 0)]
    assert rows(tmp_path, "SELECT count(*) FROM posterior_history") == [(0,)]
