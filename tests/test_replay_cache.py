"""The cache of old rollouts, which of them are replayed, and their advantages."""

import io
import math
import pickle

import numpy as np
import pytest

from openrlhf_dbb.core.replay_cache import CachedRollout, ReplayCache, highest, replay_advantages
from openrlhf_dbb.errors import RunError


def rollout(reward, prompt=2, response=3, token=7):
    """Tokens ``token`` to the end, actions after the prompt, log-probs -1, -2, ..."""
    length = prompt + response
    return CachedRollout(
        tokens=np.full(length, token, dtype=np.int32),
        actions=np.arange(length - 1) >= prompt - 1,
        log_probs=-np.arange(1, response + 1, dtype=np.float32),
        reward=reward,
    )


def filled(size, rewards_of):
    cache = ReplayCache(size)
    for prompt, rewards in rewards_of.items():
        for reward in rewards:
            cache.add(prompt, rollout(reward, response=1 + int(reward)))
    return cache


def rewards(cache, prompt):
    return [kept.reward for kept in cache.rollouts_of(prompt)]


def same(one, other):
    """Bit for bit, types included."""
    return one.reward == other.reward and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one[:3], other[:3], strict=True)
    )


def test_the_oldest_make_room_for_the_newest_of_their_prompt_alone():
    cache = filled(3, {0: [0, 1, 2, 3, 4], 5: [9]})
    assert (rewards(cache, 0), rewards(cache, 5), rewards(cache, 1)) == ([2, 3, 4], [9], [])
    assert cache.rollouts == 4


def test_a_file_holds_everything(tmp_path):
    unanswered = CachedRollout(np.array([4, 5], np.int32), np.array([False]), np.empty(0, np.float32), 0.5)
    several_turns = CachedRollout(
        tokens=np.array([1, 2**31 - 1, 3, 4, 5], dtype=np.int32),
        actions=np.array([0, 1, 0, 1], dtype=bool),
        log_probs=np.array([-0.0, -1e-45], dtype=np.float32),
        reward=0.1,
    )
    cache = filled(3, {17: [1, 2, 3, 4], 0: [5]})
    cache.add(2**40, unanswered)
    cache.add(2**40, several_turns)
    cache.save(tmp_path / "cache")
    loaded = ReplayCache.load(tmp_path / "cache", 3)
    for prompt in (17, 0, 2**40):
        assert all(same(*pair) for pair in zip(loaded.rollouts_of(prompt), cache.rollouts_of(prompt), strict=True))
    loaded.add(17, rollout(5.0))
    assert rewards(loaded, 17) == [3, 4, 5]
    filled(3, {}).save(tmp_path / "empty")
    assert ReplayCache.load(tmp_path / "empty", 3).rollouts == 0


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("code has run",)


def saved(save, *arrays, **named):
    save(content := io.BytesIO(), *arrays, **named)
    return content.getvalue()


BOMBS = np.array([Bomb()], dtype=object)
OTHERS = {
    "pickle": pickle.dumps(Bomb()),
    "npy": saved(np.save, BOMBS),
    "npz": saved(np.savez, rows=BOMBS),
    "other": saved(np.savez, rows=np.arange(3), tokens=np.arange(3)),
    "zip": b"PK\x03\x04",
}


@pytest.mark.parametrize("name", [*OTHERS, "missing"])
def test_a_file_of_another_kind_is_one_error_and_runs_no_code(tmp_path, name):
    for kind, content in OTHERS.items():
        (tmp_path / kind).write_bytes(content)
    with pytest.raises(RunError, match=rf"^{tmp_path / name} cannot be read: .* --warm_start"):
        ReplayCache.load(tmp_path / name, 3)


@pytest.mark.parametrize(("count", "expected"), [(2, [1, 3]), (4, [1, 3, 4, 5]), (5, [0, 1, 3, 4, 5])])
def test_the_highest_rewards_are_replayed_and_of_equal_ones_the_oldest(count, expected):
    assert highest(np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.5]), count).tolist() == expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [  # Means 1/4 and 1/2; N-1 variances (9 + 3) / 16 / 3 = 1/4 and 4 / 4 / 3 = 1/3.
        ("group_norm", [[1.5, -0.5, -0.5, -0.5], [math.sqrt(3) / 2] * 2 + [-math.sqrt(3) / 2] * 2, [0] * 4]),
        ("dr_grpo", [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0] * 4]),
        # 1 against the mean of 0 0 0, 0 against that of 1 0 0; 1 against that of 1 0 0, 0 against that of 1 1 0
        ("rloo", [[1, *[-1 / 3] * 3], [2 / 3, 2 / 3, -2 / 3, -2 / 3], [0] * 4]),
    ],
)
def test_replays_are_normalised_by_their_own_prompts_replays(form, expected):
    rewards_P_K = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0.1] * 4])
    advantages = replay_advantages(rewards_P_K, form)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    assert advantages[2].tolist() == [0.0] * 4  # the mean of four 0.1 may not be 0.1
    assert replay_advantages(np.ones((2, 1)), form).tolist() == [[0.0], [0.0]]
