"""GRESO over scripted groups: whom it skips, how its probabilities move, how many prompts a round asks for."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Decision, RunFacts
from openrlhf_dbb.core.strategies.greso import MOST_IDLE_PASSES, Greso
from openrlhf_dbb.errors import RunError

NAN = np.nan
GROUPS = {
    "e": [1, 1, 1, 1], "h": [0, 0, 0, 0], "m": [1, 0, 0, 0], "?": [NAN] * 4,
    "E": [1, NAN, 1, NAN], "H": [NAN, 0, NAN, NAN], "M": [NAN, 0, 1, NAN],  # as far as is known
}  # fmt: skip


def greso(groups=16, seed=1, p=(0.5, 0.5)):
    """Rounds of 24 prompts at first and of 8 at least."""
    sampler = Greso().sampler(RunFacts(groups=groups, rollouts=4, seed=seed))
    sampler.p_easy, sampler.p_hard = p
    return sampler


def show(sampler, groups, prompt_id=0):
    """Judge one group after the other; whether each is trained on."""
    decisions = [sampler.judge(prompt_id, np.array(GROUPS[group], dtype=float)) for group in groups]
    assert set(decisions) <= {Decision.TRAIN, Decision.DISCARD}
    return [decision is Decision.TRAIN for decision in decisions]


@pytest.mark.parametrize(
    ("groups", "probability"),
    # 0.25^4 = 0.0039 is below the floor; all wrong, then all correct: one in a row; nothing is known of "?"
    # before its third visit in a row without a score; then it is at the floor until there is one
    [
        ("", 1),
        ("e", 0.5),
        ("hhh", 0.25**3),
        ("hhhh", 0.01),
        ("hhhe", 0.5),
        ("eeh", 0.25),
        ("eM", 1),
        ("e?", 0.5),
        ("??", 1),
        ("???", 0.01),
        ("e???", 0.01),
        ("?m??", 1),
        ("????e", 0.5),
    ],
)
def test_a_prompt_is_generated_for_with_p_to_the_power_of_its_streak(groups, probability):
    sampler = greso(p=(0.5, 0.25))
    show(sampler, groups)
    generated = sum(not sampler.skips(0) for _ in range(4000))
    assert abs(generated / 4000 - probability) < 0.04  # five standard deviations
    assert sampler.probability(0) == probability  # which draws do not change
    assert sampler.probability(1) == 1  # never seen


def test_a_checkpoint_of_an_older_release_counts_visits_without_a_score_anew():
    before = greso()
    after = greso()
    show(before, "h???")
    state = before.state()
    after.load(state)
    assert after.probability(0) == before.probability(0) == 0.01
    del state["_unverified"]
    older = greso()
    older.load(state)
    assert older.probability(0) == 0.5


def test_only_groups_that_vary_are_trained_on():
    assert show(greso(), "ehmEHM?") == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("groups", "missing", "prompts"),
    [
        ("eehhmmmm", 8, 20),  # 1.25 * 8 / (1 - 1/2)
        ("eehhmmmm??", 8, 20),  # what is not known does not count
        ("mmmm", 1, 8),  # 1.25 is below the least
        ("eeem", 8, 24),  # 40 is above the most
        ("eeeeeeemmm", 4, 16),  # 1.25 * 4 / 0.3 = 16.67
        ("eehh", 1, 24),  # zero variance alone: the published code divides by 0
    ],
)
def test_a_later_round_asks_for_what_the_last_one_makes_likely(groups, missing, prompts):
    sampler = greso()
    assert sampler.round_size(missing) == 24  # the first
    show(sampler, groups)
    assert sampler.round_size(missing) == prompts


def test_the_last_round_that_generated_anything_counts_and_a_step_begins_with_the_first():
    sampler = greso()
    show(sampler, "hhhhhhhm")
    assert sampler.round_size(8) == 24
    show(sampler, "eehhmmmm")
    assert sampler.round_size(8) == 20
    assert sampler.round_size(8) == 20  # every prompt was skipped
    sampler.end_step()
    assert sampler.round_size(8) == 24


def step(sampler, *rounds):
    for groups in rounds:
        sampler.round_size(1)
        show(sampler, groups)
    sampler.end_step()
    return sampler.p_easy, sampler.p_hard


def test_probabilities_move_from_the_second_pass_on():
    sampler = greso()
    assert step(sampler, "e" * 8 + "h" * 4) == (0.5, 0.5)
    sampler.end_pass()
    # 1 of 12 easy and 2 of 12 hard are the targets themselves
    assert step(sampler, "ehh" + "m" * 9) == pytest.approx((0.49, 0.49))
    assert step(sampler, "h" + "m" * 11) == pytest.approx((0.50, 0.50))
    assert step(sampler, "hhh" + "m" * 9) == pytest.approx((0.51, 0.49))


def test_all_rounds_of_a_step_count_and_what_is_not_known_does_not():
    sampler = greso()
    sampler.end_pass()
    # easy 2 of 25: below a twelfth; hard 5 of 25: above a sixth
    assert step(sampler, "ee" + "hhhhh???", "m" * 9, "m" * 9) == pytest.approx((0.51, 0.49))
    expected = {
        "greso/p_easy": 0.51,
        "greso/p_hard": 0.49,
        "greso/easy_share": 0.08,
        "greso/hard_share": 0.2,
    }
    assert sampler.metrics() == pytest.approx(expected)
    # and of one step only
    assert step(sampler, "e" + "m" * 9) == pytest.approx((0.50, 0.50))


def test_probabilities_stay_in_their_range_and_hold_for_all_prompts_at_once():
    sampler = greso(p=(0.06, 0.945))
    show(sampler, "ee", prompt_id=7)
    sampler.end_pass()
    assert step(sampler, "em") == pytest.approx((0.05, 0.95))
    assert step(sampler, "em") == (0.05, 0.95)
    assert sampler.probability(7) == 0.01  # the floor is above 0.05^2


def test_passes_in_which_every_prompt_is_skipped_end_the_run():
    sampler = greso()
    for _ in range(2):
        for _ in range(MOST_IDLE_PASSES):
            sampler.end_pass()
        show(sampler, "h")  # one group in 200 passes is enough
    for _ in range(MOST_IDLE_PASSES):
        sampler.end_pass()
    with pytest.raises(RunError, match=r"every prompt in 200 passes .* raise greso.floor"):
        sampler.end_pass()
