"""docs/flags.md against OpenRLHF's parser, the checks at the start, and trainings with each flag."""

import itertools
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

import estimators
from estimators.forms import Form
from openrlhf_dbb import presets, tiny, upstream
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

ROOT = Path(__file__).parents[1]
ON_CPU = pytest.mark.skipif(not cpu.active(), reason="the table is that of a machine without CUDA")


def table():
    """Flag -> status, of docs/flags.md, row by row."""
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", (ROOT / "docs/flags.md").read_text(), re.M)
    return [(flag, status) for flags, status in rows for flag in re.findall(r"`--([\w.]+)`", flags)]


def flags_of(kind):
    return [flag for flag, status in table() if status.split(":")[0] == kind]


def named(words):
    """The flags on a command line."""
    return {word.partition("=")[0].lstrip("-").removeprefix("no-") for word in words if re.match(r"--[a-z]", word)}


def test_every_flag_is_in_the_table_once_and_no_other():
    parser = upstream.build_parser()
    theirs = [option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")]
    assert sorted(flag for flag, _ in table()) == sorted(set(theirs) - {"help"})
    known = r"works|needs CUDA|refused: .+|ignored: .+"
    assert [(flag, status) for flag, status in table() if not re.fullmatch(known, status)] == []


# What to give for each flag that is refused; a switch alone needs no entry.
REFUSED = {
    "actor.muon.ns_steps": ["3"],
    "actor.aux_loss_coef": ["0.01"],
    "critic.model_name_or_path": ["some/model"],
    "reward.clip_range": ["-1", "1"],
    "vllm.tensor_parallel_size": ["2"],
    "vllm.sync_backend": ["nccl"],
    "ds.ring_attn_size": ["2"],
    "ds.lora.rank": ["8"],
    "ds.experts_implementation": ["eager"],
    "algo.advantage.gamma": ["0.9"],
    "algo.advantage.lambd": ["0.9"],
    "data.max_images_per_prompt": ["1"],
    "train.async_queue_size": ["2"],
    "rollout.vllm_generate_batch_size": ["65"],
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """A folder with the configuration of a model that sees no images and has no experts."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def refusal(model, *argv):
    with pytest.raises(UsageError) as refused:
        given = ["--preset", "tiny", "--estimator", "dbb", "--actor.model_name_or_path", str(model), *argv]
        checks.check(arguments.parse(given))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@ON_CPU
@pytest.mark.parametrize("flag", [*flags_of("refused"), *flags_of("needs CUDA")])
def test_what_the_table_calls_refused_is_refused_by_its_name(flag, text_model):
    line = refusal(text_model, f"--{flag}", *REFUSED.get(flag, ()))
    assert f"--{flag}" in line


@ON_CPU
@pytest.mark.parametrize("flag", flags_of("needs CUDA"))
def test_what_needs_cuda_says_so(flag, text_model):
    assert "CUDA" in refusal(text_model, f"--{flag}", *REFUSED.get(flag, ()))


# What to give for each flag that is ignored.
IGNORED = {
    "critic.num_nodes": ["2"],
    "critic.num_gpus_per_node": ["2"],
    "critic.optim": ["muon"],
    "critic.muon.lr": ["1"],
    "critic.muon.momentum": ["0.5"],
    "critic.muon.ns_steps": ["3"],
    "critic.adam.lr": ["1"],
    "critic.adam.betas": ["0.5", "0.5"],
    "critic.adam.eps": ["1"],
    "critic.adam.weight_decay": ["1"],
    "critic.lr_scheduler": ["linear"],
    "critic.lr_warmup_ratio": ["0.5"],
    "critic.min_lr_ratio": ["0.5"],
    "critic.max_norm": ["2"],
    "critic.value_clip": ["1"],
    "vllm.gpu_memory_utilization": ["0.5"],
    "ds.ring_attn_head_stride": ["2"],
    "ds.lora.alpha": ["8"],
    "ds.lora.target_modules": ["q_proj"],
    "ds.lora.dropout": ["0.1"],
    "train.ema_beta": ["0.5"],
    "data.image_key": ["pictures"],
    "local_rank": ["1"],
}


def ignored_flags(but=""):
    """All of them, as on a command line; without those of one section."""
    flags = [flag for flag in flags_of("ignored") if flag.split(".")[0] != but]
    return list(itertools.chain.from_iterable([f"--{flag}", *IGNORED.get(flag, ())] for flag in flags))


@ON_CPU
def test_what_the_table_calls_ignored_is_accepted(text_model):
    given = ["--preset", "tiny", "--actor.model_name_or_path", str(text_model), *ignored_flags()]
    checks.check(arguments.parse(given))


DATA = ["--data.prompt_dataset", "some/data", "--data.label_key", "label", "--rollout.n_samples_per_prompt", "8"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--actor.eps_clip", "0.1"], "--actor.eps_clip 0.1 would do nothing: --actor.eps_clip_low_high 0.98 0.98 "
         "[method grpo] takes its place"),
        (["--actor.dual_clip", "1"], "--actor.dual_clip 1 is not above 1"),
        (["--algo.kl.use_loss"], "--algo.kl.use_loss would do nothing without --algo.kl.init_coef above 0"),
        (["--algo.kl.target", "0.1"], "--algo.kl.target would do nothing without --algo.kl.init_coef above 0"),
        (["--algo.kl.init_coef", "0.1", "--algo.kl.unbiased_gradient"], "would do nothing without --algo.kl.use_loss"),
        (["--algo.advantage.is_correction_level", "seq", "--algo.advantage.is_correction_mode", "clip"],
         "--algo.advantage.is_correction_mode clip needs --algo.advantage.is_correction_level token"),
        (["--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_gating", "tv"],
         "--algo.advantage.is_correction_threshold 0.5 5: a tv"),
        (["--algo.advantage.estimator", "gae"], "--algo.advantage.estimator gae has no place for an estimator: its "
         "baseline is a critic; use group_norm, or --estimator none for OpenRLHF's own advantages"),
        (["--algo.advantage.estimator", "reinforce"], "--algo.advantage.estimator reinforce has no place for an "
         "estimator: it subtracts no baseline of the prompt; use reinforce_baseline, or --estimator none"),
        (["--algo.advantage.estimator", "flash_reinforce"], "its baseline is the mean of the whole batch, for one "
         "rollout a prompt; with the prompt's own in its place it is dr_grpo: use that, or --estimator none"),
        (["--algo.advantage.no_std_norm"], "--algo.advantage.no_std_norm would do nothing: --algo.advantage.estimator "
         "group_norm is not whitened over the batch"),
        (["--algo.advantage.estimator", "reinforce_baseline", "--algo.advantage.gamma", "0.9"],
         "--algo.advantage.gamma 0.9 would do nothing: an estimator's advantages are not discounted"),
        (["--algo.advantage.estimator", "reinforce_baseline", "--method", "repo"], "--algo.advantage.estimator "
         "reinforce_baseline does not go with --replay.samples 8: it is whitened over the batch, and RePO does not"),
        (["--algo.advantage.estimator", "rloo", "--estimator", "point", "--rollout.n_samples_per_prompt", "1"],
         "--estimator point needs --rollout.n_samples_per_prompt 2 or more, got 1"),
        (["--train.max_lag", "1"], "--train.max_lag 1 does nothing without --train.async_enable"),
        (["--train.async_enable", "--train.max_lag", "-1"], "--train.max_lag -1 is below 0; give the most"),
        (["--reward.model_name_or_path", "m"], "--reward.model_name_or_path m is not asked where --reward.remote_url"),
        (["--preset", "none", "--reward.model_name_or_path", "m", *DATA],
         "--reward.model_name_or_path m gives any real number, --estimator dbb takes scores 0 and 1 only"),
        (["--preset", "none", "--reward.model_name_or_path", "m,n", *DATA],
         "--reward.model_name_or_path m,n names 2 models"),
        (["--reward.remote_url=", "--eval.dataset="], "--reward.remote_url is missing"),
        (["--reward.overlong_buffer_len", "11"], "--reward.overlong_buffer_len 11 is not above 0 and at most 10"),
        (["--reward.stop_properly_penalty_coef", "2"], "--reward.stop_properly_penalty_coef 2 is above 1"),
        (["--data.input_template", "Q:"], "--data.input_template has no {} where the prompt goes"),
        (["--data.prompt_probs", "0.5,0.5"], "--data.prompt_probs 0.5,0.5 has 2 numbers for the 1 data sets"),
        (["--data.prompt_split", "test"], "--data.prompt_split test: a file such as"),
        (["--eval.split", "test"], "--eval.split test: a file such as"),
        (["--data.apply_chat_template"], "--data.apply_chat_template: the tokenizer of --actor.model_name_or_path"),
        (["--eval.steps", "0"], "--eval.steps 0 is below 1; give a number of steps, or -1 for never"),
        (["--ckpt.save_steps", "-2"], "--ckpt.save_steps -2 is below 1"),
        (["--logger.logging_steps", "-1"], "--logger.logging_steps -1 is below 1"),
        pytest.param(["--no-vllm.enforce_eager"], "--no-vllm.enforce_eager needs CUDA", marks=ON_CPU),
        (["--rollout.temperature", "0"], "--rollout.temperature 0 is not above 0"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused(argv, line, text_model):
    assert line in refusal(text_model, *argv)


@pytest.mark.parametrize(
    ("form", "more"),
    [
        *((form, []) for form in ("group_norm", "dr_grpo", "reinforce_baseline", "rloo")),
        *((form, ["--method", "repo"]) for form in ("group_norm", "dr_grpo", "rloo")),
        ("reinforce_baseline", ["--algo.advantage.no_std_norm"]),
    ],
)
def test_every_form_goes_with_every_estimator(form, more, text_model):
    for estimator in estimators.available():
        given = ["--preset", "tiny", "--actor.model_name_or_path", str(text_model), "--estimator", estimator, *more]
        checks.check(arguments.parse([*given, "--algo.advantage.estimator", form]))


UNWEIGHTED = """
from dataclasses import dataclass

import estimators


@dataclass(frozen=True)
class Median(estimators.get("point")):
    name = "median"

    def group_weight(self, state, rewards_P_G):
        return None
"""


def test_the_policy_reads_whole_prompts_on_each_rank(text_model):
    given = ["--estimator", "predicted_prior", *ALONE["ds.tensor_parallel_size"][1:], "--ds.tensor_parallel_size", "2"]
    assert refusal(text_model, *given, "--predicted_prior.features", "hidden") == (
        "--predicted_prior.features hidden does not go with --ds.tensor_parallel_size: each rank of the policy reads "
        "whole prompts of text; use --predicted_prior.features text, or leave it out"
    )


def test_rloo_needs_an_estimator_that_can_leave_a_rollout_out(text_model, tmp_path, monkeypatch):
    (tmp_path / "medians.py").write_text(UNWEIGHTED)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["--estimator", "medians:Median", "--algo.advantage.estimator"]
    assert refusal(text_model, *given, "rloo") == (
        "--algo.advantage.estimator rloo scores a rollout by the mean without it, which --estimator medians:Median "
        "cannot tell (its group_weight is None); use dr_grpo, or --estimator dbb"
    )
    settings = ["--preset", "tiny", "--actor.model_name_or_path", str(text_model), *given, "dr_grpo"]
    checks.check(arguments.parse(settings))


def test_a_form_that_openrlhf_does_not_have_needs_an_estimator(text_model, monkeypatch):
    class Sign(Form):
        name = "sign"
        formula = "sign(X - p)"

        def advantages(self, rewards_P_G, estimate):
            raise NotImplementedError

    monkeypatch.setitem(estimators.FORMS._classes, "sign", Sign)
    given = ["--preset", "tiny", "--actor.model_name_or_path", str(text_model), "--algo.advantage.estimator", "sign"]
    checks.check(arguments.parse([*given, "--estimator", "dbb"]))
    line = "--algo.advantage.estimator sign is not OpenRLHF's, which --estimator none leaves as it is"
    with pytest.raises(UsageError, match=line):
        checks.check(arguments.parse([*given, "--estimator", "none", "--method", "none"]))


def test_a_model_that_may_have_experts_or_images_is_not_refused(tmp_path):
    flags = ["--actor.aux_loss_coef", "0.01", "--actor.freeze_visual_encoder"]
    config = {"text_config": {"output_router_logits": False}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, "not/here"):
        checks.check(arguments.parse(["--preset", "tiny", "--actor.model_name_or_path", str(model), *flags]))


# 32 prompts, 16 a step: 2 steps; 2 optimizer steps a step.
SMALL = [
    "--preset", "tiny", "--estimator", "dbb", "--run_name", "run", "--data.max_samples", "32",
    "--rollout.batch_size", "16", "--train.batch_size", "64", "--rollout.micro_batch_size", "32",
    "--train.micro_batch_size", "32", "--train.num_episodes", "1", "--ckpt.save_steps", "-1", "--eval.steps", "-1",
]  # fmt: skip
KL = ["--algo.kl.init_coef", "0.05"]
MUON = ["--actor.optim", "muon", "--actor.max_norm", "0"]
# A reward model instead of the preset's reward function, which cannot be taken away.
NO_PRESET = {
    flag: value
    for flag, value in presets.load("tiny").flags.items()
    if flag not in named(SMALL) and flag.split(".")[0] not in ("dbb", "eval", "ckpt", "logger", "method", "reward")
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
    "ignored": ignored_flags(but="vllm"),
    "actor.gradient_checkpointing_enable": [],
    "actor.gradient_checkpointing_reentrant": ["--actor.gradient_checkpointing_enable"],
    "muon": [*MUON, "--actor.muon.lr", "0.001", "--actor.muon.momentum", "0.9", "--actor.muon.nesterov"],
    "actor.lr_scheduler": [
        "cosine_with_min_lr", "--actor.lr_warmup_ratio", "0.5", "--actor.min_lr_ratio", "0.3",
    ],
    "actor.eps_clip": ["0.1", "--method", "none", "--algo.kl.init_coef", "0"],
    "actor.policy_loss_type": ["gspo"],
    "actor.loss_agg_mode": ["token-mean"],
    "ds.packing_samples": [],
    "train.dynamic_batch_enable": [
        "--train.max_tokens_per_gpu", "256", "--rollout.max_tokens_per_gpu", "512", "--method", "dr_grpo",
    ],
    "critic.freezing_steps": ["0"],
    "algo.kl.init_coef": ["0.05"],
    "ref.offload": KL,
    "algo.kl.target": ["0.01", "--algo.kl.horizon", "100", "--algo.kl.estimator", "k3", *KL],
    "algo.kl.use_loss": ["--algo.kl.estimator", "k2", *KL],
    "algo.kl.unbiased_gradient": ["--algo.kl.use_loss", *KL],
    "algo.advantage.estimator": ["dr_grpo"],
    "single": [
        "--method", "single", "--estimator", "auto", "--train.batch_size", "8", "--train.micro_batch_size", "8",
        "--rollout.micro_batch_size", "8", "--actor.policy_loss_type", "gspo",
    ],
    "algo.advantage.no_std_norm": ["--algo.advantage.estimator", "reinforce_baseline", *KL],
    "reinforce_baseline": [
        "--algo.advantage.estimator", "reinforce_baseline", "--actor.dual_clip", "3", "--actor.entropy_coef", "0.01",
        "--algo.kl.use_loss", "--algo.kl.estimator", "k2", *KL,
    ],
    "algo.dynamic_filtering_enable": ["--algo.dynamic_filtering_range", "0", "1", "--train.num_episodes", "4"],
    "a reward model": REWARD_MODEL,
    "reward.normalize_enable": REWARD_MODEL,
    "reward.offload": [*REWARD_MODEL, "--ds.value_head_prefix", "value"],
    "reward.overlong_buffer_len": ["8", "--reward.overlong_penalty_factor", "0.5"],
    "reward.stop_properly_penalty_coef": ["-0.5"],
    "ds.zero_stage": ["0"],
    "ds.zero_stage 1": ["--ds.zero_stage", "1"],
    "ds.zero_stage 3": ["--ds.zero_stage", "3"],
    "ds.overlap_comm": [],
    "ds.grad_accum_dtype": ["bf16"],
    "ds.attn_implementation": ["sdpa"],
    "train.max_epochs": ["2"],
    "train.colocate_actor_ref": KL,
    "eval.steps": ["1", "--eval.temperature", "0.5", "--eval.n_samples_per_prompt", "2", "--eval.split", "train"],
    "data.prompt_probs": ["0.5,0.5", "--data.prompt_dataset", "{tiny}/train.jsonl,{tiny}/heldout.jsonl"],
    "data.input_template": ["{}="],
    "data.disable_fast_tokenizer": [],
    "data.dataloader_num_workers": ["2"],
    "ckpt.save_hf": ["--ckpt.save_steps", "1"],
    "ckpt.disable_ds": ["--ckpt.save_steps", "1"],
    "ckpt.max_num": ["2", "--ckpt.save_steps", "1", "--train.num_episodes", "2"],
    "ckpt.max_mem": ["1e-6", "--ckpt.save_steps", "1"],
    "ckpt.load_enable": [],
    "ckpt.best_metric_key": ["eval_default_pass1", "--eval.steps", "1"],
    "logger.logging_steps": ["2"],
    "logger.wandb.run_name": ["other"],
}  # fmt: skip
STEPS = {"algo.dynamic_filtering_enable": 3, "ckpt.max_num": 4}
AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Instance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, state):
        right = float(state["action_text"].startswith(state["label"]))
        return {"rewards": torch.tensor(right), "scores": right, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""
# Flags of vLLM's engine, of the number of ranks and of the models' data types; each training has its own process.
ALONE = {
    "train.agent_func_path": ["agent.py", "--logger.wandb.key", "0" * 40],
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
# Tried by other tests.
ELSEWHERE = {
    "actor.num_nodes": "test_several_hosts.py",
    "ref.num_nodes": "test_several_hosts.py",
    "vllm.num_engines": "test_training.py",
    "actor.num_gpus_per_node": "test_training.py",
    "data.apply_chat_template": "test_flags.py",
    "train.async_enable": "test_async.py",
    "train.partial_rollout_enable": "test_async.py",
    "rollout.vllm_generate_batch_size": "test_async.py",
    "train.async_queue_size": "test_kill_resume.py",
}


def test_every_flag_that_works_is_trained_with():
    lines = [SMALL, *([f"--{flag}", *more] for flag, more in (TRAINED | ALONE).items())]
    outputs = {"ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir"}  # of every run in a lane
    tried = set().union(*map(named, lines), presets.load("tiny").flags, outputs, ELSEWHERE)
    assert sorted(set(flags_of("works")) - tried) == []
    for flag, file in ELSEWHERE.items():
        assert f'"--{flag}"' in (ROOT / "tests" / file).read_text()


def logged(folder):
    """Each tag's values, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (EventAccumulator(str(path)) for path in (folder / "runs/run/tensorboard").iterdir())
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def finished_steps(folder):
    with sqlite3.connect(f"file:{folder}/openrlhf_dbb.db?mode=ro", uri=True) as connection:
        [(status, steps)] = connection.execute("SELECT status, last_step FROM runs").fetchall()
    return steps if status == "finished" else None


# What a flag does, where it shows.
def lr_follows_the_scheduler(folder, tags):
    assert tags["train/actor_lr"] == pytest.approx({1: 3e-4, 2: 0.3 * 3e-4})


def kl_is_measured(folder, tags):
    assert tags["train/kl"][1] == pytest.approx(0, abs=1e-3) and tags["train/kl"][2] != 0


def the_policy_rests_in_the_first_step(folder, tags):
    assert list(tags["train/policy_loss"]) == [2] and list(tags["train/estimator/mean"]) == [1, 2]


def groups_are_of_one_rollout(folder, tags):
    """At its first visit a prompt's mean without its one rollout is the mean m of all, so that |A| is 2 m (1 - m) on
    average; the mean of (2 m + X) / 3 is m."""
    mean = tags["train/estimator/mean"][1]
    assert tags["train/estimator/abs_advantage"][1] == pytest.approx(2 * mean * (1 - mean), rel=1e-5)
    assert not {"train/estimator/zero_variance", "train/estimator/rescued", "train/group_reward_std"} & tags.keys()
    with sqlite3.connect(f"file:{folder}/openrlhf_dbb.db?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT generated, groups FROM steps").fetchall() == [(32, 32)]


def nothing_is_divided_by_the_deviation(folder, tags):
    assert all(0 < value < 1 for value in tags["train/estimator/abs_advantage"].values())


def long_responses_are_punished(folder, tags):
    assert tags["train/return"][1] < 0


def every_step_is_evaluated(folder, tags):
    assert list(tags["eval/eval_default_pass2"]) == [0, 1, 2]


def hf_models_are_saved(folder, tags):
    assert sorted(path.name for path in (folder / "runs/run/checkpoints").glob("*_hf")) == [
        "global_step1_hf",
        "global_step2_hf",
    ]


def no_checkpoint_is_saved(folder, tags):
    assert not (folder / "runs/run/checkpoints").exists()


def two_checkpoints_are_kept(folder, tags):
    assert sorted(path.name for path in (folder / "runs/run/checkpoints/_actor").glob("global_step*")) == [
        "global_step3",
        "global_step4",
    ]


def one_checkpoint_is_left(folder, tags):
    assert [path.name for path in (folder / "runs/run/checkpoints/_actor").glob("global_step*")] == ["global_step2"]


def the_best_is_kept(folder, tags):
    assert json.loads((folder / "runs/run/best/best.json").read_text())["measure"] == "eval_default_pass1"


def every_second_step_is_logged(folder, tags):
    assert list(tags["train/policy_loss"]) == [2]


def tensorboards_folder_has_the_name(folder, tags):
    assert (folder / "runs/run/tensorboard/other").is_dir()


SHOWS = {
    "actor.lr_scheduler": lr_follows_the_scheduler,
    "algo.kl.init_coef": kl_is_measured,
    "ref.offload": kl_is_measured,
    "critic.freezing_steps": the_policy_rests_in_the_first_step,
    "algo.advantage.estimator": nothing_is_divided_by_the_deviation,
    "single": groups_are_of_one_rollout,
    "reward.overlong_buffer_len": long_responses_are_punished,
    "eval.steps": every_step_is_evaluated,
    "ckpt.save_hf": hf_models_are_saved,
    "ckpt.disable_ds": no_checkpoint_is_saved,
    "ckpt.max_num": two_checkpoints_are_kept,
    "ckpt.max_mem": one_checkpoint_is_left,
    "ckpt.best_metric_key": the_best_is_kept,
    "logger.logging_steps": every_second_step_is_logged,
    "logger.wandb.run_name": tensorboards_folder_has_the_name,
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
        SHOWS[flag](tmp_path, logged(tmp_path))


@ON_CPU
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("flag", ALONE)
def test_a_flag_that_needs_a_process_of_its_own_is_trained_with(train, tmp_path, flag, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "agent.py").write_text(AGENT)
    result = train(tmp_path, *line_of(flag, ALONE[flag]))
    assert result.returncode == 0, result.stderr[-4000:]
    assert finished_steps(tmp_path) == 2


@ON_CPU
@pytest.mark.e2e
@pytest.mark.long
def test_a_chat_template_is_applied(lane, tmp_path):
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    shutil.copytree(tiny.prepare(tiny.default_folder()).model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    tokenizer.save_pretrained(model)
    argv = [*SMALL, "--actor.model_name_or_path", str(model), "--data.apply_chat_template"]
    result = lane.train(tmp_path, *argv)
    assert result.error is None, result.output[-4000:]
    with sqlite3.connect(f"file:{tmp_path}/openrlhf_dbb.db?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*), min(prompt LIKE '%==') FROM prompts").fetchall() == [(32, 1)]
