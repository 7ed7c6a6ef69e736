"""verl trains on a CPU, from its own command, with our advantages: what it says it rewarded is what the store has.

Trainer, TransferQueue, agent loop, reward loop, FSDP and vLLM are verl's; ``verl_on_cpu.py`` is what it lacks for that.

    OPENRLHF_DBB_LONG=1 PYTHONPATH=$PWD/.venv/verl python -m pytest tests/test_verl_training.py        (minutes)
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from trainings import rows as query

pytest.importorskip("verl", reason="needs verl")
pytest.importorskip("vllm", reason="needs vLLM")

from openrlhf_dbb.tiny import EOS, Recipe, prepare

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str.replace("<|im_end|>", "").strip() == ground_truth)
"""
PROMPTS = 8
ROLLOUTS = 4
STEPS = 3
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model, data and reward as verl wants them, and vLLM under the name that verl looks for."""
    folder = tmp_path_factory.mktemp("verl")
    assets = prepare(
        folder / "tiny",
        recipe=Recipe(train_prompts=2 * PROMPTS, heldout_prompts=4, warmup_steps=200),
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):  # verl looks for Qwen's own end token
        file = assets.model / name
        file.write_text(file.read_text().replace(EOS, "<|im_end|>"))
    settings = assets.model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    for name, file in (("train", assets.train), ("heldout", assets.heldout)):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        shown = [
            {
                "data_source": "tiny",
                "prompt": [{"role": "user", "content": row["input"]}],
                "reward_model": {"style": "rule", "ground_truth": row["label"]},
                "extra_info": {"index": number},
            }
            for number, row in enumerate(rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    (folder / "reward.py").write_text(REWARD)
    (folder / "verl_on_cpu.py").write_text(Path(__file__).with_name("verl_on_cpu.py").read_text())
    metadata = folder / "vllm-0.29.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0+cpu\n")
    return folder


def train(folder, name, *more):
    """Train as ``name`` with further settings; return what verl prints."""
    settings = f"""
        trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
        trainer.experiment_name={name} trainer.default_local_dir={folder}/{name} trainer.val_before_train=False
        trainer.rollout_data_dir={folder}/{name}-rollouts trainer.total_training_steps={STEPS} trainer.total_epochs=100
        trainer.save_freq=2 trainer.test_freq=2
        data.train_files={folder}/train.jsonl data.val_files={folder}/heldout.jsonl data.train_batch_size={PROMPTS}
        data.max_prompt_length=16 data.max_response_length=10 data.dataloader_num_workers=0
        data.filter_overlong_prompts=False
        actor_rollout_ref.model.path={folder}/tiny/model actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * ROLLOUTS}
        actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.use_torch_compile=False
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n={ROLLOUTS}
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * ROLLOUTS}
        actor_rollout_ref.rollout.free_cache_engine=False ++actor_rollout_ref.rollout.enable_sleep_mode=False
        actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.dtype=bfloat16
        actor_rollout_ref.rollout.max_model_len=32 actor_rollout_ref.rollout.max_num_batched_tokens=512
        actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
        actor_rollout_ref.rollout.enable_chunked_prefill=False actor_rollout_ref.rollout.load_format=auto
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64
        reward.custom_reward_function.path={folder}/reward.py reward.num_workers=1
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
        +ray_kwargs.ray_init.object_store_memory=300000000
        algorithm.adv_estimator=posterior +algorithm.posterior.estimator=dbb
        +algorithm.posterior.parameters.discount=0.5 +algorithm.posterior.store=sqlite:///{folder}/openrlhf_dbb.db
    """
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,openrlhf_dbb.integrations.verl",
        "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings.split(), *more]
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def rewarded(folder, name, step):
    """By prompt and label: rollouts, and how many were right, by verl's own record of the step."""
    found = defaultdict(lambda: (0, 0.0))
    for line in (folder / f"{name}-rollouts" / f"{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        rollouts, successes = found[row["input"], row["gts"]]
        found[row["input"], row["gts"]] = (rollouts + 1, successes + row["score"])
    return found


def check_step(folder, step):
    """What is stored of a step is what verl has rewarded in it."""
    sql = f"""SELECT prompt, label, rollouts, successes
              FROM posterior_history JOIN prompts USING (prompt_id) WHERE step = {step} AND run_id = 1"""
    stored = {(prompt, label): tuple(counts) for prompt, label, *counts in query(folder, sql)}
    assert stored == rewarded(folder, "demo", step)
    assert {rollouts for rollouts, _ in stored.values()} == {ROLLOUTS}


def check_kept(folder):
    """Each step's rollouts are kept, none of them missing, and verl's plan is among its metrics."""
    kept = query(
        folder,
        "SELECT step, count(*), sum(missing) FROM rollouts WHERE run_id = 1 GROUP BY step ORDER BY step",
    )
    assert [(step, missing) for step, _, missing in kept] == [(1, 0), (2, 0), (3, 0)]
    assert all(0 < count <= 64 for _, count, _ in kept)
    logged = query(folder, "SELECT metrics FROM steps WHERE run_id = 1 ORDER BY step")
    assert {json.loads(metrics)["plan/steps"] for (metrics,) in logged} == {STEPS}


def test_the_store_has_what_verl_rewarded(folder):
    printed = train(folder, "demo")
    run = query(folder, "SELECT name, status, last_step FROM runs")
    assert run == [("demo", "finished", STEPS)]
    for step in range(1, STEPS + 1):
        check_step(folder, step)
    check_kept(folder)
    assert "estimator/rescued" in printed
    assert "val-core/tiny" in printed
    saved = json.loads((folder / "demo" / "global_step_2" / "posteriors.json").read_text())
    assert saved["step"] == 2


def test_two_stages_train_on_whole_groups_of_different_rewards(folder):
    """verl generates two rollouts of a prompt, and the other two where these differ."""
    name = "stages"
    train(folder, name, "+algorithm.posterior.strategy=two_stage")
    [(run, status, last)] = query(
        folder, f"SELECT run_id, status, last_step FROM runs WHERE name = '{name}'"
    )
    assert (status, last) == ("finished", STEPS)
    counts = query(
        folder, f"SELECT generated, trained FROM dbb_step WHERE run_id = {run} ORDER BY step"
    )
    assert [trained for _, trained in counts] == [PROMPTS * ROLLOUTS] * STEPS
    for step, (generated, trained) in enumerate(counts, start=1):
        groups = rewarded(folder, name, step)
        assert {rollouts % ROLLOUTS for rollouts, _ in groups.values()} == {0}
        assert all(0 < successes < rollouts for rollouts, successes in groups.values())
        stored = query(
            folder,
            f"""SELECT prompt, label, rollouts, successes FROM posterior_history JOIN prompts USING (prompt_id)
                WHERE step = {step} AND run_id = {run}""",
        )
        of = {(prompt, label): tuple(seen) for prompt, label, *seen in stored}
        assert sum(rollouts for rollouts, _ in of.values()) == generated
        # The posterior counts the prompts that were passed over as well, two rollouts each.
        assert (generated - trained) % 2 == 0
        for key, (rollouts, successes) in groups.items():
            assert of[key][0] >= rollouts and of[key][1] >= successes
    assert sum(generated - trained for generated, trained in counts) > 0
