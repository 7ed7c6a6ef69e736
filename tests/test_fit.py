"""Threads, precision, micro-batches and checkpoints that fit a model and a machine; and the packaged model.

What is for GPUs has not run on one: it is the estimate.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver import arguments, checks, fit
from openrlhf_dbb.driver.fit import Shape
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda
from openrlhf_dbb.platform.machine import GIB
from openrlhf_dbb.presets import smollm2

# SmolLM2-135M: 30 layers of 576, 49,152 words, tied; 3 heads of 64 for keys and for values.
# An adapter of rank 1 has 30 x (4 x 576 + 2 x (9 + 3) x 64 + 3 x (576 + 1536)) parameters.
SMOLLM2 = Shape(134_479_872, 30, 576, 49_152, 2 * 30 * 3 * 64, 305_280)
TINY = Shape(116_160, 2, 64, 32, 2 * 2 * 4 * 32, 2688)
MODEL = [
    "--actor.model_name_or_path",
    "m",
    "--data.prompt_dataset",
    "d.jsonl",
    "--reward.remote_url",
    "math_answer",
]


@pytest.fixture
def machine(monkeypatch):
    """Two cores with bfloat16 and 20 GiB; a function that changes them."""
    if not cpu.active():
        pytest.skip("with CUDA nothing is fitted to the processor")

    def change(*, cores=2, bf16=True, free=20.0):
        monkeypatch.setattr(fit.os, "sched_getaffinity", lambda _: range(cores))
        monkeypatch.setattr(cpu, "has_bf16", lambda: bf16)
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda: SimpleNamespace(available=int(free * GIB))
        )

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    change()
    return change


def on_cpu(*argv, shape=SMOLLM2):
    return fit.fitted(arguments.parse([*MODEL, *argv]), shape)


def threads(*argv, shape=SMOLLM2):
    return fit.threads(on_cpu(*argv, shape=shape).args, shape)


def chosen(settings):
    ds = settings.args.ds
    actor = settings.args.actor
    return (
        ds.param_dtype,
        ds.attn_implementation,
        ds.zero_stage,
        actor.gradient_checkpointing_enable,
    )


ONE_ROW = ("--train.micro_batch_size", "1")


def test_a_real_model_gets_all_cores_and_bfloat16(machine):
    settings = on_cpu(*ONE_ROW)
    assert chosen(settings) == ("bf16", "sdpa", 0, False)
    assert settings.origin["ds.param_dtype"] == fit.ORIGIN
    assert threads(*ONE_ROW) == 2
    assert on_cpu("--data.max_len", "256").args.ds.attn_implementation == "eager"


def test_a_small_model_keeps_its_own_settings(machine):
    small = on_cpu(shape=TINY)
    assert chosen(small) == ("fp32", "eager", 2, True)
    assert threads(shape=TINY) == 1
    assert fit.engine_limits(small.args, TINY) == {}


def test_a_machine_without_bfloat16_trains_in_float32_and_its_cores_are_shared(machine):
    machine(cores=8, bf16=False)
    assert chosen(on_cpu(*ONE_ROW)) == ("fp32", "sdpa", 0, False)
    assert threads("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2") == 4
    assert threads("--train.async_enable", "--no-train.colocate_all") == 4  # both at the same time


def rate(*argv, shape=SMOLLM2):
    settings = fit.fitted(arguments.parse([*argv]), shape)
    return settings.args.actor.adam.lr, settings.origin["actor.adam.lr"]


def test_a_preset_has_its_own_values_for_float32(machine, tmp_path):
    preset = ("--preset", "smollm2")
    assert rate(*preset) == (2e-5, "preset smollm2")
    assert rate(*preset, "--ds.param_dtype", "fp32") == (1e-5, "preset smollm2, in fp32")
    machine(bf16=False)
    assert rate(*preset) == (1e-5, "preset smollm2, in fp32")
    assert rate(*preset, "--actor.adam.lr", "3e-5") == (3e-5, arguments.COMMAND_LINE)
    own = tmp_path / "own.toml"
    own.write_text('extends = "smollm2"\n[flags]\nactor.adam.lr = 4e-5\n')
    assert rate("--preset", str(own)) == (4e-5, f"preset {own}")
    own.write_text('extends = "smollm2"\n[flags]\ndata.max_len = 32\n')
    assert rate("--preset", str(own)) == (1e-5, f"preset {own}, in fp32")
    own.write_text('extends = "smollm2"\n[fp32]\nactor.adam.lr = 5e-6\n')
    assert rate("--preset", str(own)) == (5e-6, f"preset {own}, in fp32")
    for shape in (TINY, None):
        assert rate("--preset", str(own), shape=shape) == (5e-6, f"preset {own}, in fp32")


def test_flags_and_the_environment_win(machine, monkeypatch):
    flags = [
        "--ds.param_dtype",
        "fp32",
        "--ds.attn_implementation",
        "eager",
        "--ds.zero_stage",
        "3",
    ]
    assert chosen(on_cpu(*flags, "--actor.gradient_checkpointing_enable")) == (
        "fp32",
        "eager",
        3,
        True,
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads() == 7


def test_checkpointing_where_memory_needs_it_and_a_refusal_where_that_is_not_enough(machine):
    flags = [
        "--train.micro_batch_size",
        "8",
        "--data.max_len",
        "512",
        "--rollout.max_new_tokens",
        "64",
    ]

    def needed(*more):
        return fit.cpu_memory(on_cpu(*flags, *more), SMOLLM2) / GIB

    # Saved for the backward pass: 8 x 512 tokens x 30 layers x 576 x 80 bytes = 5.3 GiB; 2 layers' with checkpoints.
    with_all = needed()
    # OpenRLHF's pass copies the logits
    assert needed("--ds.packing_samples") - with_all == pytest.approx(8 * 64 * 49_152 * 10 / GIB)
    machine(free=with_all - 1)
    assert chosen(on_cpu(*flags))[3] and needed() == pytest.approx(
        with_all - 5.27 * 28 / 30, abs=0.02
    )
    # The model alone: 20 bytes a parameter, 2 in the engine, and three processes of 1.2 GiB
    machine(free=6.5)
    assert "too few if" in fit.describe(on_cpu(*flags), SMOLLM2)[1]
    machine(free=6.3)
    with pytest.raises(UsageError, match=r"m needs 6\.4 GiB .*\b6\.3 are free; take"):
        on_cpu(*flags)
    # 2 + 2 bytes a parameter, 18 a parameter of the adapters: 4.2 GiB
    on_cpu(*flags, "--ds.lora.rank", "8")


def test_the_engine_holds_a_step_of_rollouts(machine):
    flags = [
        "--rollout.batch_size",
        "8",
        "--rollout.n_samples_per_prompt",
        "8",
        "--data.max_len",
        "100",
    ]
    # 64 rollouts of four blocks of 32 tokens, and vLLM's own block; 11,520 numbers of 2 bytes a token.
    assert fit.engine_limits(on_cpu(*flags).args, SMOLLM2) == {
        "max_num_seqs": 64, "kv_cache_memory_bytes": (64 * 4 + 1) * 32 * 11_520 * 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # 128 sequences of a block of 64 tokens and vLLM's own block; 11,520 numbers of 2 bytes a token.
        ([], (128 + 1) * 64 * 11_520 * 2),
        (["--data.max_len", "65536"], int(0.3 * 80 * GIB / 2)),  # half of the engine's share
        (["--vllm.enable_sleep", "--ds.enable_sleep"], None),  # it starts alone
        (["--train.async_enable", "--no-train.colocate_all"], None),  # it has a GPU of its own
    ],
)
def test_an_engine_that_starts_beside_the_policy_measures_no_memory(pretend_gpus, flags, expected):
    pretend_gpus(2)
    settings = arguments.parse(["--preset", "smollm2", *flags])
    found = fit.engine_arguments(settings, SMOLLM2)
    assert found.get("kv_cache_memory_bytes") == expected


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
)
QWEN3 = dict(vocab_size=151_936, num_key_value_heads=8, head_dim=128)
SHAPES = {
    name: Shape.of(SimpleNamespace(**QWEN3, **dict(zip(SIZES, sizes, strict=True))))
    for name, sizes in {
        "qwen3-0.6b": (1024, 3072, 28, 16, True),
        "qwen3-1.7b": (2048, 6144, 28, 16, True),
        "qwen3-8b": (4096, 12_288, 36, 32, False),
    }.items()
}
REAL = {
    24: 23.5,
    40: 39.4,
    80: 79.2,
    141: 139.8,
}  # GiB that the driver shows of an RTX 4090, A100, H100, H200


@pytest.mark.parametrize(
    ("name", "published"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)]
)
def test_the_size_of_a_dense_model_follows_from_its_configuration(name, published):
    assert SHAPES[name].parameters == pytest.approx(published, rel=2e-4)  # without norms and biases


def test_a_mixture_or_an_unknown_kind_of_model_is_not_judged():
    assert Shape.of(SimpleNamespace(num_experts=8, hidden_size=8)) is None
    assert Shape.of(SimpleNamespace(hidden_size=8)) is None


@pytest.mark.parametrize(
    ("flags", "free", "said"),
    [
        # Of 1e9 parameters: 2 bytes of weights as trained, 12 of their copy in 32 bits and of Adam's moments.
        ([], 28e9, ""),
        ([], 27e9, "warning: 2 checkpoints of 14 GB are kept in "),
        (["--ckpt.max_mem", "20"], 27e9, ""),  # room for one
    ],
)
def test_the_start_warns_where_checkpoints_have_no_room(
    pretend_gpus, monkeypatch, flags, free, said
):
    pretend_gpus(1)
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    own = [
        "--actor.model_name_or_path",
        "m",
        "--ckpt.max_num",
        "2",
        "--ckpt.save_steps",
        "5",
        *flags,
    ]
    shape = dataclasses.replace(SHAPES["qwen3-0.6b"], parameters=10**9)
    lines = fit.checkpoint_warnings(shape, arguments.parse(own).args)
    assert len(lines) == bool(said) and "".join(lines).startswith(said)


@pytest.fixture
def fitted(pretend_gpus):
    """Function: the settings of a preset that are fitted to some GPUs."""

    def settings(preset, gib, *flags, gpus=1):
        pretend_gpus(gpus, REAL[gib])
        fitted = fit.fitted(arguments.parse(["--preset", preset, *flags]), SHAPES[preset])
        checks.check(fitted)
        return fitted

    return settings


def sizes(settings):
    return settings.args.train.micro_batch_size, settings.args.rollout.micro_batch_size


def test_the_estimate_by_hand(fitted):
    def needed(*flags, gpus=1):
        settings = fitted("qwen3-1.7b", 80, *flags, gpus=gpus)
        memory = fit.gpu_memory(settings, SHAPES["qwen3-1.7b"])
        return [memory.always / 1e9, memory.training / 1e9, memory.log_probs / 1e9]

    one = 1.720451
    logits = 4 * 4096 * 151_936 * 4 / 1e9
    # recomputed: the layers' inputs and one layer
    batch = 4 * 5120 * 2048 * (28 * 2 + 56) / 1e9 + logits
    kept = 4 * 5120 * 2048 * 28 * 56 / 1e9 + logits
    log_probs = 8 * 5120 * 2048 * 56 / 1e9 + 8 * 4096 * 151_936 * 3 / 1e9
    # 2 bytes of weights, 2 of gradients, 12 of states; 4e9 bytes beside them
    recomputed = "--actor.gradient_checkpointing_enable"
    assert needed(recomputed) == pytest.approx(
        [one * 16, one * 16 + batch + 4, one * 2 + log_probs + 4], rel=1e-5
    )
    assert needed(recomputed, gpus=4)[1] == pytest.approx(one * (2 + 14 / 4) + batch + 4)
    # ZeRO 3 gathers 2
    assert needed(recomputed, "--ds.zero_stage", "3", gpus=4)[1] == pytest.approx(
        one * 16 / 4 + 2 + batch + 4
    )
    # Of 85 GB, 0.95 hold the activations of two of the four rows, on four GPUs too.
    assert needed(gpus=4)[1] == pytest.approx(one * (2 + 14 / 4) + kept / 2 + 4)
    assert needed()[1] == pytest.approx(one * 16 + kept / 2 + 4)


@pytest.mark.parametrize(
    ("preset", "gib", "flags", "gpus", "recomputes"),
    [
        ("qwen3-1.7b", 80, [], 4, False),
        ("qwen3-1.7b", 80, [], 1, False),  # with two rows in place of four
        ("qwen3-1.7b", 40, [], 1, True),
        (
            "qwen3-0.6b",
            24,
            [],
            1,
            True,
        ),  # one row of 5,120 tokens would fit without, and leave the GPU idle
        ("qwen3-8b", 80, [], 8, True),
        ("qwen3-1.7b", 80, ["--actor.gradient_checkpointing_enable"], 4, True),
        ("qwen3-1.7b", 40, ["--no-actor.gradient_checkpointing_enable"], 1, False),
    ],
)
def test_activations_are_recomputed_only_where_they_do_not_fit(
    fitted, preset, gib, flags, gpus, recomputes
):
    settings = fitted(preset, gib, *flags, gpus=gpus)
    assert settings.args.actor.gradient_checkpointing_enable is recomputes
    said = "with" if recomputes else "without"
    assert f"{said} gradient checkpointing" in fit.describe(settings, SHAPES[preset])[0]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        # 14 bytes of each parameter, 16 processes of 4 GB
        ([], 14 * 8.1907e9 + 64e9),
        # OpenRLHF's engines keep copies, rounded up by a third.
        (["--estimator", "none"], 14 * 8.1907e9 + 64e9 + 8 * 4 / 3 * 2 * 8.1907e9),
        # Adapters alone are sent, so each engine keeps a copy of the rest.
        (["--ds.lora.rank", "64"], 14 * 0.1746e9 + 64e9 + 8 * 4 / 3 * 2 * 8.1907e9),
    ],
)
def test_the_start_warns_where_models_that_sleep_do_not_fit_into_main_memory(
    fitted, monkeypatch, flags, needed
):
    settings = fitted("qwen3-8b", 80, *flags, gpus=8)
    shape = SHAPES["qwen3-8b"]
    assert fit.host_memory(settings, shape) == pytest.approx(needed, rel=1e-4)
    monkeypatch.setattr(fit.machine, "main_memory", lambda: needed * 1.001)
    [_] = fit.describe(settings, shape)
    little = int(needed / GIB) - 1
    monkeypatch.setattr(fit.machine, "main_memory", lambda: little * GIB)
    [_, warning] = fit.describe(settings, shape)
    assert warning.startswith(f"warning: of {little} GiB of main memory")


@pytest.mark.parametrize(
    ("flags", "advised", "not_advised"),
    [
        ([], "--ds.zero_stage 3", "--actor.gradient_checkpointing_enable"),
        (["--ds.zero_stage", "3"], "--ds.adam_offload", "--ds.zero_stage"),
        (
            ["--ds.lora.rank", "8", "--no-actor.gradient_checkpointing_enable"],
            "--actor.grad",
            "--ds.lora.rank",
        ),
    ],
)
def test_what_is_given_already_is_not_advised(pretend_gpus, flags, advised, not_advised):
    pretend_gpus(1, REAL[80])
    advice = cuda.less_memory(arguments.parse(["--preset", "qwen3-1.7b", *flags]).args)
    assert advised in advice
    assert not_advised not in advice


@pytest.mark.parametrize(
    ("preset", "gib", "flags", "gpus", "expected"),
    [
        ("qwen3-0.6b", 24, [], 1, (2, 8)),
        ("qwen3-1.7b", 40, [], 1, (2, 8)),
        ("qwen3-1.7b", 24, ["--ds.lora.rank", "64"], 1, (4, 4)),
        ("qwen3-8b", 80, [], 4, (4, 8)),
    ],
)
def test_micro_batches_are_as_large_as_fit(fitted, preset, gib, flags, gpus, expected):
    settings = fitted(preset, gib, *flags, gpus=gpus)
    assert sizes(settings) == expected
    [line] = fit.describe(settings, SHAPES[preset])
    assert f"{expected[0]} rows (training) and {expected[1]} (log-probs)" in line


def test_a_replayed_row_for_each_fresh_one_halves_the_micro_batch(fitted):
    settings = fitted("qwen3-1.7b", 40, "--method", "repo")
    assert sizes(settings) == (1, 8)
    [line] = fit.describe(settings, SHAPES["qwen3-1.7b"])
    assert "micro-batches of 2 rows (training)" in line


def test_flags_win_and_the_tokens_of_dynamic_batches_follow(fitted):
    settings = fitted(
        "qwen3-0.6b", 24, "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "2"
    )
    assert sizes(settings) == (4, 2)
    warning = "warning: of 23.5 GiB of a GPU the estimate takes 24.1: lower --tr"
    assert fit.describe(settings, SHAPES["qwen3-0.6b"])[1].startswith(warning)
    packed = ("--ds.packing_samples", "--train.dynamic_batch_enable")
    args = fitted("qwen3-0.6b", 24, *packed).args  # 5,120 logits a row
    assert (args.train.max_tokens_per_gpu, args.rollout.max_tokens_per_gpu) == (5120, 2 * 5120)
    given = fitted("qwen3-0.6b", 24, *packed, "--train.max_tokens_per_gpu", "20480")
    assert (
        given.args.train.max_tokens_per_gpu == 20480
        and len(fit.describe(given, SHAPES["qwen3-0.6b"])) == 2
    )


def test_only_what_cannot_fit_in_any_case_is_refused(fitted):
    line = r"Qwen3-1.7B-Base needs 25\.6 GiB of each GPU for .* has 23\.5; give --ds.zero"
    with pytest.raises(UsageError, match=line):
        fitted("qwen3-1.7b", 24)
    # 32.8e9 bytes of states with ZeRO 3, and 5.0e9 of one row's logits
    near = fitted("qwen3-8b", 40, gpus=4)
    assert sizes(near) == (1, 4) and len(fit.describe(near, SHAPES["qwen3-8b"])) == 2


@pytest.fixture
def smollm2_folder():
    folder = smollm2.default_folder()  # which is made anew where the code that makes it has changed
    smollm2.prepare(folder)
    return folder


@pytest.mark.slow
def test_smollm2_is_converted_once(smollm2_folder):
    stamp = (smollm2_folder / "smollm2.json").stat().st_mtime_ns
    smollm2.prepare(smollm2_folder)
    assert (smollm2_folder / "smollm2.json").stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_the_held_out_problems_of_smollm2_are_others_than_those_trained_on(smollm2_folder):
    train = list(map(json.loads, (smollm2_folder / "train.jsonl").open()))
    heldout = list(map(json.loads, (smollm2_folder / "heldout.jsonl").open()))
    problems = {row["input"] for row in train}
    others = {row["input"] for row in heldout}
    assert (len(problems), len(others)) == (80, 128)
    assert problems.isdisjoint(others)
    for row in train:
        assert eval(row["input"].rpartition("\n")[2].removesuffix(" =")) == int(row["label"])


@pytest.mark.slow
def test_smollm2_answers_and_has_a_chat_template(smollm2_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder / "model")
    assert Shape.of(model.config) == SMOLLM2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGES", ("no-such-package",))
    with pytest.raises(UsageError, match=r"smollm2 .*package no-such-package.*setup_env"):
        smollm2.prepare(tmp_path / "made")
    assert not (tmp_path / "made").exists()
