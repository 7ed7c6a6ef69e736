"""Micro-batches that fit a GPU's memory, by the estimate; nothing here has been run on a GPU."""

import dataclasses

import pytest

from openrlhf_dbb.driver import arguments, checks, gpu_fit
from openrlhf_dbb.driver.capacity import Shape
from openrlhf_dbb.errors import UsageError

# Without norms; 151,936 words. Of 1.7B: 151,936 x 2,048 + 28 x (2 x 2,048 x 128 x (16 + 8) + 3 x 2,048 x 6,144).
SHAPES = {
    "qwen3-0.6b": Shape(595_984_384, 28, 1024, 151_936, 57_344, 630_784),
    "qwen3-1.7b": Shape(1_720_451_072, 28, 2048, 151_936, 57_344, 1_089_536),
    "qwen3-8b": Shape(8_190_427_136, 36, 4096, 151_936, 73_728, 2_727_936),
}
REAL = {24: 23.5, 40: 39.4, 80: 79.2, 141: 139.8}  # GiB that the driver shows of an RTX 4090, A100, H100, H200


@pytest.fixture
def fit(pretend_gpus):
    """Function: the fitted settings of a preset on some GPUs."""

    def settings(preset, gib, *flags, gpus=1):
        pretend_gpus(gpus, REAL[gib])
        parsed = dataclasses.replace(arguments.parse(["--preset", preset, *flags]), shape=SHAPES[preset])
        fitted = gpu_fit.fitted(parsed)
        checks.check(fitted)
        return fitted

    return settings


def sizes(settings):
    return settings.args.train.micro_batch_size, settings.args.rollout.micro_batch_size


def test_the_estimate_by_hand(fit):
    one, batch = 1.720451, 4 * 5120 * 2048 * (28 * 2 + 40) / 1e9 + 4 * 4096 * 151_936 * 4 / 1e9
    log_probs = 8 * 5120 * 2048 * 40 / 1e9 + 8 * 4096 * 151_936 * 3 / 1e9
    # 2 bytes of weights, 2 of gradients, 12 of states; 4e9 bytes beside them
    expected = [one * 16, one * 16 + batch + 4, one * 2 + log_probs + 4]
    settings = fit("qwen3-1.7b", 80)
    assert [needed / 1e9 for needed in gpu_fit.memory(settings)] == pytest.approx(expected, rel=1e-5)
    for flags, states in (([], one * (2 + 14 / 4)), (["--ds.zero_stage", "3"], one * 16 / 4 + 2)):  # 2 are gathered
        assert gpu_fit.memory(fit("qwen3-1.7b", 80, *flags, gpus=4))[1] / 1e9 == pytest.approx(states + batch + 4)


@pytest.mark.parametrize(
    ("preset", "gib", "flags", "gpus", "expected"),
    [
        ("qwen3-0.6b", 24, [], 1, (2, 8)),
        ("qwen3-1.7b", 40, ["--method", "repo"], 1, (1, 8)),  # a row is replayed for each fresh one
        ("qwen3-1.7b", 24, ["--ds.lora.rank", "64"], 1, (4, 4)),
        ("qwen3-8b", 80, [], 4, (4, 8)),
    ],
)
def test_micro_batches_are_as_large_as_fit(fit, preset, gib, flags, gpus, expected):
    settings = fit(preset, gib, *flags, gpus=gpus)
    assert sizes(settings) == expected
    [line] = gpu_fit.describe(settings)
    assert f"{expected[0] * (2 if 'repo' in flags else 1)} rows (training) and {expected[1]} (log-probs)" in line


def test_flags_win_and_the_tokens_of_dynamic_batches_follow(fit, monkeypatch):
    settings = fit("qwen3-0.6b", 24, "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "2")
    assert sizes(settings) == (4, 2)
    assert gpu_fit.describe(settings)[1].startswith("warning: of 23.5 GiB of a GPU the estimate takes 23.8: lower --tr")
    monkeypatch.setattr("openrlhf_dbb.platform.machine.is_real", lambda module: True)
    args = fit("qwen3-0.6b", 24).args  # packed: 5,120 logits a row
    assert (args.train.max_tokens_per_gpu, args.rollout.max_tokens_per_gpu) == (5120, 2 * 5120)
    given = fit("qwen3-0.6b", 24, "--train.max_tokens_per_gpu", "20480")
    assert given.args.train.max_tokens_per_gpu == 20480 and len(gpu_fit.describe(given)) == 2


def test_only_what_cannot_fit_in_any_case_is_refused(fit):
    with pytest.raises(
        UsageError, match=r"Qwen3-1.7B-Base needs 25\.6 GiB of each GPU for .* has 23\.5; give --ds.zero"
    ):
        fit("qwen3-1.7b", 24)
    near = fit("qwen3-8b", 40, gpus=4)  # 32.8e9 bytes of states with ZeRO 3, and 5.0e9 of one row's logits
    assert sizes(near) == (1, 4) and len(gpu_fit.describe(near)) == 2
