"""The memory of earlier rollouts: which are replayed, with which advantages, and its file; all by hand."""

import io
import math
import pickle
import re

import numpy as np
import pytest

from openrlhf_dbb.core.host import Capability, Host
from openrlhf_dbb.core.replay import Replay, TokenRollout

# prompts
A = 10
B = 0
C = 2**40


def rollout(prompt_id, reward, tokens=(1, 2, 3), actions=(0, 1), log_probs=(-0.5,)):
    """A prompt of two tokens and a response of one, or what is given."""
    return TokenRollout(
        prompt_id,
        np.array(tokens, dtype=np.int32),
        np.array(actions, dtype=bool),
        np.array(log_probs, dtype=np.float32),
        reward,
    )


def remember(memory, prompt_id, *rewards):
    memory.remember(rollout(prompt_id, reward) for reward in rewards)


def rewards_of(rows, prompt_id):
    return [row.rollout.reward for row in rows if row.rollout.prompt_id == prompt_id]


def everything(memory):
    """All rollouts of a full memory as bytes, with their types."""
    found = []
    for rollout, advantage in memory.extra_rows([A, B, C]):
        of_tokens = [(values.dtype.name, values.tobytes()) for values in arrays(rollout)]
        found.append((rollout.prompt_id, rollout.reward, advantage, *of_tokens))
    return found


def arrays(of):
    return of.tokens, of.actions, of.log_probs


def test_replay_begins_with_a_full_cache_and_without_the_steps_own_rollouts():
    memory = Replay(samples=4, cache=4).memory("group_norm")
    steps = [
        ([1, 0], []),
        ([0], []),
        ([1, 1], []),  # three are there
        ([0, 1], [0, 0, 1, 1]),  # the first of the five has gone
        ([], [1, 1, 0, 1]),
    ]
    for rewards, expected in steps:
        assert rewards_of(memory.extra_rows([A, A, B]), A) == expected
        remember(memory, A, *rewards)
    assert memory.extra_rows([B]) == []
    assert memory.metrics(4) == {"replay/replayed": 4.0, "replay/cached": 4.0}


def test_what_is_older_than_the_age_limit_leaves_the_cache(tmp_path):
    """Two rollouts a visit, a cache of two: a visit two steps ago is replayed, one three steps ago is not."""
    settings = Replay(samples=2, cache=2, max_age=2)
    memory = settings.memory("group_norm")
    remember(memory, A, 1, 0)
    for _ in range(2):
        assert rewards_of(memory.extra_rows([A]), A) == [1, 0]
        remember(memory, B, 1)
    memory.save(tmp_path)
    resumed = settings.memory("group_norm")
    resumed.load(tmp_path)
    for either in (memory, resumed):
        assert memory.metrics(0)["replay/cached"] == 4
        assert either.extra_rows([A]) == []
        assert either.metrics(0)["replay/cached"] == 2
        remember(either, A, 0, 1)
        assert rewards_of(either.extra_rows([A]), A) == [0, 1]


def test_rows_come_in_the_order_of_the_prompts_and_those_without_a_full_cache_have_none():
    memory = Replay(samples=2, cache=3).memory("dr_grpo")
    remember(memory, A, 0, 1, 1)
    remember(memory, B, 1, 1)
    remember(memory, C, 0.5, 0, 0.25)
    rows = memory.extra_rows([C, B, A, C])
    assert [(row.rollout.prompt_id, row.rollout.reward) for row in rows] == [
        (C, 0.5),
        (C, 0.25),
        (A, 1),
        (A, 1),
    ]
    assert [row.advantage for row in rows] == [0.125, -0.125, 0, 0]  # X - mean of the two
    assert memory.metrics(0) == {"replay/replayed": 0.0, "replay/cached": 8.0}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(1, [3]), (3, [1, 2, 3]), (5, [0, 1, 2, 3, 0.5]), (6, [0, 1, 2, 3, 0.5, 0])],
)
def test_the_highest_rewards_are_replayed_oldest_first(samples, expected):
    memory = Replay(samples=samples, cache=6).memory("group_norm")
    remember(memory, A, 0, 1, 2, 3, 0.5, 0)
    assert rewards_of(memory.extra_rows([A]), A) == expected


def test_of_equal_rewards_the_oldest_are_replayed():
    memory = Replay(samples=2, cache=3).memory("group_norm")
    memory.remember(rollout(A, 1, tokens=(token, 2, 3)) for token in (7, 8, 9))
    assert [row.rollout.tokens[0] for row in memory.extra_rows([A])] == [7, 8]


HALF = math.sqrt(3) / 2


@pytest.mark.parametrize(
    ("form", "of_a", "of_b"),
    [
        # Means 1/4 and 1/2; N-1 variances (9 + 3) / 16 / 3 = 1/4 and 4 / 4 / 3 = 1/3.
        ("group_norm", [1.5, -0.5, -0.5, -0.5], [HALF, HALF, -HALF, -HALF]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]),
        ("max_rl", [3, -1, -1, -1], [1, 1, -1, -1]),
        # 1 against the mean of 0 0 0, 0 against that of 1 0 0; 1 against that of 1 0 0, 0 against that of 1 1 0
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    ],
)
def test_replays_are_normalised_by_their_own_prompts_replays(form, of_a, of_b):
    memory = Replay(samples=4, cache=4).memory(form)
    remember(memory, A, 1, 0, 0, 0)
    remember(memory, B, 1, 1, 0, 0)
    remember(memory, C, 0.1, 0.1, 0.1, 0.1)
    advantages = [row.advantage for row in memory.extra_rows([A, B, C])]
    assert advantages[:8] == pytest.approx(of_a + of_b, rel=1e-12)
    assert advantages[8:] == [0, 0, 0, 0]  # the mean of four 0.1 may not be 0.1


def test_a_single_replay_has_nothing_to_be_compared_with():
    for form in ("group_norm", "rloo"):
        memory = Replay(samples=1, cache=2).memory(form)
        remember(memory, A, 1, 0)
        assert [row.advantage for row in memory.extra_rows([A])] == [0]


def test_what_is_kept_is_a_copy():
    memory = Replay(samples=1, cache=1).memory("group_norm")
    given = rollout(A, 1)
    memory.remember([given])
    for values in arrays(given):
        values[:] = 0
    [row] = memory.extra_rows([A])
    assert [values.tolist() for values in arrays(row.rollout)] == [[1, 2, 3], [False, True], [-0.5]]


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({"actions": (0, 1, 1)}, "prompt 10 .* 3 tokens .* 3 actions"),
        ({"log_probs": ()}, "prompt 10 .* 1 generated .* 0 log_probs"),
        ({"tokens": ()}, "prompt 10 .* 0 tokens"),
        ({"reward": math.nan}, "prompt 10 .* reward nan"),
        ({"reward": math.inf}, "prompt 10 .* reward inf"),
        ({"log_probs": (math.nan,)}, "prompt 10 .* log_probs"),
    ],
)
def test_a_rollout_that_cannot_be_replayed_is_refused_and_its_step_is_not_kept(bad, names):
    memory = Replay(samples=1, cache=1).memory("group_norm")
    with pytest.raises(ValueError, match=names) as caught:
        memory.remember([rollout(A, 1), rollout(**{"prompt_id": A, "reward": 1} | bad)])
    assert "\n" not in str(caught.value)
    assert memory.metrics(0)["replay/cached"] == 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"samples": -1}, r"replay.samples = -1 is not in \[0, inf\)"),
        ({"cache": 0}, r"replay.cache = 0 is not in \[1, inf\)"),
        ({"samples": 2.5}, "replay.samples = 2.5 .* whole"),
        ({"samples": True}, "replay.samples = True .* whole"),
        ({"samples": 8, "cache": 4}, "replay.samples = 8 .* replay.cache"),
    ],
)
def test_settings_are_whole_numbers_and_no_more_is_replayed_than_kept(settings, names):
    with pytest.raises(ValueError, match=names):
        Replay(**settings)


@pytest.mark.parametrize("form", ["reinforce_baseline", "none_such"])
def test_a_form_that_is_unknown_or_whitened_over_the_step_is_refused(form):
    with pytest.raises(ValueError, match=form):
        Replay(samples=8).memory(form)


def test_without_samples_nothing_is_replayed():
    memory = Replay(cache=2).memory("group_norm")
    remember(memory, A, 1, 0)
    assert Replay().samples == 0
    assert memory.extra_rows([A]) == []


def test_a_host_that_takes_no_further_rows_is_told():
    host = Host("Mine", {Capability.EXTRA_ROWS: "it knows its own rows only"}, {})
    assert re.search(
        "replay .*own log-probs; Mine does not: it knows", host.refusal("replay", Replay().needs)
    )


SEVERAL_TURNS = {
    "tokens": (1, 2**31 - 1, 3, 4, 5),
    "actions": (0, 1, 0, 1),
    "log_probs": (-0.0, -1e-45),
}
UNANSWERED = {"tokens": (4, 5), "actions": (0,), "log_probs": ()}


def full(cache=3):
    """Three prompts; of one the oldest has gone."""
    memory = Replay(samples=cache, cache=cache).memory("group_norm")
    memory.remember(
        [rollout(C, 0.1, **SEVERAL_TURNS), rollout(C, 0.5, **UNANSWERED), rollout(C, -2.0)]
    )
    remember(memory, A, 0, 1 / 3, 1, 0)
    remember(memory, B, 5, 4)
    return memory


def test_a_file_holds_everything_bit_for_bit_and_the_newest_of_a_prompt_push_out_its_oldest(
    tmp_path,
):
    memory = full()
    memory.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["replay.npz"]
    loaded = Replay(samples=3, cache=3).memory("group_norm")
    remember(loaded, B, 9, 9, 9)  # what was there before is not of the checkpoint
    loaded.load(tmp_path)
    assert everything(loaded) == everything(memory)
    assert rewards_of(loaded.extra_rows([A, B, C]), A) == [1 / 3, 1, 0]
    assert loaded.metrics(0)["replay/cached"] == 8
    for continued in (memory, loaded):
        remember(continued, B, 3, 2)
        remember(continued, A, 7)
    assert everything(loaded) == everything(memory)
    assert rewards_of(loaded.extra_rows([B]), B) == [4, 3, 2]


def test_an_empty_memory_can_be_saved_and_loaded(tmp_path):
    Replay(samples=3, cache=3).memory("group_norm").save(tmp_path)
    memory = full()
    memory.load(tmp_path)
    assert memory.metrics(0)["replay/cached"] == 0


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("code has run",)


def saved(save, *values, **named):
    save(content := io.BytesIO(), *values, **named)
    return content.getvalue()


ARRAYS = ("cache", "prompt_ids", "rewards", "lengths", "tokens", "actions", "log_probs")
BOMBS = np.array([Bomb()], dtype=object)
OTHERS = {
    "pickle": pickle.dumps(Bomb()),
    "npy": saved(np.save, np.arange(3)),
    "npz of a pickle": saved(np.savez, **dict.fromkeys(ARRAYS, BOMBS)),
    "other names": saved(np.savez, rows=np.arange(3)),
    "other kinds": saved(np.savez, **dict.fromkeys(ARRAYS, np.array(["a", "b"]))),
    "other lengths": saved(np.savez, **dict.fromkeys(ARRAYS, np.array([3]))),
    "zip": b"PK\x03\x04",
    "empty": b"",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_refused_in_one_line_and_runs_no_code(tmp_path, name):
    (tmp_path / "replay.npz").write_bytes(OTHERS[name])
    memory = full()
    before = everything(memory)
    with pytest.raises(ValueError, match=r"replay\.npz") as caught:
        memory.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert everything(memory) == before


@pytest.mark.parametrize("kept", [200, -30])
def test_a_file_that_was_cut_off_is_refused(tmp_path, kept):
    full().save(tmp_path)
    path = tmp_path / "replay.npz"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=str(path)):
        full().load(tmp_path)


def test_a_file_with_a_changed_byte_is_refused_or_means_the_same(tmp_path):
    memory = full()
    memory.save(tmp_path)
    path = tmp_path / "replay.npz"
    content = path.read_bytes()
    refused = 0
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        loaded = full()
        try:
            loaded.load(tmp_path)
        except ValueError:
            refused += 1
        assert everything(loaded) == everything(memory)
    assert refused > 300


def test_a_folder_without_the_file_and_a_file_of_another_cache_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"replay\.npz .*replay\.samples"):
        full().load(tmp_path)
    full(cache=3).save(tmp_path)
    with pytest.raises(ValueError, match=r"replay\.cache .*3.* 4"):
        full(cache=4).load(tmp_path)
