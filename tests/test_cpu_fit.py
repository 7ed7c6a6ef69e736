"""Threads, precision and memory of a run without CUDA, and the model that an installed package carries."""

import json

import pytest

from openrlhf_dbb.driver import arguments, fit
from openrlhf_dbb.driver.fit import Shape
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.platform.machine import GIB
from openrlhf_dbb.presets import smollm2

pytestmark = pytest.mark.skipif(not cpu.active(), reason="with CUDA nothing is fitted to the processor")

# SmolLM2-135M: 30 layers of 576, 49,152 words, tied; 3 heads of 64 for keys and for values.
# An adapter of rank 1 has 30 x (4 x 576 + 2 x (9 + 3) x 64 + 3 x (576 + 1536)) parameters.
SMOLLM2 = Shape(134_479_872, 30, 576, 49_152, 2 * 30 * 3 * 64, 305_280)
TINY = Shape(116_160, 2, 64, 32, 2 * 2 * 4 * 32, 2688)
MODEL = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d.jsonl", "--reward.remote_url", "math_answer"]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Two cores with bfloat16 and 20 GiB; a function that changes them."""

    def change(*, cores=2, bf16=True, free=20.0):
        monkeypatch.setattr(fit.os, "sched_getaffinity", lambda _: range(cores))
        monkeypatch.setattr(cpu, "has_bf16", lambda: bf16)
        monkeypatch.setattr(fit, "_available", lambda: int(free * GIB))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    change()
    return change


def fitted(*argv, shape=SMOLLM2):
    return fit.fitted(arguments.parse([*MODEL, *argv]), shape)


def threads(*argv, shape=SMOLLM2):
    return fit.threads(fitted(*argv, shape=shape).args, shape)


def chosen(settings):
    ds, actor = settings.args.ds, settings.args.actor
    return ds.param_dtype, ds.attn_implementation, ds.zero_stage, actor.gradient_checkpointing_enable


def test_a_real_model_gets_all_cores_and_bfloat16_and_a_small_one_keeps_its_own(machine):
    settings = fitted("--train.micro_batch_size", "1")
    assert chosen(settings) == ("bf16", "sdpa", 0, False) and threads("--train.micro_batch_size", "1") == 2
    assert settings.origin["ds.param_dtype"] == fit.ORIGIN
    assert fitted("--data.max_len", "256").args.ds.attn_implementation == "eager"
    small = fitted(shape=TINY)
    assert chosen(small) == ("fp32", "eager", 2, True) and threads(shape=TINY) == 1
    assert fit.engine_arguments(small.args, TINY) == {}
    machine(cores=8, bf16=False)
    assert chosen(fitted("--train.micro_batch_size", "1")) == ("fp32", "sdpa", 2, False)
    assert threads("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2") == 4
    assert threads("--train.async_enable", "--no-train.colocate_all") == 4  # both at the same time


def test_flags_and_the_environment_win(monkeypatch):
    flags = ["--ds.param_dtype", "fp32", "--ds.attn_implementation", "eager", "--ds.zero_stage", "3"]
    assert chosen(fitted(*flags, "--actor.gradient_checkpointing_enable")) == ("fp32", "eager", 3, True)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads() == 7


def test_checkpointing_where_memory_needs_it_and_a_refusal_where_that_is_not_enough(machine):
    flags = ["--train.micro_batch_size", "8", "--data.max_len", "512", "--rollout.max_new_tokens", "64"]

    def needed(*more):
        return fit.cpu_memory(fitted(*flags, *more), SMOLLM2) / GIB

    # Saved for the backward pass: 8 x 512 tokens x 30 layers x 576 x 80 bytes = 5.3 GiB; 2 layers' with checkpoints.
    with_all = needed()
    # OpenRLHF's pass copies the logits
    assert needed("--ds.packing_samples") - with_all == pytest.approx(8 * 64 * 49_152 * 10 / GIB)
    machine(free=with_all - 1)
    assert chosen(fitted(*flags))[3] and needed() == pytest.approx(with_all - 5.27 * 28 / 30, abs=0.02)
    machine(free=6.5)  # the model alone: 20 bytes a parameter, 2 in the engine, and three processes of 1.2 GiB
    assert "too few if" in fit.describe(fitted(*flags), SMOLLM2)[1]
    machine(free=6.3)
    with pytest.raises(UsageError, match=r"m needs 6\.4 GiB of memory beside its rollouts, 6\.3 are free; take"):
        fitted(*flags)
    fitted(*flags, "--ds.lora.rank", "8")  # 2 + 2 bytes a parameter, 18 a parameter of the adapters: 4.2 GiB


def test_the_engine_holds_a_step_of_rollouts():
    flags = ["--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "8", "--data.max_len", "100"]
    # 64 rollouts of four blocks of 32 tokens, and vLLM's own block; 11,520 numbers of 2 bytes a token.
    assert fit.engine_arguments(fitted(*flags).args, SMOLLM2) == {
        "max_num_seqs": 64, "kv_cache_memory_bytes": (64 * 4 + 1) * 32 * 11_520 * 2
    }  # fmt: skip


@pytest.mark.slow
def test_smollm2_is_converted_once_with_its_chat_template_and_held_out_problems():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.default_folder()  # which is made anew where the code that makes it has changed
    smollm2.prepare(folder)
    stamp = (folder / "smollm2.json").stat().st_mtime_ns
    smollm2.prepare(folder)
    assert (folder / "smollm2.json").stat().st_mtime_ns == stamp
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    problems = {name: {row["input"] for row in of_name} for name, of_name in rows.items()}
    assert [len(problems["train"]), len(problems["heldout"])] == [80, 128]
    assert problems["train"].isdisjoint(problems["heldout"])
    for row in rows["train"]:
        assert eval(row["input"].rpartition("\n")[2].removesuffix(" =")) == int(row["label"])
    model, tokenizer = (each.from_pretrained(folder / "model") for each in (AutoModelForCausalLM, AutoTokenizer))
    assert Shape.of(model.config) == SMOLLM2
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGES", ("no-such-package",))
    with pytest.raises(UsageError, match=r"--preset smollm2 needs the package no-such-package.*setup_env"):
        smollm2.prepare(tmp_path / "made")
    assert not (tmp_path / "made").exists()
