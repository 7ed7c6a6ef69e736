"""OpenRLHF's own RL recipes, the command lines of its ``examples/scripts``, are accepted alone and with an estimator.

A dry run for 8 GPUs, on small files, makes every check that a start makes without a GPU.
"""

import json
import shutil

import pytest

from openrlhf_dbb import estimators, tiny
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.driver import arguments, checks

# What the scripts have in common, one line for each kind of thing.
TOGETHER = "--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --vllm.sync_backend nccl --vllm.enforce_eager"
ZERO = "--ds.zero_stage 3 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable"
PACKED = "--ds.packing_samples"
SAVED = "--ckpt.output_dir out --ckpt.path out/ckpt --ckpt.save_hf"
MESSAGES = "--data.prompt_dataset messages.jsonl --data.input_key context_messages --data.apply_chat_template"
QUESTIONS = (
    "--data.prompt_dataset questions.jsonl --data.input_key prompt --data.label_key label "
    "--data.apply_chat_template"
)
FILTERED = "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1"
CORRECTED = "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode"  # clip: TIS, mask: ICEPOP


def on(gpus, engines, tensor_parallel, models=("ref", "actor")):
    """So many GPUs for each of the models."""
    placed = " ".join(
        f"--{model}.num_nodes 1 --{model}.num_gpus_per_node {gpus}" for model in models
    )
    return f"{placed} --vllm.num_engines {engines} --vllm.tensor_parallel_size {tensor_parallel}"


RECIPES = {
    # train_reinforce_baseline_hybrid_engine is this one without the last two flags.
    "train_reinforce_baseline_ray_agent_async": [
        on(4, 2, 2), QUESTIONS, ZERO, PACKED, SAVED, FILTERED, f"{CORRECTED} mask",
        "--ckpt.load_enable --ckpt.max_num 3 --ckpt.save_steps 10 --eval.steps -1",
        "--train.agent_func_path agent.py --data.max_len 74240 --rollout.max_new_tokens 64000",
        "--data.max_samples 128000 --train.max_epochs 1 --train.num_episodes 1",
        "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 --train.micro_batch_size 1",
        "--rollout.micro_batch_size 8 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192",
        "--rollout.max_tokens_per_gpu 32768 --train.colocate_all --ds.enable_sleep --vllm.sync_backend nccl",
        "--ds.ring_attn_size 2 --ds.ring_attn_head_stride 2 --actor.adam.lr 5e-7 --actor.entropy_coef 0.0",
        "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 1e-5 --algo.kl.use_loss",
        "--algo.kl.estimator k2 --vllm.enforce_eager --logger.tensorboard_dir out/runs --logger.logging_steps 1",
        "--vllm.gpu_memory_utilization 0.95 --train.async_enable --train.partial_rollout_enable",
    ],
    "train_dapo_ray_hybrid_engine": [
        on(8, 4, 2), TOGETHER, ZERO, PACKED, SAVED, MESSAGES, FILTERED, f"{CORRECTED} clip",
        "--vllm.gpu_memory_utilization 0.6 --reward.remote_url reward.py --ckpt.save_steps 20",
        "--algo.advantage.estimator group_norm --algo.advantage.gamma 1.0 --actor.eps_clip_low_high 0.2 0.27",
        "--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 --actor.adam.lr 5e-7",
        "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 16",
        "--train.batch_size 128 --train.micro_batch_size 8 --train.max_epochs 1",
        "--data.max_len 2048 --data.max_samples 20000",
    ],
    "train_ppo_ray_hybrid_engine": [
        on(8, 4, 2, ("ref", "reward", "critic", "actor")), TOGETHER, ZERO, PACKED, SAVED, MESSAGES, f"{CORRECTED} clip",
        "--vllm.gpu_memory_utilization 0.5 --reward.model_name_or_path model --reward.normalize_enable",
        "--algo.kl.init_coef 0.01 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6",
        "--rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 --train.batch_size 128 --train.max_epochs 1",
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --data.max_len 2048 --data.max_samples 100000",
    ],
    "train_ppo_with_reward_fn": [
        on(2, 2, 2, ("ref", "critic", "actor")), ZERO, PACKED, MESSAGES, "--train.colocate_actor_ref",
        "--reward.remote_url reward.py --reward.normalize_enable --ckpt.output_dir out",
        "--algo.kl.init_coef 0.01 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --ds.adam_offload",
        "--ds.attn_implementation flash_attention_2 --rollout.batch_size 1024 --rollout.micro_batch_size 16",
        "--train.batch_size 128 --train.micro_batch_size 8 --train.max_epochs 1",
        "--data.max_len 2048 --data.max_samples 100000 --logger.wandb.key KEY",
    ],
    "train_vlm_math_hybrid_engine": [
        on(4, 4, 1), TOGETHER, ZERO, SAVED, QUESTIONS, "--vllm.gpu_memory_utilization 0.7",
        "--algo.advantage.estimator reinforce_baseline --algo.advantage.gamma 1.0 --actor.adam.lr 2e-6",
        "--algo.kl.init_coef 0 --algo.kl.use_loss --algo.kl.estimator k2 --reward.remote_url reward.py",
        "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 1",
        "--train.batch_size 1024 --train.micro_batch_size 1 --train.num_episodes 100",
        "--data.max_len 4096 --rollout.max_new_tokens 2048 --ckpt.save_steps 5 --eval.steps -1",
        "--data.image_key images --data.max_images_per_prompt 1 --actor.freeze_visual_encoder",
        "--ds.attn_implementation eager",
    ],
}  # fmt: skip
PROMPTS = 1024  # the largest rollout batch
VISION = "train_vlm_math_hybrid_engine"
REWARD_MODEL = "train_ppo_ray_hybrid_engine"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with what the command lines name: two models, one of them said to see images, data and rewards."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(tiny.prepare(tiny.default_folder()).model, folder / "model")
    template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    (folder / "model/chat_template.jinja").write_text(template)
    shutil.copytree(folder / "model", folder / "vision")
    path = folder / "vision/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": {}}))
    questions = [{"prompt": f"{i}+1", "label": str(i + 1)} for i in range(PROMPTS)]
    messages = [
        {"context_messages": [{"role": "user", "content": row["prompt"]}]} for row in questions
    ]
    for name, rows in (
        ("questions", questions),
        ("heldout", questions[:8]),
        ("messages", messages),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': [0]}\n"
    )
    (folder / "agent.py").write_text("class AgentExecutor: ...\n")
    return folder


@pytest.fixture
def command(files, monkeypatch, pretend_gpus):
    """Function: a recipe's command line with further flags, for a machine with 8 GPUs and all that it needs."""
    monkeypatch.chdir(files)
    pretend_gpus(8)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setattr(
        "openrlhf_dbb.driver.ray_session.RayStart", lambda _: pytest.fail("Ray was started")
    )
    # flash-attn, ring attention and CUDA's compiler
    monkeypatch.setattr("openrlhf_dbb.platform.machine.is_real", lambda module: True)
    monkeypatch.setattr("openrlhf_dbb.platform.machine.nvcc", lambda: "nvcc")

    def of(name, *more):
        model = "vision" if name == VISION else "model"
        words = " ".join(RECIPES[name]).split()
        return [*words, "--actor.model_name_or_path", model, *more, "--dry_run"]

    return of


# The processor of a model that sees images is not made on the spot, so a dry run of its recipe goes no further than the
# flags. A reward model gives real numbers, which need another estimator.
ESTIMATORS = {
    name: "gaussian" if name == REWARD_MODEL else "dbb" for name in RECIPES if name != VISION
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_recipe_is_accepted_alone_and_with_an_estimator(command, capsys, name):
    said = []
    for estimator in ("none", ESTIMATORS[name]):
        assert train_grpo.main(command(name, "--estimator", estimator)) == 0
        said.append(capsys.readouterr().out)
        assert said[-1].endswith("\ndry run: all checks passed, nothing was started or stored\n")
    _, _, named = " ".join(RECIPES[name]).partition("--algo.advantage.estimator ")
    # gae, OpenRLHF's default, needs a critic
    form = estimators.FORMS.get(named.partition(" ")[0] or "group_norm")
    assert "estimator none" in said[0] and f"\ndata       {PROMPTS} of {PROMPTS} prompts" in said[1]
    assert f"; estimator {ESTIMATORS[name]}; advantage {form.formula}; loss " in said[1]


def test_the_recipe_for_images_is_accepted(command):
    for estimator in ("none", "dbb"):
        settings = arguments.parse(command(VISION, "--estimator", estimator))
        checks.check(settings)
        assert settings.args.algo.advantage.estimator == "reinforce_baseline"
        # Its --algo.kl.use_loss has no effect, in OpenRLHF neither
        assert settings.args.algo.kl.init_coef == 0
