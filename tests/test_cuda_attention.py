"""An attention has to prove itself before it is trained with; on the CPU, with right ones and wrong ones."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from openrlhf_dbb import tiny
from openrlhf_dbb.driver import arguments, preflight
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import attention, cpu, machine

cpu.prepare_driver()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen3 with attention as published, and a model folder without weights."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("qwen3")
    sizes = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    Qwen3Config(**sizes, num_hidden_layers=12, vocab_size=1000).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def register():
    """Function: make an attention from torch's, changed, known to transformers by a name."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def put(name, change):
        def forward(module, query, key, value, attention_mask, **rest):
            given = change(SimpleNamespace(query=query, key=key, value=value, mask=attention_mask, rest=rest))
            return sdpa_attention_forward(module, given.query, given.key, given.value, given.mask, **given.rest)

        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, sdpa_mask)
        return name

    return put


def looks_into_other_samples(given):
    given.mask, given.rest["is_causal"] = None, True
    return given


def scales_wrongly(given):
    given.rest["scaling"] *= 1.1
    return given


def stops_a_gradient(given):
    given.key = given.key.detach()
    return given


def gives_nan(given):
    given.value = given.value * float("nan")
    return given


@pytest.mark.slow
def test_an_attention_that_computes_the_same_passes(model, register):
    for name in ("sdpa", "eager", register("unchanged", lambda given: given)):
        found = attention.check(name, model)
        assert found.ok and found.error is None
        assert 0 < found.rounding < 0.1 and found.largest_difference <= 3 * found.rounding


@pytest.mark.slow
@pytest.mark.parametrize("fault", [looks_into_other_samples, scales_wrongly, stops_a_gradient, gives_nan])
def test_a_wrong_attention_is_found(model, register, fault):
    found = attention.check(register(fault.__name__, fault), model)
    assert not found.ok
    assert found.largest_difference > 3 * found.rounding
    assert found.error.startswith("it is off by ")


def test_one_that_fails_says_so(model):
    found = attention.check("nonsense", model)
    assert not found.ok and found.error.startswith('ValueError: Specified `attn_implementation="nonsense"`')


@pytest.mark.slow
def test_the_check_is_a_program_with_one_json_object():
    files = tiny.prepare(tiny.default_folder())
    command = [sys.executable, "-m", "openrlhf_dbb.platform.attention"]
    good = subprocess.run([*command, "sdpa", str(files.model)], capture_output=True, text=True)
    assert good.returncode == 0 and json.loads(good.stdout)["ok"]
    bad = subprocess.run([*command, "flash_attention_4", str(files.model)], capture_output=True, text=True)
    assert bad.returncode == 1 and json.loads(bad.stdout)["error"].startswith("ImportError: FlashAttention4 has been")


GPU = machine.Gpu("NVIDIA H100", 80 * machine.GIB, (9, 0))
ANSWERS = {
    "right": (0, '{"ok": true, "error": null, "largest_difference": 0.01, "rounding": 0.01, "seconds": 9.0}', ""),
    "wrong": (1, '{"ok": false, "error": "it is off", "largest_difference": 9, "rounding": 0.01, "seconds": 9.0}', ""),
    "killed": (-9, "", "out of\nmemory\n"),
}


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Function: what the process of the check will answer; its attribute ``asked`` counts the calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answer(name):
        code, out, err = ANSWERS[name]

        def run(*_, **__):
            answer.asked += 1
            return SimpleNamespace(returncode=code, stdout=out, stderr=err)

        monkeypatch.setattr(attention.subprocess, "run", run)

    answer.asked = 0
    return answer


def test_what_passed_is_not_checked_again_on_such_a_gpu_and_what_failed_is(process, model, capsys):
    process("wrong")
    assert [attention.checked("flash_attention_4", model, GPU).error for _ in range(2)] == ["it is off"] * 2
    assert process.asked == 2
    process("right")
    assert [attention.checked("flash_attention_4", model, GPU).ok for _ in range(3)] == [True] * 3
    assert process.asked == 3
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("checking flash_attention_4 on NVIDIA H100, once: it makes")
    )
    attention.checked("flash_attention_4", model, machine.Gpu("NVIDIA B200", GPU.memory, (10, 0)))
    attention.checked("flash_attention_2", model, GPU)
    assert process.asked == 5


def test_a_check_that_dies_is_a_failure(process, model):
    process("killed")
    assert attention.checked("flash_attention_4", model, GPU).error == "its process ended with -9: memory"


@pytest.fixture
def settings(monkeypatch, model):
    """Function: parsed for one H100 with flash-attn-4 installed."""
    monkeypatch.setattr(attention, "_installed", lambda distribution: distribution == "flash-attn-4")
    monkeypatch.setattr(attention.importlib.metadata, "version", lambda distribution: "1")
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: machine.Machine((GPU,), (13, 0)))
    monkeypatch.setattr(arguments.upstream, "check_version", lambda: None)
    own = [
        "--actor.model_name_or_path",
        model,
        "--data.prompt_dataset",
        "d.jsonl",
        "--reward.remote_url",
        "math_answer",
    ]
    return lambda *argv: arguments.parse([*own, *argv])


FLAGS = ("ds.attn_implementation", "ds.packing_samples", "train.dynamic_batch_enable")


def test_a_training_goes_on_with_torchs_attention_if_the_chosen_one_fails(process, settings):
    made = settings()
    assert [made.flags[flag] for flag in FLAGS] == ["flash_attention_4", True, True]
    process("right")
    assert preflight._with_proven_attention(made) is made
    process("wrong")
    made = settings("--run_name", "another", "--data.max_len", "4096")
    (attention.user_cache.folder() / "attention").rename(attention.user_cache.folder() / "elsewhere")
    proven = preflight._with_proven_attention(made)
    assert [proven.flags[flag] for flag in FLAGS] == ["sdpa", False, False]
    assert {proven.origin[flag] for flag in FLAGS} == {"flash_attention_4 does not work here: it is off"}
    with pytest.raises(
        UsageError, match=r"--train.batch_size 512 is not a multiple of --train.micro_batch_size 3 x 1 ranks"
    ):
        preflight._with_proven_attention(settings("--train.micro_batch_size", "3"))


def test_an_attention_that_was_asked_for_and_fails_is_refused(process, settings):
    process("killed")
    with pytest.raises(
        UsageError, match=r"--ds.attn_implementation flash_attention_4 does not work here: its process .* sdpa$"
    ):
        preflight._with_proven_attention(settings("--ds.attn_implementation", "flash_attention_4"))
    kept = preflight._with_proven_attention(settings("--ds.packing_samples"))
    assert [kept.flags[flag] for flag in FLAGS] == ["sdpa", True, False]
