"""Micro-batches that fit a GPU's memory, by the estimate, and checkpoints that fit the disk; not run on a GPU."""

import dataclasses
from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver import arguments, checks, fit
from openrlhf_dbb.driver.fit import Shape
from openrlhf_dbb.errors import UsageError

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
QWEN3 = dict(vocab_size=151_936, num_key_value_heads=8, head_dim=128)
SHAPES = {
    name: Shape.of(SimpleNamespace(**QWEN3, **dict(zip(SIZES, sizes, strict=True))))
    for name, sizes in {
        "qwen3-0.6b": (1024, 3072, 28, 16, True),
        "qwen3-1.7b": (2048, 6144, 28, 16, True),
        "qwen3-8b": (4096, 12_288, 36, 32, False),
    }.items()
}
REAL = {24: 23.5, 40: 39.4, 80: 79.2, 141: 139.8}  # GiB that the driver shows of an RTX 4090, A100, H100, H200


@pytest.mark.parametrize(("name", "published"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)])
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
        (["--ckpt.save_steps", "-1"], 28e9, "note: no checkpoints are saved "),
    ],
)
def test_the_start_warns_where_checkpoints_have_no_room(pretend_gpus, monkeypatch, flags, free, said):
    pretend_gpus(1)
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    own = ["--actor.model_name_or_path", "m", "--ckpt.max_num", "2", "--ckpt.save_steps", "5", *flags]
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
        return [
            each / 1e9 for each in fit.gpu_memory(fitted("qwen3-1.7b", 80, *flags, gpus=gpus), SHAPES["qwen3-1.7b"])
        ]

    one, batch = 1.720451, 4 * 5120 * 2048 * (28 * 2 + 40) / 1e9 + 4 * 4096 * 151_936 * 4 / 1e9
    log_probs = 8 * 5120 * 2048 * 40 / 1e9 + 8 * 4096 * 151_936 * 3 / 1e9
    # 2 bytes of weights, 2 of gradients, 12 of states; 4e9 bytes beside them
    assert needed() == pytest.approx([one * 16, one * 16 + batch + 4, one * 2 + log_probs + 4], rel=1e-5)
    assert needed(gpus=4)[1] == pytest.approx(one * (2 + 14 / 4) + batch + 4)
    # ZeRO 3 gathers 2
    assert needed("--ds.zero_stage", "3", gpus=4)[1] == pytest.approx(one * 16 / 4 + 2 + batch + 4)


@pytest.mark.parametrize(
    ("preset", "gib", "flags", "gpus", "expected"),
    [
        ("qwen3-0.6b", 24, [], 1, (2, 8)),
        ("qwen3-1.7b", 40, ["--method", "repo"], 1, (1, 8)),  # a row is replayed for each fresh one
        ("qwen3-1.7b", 24, ["--ds.lora.rank", "64"], 1, (4, 4)),
        ("qwen3-8b", 80, [], 4, (4, 8)),
    ],
)
def test_micro_batches_are_as_large_as_fit(fitted, preset, gib, flags, gpus, expected):
    settings = fitted(preset, gib, *flags, gpus=gpus)
    assert sizes(settings) == expected
    [line] = fit.describe(settings, SHAPES[preset])
    assert f"{expected[0] * (2 if 'repo' in flags else 1)} rows (training) and {expected[1]} (log-probs)" in line


def test_flags_win_and_the_tokens_of_dynamic_batches_follow(fitted, monkeypatch):
    settings = fitted("qwen3-0.6b", 24, "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "2")
    assert sizes(settings) == (4, 2)
    assert fit.describe(settings, SHAPES["qwen3-0.6b"])[1].startswith(
        "warning: of 23.5 GiB of a GPU the estimate takes 23.8: lower --tr"
    )
    monkeypatch.setattr("openrlhf_dbb.platform.machine.is_real", lambda module: True)
    args = fitted("qwen3-0.6b", 24).args  # packed: 5,120 logits a row
    assert (args.train.max_tokens_per_gpu, args.rollout.max_tokens_per_gpu) == (5120, 2 * 5120)
    given = fitted("qwen3-0.6b", 24, "--train.max_tokens_per_gpu", "20480")
    assert given.args.train.max_tokens_per_gpu == 20480 and len(fit.describe(given, SHAPES["qwen3-0.6b"])) == 2


def test_only_what_cannot_fit_in_any_case_is_refused(fitted):
    with pytest.raises(
        UsageError, match=r"Qwen3-1.7B-Base needs 25\.6 GiB of each GPU for .* has 23\.5; give --ds.zero"
    ):
        fitted("qwen3-1.7b", 24)
    near = fitted("qwen3-8b", 40, gpus=4)  # 32.8e9 bytes of states with ZeRO 3, and 5.0e9 of one row's logits
    assert sizes(near) == (1, 4) and len(fit.describe(near, SHAPES["qwen3-8b"])) == 2
