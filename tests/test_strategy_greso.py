"""GRESO over scripted groups: whom it skips, how its probabilities move, how many prompts a round asks for."""

import pickle

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import GresoSampling, SamplingError
from openrlhf_dbb.core.strategies.greso import MOST_IDLE_PASSES

NAN = np.nan
GROUPS = {
    "e": [1, 1, 1, 1],
    "h": [0, 0, 0, 0],
    "m": [1, 0, 0, 0],
    "E": [1, NAN, 1, NAN],  # easy, hard and mixed as far as is known
    "H": [NAN, 0, NAN, NAN],
    "M": [NAN, 0, 1, NAN],
    "?": [NAN, NAN, NAN, NAN],
}


def greso(**changes):
    parameters = {
        "batch": 4, "first_batch": 24, "min_batch": 8, "safety": 1.25, "p_easy": 0.5, "p_hard": 0.5,
        "target_easy": 1 / 12, "target_hard": 1 / 6, "step": 0.01, "min_p": 0.05, "max_p": 0.95, "floor": 0.01,
        "seed": 1,
    } | changes  # fmt: skip
    return GresoSampling(parameters.pop("batch"), **parameters)


def show(sampling, groups, prompt=0):
    """Judge one group after the other; which were kept."""
    return [sampling.keeps(prompt, np.array(GROUPS[group], dtype=float)) for group in groups]


@pytest.mark.parametrize(
    ("groups", "probability"),
    [
        ("", 1),
        ("e", 0.5),
        ("eee", 0.5**3),
        ("h", 0.25),
        ("hhh", 0.25**3),
        ("hhhh", 0.01),  # .25^4 = .0039 is below the floor
        ("eem", 1),
        ("hhm", 1),
        ("hme", 0.5),
        ("hhhe", 0.5),  # all wrong, then all correct: one in a row
        ("eeh", 0.25),
        ("eE", 0.5**2),
        ("hH", 0.25**2),
        ("eM", 1),
        ("e?", 0.5),  # nothing is known of the second
    ],
)
def test_a_prompt_is_generated_for_with_p_to_the_power_of_its_streak(groups, probability):
    sampling = greso(p_easy=0.5, p_hard=0.25)
    show(sampling, groups)
    assert sampling.generates(0) == probability
    assert sampling.generates(1) == 1  # never seen


def test_only_groups_that_vary_are_trained_on():
    assert show(greso(), "ehmEHM?") == [False, False, True, False, False, True, False]


def test_skipping_changes_no_probability():
    sampling = greso()
    show(sampling, "ee")
    skipped = sum(sampling.skips(0) for _ in range(100))
    assert skipped > 0
    assert sampling.generates(0) == 0.25
    assert not any(sampling.skips(1) for _ in range(100))


@pytest.mark.parametrize(("groups", "probability"), [("ee", 0.25), ("hhh", 0.125), ("e" * 9, 0.01)])
def test_prompts_are_skipped_as_often_as_they_should_be(groups, probability):
    sampling, draws = greso(), 20_000
    show(sampling, groups)
    generated = sum(not sampling.skips(0) for _ in range(draws))
    # binomial: 4 standard deviations
    assert abs(generated / draws - probability) < 4 * (probability * (1 - probability) / draws) ** 0.5


@pytest.mark.parametrize(
    ("groups", "missing", "prompts"),
    [
        ("eehhmmmm", 8, 20),  # 1.25 * 8 / (1 - 1/2)
        ("emm", 6, 11),  # 1.25 * 6 / (2/3) = 11.25
        ("eeeehhhmmm", 3, 12),  # 1.25 * 3 / .3 = 12.5
        ("eehhmmmm??", 8, 20),  # what is not known does not count
        ("mmmm", 1, 8),  # 1.25 is below the least
        ("eeem", 8, 24),  # 40 is above the most
        ("eehh", 1, 24),  # all agree: the published code divides by 0
    ],
)
def test_a_later_round_asks_for_what_the_last_one_makes_likely(groups, missing, prompts):
    sampling = greso()
    assert sampling.round_size(missing) == 24  # the first
    show(sampling, groups)
    sampling.end_round()
    assert sampling.round_size(missing) == prompts


def test_a_whole_number_of_prompts_is_not_lost_to_rounding():
    sampling = greso(first_batch=99)
    show(sampling, "eeeeeeemmm")
    sampling.end_round()
    assert sampling.round_size(12) == 50  # 1.25 * 12 / .3


def test_the_last_round_that_generated_anything_counts_and_a_step_begins_with_the_first():
    sampling = greso()
    show(sampling, "hhhhhhhm")
    sampling.end_round()
    show(sampling, "eehhmmmm")
    sampling.end_round()
    sampling.end_round()  # every prompt was skipped
    assert sampling.round_size(8) == 20
    sampling.end_step()
    assert sampling.round_size(8) == 24


def test_the_least_is_never_above_the_most():
    sampling = greso(first_batch=6, min_batch=8)
    show(sampling, "m")
    sampling.end_round()
    assert sampling.round_size(1) == 6


def step(sampling, *rounds):
    for groups in rounds:
        show(sampling, groups)
        sampling.end_round()
    sampling.end_step()
    return sampling.p_easy, sampling.p_hard


def test_probabilities_move_from_the_second_pass_on():
    sampling = greso()
    assert step(sampling, "e" * 8 + "h" * 4) == (0.5, 0.5)
    sampling.end_pass()
    # 1 of 12 easy and 2 of 12 hard are the targets themselves
    assert step(sampling, "ehh" + "m" * 9) == pytest.approx((0.49, 0.49))
    assert step(sampling, "h" + "m" * 11) == pytest.approx((0.50, 0.50))
    assert step(sampling, "hhh" + "m" * 9) == pytest.approx((0.51, 0.49))


def test_all_rounds_of_a_step_count_and_what_is_not_known_does_not():
    sampling = greso()
    sampling.end_pass()
    # easy 2 of 25: below a twelfth; hard 5 of 25: above a sixth
    assert step(sampling, "ee" + "hhhhh???", "m" * 9, "m" * 9) == pytest.approx((0.51, 0.49))
    assert sampling.metrics() == pytest.approx(
        {"greso/p_easy": 0.51, "greso/p_hard": 0.49, "greso/easy_share": 0.08, "greso/hard_share": 0.2}
    )
    # and of one step only
    assert step(sampling, "e" + "m" * 9) == pytest.approx((0.50, 0.50))


def test_probabilities_stay_in_their_range():
    sampling = greso(p_easy=0.06, p_hard=0.945)
    sampling.end_pass()
    assert step(sampling, "em") == pytest.approx((0.05, 0.95))
    assert step(sampling, "em") == (0.05, 0.95)


def test_a_moved_probability_holds_for_all_prompts_at_once():
    sampling = greso(step=0.1)
    show(sampling, "ee", prompt=7)
    sampling.end_pass()
    step(sampling, "e" + "m" * 3)
    assert sampling.generates(7) == pytest.approx(0.4**2)


def test_passes_in_which_every_prompt_is_skipped_end_the_run():
    sampling = greso()
    for _ in range(2):
        for _ in range(MOST_IDLE_PASSES):
            sampling.end_pass()
        show(sampling, "h")  # one group in 200 passes is enough
    for _ in range(MOST_IDLE_PASSES):
        sampling.end_pass()
    with pytest.raises(SamplingError, match=r"every prompt in 200 passes .* raise --greso.floor or --greso.min_p"):
        sampling.end_pass()


def future(sampling):
    """What it decides over three more steps."""
    seen = []
    for groups in ("eh", "hm", "em"):
        for prompt in range(40):
            skipped = sampling.skips(prompt)
            seen.append(skipped)
            if not skipped:
                show(sampling, groups[prompt % 2], prompt)
        sampling.end_step()
        seen.append((sampling.p_easy, sampling.p_hard))
    return seen


def test_a_checkpoint_continues_with_the_same_decisions():
    first = greso()
    for prompt in range(40):
        first.skips(prompt)
        show(first, "eehhm"[prompt % 5] * 2, prompt)
    step(first, "mmeh")
    first.end_pass()
    state = pickle.dumps(first.state())
    expected = future(first)
    assert {True, False} <= set(expected)

    resumed = greso(seed=99, p_easy=0.9)
    resumed.load(pickle.loads(state))
    assert future(resumed) == expected
    assert future(greso()) != expected


def test_a_state_is_not_changed_by_what_comes_later():
    sampling = greso()
    show(sampling, "ee")
    state = sampling.state()
    before = pickle.dumps(state)
    show(sampling, "em")
    sampling.skips(0)
    assert pickle.dumps(state) == before
