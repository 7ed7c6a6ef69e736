"""Replay beside a step: when it begins, which rollouts, with which advantages; the files beside the checkpoints."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402

from openrlhf_dbb.actors.replay import Replays  # noqa: E402
from openrlhf_dbb.core.checkpoints import (  # noqa: E402
    complete,
    delete_stale,
    features_file,
    listing,
    newest_whole,
    replay_file,
)
from openrlhf_dbb.core.replay.cache import ReplayCache  # noqa: E402

NAN = math.nan
KEYS = [(f"prompt {i}", "label") for i in range(3)]
A, B, C = KEYS
NUMBERS = {key: 10 * place for place, key in enumerate(KEYS)}


def replays(form="group_norm", **changes):
    """Groups of 2, replayed by 2 of 4 cached rollouts: the published proportions."""
    options = {
        "samples": 2, "cache": 4, "min_cache": 4, "select": "recency", "normalization": "split", "normalizer": "code",
        "coef": 1.0,
    } | changes  # fmt: skip
    args = SimpleNamespace(
        replay=SimpleNamespace(**options), algo=SimpleNamespace(advantage=SimpleNamespace(estimator=form))
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
    return {key: [rollout.reward for rollout in old] for key, old in chosen.items()}


def test_replay_begins_at_the_third_visit_with_the_two_before():
    made = replays(select="full")
    for group, expected in (
        ([1, 0], {}),
        ([0, 0], {}),
        ([1, 1], {A: [1, 0, 0, 0]}),
        ([0, 1], {A: [0, 0, 1, 1]}),  # the oldest two have gone
    ):
        assert rewards(made.choose([A, A])) == expected  # the step's own rollouts are not among them
        made.remember([batch((A, group))])


def test_prompts_are_chosen_for_one_by_one():
    made = filled((A, [1, 0, 0, 0]), (B, [1, 1, 1]), (C, [0, 1, 1, 0]), select="reward")
    assert rewards(made.choose([C, A, A, B])) == {C: [1, 1], A: [1, 0]}
    assert rewards(filled((B, [1, 1, 1]), min_cache=3).choose([B])) == {B: [1, 1]}
    assert rewards(filled((B, [1]), min_cache=1).choose([B])) == {B: [1]}  # fewer than asked for


def test_what_was_not_verified_is_not_cached():
    made = filled((A, [1, NAN, 0, 0, NAN]), min_cache=1, select="full")
    assert rewards(made.choose([A])) == {A: [1, 0, 0]}


def test_rewards_are_cached_as_they_were_optimised():
    experience = batch((A, [1, 1, 0, 1]))
    experience.rewards = torch.tensor([0.5, 1, -0.5, 1])  # after a length penalty
    made = replays(select="full")
    made.remember([experience])
    assert rewards(made.choose([A])) == {A: [0.5, 1, -0.5, 1]}


FRESH = [A, B, A, B]
FRESH_REWARDS = np.array([1.0, 0, 0, NAN])
FRESH_ADVANTAGES = np.array([0.3, -0.7, -0.3, 0])  # any, the estimator's


def normalise(made):
    advantages, old = made.normalise(FRESH, FRESH_REWARDS, FRESH_ADVANTAGES, made.choose(FRESH))
    return advantages, {key: values.tolist() for key, values in old.items()}


def test_split_leaves_fresh_advantages_alone():
    made = filled((A, [0, 0, 1, 0, 1]), (B, [1, 1]), samples=3, cache=5)
    advantages, old = normalise(made)
    assert advantages.tolist() == FRESH_ADVANTAGES.tolist()
    # 1 0 1: mean 2/3, N-1 variance 1/3; b has too few in the cache
    third = 1 / math.sqrt(3)
    assert old == {A: pytest.approx([third, -2 * third, third])}


def test_the_form_of_the_advantage_holds_for_replays():
    _, old = normalise(filled((A, [0, 0, 1, 0, 1]), samples=3, cache=5, form="dr_grpo"))
    assert old == {A: pytest.approx([1 / 3, -2 / 3, 1 / 3])}


def test_mixed_takes_fresh_and_replayed_rewards_together():
    made = filled((A, [0, 0, 1, 1]), (B, [1, 1]), normalization="mixed", form="dr_grpo")
    advantages, old = normalise(made)
    # a: 1 0 fresh, 1 1 replayed: mean 3/4. b, not replayed: 0 and a missing one.
    assert advantages == pytest.approx([0.25, 0, -0.75, 0])
    assert old == {A: pytest.approx([0.25, 0.25])}
    made = filled((A, [0, 0, 1, 1]), (B, [1, 1, 1, 1]), normalization="mixed")
    advantages, old = normalise(made)
    # N-1 variance of 1 0 1 1 is 1/4, that of b's 0 1 1 is 1/3, with mean 2/3
    third = 1 / math.sqrt(3)
    assert advantages == pytest.approx([0.5, -2 * third, -1.5, 0])
    assert old == {A: pytest.approx([0.5, 0.5]), B: pytest.approx([third, third])}


def test_the_normalisers_weigh_replays_as_they_say():
    groups = (A, [0, 0, 1, 0]), (B, [1, 1])
    code = normalise(filled(*groups, coef=0.5, form="dr_grpo"))
    assert code[0].tolist() == FRESH_ADVANTAGES.tolist()
    assert code[1] == {A: [0.25, -0.25]}  # half of 1 - 1/2, 0 - 1/2
    formula = normalise(filled(*groups, coef=0.5, normalizer="formula", form="dr_grpo"))
    # 4 fresh rows and 2 replayed: in a mean over 6 a fresh one is to weigh 1/4, a replayed one 0.5 / 2 prompts / 2
    assert formula[0] == pytest.approx(6 / 4 * FRESH_ADVANTAGES)
    assert formula[1] == {A: pytest.approx([0.5 * 0.125 * 6, -0.5 * 0.125 * 6])}


def test_prompts_may_have_different_numbers_of_replays():
    made = filled((A, [1, 0, 1]), (B, [1]), min_cache=1, select="full", normalizer="formula", form="dr_grpo")
    advantages, old = normalise(made)
    # 4 fresh rows and 4 replayed: a fresh one is to weigh 1/4 of 8, one of a's three replays 1/2 / 3 of 8
    assert advantages == pytest.approx(2 * FRESH_ADVANTAGES)
    assert old == {A: pytest.approx([4 / 3 / 3, -8 / 3 / 3, 4 / 3 / 3]), B: [0]}


def test_without_replays_nothing_changes():
    made = replays(normalizer="formula", normalization="mixed")
    advantages, old = made.normalise(FRESH, FRESH_REWARDS, FRESH_ADVANTAGES, {})
    assert advantages.tolist() == FRESH_ADVANTAGES.tolist() and old == {}
    assert made.rows({}, old, batch((A, [1, 0]))) == []


def test_rows_carry_each_rollouts_own_advantage():
    made = filled((A, [0, 0, 1, 1]), (B, [1, 0, 1, 0, 1]), samples=2, select="full", cache=5)
    chosen = made.choose([B, A])
    like = batch((C, [1, 0]))
    rows = made.rows(chosen, {A: np.array([1.0, 2, 3, 4]), B: np.array([5.0, 6, 7, 8, 9])}, like)
    assert [row.advantages[0].item() for row in rows] == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert [row.rewards.item() for row in rows] == [1, 0, 1, 0, 1, 0, 0, 1, 1]


def test_metrics_are_of_fresh_rollouts_alone():
    made = filled((A, [1, 1, 1, 1]))
    fresh = [batch((A, [1, 0]), length=2), batch((B, [0, 0]), length=4)]
    logged = made.metrics(2, fresh)
    # 4 rollouts with 4 tokens of int32, 3 log-probs of float32 and a byte of flags
    assert logged.pop("replay/memory_mb") == 4 * (4 * 4 + 3 * 4 + 1) / 2**20
    assert logged == {
        "replay/replayed": 2, "replay/cached": 4, "reward": 0.25, "response_length": 3, "total_length": 4,
        "truncated": 0,
    }  # fmt: skip
    assert set(made.metrics(0, fresh)) == {"replay/replayed", "replay/cached", "replay/memory_mb"}


def test_caches_go_with_their_checkpoints(tmp_path):
    """Checkpoints as OpenRLHF lays them out: a folder of each step."""
    made = filled((A, [1, 0]))
    for step in (2, 4, 6, 60):
        file = replay_file(tmp_path, step)
        file.parent.mkdir(exist_ok=True)
        made.cache.save(file)
    for folder in ("_actor/global_step4", "_actor/global_step60"):
        (tmp_path / folder).mkdir(parents=True)
    delete_stale(tmp_path)
    left = sorted(file.name for file in (tmp_path / "replay").iterdir())
    assert left == ["global_step4.npz", "global_step60.npz"]
    assert ReplayCache.load(replay_file(tmp_path, 4), 4).rollouts == 2


def test_features_go_with_their_checkpoints_too(tmp_path):
    for step in (2, 4):
        file = features_file(tmp_path, step)
        file.parent.mkdir(exist_ok=True)
        np.savez(file, features=np.zeros((1, 2)))
    (tmp_path / "_actor/global_step4").mkdir(parents=True)
    (tmp_path / "_actor/global_step4/states.pt").write_bytes(b"weights")
    delete_stale(tmp_path)
    assert [file.name for file in (tmp_path / "features").iterdir()] == ["global_step4.npz"]
    complete(tmp_path, "global_step4", "run", [listing(tmp_path, "global_step4")])
    assert newest_whole(tmp_path, "run", 4)[0] == "global_step4"
    features_file(tmp_path, 4).write_bytes(b"damaged")
    found, [passed] = newest_whole(tmp_path, "run", 4)
    assert found is None and "features/global_step4.npz has 7 bytes" in passed


def test_without_replays_there_is_nothing_to_delete(tmp_path):
    delete_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []
