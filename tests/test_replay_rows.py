"""A fresh rollout through the cache and back is the row that OpenRLHF would have trained on."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.driver import arguments
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.trainer.ppo_utils.experience import (  # noqa: E402
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402

from openrlhf_dbb.actors.replay_rows import cached, replay_row  # noqa: E402
from openrlhf_dbb.core.replay.cache import ReplayCache  # noqa: E402

PAD = 99
# Tokens, spans of them that were generated, reward. The third answered twice and was answered twice; the last
# was cut off before it could answer.
ROLLOUTS = [
    ([1, 2, 3, 4, 5], [(2, 5)], 1.0),
    ([1, 2, 3, 4], [(2, 4)], 0.0),
    ([6, 7, 8, 9, 10, 11, 12], [(1, 3), (4, 5)], 0.5),
    ([6, 7], [], 0.0),
]
ACTIONS = [[0, 1, 1, 1], [0, 1, 1], [1, 1, 0, 1, 0, 0], [0]]


def fresh_batch(scores=None):
    """Two groups of two rollouts, padded to one batch, after the models' forward passes."""
    generator = SamplesGenerator.__new__(SamplesGenerator)  # its engines are not needed
    singles = []
    for i, (tokens, spans, reward) in enumerate(ROLLOUTS):
        response = {
            "observation_tokens": tokens,
            "action_ranges": spans,
            "reward": reward,
            "scores": scores[i] if scores else reward,
            "rollout_log_probs": None,
            "prompt": f"prompt {i // 2}",
            "label": "label",
            "extra_logs": {"turns": len(spans)},
        }
        singles.append(generator._process_response_into_experience(response, max_len=16))
    batch = Experience.concat_experiences(singles, PAD)
    batch.index = [0, 1, 2, 3]
    positions = torch.arange(batch.action_mask.numel()).reshape(batch.action_mask.shape)
    batch.action_log_probs = -(1 + positions.float()) / 8 * batch.action_mask  # 0 elsewhere, as Actor.forward gives
    batch.kl = torch.zeros_like(batch.action_log_probs)
    batch.info["kl"] = torch.full((4,), 0.25)
    return batch


def with_advantages(batch):
    flags = ["--preset", "tiny", "--estimator", "none", "--algo.advantage.estimator", "dr_grpo"]
    args = arguments.parse([*flags, "--rollout.n_samples_per_prompt", "2"]).args
    kl = SimpleNamespace(value=0.0)
    maker = RemoteExperienceMaker(None, None, None, None, kl, SimpleNamespace(args=args), None)
    return maker.compute_advantages_and_returns([batch])[0]


ADVANTAGES = [0.5, -0.5, 0.25, -0.25]  # X - mean of the pairs (1, 0) and (0.5, 0)


def replayed(batch, advantages=ADVANTAGES):
    """The batch's rollouts, through a cache, as rows of replay."""
    cache = ReplayCache(4)
    cache.add(0, cached(batch))
    return [replay_row(old, batch, advantage) for old, advantage in zip(cache.of(0), advantages, strict=True)]


def test_rollouts_are_cached_without_padding():
    batch = with_advantages(fresh_batch())
    rollouts = cached(batch)
    assert [rollout.tokens.tolist() for rollout in rollouts] == [tokens for tokens, _, _ in ROLLOUTS]
    assert [rollout.actions.tolist() for rollout in rollouts] == ACTIONS
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.5, 0.0]
    # The batch is 6 actions wide: rows begin at 0, 6, 12 and 18; minus eighths of the position + 1.
    eighths = [[2, 3, 4], [8, 9], [13, 14, 16], []]
    assert [(-8 * rollout.log_probs).tolist() for rollout in rollouts] == eighths
    assert batch.index == [0, 1, 2, 3] and batch.sequences.shape == (4, 7)


def test_what_was_not_verified_has_no_reward():
    rewards = [rollout.reward for rollout in cached(fresh_batch(scores=[1.0, math.nan, 0.0, 0.0]))]
    assert math.isnan(rewards[1])
    assert [rewards[i] for i in (0, 2, 3)] == [1.0, 0.5, 0.0]


def test_a_replayed_row_is_the_fresh_row():
    batch = with_advantages(fresh_batch())
    rows = replayed(batch)
    fresh = remove_padding_in_sequences(split_experience_batch(dataclasses.replace(batch)))
    for old, new in zip(rows, fresh, strict=True):
        for field in dataclasses.fields(Experience):
            value, expected = getattr(old, field.name), getattr(new, field.name)
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=f"{field.name}: {value}, {expected}")
        assert (old.index, old.kl, old.values, old.prompts) == (None, None, None, [None])
        assert old.info.keys() == new.info.keys() == {
            "response_clip_ratio", "reward", "score", "turns", "kl", "group_reward_std", "return"
        }  # fmt: skip
        for key, value in old.info.items():
            assert (value.dtype, value.shape) == (new.info[key].dtype, ())
            assert value == (new.info[key] if key in ("reward", "score") else 0)


def test_an_advantage_reaches_from_the_first_token_to_the_last_action():
    rows = replayed(with_advantages(fresh_batch()), advantages=[2.0, -3.0, 4.0, 5.0])
    expected = [[2.0] * 4, [-3.0] * 3, [4.0] * 4 + [0.0] * 2, [0.0]]
    assert [row.advantages.tolist() for row in rows] == expected
    assert [row.returns.tolist() for row in rows] == expected


@pytest.mark.parametrize("replays_first", [False, True])
def test_fresh_and_replayed_rows_make_one_batch(replays_first):
    batch = with_advantages(fresh_batch())
    old = replayed(batch)[:2]
    fresh = remove_padding_in_sequences(split_experience_batch(dataclasses.replace(batch)))
    mixed = make_experience_batch(old + fresh if replays_first else fresh + old)
    rows = [0, 1, 0, 1, 2, 3] if replays_first else [0, 1, 2, 3, 0, 1]
    for name in ("action_mask", "action_log_probs", "advantages", "returns", "rewards", "scores", "total_length"):
        torch.testing.assert_close(getattr(mixed, name), getattr(batch, name)[rows], rtol=0, atol=0)
    assert len(mixed.info["reward"]) == 6 and torch.tensor(mixed.info["reward"]).tolist() == [
        [1.0, 0.0, 0.5, 0.0][row] for row in rows
    ]
    assert mixed.base_action_log_probs is None and len(mixed.prompts) == 6


@pytest.mark.parametrize("field", ["values", "base_action_log_probs", "rollout_log_probs"])
def test_fresh_rows_with_what_is_not_cached_are_refused(field):
    batch = with_advantages(fresh_batch())
    setattr(batch, field, torch.zeros_like(batch.action_log_probs))
    with pytest.raises(ValueError, match=f"fresh rollouts have {field}, replayed ones do not; replay needs no critic"):
        replayed(batch)
