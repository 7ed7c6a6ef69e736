"""The policy's hidden states as features: the same one by one as in padded batches, shared out over ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf_dbb.actors import hidden_features  # noqa: E402
from openrlhf_dbb.actors.hidden_features import last_hidden, of_prompts, projected  # noqa: E402

TOKENS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 2], [9, 9, 9, 9]]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return tiny.build_model(0).eval()


def test_hidden_states_are_those_of_each_prompt_alone(model):
    found = last_hidden(model, TOKENS, 2)
    for row, tokens in zip(found, TOKENS, strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(row, alone.numpy(), rtol=1e-4, atol=1e-5)


def test_a_projection_keeps_angles_and_not_lengths():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(200, 2048)).astype(np.float32)
    found = projected(hidden)
    assert found.shape == (200, 64) and found.dtype == np.float32
    assert np.mean(found**2) == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(projected(7 * hidden), found, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(projected(hidden[3:5]), found[3:5], rtol=1e-4, atol=1e-5)
    assert np.isfinite(projected(np.zeros((1, 8), dtype=np.float32))).all()
    # The same directions in every run: the first numbers of RandomState(0).
    first = projected(np.eye(1, 4, dtype=np.float32))[0, :2]
    np.testing.assert_allclose(first, [1.7640524 * 2 / 2, 0.4001572 * 2 / 2], rtol=1e-5)


@pytest.mark.parametrize(("prompts", "ranks"), [(7, 3), (6, 3), (1, 2), (5, 1)])
def test_every_rank_gets_as_many_prompts_and_all_come_back_in_order(prompts, ranks, monkeypatch):
    asked = []

    def call(method_name, tokens):
        assert method_name == "prompt_features"
        asked.extend(tokens)
        return [[np.array([np.full(64, ids[0]) for ids in share], dtype=np.float32)] for share in tokens]

    monkeypatch.setattr(hidden_features.ray, "get", lambda found: found)
    policy = SimpleNamespace(_actor_handlers=[None] * ranks, async_run_method_batch=call)
    found = of_prompts(policy, [[prompt] for prompt in range(prompts)])
    assert found.tolist() == [[float(prompt)] * 64 for prompt in range(prompts)]
    assert len(asked) == ranks and len(set(map(len, asked))) == 1
