"""The experiment about draws: its gate, the rollouts that an arm needs, and the oracle's posterior."""

import numpy as np
import pytest

from study import draws, measured

SOLVED_IN_HALF = (
    144 / 1680 / (16 / 56) ** 2
)  # right, right, wrong, wrong among 4 of 8, over right, wrong among 2, squared


@pytest.mark.parametrize(("successes", "lift"), [([4, 4], SOLVED_IN_HALF), ([4, 0, 0, 8], 4 * SOLVED_IN_HALF)])
def test_the_lift_is_the_mean_square_of_p_times_1_minus_p_over_its_squared_mean(
    successes: list[int], lift: float
) -> None:
    assert draws.lift(np.array(successes), 8) == pytest.approx(lift)


def test_the_share_is_of_the_rollouts_with_which_even_draws_make_nine_tenths_of_their_gain() -> None:
    rollouts = np.array([0.0, 100, 200])
    even = {seed: (rollouts, np.array([0.1, 0.2, 0.3])) for seed in (1, 2)}  # 0.28 after 180 rollouts
    twice = {seed: (rollouts, np.array([0.1, 0.3, 0.3])) for seed in (6, 7, 8)}  # after 90
    never = {6: (rollouts, np.array([0.1, 0.2, 0.27]))}
    assert draws.share(twice, even) == pytest.approx((0.5, 0.5, 0.5))
    assert draws.share(never, even) == (np.inf,) * 3


def test_the_oracle_keeps_the_rates_of_the_first_group() -> None:
    estimator = measured.FirstGroup()
    state = estimator.initial_state(2)
    for rewards in ([[1, 1, 0, 0], [0, 0, 0, np.nan]], [[0, 0, 0, 0], [1, 1, 1, 1]]):
        state |= estimator.update(state, np.array(rewards, float))
    alpha, beta = estimator.predictive(state)
    assert alpha == pytest.approx([0.1 + 2, 0.1])
    assert beta == pytest.approx([0.9 + 2, 0.9 + 3])
