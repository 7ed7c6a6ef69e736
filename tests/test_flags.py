"""Every flag of OpenRLHF works: trainings of a few steps with each, and the combinations that are refused."""

import re
from dataclasses import dataclass

import pytest
import trainings

from openrlhf_dbb import estimators, presets
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

ON_CPU = pytest.mark.skipif(not cpu.active(), reason="the flags of a machine without CUDA")


def check(*argv):
    checks.check(arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv]))


ASYNC, AHEAD = "--train.async_enable", "--rollout.vllm_generate_batch_size"
DATA = ["--data.prompt_dataset", "some/data", "--data.label_key", "label", "--rollout.n_samples_per_prompt", "8"]
MODEL = ["--actor.model_name_or_path", "m"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--preset", "none"], "--actor.model_name_or_path is missing"),
        *(
            ([f"--run_name={name}"], "names folders: use letters, digits and . _ + - only, not only dots")
            for name in ("a/b", ".", "..", "...", "-x", "a b", "a\n", "x" * 201, "\u6f22" * 67)
        ),
        (["--resume", "--warm_start", "x"], "--resume continues a run, --warm_start begins a new one"),
        (["--ckpt.max_num", "1"], "--ckpt.max_num 1 does not work: OpenRLHF deletes an old checkpoint"),
        (["--ds.lora.rank", "8", "--estimator", "none"], "--ds.lora.rank 8 does not go with --estimator none"),
        (["--ds.lora.rank", "8", "--ds.param_dtype", "bf16", "--ds.tensor_parallel_size", "2"],
         "--ds.lora.rank 8 does not go with --ds.tensor_parallel_size 2"),
        (["--vllm.num_engines", "2"], "--train.colocate_all: the policy has 1 GPUs"),
        *((["--estimator", "none", *flag], f"{flag[0]} ") for flag in (
            ["--rollout.strategy", "dynamic"], ["--replay.samples", "2"], ["--train.max_rollouts", "512"],
            ["--probe.fraction", "0.1"], ["--warm_start", "x"],
        )),
        (["--algo.advantage.estimator", "gae"], "--algo.advantage.estimator gae has no place for an estimator"),
        (["--algo.advantage.estimator", "reinforce_baseline", "--method", "repo"],
         "--replay.samples 8 does not go with --algo.advantage.estimator reinforce_baseline: replays are not whitened"),
        (["--estimator", "point", "--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8"],
         "--estimator point needs --rollout.n_samples_per_prompt 2 or more, got 1"),
        (["--rollout.strategy", "posterior", "--estimator", "point", "--point.memory", "gaussian"],
         "posterior draws prompts by a forecast, and gaussian makes none; use --estimator point with --point.memory"),
        (["--reward.model_name_or_path", "m"], "--reward.model_name_or_path m is not asked where --reward.remote_url"),
        (["--preset", "none", *MODEL, "--vllm.num_engines", "1", "--reward.model_name_or_path", "m", *DATA],
         "--reward.model_name_or_path m gives any real number, --estimator dbb takes scores of 0 to 1"),
        (["--eval.steps", "0"], "--eval.steps 0 is too low; give 1 or more, or -1 for never"),
        ([ASYNC, AHEAD, "63"], f"{AHEAD} 63 is less than --rollout.batch_size 64"),
        (["--train.batch_size", "24"], "= 512 is not a multiple of --train.batch_size = 24"),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_or_fail_late_is_refused_in_one_line(argv, line):
    with pytest.raises(UsageError) as refused:
        check(*argv)
    assert line in str(refused.value) and "\n" not in str(refused.value)


@dataclass(frozen=True)
class Median(estimators.get("point")):
    name = "median"

    def group_weight(self, state, rewards_P_G):
        return None


def test_rloo_needs_an_estimator_that_can_leave_a_rollout_out():
    given = ["--estimator", f"{__name__}:Median", "--algo.advantage.estimator"]
    with pytest.raises(UsageError, match=r"--algo.advantage.estimator rloo scores a rollout by the mean without it"):
        check(*given, "rloo")
    check(*given, "dr_grpo")


# 32 prompts, 16 a step: 2 steps; 2 optimizer steps a step.
SMALL = [
    *trainings.SMALL, "--estimator", "dbb", "--run_name", "run", "--train.num_episodes", "1",
    "--ckpt.save_steps", "-1", "--eval.steps", "-1",
]  # fmt: skip
KL = ["--algo.kl.init_coef", "0.05"]
MUON = ["--actor.optim", "muon", "--actor.max_norm", "0"]
# A reward model instead of the preset's reward function, which cannot be taken away.
NO_PRESET = {
    flag: value
    for flag, value in presets.load("tiny").flags.items()
    if f"--{flag}" not in SMALL and flag.split(".")[0] not in ("dbb", "eval", "ckpt", "logger", "method", "reward")
}
REWARD_MODEL = [
    "--preset", "none", "--estimator", "gaussian", "--method", "grpo", "--reward.model_name_or_path", "{tiny}/model",
    *(f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in NO_PRESET.items()),
]  # fmt: skip
# Flags -> what else to give; trained one after another in the same actors. Flags in the values count as tried as well.
TRAINED = {
    "plain numbers": [
        "--actor.adam.lr", "1e-4", "--actor.adam.betas", "0.8", "0.9", "--actor.adam.eps", "1e-6",
        "--actor.adam.weight_decay", "0.1", "--actor.max_norm", "0.5", "--rollout.temperature", "0.9",
        "--rollout.top_p", "0.95", "--rollout.max_new_tokens", "8", "--rollout.n_samples_per_prompt", "4",
        "--train.seed", "7", "--actor.eps_clip_low_high", "0.1", "0.2",
        "--actor.dual_clip", "3", "--actor.entropy_coef", "0.01", "--data.prompt_split", "train",
        "--logger.wandb.org", "me", "--logger.wandb.group", "mine", "--logger.wandb.project", "ours",
    ],
    "actor.gradient_checkpointing_reentrant": ["--actor.gradient_checkpointing_enable"],
    "muon": [*MUON, "--actor.muon.lr", "0.001", "--actor.muon.momentum", "0.9", "--actor.muon.nesterov"],
    "actor.lr_scheduler": [
        "cosine_with_min_lr", "--actor.lr_warmup_ratio", "0.5", "--actor.min_lr_ratio", "0.3",
    ],
    "actor.eps_clip": ["0.1", "--method", "none", "--algo.kl.init_coef", "0"],
    "critic.freezing_steps": ["0"],
    "algo.kl.init_coef": ["0.05"],
    "ref.offload": [*KL, "--train.colocate_actor_ref"],
    "algo.kl.target": ["0.01", "--algo.kl.horizon", "100", "--algo.kl.estimator", "k3", *KL],
    "algo.kl.unbiased_gradient": ["--algo.kl.use_loss", *KL],
    "single": [
        "--method", "single", "--estimator", "auto", "--train.batch_size", "8", "--train.micro_batch_size", "8",
        "--rollout.micro_batch_size", "8", "--actor.policy_loss_type", "gspo",
    ],
    "algo.advantage.no_std_norm": ["--algo.advantage.estimator", "reinforce_baseline", *KL],
    "reward.normalize_enable": REWARD_MODEL,
    "reward.offload": [*REWARD_MODEL, "--ds.value_head_prefix", "value"],
    "reward.overlong_buffer_len": ["8", "--reward.overlong_penalty_factor", "0.5"],
    "reward.stop_properly_penalty_coef": ["-0.5"],
    "ds.overlap_comm": [],
    "ds.attn_implementation": ["sdpa", "--ds.grad_accum_dtype", "bf16"],
    "train.max_epochs": ["2"],
    "data.prompt_probs": ["0.5,0.5", "--data.prompt_dataset", "{tiny}/train.jsonl,{tiny}/heldout.jsonl"],
    "data.input_template": ["{}=", "--data.disable_fast_tokenizer", "--data.dataloader_num_workers", "2"],
    "ckpt.save_hf": ["--ckpt.save_steps", "1"],
    "ckpt.disable_ds": ["--ckpt.save_steps", "1"],
    "ckpt.max_num": ["2", "--ckpt.save_steps", "1", "--train.num_episodes", "2"],
    "ckpt.max_mem": ["1e-6", "--ckpt.save_steps", "1"],
    "ckpt.load_enable": [],
    "logger.logging_steps": ["2"],
    "logger.wandb.run_name": ["other"],
}  # fmt: skip
STEPS = {"ckpt.max_num": 4}
# Flags of vLLM's engine, of the number of ranks and of the models' data types; each training has its own process.
ALONE = {
    "ds.zpg": ["2", "--ds.zero_stage", "3", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"],
    "ds.adam_offload": [],
    "train.colocate_all": [
        "--no-train.colocate_all", *KL, "--ref.num_gpus_per_node", "1", *REWARD_MODEL,
        "--reward.num_gpus_per_node", "1", "--reward.num_nodes", "1",
    ],
    "ds.tensor_parallel_size": [
        "2", "--ds.param_dtype", "bf16", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2",
    ],
    "vllm.enable_prefix_caching": [
        "--vllm.gpu_memory_utilization", "0.5", "--vllm.enforce_eager", "--train.full_determinism_enable",
        "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_mode", "clip",
        "--algo.advantage.is_correction_gating", "ratio", "--algo.advantage.is_correction_threshold", "0.9", "1.1",
    ],
}  # fmt: skip


def finished_steps(folder):
    [(status, steps)] = trainings.rows(folder, "SELECT status, last_step FROM runs")
    return steps if status == "finished" else None


def saved(folder, pattern):
    return sorted(path.name for path in (folder / "runs/run/checkpoints").glob(pattern))


# At its first visit a prompt's mean without its one rollout is the mean m of all: |A| is 2 m (1 - m) on average.
# The mean of (2 m + X) / 3 is m.
def groups_are_of_one_rollout(folder, tags):
    mean = tags["train/estimator/mean"][1]
    return tags["train/estimator/abs_advantage"][1] == pytest.approx(2 * mean * (1 - mean), rel=1e-5)


# Whether a flag did something, from the folder and the logged values by step.
SHOWS = {
    "actor.lr_scheduler": lambda _, tags: tags["train/actor_lr"] == pytest.approx({1: 3e-4, 2: 0.3 * 3e-4}),
    "algo.kl.init_coef": lambda _, tags: abs(tags["train/kl"][1]) < 1e-3 and tags["train/kl"][2] != 0,
    "critic.freezing_steps": lambda _, tags: list(tags["train/policy_loss"]) == [2],  # the policy rests in step 1
    "single": groups_are_of_one_rollout,
    "reward.overlong_buffer_len": lambda _, tags: tags["train/return"][1] < 0,
    "ckpt.save_hf": lambda folder, _: saved(folder, "*_hf") == ["global_step1_hf", "global_step2_hf"],
    "ckpt.disable_ds": lambda folder, _: saved(folder, "*") == [],
    "ckpt.max_num": lambda folder, _: saved(folder, "_actor/global_step*") == ["global_step3", "global_step4"],
    "ckpt.max_mem": lambda folder, _: saved(folder, "_actor/global_step*") == ["global_step2"],
    "logger.logging_steps": lambda _, tags: list(tags["train/policy_loss"]) == [2],
    "logger.wandb.run_name": lambda folder, _: (folder / "runs/run/tensorboard/other").is_dir(),
}


def line_of(flag, more):
    return [*SMALL, *([f"--{flag}"] if re.fullmatch(r"[\w.]*\.\w+", flag) else []), *more]


@ON_CPU
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("flag", TRAINED)
def test_a_flag_that_works_is_trained_with(lane, tmp_path, flag):
    result = lane.train(tmp_path, *line_of(flag, TRAINED[flag]))
    assert result.error is None, result.output[-4000:]
    assert finished_steps(tmp_path) == STEPS.get(flag, 2)
    if flag in SHOWS:
        [events] = (tmp_path / "runs/run/tensorboard").iterdir()
        assert SHOWS[flag](tmp_path, trainings.logged(events))


@ON_CPU
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("flag", ALONE)
def test_a_flag_that_needs_a_process_of_its_own_is_trained_with(train, tmp_path, flag):
    result = train(tmp_path, *line_of(flag, ALONE[flag]))
    assert result.returncode == 0, result.stderr[-4000:]
    assert finished_steps(tmp_path) == 2
