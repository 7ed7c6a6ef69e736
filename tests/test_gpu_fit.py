"""Micro-batches that fit a GPU's memory, by the estimate; nothing here has been run on a GPU."""

import dataclasses
from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver import arguments, checks, gpu_fit
from openrlhf_dbb.driver.capacity import Shape
from openrlhf_dbb.errors import UsageError

QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-1.7b": (2048, 6144, 28, 16),
    "qwen3-8b": (4096, 12_288, 36, 32),
}
NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
REAL = {24: 23.5, 40: 39.4, 80: 79.2, 141: 139.8}  # GiB that the driver shows of an RTX 4090, A100, H100, H200


@pytest.fixture
def fit(pretend_gpus):
    """Function: the fitted settings of a preset on some GPUs."""

    def settings(preset, gib, *flags, gpus=1):
        pretend_gpus(gpus, REAL[gib])
        sizes = dict(zip(NAMES, SIZES[preset], strict=True))
        shape = Shape.of(SimpleNamespace(**QWEN3, **sizes, tie_word_embeddings=preset != "qwen3-8b"))
        parsed = dataclasses.replace(arguments.parse(["--preset", preset, *flags]), shape=shape)
        checks.check(parsed)
        fitted = gpu_fit.fitted(parsed)
        checks.check(fitted)
        return fitted

    return settings


def sizes(settings):
    return settings.args.train.micro_batch_size, settings.args.rollout.micro_batch_size


def test_the_estimate_by_hand(fit):
    settings = fit("qwen3-1.7b", 80)
    # 151,936 x 2,048 + 28 x (2 x 2,048 x 128 x (16 + 8) + 3 x 2,048 x 6,144) = 1.7204e9 parameters.
    states = 1.7204 * (2 + 2 + 12)
    # 4 rows of 5,120 tokens x 2,048 units x (28 x 2 + 40) bytes; 4 x 4,096 x 151,936 logits of 10 bytes.
    batch = 4 * 5120 * 2048 * 96 / 1e9 + 4 * 4096 * 151_936 * 10 / 1e9
    least, training, log_probs = (needed / 1e9 for needed in gpu_fit.memory(settings))
    assert (least, training) == (
        pytest.approx(states + 4 * 1.7204, rel=1e-3),
        pytest.approx(states + batch + 4, rel=1e-3),
    )
    asleep = 1.7204 * 2 + 8 * 5120 * 2048 * 40 / 1e9 + 8 * 4096 * 151_936 * 6 / 1e9 + 4
    assert log_probs == pytest.approx(asleep, rel=1e-3)
    four = gpu_fit.memory(fit("qwen3-1.7b", 80, gpus=4))[1] / 1e9  # ZeRO 2: whole weights
    assert four == pytest.approx(1.7204 * (2 + 14 / 4) + batch + 4, rel=1e-3)
    four = gpu_fit.memory(fit("qwen3-1.7b", 80, "--ds.zero_stage", "3", gpus=4))[1] / 1e9  # 1e9 gathered parameters
    assert four == pytest.approx(1.7204 * 16 / 4 + batch + 4 + 2, rel=1e-3)
    awake = gpu_fit.memory(fit("qwen3-1.7b", 80, "--no-vllm.enable_sleep"))[1] - gpu_fit.memory(settings)[1]
    assert awake == pytest.approx(0.7 * 79.2 * 2**30 - (batch - batch / 4) * 1e9, rel=1e-3)  # and one row in place of 4


@pytest.mark.parametrize(
    ("preset", "gib", "flags", "gpus", "expected"),
    [
        ("qwen3-0.6b", 24, [], 1, (1, 4)),
        ("qwen3-0.6b", 40, [], 1, (2, 8)),
        ("qwen3-1.7b", 40, [], 8, (4, 4)),
        ("qwen3-1.7b", 80, [], 1, (4, 8)),
        ("qwen3-1.7b", 80, ["--method", "repo"], 1, (2, 8)),  # a row is replayed for each fresh one
        ("qwen3-1.7b", 24, ["--ds.lora.rank", "64"], 1, (2, 2)),
        ("qwen3-8b", 80, [], 4, (2, 4)),
        ("qwen3-8b", 141, [], 4, (4, 8)),
    ],
)
def test_micro_batches_are_as_large_as_fit(fit, preset, gib, flags, gpus, expected):
    settings = fit(preset, gib, *flags, gpus=gpus)
    assert sizes(settings) == expected
    [line] = gpu_fit.describe(settings)
    replayed = 2 if "repo" in flags else 1
    assert f"micro-batches of {replayed * expected[0]} rows (training) and {expected[1]} (log-probs)" in line


def test_flags_win_and_a_flag_that_does_not_fit_is_warned_of(fit):
    settings = fit("qwen3-0.6b", 24, "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "2")
    assert sizes(settings) == (4, 2)
    [_, warning] = gpu_fit.describe(settings)
    assert warning.startswith("warning: ") and "has 23.5: lower --train.micro_batch_size" in warning


def test_with_dynamic_batches_the_tokens_follow_unless_a_flag_gives_them(fit, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.platform.machine.is_real", lambda module: True)
    args = fit("qwen3-0.6b", 24).args  # packed: 5,120 logits a row
    assert args.train.dynamic_batch_enable
    assert (args.train.max_tokens_per_gpu, args.rollout.max_tokens_per_gpu) == (5120, 2 * 5120)
    given = fit("qwen3-0.6b", 24, "--train.max_tokens_per_gpu", "20480")
    assert given.args.train.max_tokens_per_gpu == 20480 and len(gpu_fit.describe(given)) == 2


def test_only_what_cannot_fit_in_any_case_is_refused(fit):
    with pytest.raises(
        UsageError, match=r"Qwen3-1.7B-Base needs 32\.0 GiB of each GPU for .* has 23\.5; give --ds.zero"
    ):
        fit("qwen3-1.7b", 24)
    near = fit("qwen3-8b", 40, gpus=4)  # 41.0e9 bytes of states with ZeRO 3, and one row's logits of 12.4e9
    assert sizes(near) == (1, 2) and len(gpu_fit.describe(near)) == 2
