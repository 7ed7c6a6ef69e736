"""Advantages of replayed rollouts by hand, and their weight in OpenRLHF's loss against RePO's formula."""

import math

import numpy as np
import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import PolicyLoss  # noqa: E402

from openrlhf_dbb.core.replay.normalization import mixed_advantages, replay_advantages, weights  # noqa: E402

NAN = math.nan


def test_split_normalises_each_prompt_by_its_own_replays():
    rewards_P_K = np.array([[1, 0, 0, 0], [1, 1, 0, NAN], [0.1, 0.1, 0.1, NAN], [1, NAN, NAN, NAN], [NAN] * 4])
    # Means 1/4 and 2/3; N-1 variances (9 + 3) / 16 / 3 = 1/4 and 6/9 / 2 = 1/3.
    third = 1 / math.sqrt(3)
    by_std = [[1.5, -0.5, -0.5, -0.5], [third, third, -2 * third, NAN], [0, 0, 0, NAN], [0, NAN, NAN, NAN], [NAN] * 4]
    by_mean = [[0.75, -0.25, -0.25, -0.25], [1 / 3, 1 / 3, -2 / 3, NAN], [0, 0, 0, NAN], [0, NAN, NAN, NAN], [NAN] * 4]
    np.testing.assert_allclose(replay_advantages(rewards_P_K, "group_norm"), by_std, rtol=1e-12)
    np.testing.assert_allclose(replay_advantages(rewards_P_K, "dr_grpo"), by_mean, rtol=1e-12)
    # 1 against the mean of 0 0 0, 0 against that of 1 0 0; 1 against that of 1 0, 0 against that of 1 1
    others = [[1, *[-1 / 3] * 3], [0.5, 0.5, -1, NAN], [0, 0, 0, NAN], [0, NAN, NAN, NAN], [NAN] * 4]
    np.testing.assert_allclose(replay_advantages(rewards_P_K, "rloo"), others, rtol=1e-12)
    for form in ("group_norm", "dr_grpo", "rloo"):
        assert replay_advantages(rewards_P_K, form)[2:4, 0].tolist() == [
            0.0,
            0.0,
        ]  # the mean of three 0.1 is not 0.1
        assert replay_advantages(np.full((2, 3), NAN), form).shape == (2, 3)
        assert replay_advantages(np.empty((2, 0)), form).shape == (2, 0)


def test_mixed_normalises_fresh_and_replayed_together():
    fresh_P_N = np.array([[0.0, 0.0, NAN], [1.0, 1.0, 1.0]])
    replayed_P_K = np.array([[1.0, 1.0], [NAN, NAN]])
    # 0 0 1 1: mean 1/2, N-1 variance 1/3.
    half = math.sqrt(3) / 2
    fresh, replayed = mixed_advantages(fresh_P_N, replayed_P_K, "group_norm")
    np.testing.assert_allclose(fresh, [[-half, -half, 0], [0, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(replayed, [[half, half], [NAN, NAN]], rtol=1e-12)
    fresh, replayed = mixed_advantages(fresh_P_N, replayed_P_K, "dr_grpo")
    np.testing.assert_allclose(fresh, [[-0.5, -0.5, 0], [0, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(replayed, [[0.5, 0.5], [NAN, NAN]], rtol=1e-12)
    # each against the other three
    fresh, replayed = mixed_advantages(fresh_P_N, replayed_P_K, "rloo")
    np.testing.assert_allclose(fresh, [[-2 / 3, -2 / 3, 0], [0, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(replayed, [[2 / 3, 2 / 3], [NAN, NAN]], rtol=1e-12)


def test_weights_by_hand():
    fresh_P, replayed_P = np.array([2, 2]), np.array([0, 4])
    factor, factors_P = weights(fresh_P, replayed_P, "code", 0.5)
    assert (factor, factors_P.tolist()) == (1.0, [0.5, 0.5])
    # 8 rows: a fresh one weighs 1/4 = 2 / 8, one of four replays 0.5 / 2 prompts / 4 = 0.5 / 8.
    factor, factors_P = weights(fresh_P, replayed_P, "formula", 0.5)
    assert (factor, factors_P.tolist()) == (2.0, [0.0, 0.5])
    # Without replays nothing changes.
    assert weights(fresh_P, np.array([0, 0]), "formula", 1.0)[0] == 1.0


@pytest.mark.parametrize(
    ("normalizer", "coef", "fresh", "complaint"),
    [
        ("paper", 1.0, 2, "normalizer 'paper' is unknown; use one of code, formula"),
        ("code", 0.0, 2, "replayed rollouts must be above 0, got 0.0"),
        ("formula", NAN, 2, "replayed rollouts must be above 0, got nan"),
        ("code", 1.0, 0, "there is no fresh rollout"),
    ],
)
def test_weights_refuse(normalizer, coef, fresh, complaint):
    with pytest.raises(ValueError, match=complaint):
        weights(np.array([fresh]), np.array([2]), normalizer, coef)


FRESH_P, REPLAYED_P = np.array([2, 3, 2]), np.array([0, 1, 3])
LOW, HIGH = 0.2, 0.28
TOKENS = 5


def row_loss(log_ratios, advantage):
    """Mean over a row's tokens of -min(w A, clip(w) A)."""
    ratio = np.exp(log_ratios)
    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
    return float(np.mean(-np.minimum(ratio * advantage, clipped * advantage)))


@pytest.mark.parametrize("coef", [1.0, 0.5])
@pytest.mark.parametrize("normalizer", ["code", "formula"])
def test_weighted_rows_in_openrlhfs_loss_are_repos_objective(normalizer, coef):
    random = np.random.default_rng(11)
    rows = [(prompt, old) for old, counts in ((False, FRESH_P), (True, REPLAYED_P)) for prompt in range(3)
            for _ in range(counts[prompt])]  # fmt: skip
    lengths = random.integers(1, TOKENS + 1, len(rows))
    log_ratios = random.normal(0, 0.5, (len(rows), TOKENS))
    advantages = random.normal(0, 1, len(rows))
    ratios = np.concatenate([np.exp(log_ratios[i, :length]) for i, length in enumerate(lengths)])
    signs = np.repeat(advantages, lengths)
    assert np.any((ratios > 1 + HIGH) & (signs > 0)) and np.any((ratios < 1 - LOW) & (signs < 0))  # both clips bind

    losses = [row_loss(log_ratios[i, : lengths[i]], advantages[i]) for i in range(len(rows))]
    fresh = [loss for loss, (_, old) in zip(losses, rows, strict=True) if not old]
    replayed = [[loss for loss, row in zip(losses, rows, strict=True) if row == (p, True)] for p in range(3)]
    if normalizer == "code":
        expected = (sum(fresh) + coef * sum(map(sum, replayed))) / 11
    else:
        expected = sum(fresh) / 7 + coef * (0 + replayed[1][0] + sum(replayed[2]) / 3) / 3

    factor, factors_P = weights(FRESH_P, REPLAYED_P, normalizer, coef)
    weighted = [a * (factors_P[prompt] if old else factor) for a, (prompt, old) in zip(advantages, rows, strict=True)]
    loss_fn = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, token_level_loss=False)
    mask = torch.arange(TOKENS)[None, :] < torch.tensor(lengths)[:, None]
    log_probs = torch.tensor(log_ratios)
    old_log_probs = torch.zeros_like(log_probs)
    loss = loss_fn(log_probs, old_log_probs, torch.tensor(weighted)[:, None].expand(-1, TOKENS), mask)[0]
    assert loss.item() == pytest.approx(expected, rel=1e-7)
