"""The settings that a command line gets on a machine with GPUs: packing, batches, and the places of the models."""

import shlex
from pathlib import Path

import pytest

from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cuda, machine

MODEL = [
    "--actor.model_name_or_path", "a/model", "--data.prompt_dataset", "d.jsonl", "--reward.remote_url", "math_answer",
]  # fmt: skip
BATCHES = (
    "ds.attn_implementation", "ds.packing_samples", "train.dynamic_batch_enable", "train.max_tokens_per_gpu",
    "rollout.max_tokens_per_gpu", "vllm.enable_prefix_caching",
)  # fmt: skip
OPENRLHFS = [16192, None]  # OpenRLHF's limits of tokens; not used without dynamic batches
PLACES = ("actor.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size")


@pytest.fixture
def parse(pretend_gpus, monkeypatch):
    """Function: the checked settings of a command line on a host with some Hopper GPUs of 80 GiB."""

    def settings(*argv, gpus=1, flash=False, capability=(9, 0)):
        pretend_gpus(gpus, capability=capability)
        monkeypatch.setattr(machine, "nvcc", lambda: None)
        monkeypatch.setattr(machine, "is_real", lambda module: flash)
        parsed = arguments.parse(list(argv))
        checks.check(parsed)
        return parsed

    return settings


def batches(settings):
    return [settings.flags[flag] for flag in BATCHES]


def test_samples_are_packed_into_dynamic_batches_on_request_and_flash_attention_is_used_where_it_has_kernels(
    parse,
):
    # OpenRLHF's max_len is 2,048; micro-batches of 4 and 8.
    assert batches(parse(*MODEL)) == ["sdpa", False, False, *OPENRLHFS, True]
    packed = [*MODEL, "--ds.packing_samples", "--train.dynamic_batch_enable"]
    assert batches(parse(*packed, flash=True)) == [
        "flash_attention_2",
        True,
        True,
        4 * 2048,
        8 * 2048,
        True,
    ]
    assert batches(parse(*packed, "--train.max_tokens_per_gpu", "999"))[3:5] == [999, 8 * 2048]
    assert batches(parse(*MODEL, flash=True, capability=(10, 0)))[0] == "sdpa"  # Blackwell


@pytest.mark.parametrize(
    ("gpus", "prompts", "sequences"), [(8, 128, 128), (4, 128, 256), (1, 512, 512)]
)
def test_an_engine_runs_its_share_of_a_steps_rollouts(parse, gpus, prompts, sequences):
    limits = cuda.engine_limits(parse(*MODEL, "--rollout.batch_size", str(prompts), gpus=gpus).args)
    assert limits == {"max_num_seqs": sequences, "max_num_batched_tokens": 8192}


ALONE_ASYNC = ["--estimator", "none", "--train.async_enable"]


@pytest.mark.parametrize(
    ("gpus", "flags", "places"),
    [
        (8, [*MODEL, "--vllm.tensor_parallel_size", "4"], [8, 2, 4]),
        (2, ALONE_ASYNC, [1, 1, 1]),
        (6, [*ALONE_ASYNC, "--vllm.tensor_parallel_size", "4"], [2, 1, 4]),
        (8, [*ALONE_ASYNC, "--preset", "tiny"], [1, 1, 1]),  # the tiny preset never takes more
        (8, [*ALONE_ASYNC, "--actor.num_gpus_per_node", "6", "--vllm.num_engines", "2"], [6, 2, 1]),
    ],
)
def test_models_share_all_gpus_and_in_async_training_the_engines_get_half(
    parse, gpus, flags, places
):
    settings = parse(*flags, gpus=gpus)
    assert [settings.flags[flag] for flag in PLACES] == places
    if "--train.async_enable" in flags:
        assert (settings.args.vllm.enable_sleep, settings.args.ds.enable_sleep) == (False, False)
        assert checks.gpus_needed(settings.args) == places[0] + places[1] * places[2]


SHARED = ("train.colocate_all", "vllm.enable_sleep", "ds.enable_sleep")
PLACED = ["--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"]


@pytest.mark.parametrize(
    ("flags", "gpus", "shared"),
    [
        (MODEL, 4, True),
        ([*MODEL, *PLACED], 2, False),
        (["--preset", "qwen3-1.7b", *PLACED], 2, True),
    ],
)
def test_the_default_preset_shares_all_gpus_unless_the_command_line_places_the_models(
    parse, flags, gpus, shared
):
    settings = parse(*flags, gpus=4)
    assert [settings.flags[flag] for flag in (*PLACES[:2], *SHARED)] == [
        gpus,
        gpus,
        shared,
        shared,
        shared,
    ]


def test_a_preset_of_ones_own_can_train_asynchronously(parse, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'extends = "qwen3-8b"\n[flags]\ntrain.async_enable = true\n'
    )
    mine = ["--estimator", "none", "--preset", str(tmp_path / "mine.toml")]
    args = parse(*mine, gpus=4).args
    synchronous = parse(*mine, "--no-train.async_enable", gpus=4).args
    assert (args.actor.num_gpus_per_node, args.vllm.num_engines, args.vllm.enable_sleep) == (
        2,
        2,
        False,
    )
    assert (synchronous.vllm.num_engines, synchronous.vllm.enable_sleep) == (4, True)


def test_more_gpus_than_the_machine_has_are_refused_before_ray_starts(parse, monkeypatch):
    with pytest.raises(UsageError, match=r"need 2 GPUs.* 1;"):
        parse("--preset", "qwen3-8b", *ALONE_ASYNC, gpus=1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    parse("--preset", "qwen3-8b", *ALONE_ASYNC, gpus=1)  # the other GPUs are on other hosts


@pytest.mark.parametrize(("mode", "gpus"), [([], 4), (ALONE_ASYNC, 2)])
def test_models_that_share_gpus_are_where_the_policy_is(parse, mode, gpus):
    kl = ["--preset", "qwen3-8b", "--algo.kl.init_coef", "0.1"]
    settings = parse(*kl, *mode, gpus=4)
    assert settings.args.ref.num_gpus_per_node == settings.args.actor.num_gpus_per_node == gpus
    assert settings.origin["ref.num_gpus_per_node"] == "--train.colocate_all: on the policy's GPUs"
    assert parse(*kl, *mode, "--ref.num_gpus_per_node", "1", gpus=4).args.ref.num_gpus_per_node == 1


FLASH = ["--ds.attn_implementation", "flash_attention_2"]
RING = ["--ds.packing_samples", "--ds.attn_implementation", "sdpa", "--ds.ring_attn_size", "2"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (RING, "--ds.ring_attn_size 2: .*flash_attention_2 and ring_flash_attn"),
        (["--ds.param_dtype", "fp16"], "--ds.param_dtype fp16: .*; use bf16"),
        (["--ds.zero_stage", "0"], "--ds.zero_stage 0: --ds.enable_sleep .*; use 2, or --no-ds"),
        (FLASH, "--ds.attn_implementation .*flash-attn"),
        (["--ds.adam_offload"], "--ds.adam_offload: .*nvcc"),
        (["--ds.deepcompile"], "--ds.deepcompile: .*nvcc"),
        (["--actor.optim", "muon"], "--actor.optim muon: .*nvcc"),
        (
            ["--ds.use_liger_kernel"],
            "--ds.use_liger_kernel: liger_kernel .*; install it, or leave it",
        ),
        (["--ds.load_in_4bit"], "--ds.load_in_4bit: .*; leave it out"),
    ],
)
def test_what_would_fail_late_or_train_wrongly_is_refused(parse, flags, problem):
    with pytest.raises(UsageError, match=f"^{problem}"):
        parse("--preset", "qwen3-1.7b", *flags, gpus=2)


def test_gpus_without_bfloat16_are_refused(parse):
    with pytest.raises(UsageError, match=r"^GPU: .*bfloat16.* 8\.0; .*CUDA_VISIBLE_DEVICES"):
        parse(*MODEL, capability=(7, 5))
    parse(*MODEL, capability=(8, 0))


def test_the_slurm_example_uses_all_gpus_of_both_hosts(parse, monkeypatch):
    script = (Path(__file__).parents[1] / "examples/cluster/slurm.sh").read_text()
    [line] = [
        line
        for line in script.splitlines()
        if line.startswith("#   sbatch --nodes 2 --gpus-per-node 8 ")
    ]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    flags = shlex.split(line.partition("slurm.sh ")[2])
    args = parse(*flags, "--algo.kl.init_coef", "0.1", gpus=8).args
    for part in (args.actor, args.ref):
        assert (part.num_nodes, part.num_gpus_per_node) == (2, 8)
    assert args.vllm.num_engines == checks.gpus_needed(args) == 16
    apart = parse(*flags, *ALONE_ASYNC, gpus=8).args
    assert (apart.actor.num_gpus_per_node, apart.vllm.num_engines, checks.gpus_needed(apart)) == (
        4,
        8,
        16,
    )
    assert parse(*flags, "--vllm.tensor_parallel_size", "4", gpus=8).args.vllm.num_engines == 4


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ("expandable_segments:True", ""),
        ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        (
            "expandable_segments:False, garbage_collection_threshold:0.8",
            " garbage_collection_threshold:0.8",
        ),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_expand_are_taken_out_of_the_actors_environment(
    monkeypatch, name, settings, left
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert cuda.worker_environment().keys() == {"VLLM_USE_FLASHINFER_SAMPLER"}
    monkeypatch.setenv(name, settings)
    assert cuda.worker_environment()[name] == left
