"""Which cached rollouts are replayed: hand cases, and brute force over all subsets."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from openrlhf_dbb.core.replay.selection import SELECTIONS


def chosen(name, rewards, count):
    return SELECTIONS[name](np.array(rewards, dtype=float), count).tolist()


REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("full", 2, [0, 1, 2, 3, 4, 5]),
        ("recency", 2, [4, 5]),
        ("reward", 2, [1, 3]),  # of three ones the oldest two
        ("reward", 4, [1, 3, 4, 5]),
        ("reward", 5, [0, 1, 3, 4, 5]),
        ("variance", 1, [1]),  # 0 for each: the largest sum, the oldest of them
        ("variance", 2, [0, 1]),
        ("variance", 3, [0, 1, 3]),  # 2/9 with one 1 as with two: the larger sum
        ("variance", 4, [0, 1, 2, 3]),
        ("variance", 5, [0, 1, 2, 3, 4]),
    ],
)
def test_by_hand(name, count, expected):
    assert chosen(name, REWARDS, count) == expected


@pytest.mark.parametrize("name", SELECTIONS)
def test_fewer_than_asked_for_are_all_replayed(name):
    assert chosen(name, [1.0, 0.0, 1.0], 8) == [0, 1, 2]
    assert chosen(name, [1.0, 0.0, 1.0], 3) == [0, 1, 2]
    assert chosen(name, [], 8) == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.1, 0.3)])
@pytest.mark.parametrize("successes", range(17))
def test_variance_of_two_values_takes_half_of_each_and_the_odd_one_higher(low, high, successes):
    rewards = [low] * (16 - successes) + [high] * successes
    for count in (7, 8):
        wanted = (count + 1) // 2  # 3 of 7 and 4 of 7 have the same variance
        wanted = min(max(wanted, count - (16 - successes)), successes)
        positions = chosen("variance", rewards, count)
        assert len(positions) == count
        assert sum(rewards[i] == high for i in positions) == wanted


def brute_force(rewards, count):
    """The best of all subsets; ``combinations`` yields the one with the oldest rollouts first."""

    def key(positions):
        values = [Fraction(rewards[i]) for i in positions]
        mean = sum(values) / count
        return sum((value - mean) ** 2 for value in values), sum(values)

    return list(max(combinations(range(len(rewards)), count), key=key))


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, 0.1, 1.0], [-1.0, -0.5, 0.0, 0.5, 1.0], None], ids=str)
def test_variance_is_the_best_of_all_subsets(values):
    random = np.random.default_rng(3)
    for _ in range(100):
        size = int(random.integers(2, 9))
        count = int(random.integers(1, size + 1))
        rewards = random.random(size) if values is None else random.choice(values, size)
        assert chosen("variance", rewards, count) == brute_force(rewards.tolist(), count), (rewards, count)


def test_reward_is_the_best_sum_of_all_subsets():
    random = np.random.default_rng(5)
    for _ in range(100):
        rewards = random.choice([0.0, 0.5, 1.0], 7)
        best = max(combinations(range(7), 3), key=lambda positions: sum(rewards[list(positions)]))
        assert chosen("reward", rewards, 3) == list(best)
