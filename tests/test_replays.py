"""Old rollouts: cached, saved, chosen, with which advantages, and as rows that OpenRLHF would have made."""

import dataclasses
import io
import math
import pickle
from types import SimpleNamespace

import numpy as np
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

from openrlhf_dbb.actors.replays import (  # noqa: E402
    CachedRollout,
    PolicyDrift,
    Replays,
    RolloutCache,
    cached_rollouts,
    highest,
    replay_advantages,
    replay_row,
)
from openrlhf_dbb.errors import RunError  # noqa: E402

NAN = math.nan
A, B, C = KEYS = [(f"prompt {i}", "label") for i in range(3)]
NUMBERS = {key: 10 * place for place, key in enumerate(KEYS)}


def replays(form="group_norm", samples=2, cache=4):
    """Groups of 2, replayed by 2 of 4 cached rollouts: the published proportions."""
    args = SimpleNamespace(
        replay=SimpleNamespace(samples=samples, cache=cache),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=form)),
    )
    return Replays(args, NUMBERS)


def batch(*groups, length=3):
    """Fresh rollouts of (prompt, scores); a prompt token and ``length`` others each. A missing one has reward 0."""
    keys = [key for key, scores in groups for _ in scores]
    scores = torch.tensor([score for _, scores in groups for score in scores], dtype=torch.float32)
    rows = len(scores)
    return Experience(
        sequences=torch.ones(rows, length + 1, dtype=torch.long),
        attention_mask=torch.ones(rows, length + 1, dtype=torch.long),
        action_mask=torch.ones(rows, length),
        action_log_probs=torch.zeros(rows, length),
        advantages=torch.zeros(rows, length),
        returns=torch.zeros(rows, length),
        rewards=scores.nan_to_num(),
        scores=scores,
        response_length=torch.full((rows,), float(length)),
        total_length=torch.full((rows,), float(length + 1)),
        truncated=torch.zeros(rows),
        prompts=[text for text, _ in keys],
        labels=[label for _, label in keys],
        info={"reward": scores.nan_to_num()},
    )


def filled(*groups, **options):
    """Replays whose cache holds these rewards."""
    made = replays(**options)
    made.remember([batch(*groups)])
    return made


def rewards(chosen):
    return {key: [rollout.reward for rollout in rollouts] for key, rollouts in chosen.items()}


def same(one, other):
    """Bit for bit, types included."""
    return one.reward == other.reward and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one[:3], other[:3], strict=True)
    )


def test_a_file_holds_everything_and_the_newest_of_a_prompt_take_the_place_of_its_oldest(tmp_path):
    several_turns = CachedRollout(
        tokens=np.array([1, 2**31 - 1, 3, 4, 5], dtype=np.int32),
        actions=np.array([0, 1, 0, 1], dtype=bool),
        log_probs=np.array([-0.0, -1e-45], dtype=np.float32),
        reward=0.1,
    )
    unanswered = CachedRollout(np.array([4, 5], np.int32), np.array([False]), np.empty(0, np.float32), 0.5)
    cache, loaded = RolloutCache(3, {A: 2**40, B: 0}), RolloutCache(3, {A: 2**40, B: 0})
    cache.save(tmp_path / "empty")
    cache.remember([batch((A, [1, 0]), (B, [5, 4, 3, 2]))])
    for rollout in (several_turns, unanswered):
        cache._add(2**40, rollout)
    cache.save(tmp_path / "cache")
    loaded.load(tmp_path / "empty")
    assert loaded.rollouts == 0
    loaded.load(tmp_path / "cache")
    assert loaded.rollouts == 6
    for key, expected in ((A, [0, 0.1, 0.5]), (B, [4, 3, 2])):
        assert rewards({key: loaded.rollouts_of(key)}) == {key: expected}
        assert all(same(*pair) for pair in zip(loaded.rollouts_of(key), cache.rollouts_of(key), strict=True))
    loaded.remember([batch((B, [6]))])
    assert rewards({B: loaded.rollouts_of(B)}) == {B: [3, 2, 6]}


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
    if name in OTHERS:
        (tmp_path / name).write_bytes(OTHERS[name])
    with pytest.raises(RunError, match=rf"^{tmp_path / name} cannot be read: .* --warm_start"):
        RolloutCache(3, {}).load(tmp_path / name)


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


def test_replay_begins_with_a_full_cache_and_without_the_steps_own_rollouts():
    made = replays(samples=4)
    for group, expected in (
        ([1, 0], {}),
        ([0, NAN, 0], {}),  # a rollout that was not verified is not cached
        ([1, 1], {A: [1, 0, 0, 0]}),
        ([0, 1], {A: [0, 0, 1, 1]}),  # the oldest two have gone
    ):
        assert rewards(made.choose([A, A])) == expected
        made.remember([batch((A, group))])
    penalised = batch((B, [1, 1, 0, 1]))
    penalised.rewards = torch.tensor([0.5, 1, -0.5, 1])  # after a length penalty: the rewards that are optimised
    made.remember([penalised])
    assert rewards(made.choose([B])) == {B: [0.5, 1, -0.5, 1]}
    chosen = filled((A, [1, 0, 0, 0]), (B, [1, 1, 1]), (C, [0, 1, 1, 0])).choose([C, A, A, B])
    assert rewards(chosen) == {C: [1, 1], A: [1, 0]}


def test_the_drift_counts_from_the_last_visit_also_if_that_was_filtered():
    made = PolicyDrift(NUMBERS)

    def drift(prompts, log_prob, verified=True):
        def policy(rollouts):
            return [np.full(len(rollout.log_probs), log_prob, dtype=np.float32) for rollout in rollouts]

        return made.measure(prompts, [verified] * len(prompts), policy).tolist()

    assert drift([A, B], -1) == [0, 0]  # first visits
    made.remember([batch((A, [1, 0]), (B, [NAN]))])  # log-probs 0
    assert drift([A, B, A], -0.5) == [0.5, 0, 0.5]
    assert drift([A], -0.75) == [0.25]  # the visit before had no log-probs of its own
    assert drift([A], -2, verified=False) == [0]  # no visit
    assert drift([A], -1) == [0.25]


def test_rows_are_normalised_among_themselves():
    made = filled((A, [0, 1, 1]), (B, [1, 1, 1]), form="dr_grpo", samples=3, cache=3)
    rows = made.rows(made.choose([B, A, C]), batch((C, [1, 0])))
    assert [row.rewards.item() for row in rows] == [1, 1, 1, 0, 1, 1]
    assert [row.advantages[0].item() for row in rows] == pytest.approx([0, 0, 0, -2 / 3, 1 / 3, 1 / 3])
    assert made.rows({}, batch((A, [1, 0]))) == []


def test_metrics_are_of_fresh_rollouts_alone():
    made = filled((A, [1, 1, 1, 1]))
    fresh = [batch((A, [1, 0]), length=2), batch((B, [0, 0]), length=4)]
    logged = made.metrics(2, fresh)
    assert logged == {
        "replay/replayed": 2, "replay/cached": 4, "reward": 0.25, "response_length": 3, "total_length": 4,
        "truncated": 0,
    }  # fmt: skip
    assert set(made.metrics(0, fresh)) == {"replay/replayed", "replay/cached"}


PAD = 99
# Tokens, spans of them that were generated, reward. The third answered twice and was answered twice; the last
# was cut off before it could answer.
ROLLOUTS = [
    ([1, 2, 3, 4, 5], [(2, 5)], 1.0),
    ([1, 2, 3, 4], [(2, 4)], 0.0),
    ([6, 7, 8, 9, 10, 11, 12], [(1, 3), (4, 5)], 0.5),
    ([6, 7], [], 0.0),
]
ADVANTAGES = [0.5, -0.5, 0.25, -0.25]  # X - mean of the pairs (1, 0) and (0.5, 0)


def fresh_batch():
    """Two groups of two rollouts, padded to one batch, after OpenRLHF's forward passes and its advantages."""
    generator = SamplesGenerator.__new__(SamplesGenerator)  # its engines are not needed
    singles = []
    for i, (tokens, spans, reward) in enumerate(ROLLOUTS):
        response = {
            "observation_tokens": tokens, "action_ranges": spans, "reward": reward, "scores": reward,
            "rollout_log_probs": None, "prompt": f"prompt {i // 2}", "label": "label",
            "extra_logs": {"turns": len(spans)},
        }  # fmt: skip
        singles.append(generator._process_response_into_experience(response, max_len=16))
    batch = Experience.concat_experiences(singles, PAD)
    batch.index = [0, 1, 2, 3]
    positions = torch.arange(batch.action_mask.numel()).reshape(batch.action_mask.shape)
    batch.action_log_probs = -(1 + positions.float()) / 8 * batch.action_mask  # 0 elsewhere, as Actor.forward gives
    batch.kl = torch.zeros_like(batch.action_log_probs)
    batch.info["kl"] = torch.full((4,), 0.25)
    flags = ["--preset", "tiny", "--estimator", "none", "--algo.advantage.estimator", "dr_grpo"]
    args = arguments.parse([*flags, "--rollout.n_samples_per_prompt", "2"]).args
    maker = RemoteExperienceMaker(None, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=args), None)
    return maker.compute_advantages_and_returns([batch])[0]


def test_a_replayed_row_is_the_fresh_row_and_makes_one_batch_with_it():
    batch, gone = fresh_batch(), fresh_batch()
    cached = cached_rollouts(gone)
    gone.sequences.zero_(), gone.action_mask.zero_(), gone.action_log_probs.zero_()  # the cache has copies
    rows = [replay_row(rollout, batch, advantage) for rollout, advantage in zip(cached, ADVANTAGES, strict=True)]
    fresh = remove_padding_in_sequences(split_experience_batch(dataclasses.replace(batch)))
    for old, new in zip(rows, fresh, strict=True):
        for field in dataclasses.fields(Experience):
            value, expected = getattr(old, field.name), getattr(new, field.name)
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=f"{field.name}: {value}, {expected}")
        assert (old.index, old.kl, old.values, old.prompts) == (None, None, None, [])
        assert old.info.keys() == new.info.keys() == {
            "response_clip_ratio", "reward", "score", "turns", "kl", "group_reward_std", "return"
        }  # fmt: skip
        for key, value in old.info.items():
            assert (value.dtype, value.shape) == (new.info[key].dtype, ())
            assert value == (new.info[key] if key in ("reward", "score") else 0)
    for mixed, order in (
        (make_experience_batch(rows[:2] + fresh), [0, 1, 0, 1, 2, 3]),
        (make_experience_batch(fresh + rows[:2]), [0, 1, 2, 3, 0, 1]),
    ):
        for name in ("action_mask", "action_log_probs", "advantages", "returns", "rewards", "scores", "total_length"):
            torch.testing.assert_close(getattr(mixed, name), getattr(batch, name)[order], rtol=0, atol=0)
        assert torch.tensor(mixed.info["reward"]).tolist() == [[1.0, 0.0, 0.5, 0.0][row] for row in order]
