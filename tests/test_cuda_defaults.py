"""Flag values that are chosen for a machine with CUDA, and combinations that are refused there; without a GPU."""

import shutil

import pytest

from openrlhf_dbb.driver import arguments, checks, cluster, printed
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import attention, cuda, machine, shims

MODEL = [
    "--actor.model_name_or_path",
    "some/model",
    "--data.prompt_dataset",
    "d.jsonl",
    "--reward.remote_url",
    "math_answer",
]
CHOSEN = (
    "ds.attn_implementation", "ds.packing_samples", "train.dynamic_batch_enable", "train.max_tokens_per_gpu",
    "rollout.max_tokens_per_gpu", "vllm.max_num_seqs", "vllm.max_num_batched_tokens", "vllm.enable_prefix_caching",
)  # fmt: skip
OPENRLHFS = [16192, None]  # tokens of dynamic batches, which are off


@pytest.fixture
def installed(monkeypatch):
    """Function: which flash attentions are installed."""

    def put(*names):
        monkeypatch.setattr(shims, "is_real", lambda module: "flash_attention_2" in names)
        monkeypatch.setattr(attention, "_installed", lambda distribution: "flash_attention_4" in names)

    put()
    return put


@pytest.fixture(autouse=True)
def machine_with(pretend_gpus):
    global _put
    _put = pretend_gpus


def parse(*argv, gpus="1x80"):
    """Settings on a machine with these GPUs, such as 8x80 for 8 GPUs of 80 GiB, until the test ends."""
    count, gib = map(int, gpus.split("x"))
    _put(count, gib)
    return arguments.parse(list(argv))


def chosen(*argv, gpus="1x80"):
    settings = parse(*MODEL, *argv, gpus=gpus)
    checks.check(settings)
    return [settings.flags[flag] for flag in CHOSEN]


HOPPER, AMPERE, TURING = ((machine.Gpu("G", 1, capability),) for capability in ((9, 0), (8, 0), (7, 5)))


@pytest.mark.parametrize(
    ("names", "gpus", "attention_of"),
    [
        ((), HOPPER, "sdpa"),
        (("flash_attention_4",), HOPPER, "flash_attention_4"),
        (("flash_attention_4",), AMPERE, "sdpa"),
        (("flash_attention_2",), AMPERE, "flash_attention_2"),
        (("flash_attention_2", "flash_attention_4"), HOPPER, "flash_attention_2"),
        (("flash_attention_2", "flash_attention_4"), (machine.Gpu("B", 1, (10, 0)),), "flash_attention_4"),
        (("flash_attention_4",), (*HOPPER, *AMPERE), "sdpa"),
        (("flash_attention_2", "flash_attention_4"), TURING, "sdpa"),
    ],
)
def test_attention_is_chosen_by_what_is_installed_and_by_the_gpus(installed, names, gpus, attention_of):
    installed(*names)
    name, why = attention.choose(gpus)
    assert name == attention_of
    assert why.startswith("CUDA, ")


def test_with_flash_attention_samples_are_packed_into_dynamic_batches(installed):
    installed("flash_attention_4")
    # OpenRLHF's max_len is 2,048; micro-batches of 4 and 8. 128 prompts x 8 rollouts.
    fast = ["flash_attention_4", True, True, 4 * 2048, 8 * 2048, 1024, 8192, True]
    assert chosen() == fast
    settings = parse(*MODEL)
    assert settings.origin["ds.packing_samples"] == "fast on CUDA"
    assert settings.origin["ds.attn_implementation"] == "CUDA, flash_attention_4 is installed"
    assert chosen("--train.max_tokens_per_gpu", "999")[3:5] == [999, 8 * 2048]
    assert chosen("--rollout.batch_size", "32", "--vllm.max_num_batched_tokens", "7")[5:7] == [256, 7]


def test_without_flash_attention_nothing_is_packed_unless_asked(installed):
    assert chosen() == ["sdpa", False, False, *OPENRLHFS, 1024, 8192, True]
    assert chosen("--ds.packing_samples", "--train.dynamic_batch_enable")[:4] == ["sdpa", True, True, 4 * 2048]


@pytest.mark.parametrize(
    ("flags", "packed", "dynamic"),
    [
        (["--method", "repo", "--estimator", "point"], True, False),
        (["--no-ds.packing_samples"], False, False),
        (["--no-train.dynamic_batch_enable"], True, False),
        (["--ds.attn_implementation", "sdpa"], False, False),
        (["--data.max_images_per_prompt", "1"], False, False),
        (["--probe.fraction", "0.1"], True, True),
        (["--algo.advantage.estimator", "dr_grpo"], True, True),
    ],
)
def test_what_excludes_packing_or_dynamic_batches_takes_them_back(installed, flags, packed, dynamic):
    installed("flash_attention_4")
    assert chosen(*flags)[1:3] == [packed, dynamic]


def test_dynamic_batches_that_are_asked_for_with_replay_are_refused(installed):
    installed("flash_attention_4")
    with pytest.raises(UsageError, match=r"--train.dynamic_batch_enable does not go with --replay.samples 8"):
        chosen("--method", "repo", "--estimator", "point", "--train.dynamic_batch_enable")


@pytest.mark.parametrize(
    ("gpus", "prompts", "sequences"), [("8x80", 128, 128), ("4x80", 128, 256), ("1x80", 512, 1024)]
)
def test_an_engine_runs_its_share_of_a_steps_rollouts(installed, gpus, prompts, sequences):
    assert chosen("--rollout.batch_size", str(prompts), gpus=gpus)[5] == sequences


def test_engines_allow_for_tensor_parallelism_wherever_it_is_said(installed, tmp_path):
    assert parse(*MODEL, "--vllm.tensor_parallel_size", "4", gpus="8x80").args.vllm.num_engines == 2
    (tmp_path / "mine.toml").write_text('extends = "default"\n[gpus]\nvllm.tensor_parallel_size = 2\n')
    assert parse(*MODEL, "--preset", str(tmp_path / "mine.toml"), gpus="8x80").args.vllm.num_engines == 4
    with pytest.raises(UsageError, match=r"the policy has 3 GPUs .*, vLLM 1 x 2 .*; give both as many"):
        chosen("--vllm.tensor_parallel_size", "2", gpus="3x80")


def test_openrlhf_alone_gets_no_more_than_it_cannot_do_without(installed):
    alone = [
        "--estimator",
        "none",
        *MODEL,
        "--algo.advantage.estimator",
        "group_norm",
        "--rollout.n_samples_per_prompt",
        "2",
    ]
    settings = parse(*alone, "--vllm.num_engines", "1")
    assert [settings.flags[flag] for flag in CHOSEN] == ["sdpa", False, False, *OPENRLHFS, None, None, False]


ALONE_ASYNC = ["--estimator", "none", "--train.async_enable"]
PLACES = ("actor.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size")


@pytest.mark.parametrize(
    ("gpus", "flags", "policy", "engines", "size"),
    [
        ("2x80", [], 1, 1, 1),
        ("3x80", [], 1, 2, 1),
        ("8x80", [], 4, 4, 1),
        ("8x80", ["--preset", "qwen3-8b"], 4, 4, 1),
        ("8x80", ["--preset", "qwen3-8b", "--vllm.num_engines", "2"], 4, 2, 1),
        ("8x80", ["--vllm.tensor_parallel_size", "2"], 4, 2, 2),
        ("6x80", ["--vllm.tensor_parallel_size", "4"], 2, 1, 4),
        ("8x80", ["--preset", "tiny"], 1, 1, 1),  # which never takes more
        ("8x80", ["--actor.num_gpus_per_node", "6", "--vllm.num_engines", "2"], 6, 2, 1),
    ],
)
def test_in_asynchronous_training_half_of_the_gpus_are_the_engines(installed, gpus, flags, policy, engines, size):
    settings = parse(*ALONE_ASYNC, *flags, gpus=gpus)
    checks.check(settings)
    cluster.check_gpus(settings)
    assert [settings.flags[flag] for flag in PLACES] == [policy, engines, size]
    assert cluster.gpus_needed(settings.args) == policy + engines * size
    assert (settings.args.vllm.enable_sleep, settings.args.ds.enable_sleep) == (False, False)


def test_the_configuration_shows_where_asynchronous_training_puts_the_models(installed):
    lines = printed.configuration(parse(*ALONE_ASYNC, gpus="8x80"), None).splitlines()
    assert "   --actor.num_gpus_per_node 4  [preset qwen3-1.7b]" in lines
    assert "   --vllm.num_engines 4  [preset qwen3-1.7b]" in lines
    assert "   --vllm.enable_sleep False  [--train.async_enable: the engines have GPUs of their own]" in lines
    assert "   --ds.enable_sleep False  [--train.async_enable: the engines have GPUs of their own]" in lines


def test_a_preset_of_ones_own_can_train_asynchronously(installed, tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "qwen3-8b"\n[flags]\ntrain.async_enable = true\n')
    mine = ["--estimator", "none", "--preset", str(tmp_path / "mine.toml")]
    args, synchronous = parse(*mine, gpus="4x80").args, parse(*mine, "--no-train.async_enable", gpus="4x80").args
    assert (args.actor.num_gpus_per_node, args.vllm.num_engines, args.vllm.enable_sleep) == (2, 2, False)
    assert (synchronous.actor.num_gpus_per_node, synchronous.vllm.num_engines) == (4, 4)
    assert synchronous.vllm.enable_sleep
    (tmp_path / "mine.toml").write_text("[flags]\nvllm.enable_sleep = true\nrollout.n_samples_per_prompt = 2\n")
    with pytest.raises(UsageError, match=r"--vllm.enable_sleep \[preset .*mine.toml\] does not go with --train.async"):
        parse(*MODEL, *mine, "--train.async_enable", "--vllm.num_engines", "1", gpus="4x80")


@pytest.mark.parametrize(
    ("flags", "needed", "has", "rest"),
    [
        (["--preset", "qwen3-8b", *ALONE_ASYNC], 2, 1, "the engines have 1 of their own .* use at least 2 GPUs, "),
        ([*ALONE_ASYNC, "--vllm.tensor_parallel_size", "2"], 3, 2, "have 2 of their own .* use at least 3 GPUs, "),
        (["--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"], 4, 3, "or share GPUs with --train.colocate"),
    ],
)
def test_more_gpus_than_the_machine_has_are_refused_before_ray_starts(installed, monkeypatch, flags, needed, has, rest):
    settings = parse(*flags, gpus=f"{has}x80")
    checks.check(settings)
    with pytest.raises(
        UsageError, match=rf"^these flags need {needed} GPUs, this machine has {has}; .*{rest}"
    ) as caught:
        cluster.check_gpus(settings)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster.check_gpus(settings)  # the others are on other hosts


@pytest.mark.parametrize("mode", [[], ALONE_ASYNC])
def test_models_that_share_gpus_are_where_the_policy_is(installed, mode):
    kl = ["--preset", "qwen3-8b", "--algo.kl.init_coef", "0.1"]
    settings = parse(*kl, *mode, gpus="4x80")
    assert settings.args.ref.num_gpus_per_node == settings.args.actor.num_gpus_per_node == (2 if mode else 4)
    assert settings.origin["ref.num_gpus_per_node"] == "--train.colocate_all: on the policy's GPUs"
    assert "reward.num_gpus_per_node" not in settings.origin
    assert parse(*kl, *mode, "--ref.num_gpus_per_node", "1", gpus="4x80").args.ref.num_gpus_per_node == 1
    critic = parse("--preset", "qwen3-8b", "--estimator", "none", "--algo.advantage.estimator", "gae", gpus="4x80")
    assert critic.args.critic.num_gpus_per_node == 4


REFUSED = [
    (["--ds.attn_implementation", "flash_attention_2"], "no compiled flash-attn is installed; use sdpa, or leave it"),
    (["--ds.attn_implementation", "flash_attention_4"], "flash-attn-4 is not installed; use sdpa, or leave it out"),
    (["--ds.ring_attn_size", "2", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"],
     "--ds.ring_attn_size 2 needs ring_flash_attn and flash_attn_2_cuda, which cannot be found"),
    (["--ds.use_liger_kernel"], "--ds.use_liger_kernel needs the package liger_kernel, which is not installed"),
    (["--ds.adam_offload"], "--ds.adam_offload: DeepSpeed compiles this with nvcc, and there is none"),
    (["--actor.optim", "muon"], "--actor.optim muon: DeepSpeed compiles this with nvcc, and there is none"),
    (["--ds.lora.rank", "8"], "--ds.lora.rank 8: OpenRLHF's weight sync sends adapters under names"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_what_cannot_work_with_cuda_is_one_line(installed, monkeypatch, flags, line):
    monkeypatch.setattr(machine, "nvcc", lambda: None)
    with pytest.raises(UsageError) as caught:
        chosen(*flags)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_deepspeed_cannot_accumulate_dynamic_batches_in_every_way(installed):
    dynamic = ["--ds.packing_samples", "--train.dynamic_batch_enable"]
    with pytest.raises(
        UsageError, match=r"--ds.overlap_comm: with --train.dynamic_batch_enable .*_stage 2 only, not 3; l"
    ):
        chosen(*dynamic, "--ds.overlap_comm", "--ds.zero_stage", "3")
    chosen(*dynamic, "--ds.overlap_comm", "--ds.zero_stage", "2")
    with pytest.raises(UsageError, match=r"--ds.deepcompile does not go with --train.dynamic_batch_enable"):
        chosen(*dynamic, "--ds.deepcompile")


def test_expandable_segments_are_refused_where_weights_go_by_cuda_ipc(installed):
    shared, apart = parse(*MODEL).args, parse(*MODEL, "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1").args
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    with pytest.raises(
        UsageError, match=r"expandable_segments:True,max_split_size_mb:128: with --train.colocate_all .* unset"
    ):
        cuda.check_flags(shared, (), expandable)
    cuda.check_flags(shared, (), {})
    cuda.check_flags(apart, (), expandable)


def test_flashinfer_is_left_out_where_it_would_look_for_nvcc_in_vain(monkeypatch):
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setattr(machine, "nvcc", lambda: None)
    assert cuda.worker_environment() == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    monkeypatch.setattr(machine, "nvcc", lambda: shutil.which("sh"))
    assert cuda.worker_environment() == {}
    monkeypatch.setattr(machine, "nvcc", lambda: None)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")  # the user's
    assert cuda.worker_environment() == {}
