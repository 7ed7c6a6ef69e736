"""What fits on a GPU, in memory and on disk: numbers worked out by hand."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_dbb import presets
from openrlhf_dbb.driver import arguments, capacity
from openrlhf_dbb.driver.capacity import Needs, Shape
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform.machine import GIB, Gpu

QWEN3 = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
CONFIGS = {
    "qwen3-0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-1.7b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}


def config(name):
    return SimpleNamespace(**QWEN3, **CONFIGS[name], tie_word_embeddings=name != "qwen3-8b")


@pytest.fixture(autouse=True)
def machine_with(pretend_gpus):
    global _put
    _put = pretend_gpus


def settings(name, gpus="1x80", *more):
    _put(*map(int, gpus.split("x")))
    return arguments.parse(["--preset", name, *more])


@pytest.mark.parametrize(
    ("name", "published"), [("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976), ("qwen3-8b", 8_190_735_360)]
)
def test_the_size_of_a_dense_model_follows_from_its_configuration(name, published):
    # Without the norms and biases, less than a thousandth.
    assert Shape.of(config(name)).parameters == pytest.approx(published, rel=2e-4)


def test_a_mixture_or_an_unknown_kind_of_model_is_not_judged():
    assert Shape.of(SimpleNamespace(num_experts=8, hidden_size=8)) is None
    assert Shape.of(SimpleNamespace(hidden_size=8)) is None


SHAPE = Shape(parameters=10**9, layers=10, hidden=1000, vocabulary=10**5)
FLAGS = [
    "--data.max_len", "1000", "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "16",
    "--actor.gradient_checkpointing_enable", "--ckpt.max_num", "2", "--ckpt.save_steps", "5",
    "--no-train.dynamic_batch_enable",
]  # fmt: skip


def needs(*more, gpus="1x80"):
    return capacity.needs(SHAPE, settings("default", gpus, *FLAGS, *more, "--actor.model_name_or_path", "m").args)


def test_needs_by_hand():
    # 10^9 parameters: 2 GB of weights, 2 of gradients, 12 of optimizer. A token: 10^5 words x (6 + 6) bytes, and 10
    # layers x 1000 x 2 bytes that checkpointing keeps. While vLLM generates, the weights stay; main memory has the
    # optimizer and, while the policy trains, vLLM's weights.
    assert needs() == Needs(
        states=16 * 10**9,
        longest=1000 * 1_220_000,
        training=4 * 1000 * 1_220_000,
        scoring=16 * 1000 * 600_000,
        asleep=2 * 10**9,
        engine=2 * 10**9,
        host=14 * 10**9,
        checkpoint=14 * 10**9,
        disk=30 * 10**9,
    )


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--ds.zero_stage", "2"], {"states": 2 + 1 + 6, "host": 12 + 4}),
        (["--ds.zero_stage", "3"], {"states": 1 + 1 + 6, "asleep": 1, "host": 16}),
        (["--ds.zero_stage", "1"], {"states": 2 + 2 + 6, "host": 16}),
        (
            ["--ds.zero_stage", "3", "--vllm.tensor_parallel_size", "2"],
            {"states": 8, "asleep": 1, "engine": 1, "host": 14},
        ),
        (["--no-ds.enable_sleep"], {"states": 9, "asleep": 9, "host": 4}),
        (["--ckpt.save_steps", "-1"], {"states": 9, "host": 16, "checkpoint": 0, "disk": 2}),
        (["--ckpt.max_num", "3"], {"states": 9, "host": 16, "disk": 44}),
    ],
)
def test_what_two_gpus_and_other_flags_change(flags, changed):
    expected = dataclasses.replace(needs(), **{name: round(value * 10**9) for name, value in changed.items()})
    assert needs(*flags, gpus="2x80") == expected


def test_engines_on_gpus_of_their_own_share_no_memory_with_the_policy():
    alone = ["--estimator", "none", "--train.async_enable"]
    # One GPU each: the policy's keeps all 16 bytes a parameter, nothing sleeps in main memory.
    expected = dataclasses.replace(needs(), asleep=16 * 10**9, host=0)
    assert needs(*alone, gpus="2x80") == expected
    assert check(18, *alone, gpus="2x80")[0].startswith("warning: ")  # 16 GB and a sequence, without vLLM's share
    [line] = check(15, *alone, gpus="2x80")
    assert re.search(r"training takes 16 GiB of a GPU at least .*, and a G has 15 GiB", line)


def test_replays_and_dynamic_batches_size_a_micro_batch():
    replayed = needs("--method", "repo", "--replay.samples", "4")  # of 8 rollouts: half as many more
    assert (replayed.training, replayed.scoring) == (6 * 1000 * 1_220_000, 16 * 1000 * 600_000)
    dynamic = needs(
        "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "5000", "--rollout.max_tokens_per_gpu", "9"
    )
    assert (dynamic.training, dynamic.scoring) == (5000 * 1_220_000, 1000 * 600_000)  # a whole sequence at least


def check(gibibytes, *more, host=1000, gpus="1x80"):
    args = settings("default", gpus, *FLAGS, *more, "--actor.model_name_or_path", "m").args
    return capacity.check(SHAPE, args, [Gpu("G", int(gibibytes * GIB), (9, 0))], host=host * GIB)


def test_what_cannot_fit_is_one_warning_with_the_flags_to_change():
    assert check(80) == []
    [line] = check(15)
    assert re.search(r"training takes 16 GiB of a GPU at least \(14.9 GiB weights, gradients and .*1.14", line)
    [line] = check(15)
    assert re.search(r"a G has 15 GiB; use more GPUs, --ds.zero_stage 3 or --ds.adam_offload or a lower", line)
    [line] = check(80, "--vllm.gpu_memory_utilization", "0.02")
    assert re.search(r"vLLM's weights take 1.86 GiB of each GPU, --vllm.gpu_memory_utilization 0.02 gives", line)
    [line] = check(20, "--no-ds.enable_sleep")
    assert re.search(r"vLLM has its 14 GiB of a GPU, the policy keeps 14.9 .* --ds.enable_sleep \(estimated\)$", line)
    [line] = check(40, "--no-vllm.enable_sleep")
    assert re.search(r"vLLM, which does not sleep\), and a G has 40 GiB; use more GPUs, --vllm.enable_sle", line)
    [line] = check(80, host=8)
    assert re.search(r"what sleeps or is offloaded takes 13 GiB of main memory, there are 8 GiB; leave out", line)


def test_what_may_not_fit_is_a_warning_with_a_value_that_would():
    # 14.9 GiB of states; 4 sequences 4.55, 16 to score 8.94.
    scoring = check(22)
    assert len(scoring) == 1
    assert re.search(
        r"the log-probabilities may take 23.8 GiB .* then give --rollout.micro_batch_size 8 \(estimated\)$", scoring[0]
    )
    training, scoring = check(18)
    assert re.search(r"training may take 19.4 GiB of a GPU, .* --train.micro_batch_size 2 \(estimated\)$", training)
    assert scoring.endswith("--rollout.micro_batch_size 4 (estimated)")


def test_dynamic_batches_get_what_the_gpu_has_room_for():
    args = settings("default", "1x80", *FLAGS, "--train.dynamic_batch_enable", "--actor.model_name_or_path", "m").args
    # 0.8 x (20 GiB - 16 GB) / 1.22 MB or 0.6 MB a token, in steps of 1,024.
    limits = capacity.token_limits(SHAPE, args, [Gpu("G", 20 * GIB, (9, 0))])
    assert limits == {"train.max_tokens_per_gpu": 3 * 1024, "rollout.max_tokens_per_gpu": 7 * 1024}
    roomy = capacity.token_limits(SHAPE, args, [Gpu("G", 1000 * GIB, (9, 0))])
    assert roomy == {"train.max_tokens_per_gpu": 32_768, "rollout.max_tokens_per_gpu": 65_536}
    tight = capacity.token_limits(SHAPE, args, [Gpu("G", 15 * GIB, (9, 0))])
    assert set(tight.values()) == {1000}  # the longest sequence


def test_a_disk_without_room_for_the_checkpoints_is_refused(tmp_path, monkeypatch):
    args = settings("default", "1x80", *FLAGS, "--actor.model_name_or_path", "m", "--ckpt.path", f"{tmp_path}/new").args
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: SimpleNamespace(free=27 * GIB))
    with pytest.raises(
        UsageError, match=r"new has 27 GiB free; --ckpt.max_num 2 checkpoints of 13 GiB and the .* 27.9 GiB; ma"
    ):
        capacity.check_disk(SHAPE, args)
    (tmp_path / "new").mkdir()
    with open(tmp_path / "new/checkpoint", "wb") as sparse:  # of a run that is continued: it will be replaced
        sparse.truncate(GIB)
    capacity.check_disk(SHAPE, args)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_works_on_the_machine_it_says(name):
    form = r"(\d+) GPUs? or more of (\d+) GiB, (\d+) GiB of memory, (\d+) GiB of disk"
    gpus, each, memory, disk = map(int, re.findall(form, presets.load(name).expects)[0])
    row = f"| `{name}` | {gpus} or more of {each} GiB | {memory} GiB | {disk} GiB |"
    assert row in (Path(__file__).parents[1] / "docs/machines.md").read_text()
    shape, made = Shape.of(config(name)), settings(name, f"{gpus}x{each}")
    apart = settings(name, f"{2 * gpus}x{each}", "--estimator", "none", "--train.async_enable")
    assert capacity.check(shape, apart.args, apart.machine.gpus, host=memory * GIB) == []
    assert capacity.check(shape, made.args, made.machine.gpus, host=memory * GIB) == []
    assert capacity.needs(shape, made.args).disk <= disk * GIB < 1.1 * capacity.needs(shape, made.args).disk
    [line] = capacity.check(shape, made.args, [Gpu("small", 16 * GIB, (9, 0))], host=memory * GIB)
    assert re.search(r"vLLM's weights take|training takes", line)


def test_the_start_says_what_a_checkpoint_takes_and_how_many_are_kept():
    def said(*flags, gpus="1x80"):
        args = settings("default", gpus, *FLAGS, "--actor.model_name_or_path", "m", *flags).args
        return capacity.describe_checkpoints(SHAPE, args)

    # a billion parameters: 2 bytes of weights as trained, 12 of their copy in 32 bits and of Adam's moments
    three = ("--ckpt.save_steps", "10", "--ckpt.max_num", "3")
    assert said(*three).startswith("14 GB each, after every 10 steps; the last 3 kept, 42 GB in ")
    assert "the last 1 kept, 14 GB in" in said(*three, "--ckpt.max_mem", "20")
    assert said("--ckpt.save_steps", "-1").startswith("none")
