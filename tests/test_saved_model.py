"""A trained model is saved in the precision and size of the one that the training began with."""

import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from openrlhf_dbb import tiny
from openrlhf_dbb.driver import arguments
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.evaluation import model as evaluated_model
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import get_llm_for_sequence_regression  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402

from openrlhf_dbb.platform.backend import Backend  # noqa: E402


def test_a_model_actor_takes_the_threads_that_the_driver_has_chosen():
    args = arguments.parse(["--preset", "tiny"]).openrlhf_args()
    before = torch.get_num_threads()
    try:
        pickle.loads(pickle.dumps(LightBackend(args, threads=3)))  # as an actor gets it
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Function: save a model that was trained from one in a folder, on one rank."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )

    def call(model, original, folder, tokenizer, *, save_adapter=False):
        flags = ["--preset", "tiny", "--actor.model_name_or_path", str(original)]
        if save_adapter:
            flags.append("--ckpt.save_adapter")
        strategy = Backend(zero_stage=2, args=arguments.parse(flags).openrlhf_args())
        strategy.save_model(model, tokenizer, folder)

    yield call
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "tied", "weights"),
    # 11 words x 8: embeddings and head are one tensor or two
    [(torch.bfloat16, True, 1), (torch.float32, False, 2)],
)
def test_a_model_trained_in_float32_is_saved_as_it_came(tmp_path, save, dtype, tied, weights):
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    original = tmp_path / "original"
    saved = tmp_path / "saved"
    LlamaForCausalLM(config).to(dtype).save_pretrained(original)
    trained = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        trained.model.embed_tokens.weight.add_(1.0)
    save(trained, original, saved, Tokenizer())

    tensors = weights_of(saved)
    assert tensors.keys() == weights_of(original).keys()
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert sum(tensor.shape == (11, 8) for tensor in tensors.values()) == weights
    assert trained.config.dtype == torch.float32
    assert trained.dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    # A tied head is the embeddings
    assert torch.equal(
        loaded.model.embed_tokens.weight, trained.model.embed_tokens.weight.to(dtype)
    )
    assert torch.equal(loaded.lm_head.weight, trained.lm_head.weight.to(dtype))


@pytest.fixture
def adapted(tmp_path):
    """A model with adapters that change its weights; the base is in the folder ``base``."""
    tiny.build_model(0).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    policy = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return policy


def weights_of(folder, file="model.safetensors"):
    return safetensors.torch.load_file(Path(folder) / file)


def test_a_model_with_adapters_is_saved_merged_as_a_plain_model(tmp_path, save, adapted):
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    save(adapted, tmp_path / "base", tmp_path / "saved", Tokenizer())
    base = weights_of(tmp_path / "base")
    saved = weights_of(tmp_path / "saved")
    assert base.keys() == saved.keys()
    name = "model.layers.1.self_attn.v_proj"
    layer = adapted.get_submodule(f"base_model.model.{name}")
    low_rank = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(saved[f"{name}.weight"], base[f"{name}.weight"] + 6 / 2 * low_rank)
    tokens = torch.arange(8)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(tokens).logits
    torch.testing.assert_close(merged, adapted(tokens).logits, rtol=1e-4, atol=1e-4)
    for name, weight in adapted.state_dict().items():  # the training goes on with the adapters
        assert torch.equal(weight, before[name])


@pytest.fixture
def adapter(tmp_path, save, adapted):
    """The folder of the adapters alone, beside the base and the merged model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.default_folder() / "model")
    save(adapted, tmp_path / "base", tmp_path / "saved", Tokenizer())
    save(adapted, tmp_path / "base", tmp_path / "adapter", tokenizer, save_adapter=True)
    return tmp_path / "adapter"


def test_adapters_are_saved_alone_on_request(adapter, adapted):
    adapters = {}
    for name, weight in adapted.state_dict().items():
        if ".lora_" in name:
            adapters[name.replace(".default", "")] = weight
    saved = weights_of(adapter, "adapter_model.safetensors")
    assert saved.keys() == adapters.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, adapters[name])


def test_adapters_are_merged_for_an_evaluation(tmp_path, adapter):
    with evaluated_model.merged(str(adapter), tmp_path) as folder:
        served = weights_of(folder)
        assert {"config.json", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    assert not Path(folder).exists()
    plain = weights_of(tmp_path / "saved")
    assert served.keys() == plain.keys()
    for name, weight in served.items():
        torch.testing.assert_close(weight, plain[name])


def test_a_plain_model_is_evaluated_as_it_is(tmp_path):
    with evaluated_model.merged(str(tmp_path / "saved"), tmp_path) as folder:
        assert folder == str(tmp_path / "saved")


@pytest.mark.parametrize(
    ("values", "expected"), [({"mean": 2.0, "std": 0.5}, (2.0, 0.5)), ({}, (0.0, 1.0))]
)
def test_a_reward_model_is_prepared_with_the_mean_and_deviation_of_its_configuration(
    tmp_path, monkeypatch, values, expected
):
    made = tiny.build_model(0)
    made.config.update(values)
    made.save_pretrained(tmp_path)
    reward = get_llm_for_sequence_regression(
        str(tmp_path),
        "reward",
        normalize_reward=True,
        attn_implementation="eager",
        value_head_prefix="score",
    )
    reward.mean.fill_(float("nan"))  # what a model holds that was made without memory
    monkeypatch.setattr(DeepspeedStrategy, "prepare", lambda self, *models: models)
    backend = Backend(zero_stage=2, args=arguments.parse(["--preset", "tiny"]).openrlhf_args())
    [prepared] = backend.prepare(reward)
    assert (prepared.mean.item(), prepared.std.item()) == expected
