"""The size of a model and of its checkpoints: numbers worked out by hand."""

from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver import arguments, capacity
from openrlhf_dbb.driver.capacity import Shape

QWEN3 = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
CONFIGS = {
    "qwen3-0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}
SHAPE = Shape(parameters=10**9, layers=10, hidden=1000, vocabulary=10**5, key_values=2 * 10 * 1000, adapter=10**6)
FLAGS = ["--actor.model_name_or_path", "m", "--ckpt.max_num", "2", "--ckpt.save_steps", "5"]


@pytest.mark.parametrize(("name", "published"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)])
def test_the_size_of_a_dense_model_follows_from_its_configuration(name, published):
    config = SimpleNamespace(**QWEN3, **CONFIGS[name], tie_word_embeddings=name != "qwen3-8b")
    assert Shape.of(config).parameters == pytest.approx(published, rel=2e-4)  # without norms and biases


def test_a_mixture_or_an_unknown_kind_of_model_is_not_judged():
    assert Shape.of(SimpleNamespace(num_experts=8, hidden_size=8)) is None
    assert Shape.of(SimpleNamespace(hidden_size=8)) is None


def test_the_start_warns_where_checkpoints_have_no_room(pretend_gpus, monkeypatch):
    def said(*flags):
        return "".join(capacity.checkpoint_warnings(SHAPE, arguments.parse([*FLAGS, *flags]).args))

    pretend_gpus(1)
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: SimpleNamespace(free=28 * 10**9))
    assert said() == ""
    assert said("--ckpt.save_steps", "-1").startswith("note: no checkpoints are saved ")
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: SimpleNamespace(free=27 * 10**9))
    # 2 bytes of weights as trained, 12 of their copy in 32 bits and of Adam's moments
    assert said().startswith("warning: 2 checkpoints of 14 GB are kept in ") and "only 27 GB are free" in said()
    assert said("--ckpt.max_mem", "20") == ""  # room for one
