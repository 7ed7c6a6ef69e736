"""The cache of old rollouts: bounded, counted, and the same after a file as before it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.core.replay.cache import CachedRollout, ReplayCache

ROOT = Path(__file__).parents[1]


def rollout(reward, prompt=2, response=3, token=7):
    """Tokens ``token`` to the end, actions after the prompt, log-probs -1, -2, ..."""
    length = prompt + response
    return CachedRollout(
        tokens=np.full(length, token, dtype=np.int32),
        actions=np.arange(length - 1) >= prompt - 1,
        log_probs=-np.arange(1, response + 1, dtype=np.float32),
        reward=reward,
    )


def rewards(cache, prompt):
    return [kept.reward for kept in cache.of(prompt)]


def same(one, other):
    """Bit for bit, types included."""
    arrays = [(r.tokens, r.actions, r.log_probs) for r in (one, other)]
    return one.reward == other.reward and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(*arrays, strict=True)
    )


def test_the_oldest_make_room_for_the_newest_of_their_prompt_alone():
    cache = ReplayCache(4)
    cache.add(0, [rollout(0.0), rollout(1.0), rollout(2.0)])
    cache.add(5, [rollout(9.0)])
    cache.add(0, [rollout(3.0), rollout(4.0)])
    assert rewards(cache, 0) == [1.0, 2.0, 3.0, 4.0]
    assert rewards(cache, 5) == [9.0]
    assert list(cache.of(1)) == []
    cache.add(0, [rollout(float(i)) for i in range(10, 20)])
    assert rewards(cache, 0) == [16.0, 17.0, 18.0, 19.0]


def test_rollouts_and_bytes_are_counted():
    cache = ReplayCache(2)
    assert (cache.rollouts, cache.nbytes) == (0, 0)
    # 5 tokens of 4 bytes, 4 actions in one byte, 3 log-probs of 4 bytes; then 12, 11 in two bytes, and 10
    cache.add(3, [rollout(1.0), rollout(0.0, response=10)])
    assert (cache.rollouts, cache.nbytes) == (2, (20 + 1 + 12) + (48 + 2 + 40))
    cache.add(3, [rollout(1.0, response=1)])
    assert (cache.rollouts, cache.nbytes) == (2, (48 + 2 + 40) + (12 + 1 + 4))


def test_a_rollout_comes_back_as_it_went_in_and_is_a_copy():
    several_turns = CachedRollout(
        tokens=np.array([1, 2**31 - 1, 3, 4, 5, 6, 7, 8, 9, 10], dtype=np.int32),
        actions=np.array([0, 1, 1, 0, 0, 1, 0, 0, 1], dtype=bool),
        log_probs=np.array([-0.0, -1e-45, -np.inf, -20.5], dtype=np.float32),
        reward=0.1,
    )
    unanswered = CachedRollout(np.array([4, 5], np.int32), np.array([False]), np.empty(0, np.float32), 0.0)
    cache = ReplayCache(8)
    cache.add(1, [several_turns, unanswered])
    assert all(same(*pair) for pair in zip(cache.of(1), [several_turns, unanswered], strict=True))
    several_turns.tokens[0] = 99
    assert cache.of(1)[0].tokens[0] == 1


def test_a_file_holds_everything(tmp_path):
    cache = ReplayCache(3)
    random = np.random.default_rng(4)
    for prompt in (17, 0, 2**40):
        for length in range(9, 10 + prompt % 5):  # of 8 actions, a whole byte, and more
            actions = random.random(length - 1) < 0.6
            log_probs = random.standard_normal(actions.sum()).astype(np.float32)
            tokens = random.integers(0, 2**31, length).astype(np.int32)
            cache.add(prompt, [CachedRollout(tokens, actions, log_probs, float(random.random()))])
    assert [len(cache.of(prompt)) for prompt in (17, 0, 2**40)] == [3, 1, 2]  # 2^40 = 1 modulo 5
    cache.save(tmp_path / "cache")
    loaded = ReplayCache.load(tmp_path / "cache", 3)
    for prompt in (17, 0, 2**40):
        assert all(same(*pair) for pair in zip(loaded.of(prompt), cache.of(prompt), strict=True))
        assert all(kept.tokens.base is None for kept in loaded.of(prompt))  # what falls out frees its memory
    assert (loaded.rollouts, loaded.nbytes) == (6, cache.nbytes)
    loaded.add(17, [rollout(5.0)])
    assert rewards(loaded, 17) == [*rewards(cache, 17)[1:], 5.0]
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_an_empty_cache_has_a_file_too(tmp_path):
    ReplayCache(3).save(tmp_path / "cache")
    assert ReplayCache.load(tmp_path / "cache", 3).rollouts == 0


def test_a_save_that_fails_leaves_the_older_file(tmp_path):
    path = tmp_path / "cache"
    cache = ReplayCache(3)
    cache.add(1, [rollout(1.0)])
    cache.save(path)
    cache.add(1, [rollout(2.0)])
    (tmp_path / "cache.part").mkdir()
    with pytest.raises(OSError, match=r"cache\.part"):
        cache.save(path)
    os.rmdir(tmp_path / "cache.part")
    assert rewards(ReplayCache.load(path, 3), 1) == [1.0]
    cache.save(path)
    assert rewards(ReplayCache.load(path, 3), 1) == [1.0, 2.0]


def test_every_damage_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "cache"
    cache = ReplayCache(3)
    cache.add(1, [rollout(1.0), rollout(0.5, response=20)])
    cache.save(path)
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            loaded = ReplayCache.load(path, 3)
        except ValueError as error:
            assert str(error).startswith(f"replay cache {path} is damaged")
            noticed += 1
        else:
            assert all(same(*pair) for pair in zip(loaded.of(1), cache.of(1), strict=True))
    assert noticed > len(whole) / 6
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cache is damaged .*not a zip file.*; resume from a checkpoint"):
        ReplayCache.load(path, 3)


def test_a_file_that_is_missing_or_of_another_size_is_named(tmp_path):
    path = tmp_path / "cache"
    with pytest.raises(ValueError, match=f"replay cache {path} does not exist; resume from a checkpoint"):
        ReplayCache.load(path, 3)
    ReplayCache(3).save(path)
    with pytest.raises(ValueError, match=f"replay cache {path} keeps 3 rollouts of a prompt, not 4; continue with"):
        ReplayCache.load(path, 4)


def test_what_cannot_be_replayed_is_refused_and_nothing_is_added():
    cache = ReplayCache(3)
    with pytest.raises(ValueError, match="prompt id -1 is negative"):
        cache.add(-1, [rollout(1.0)])
    with pytest.raises(ValueError, match="rollout of prompt 4 has reward nan; leave out rollouts that were not"):
        cache.add(4, [rollout(1.0), rollout(float("nan"))])
    short = CachedRollout(*(getattr(rollout(1.0), name) for name in ("tokens", "actions")), np.zeros(2, np.float32), 1)
    with pytest.raises(ValueError, match=r"prompt 4: 5 tokens, 4 actions \(3 of them true\), 2 log-probs"):
        cache.add(4, [short])
    assert cache.rollouts == 0
    with pytest.raises(ValueError, match="must keep at least 1 rollout per prompt, got 0"):
        ReplayCache(0)


def test_cache_selection_and_normalization_need_no_torch():
    modules = ", ".join(f"openrlhf_dbb.core.replay.{name}" for name in ("cache", "selection", "normalization"))
    code = f"import {modules}, sys; print(sorted(sys.modules.keys() & {{'torch', 'ray', 'openrlhf'}}))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
