"""Which rollouts of a step are kept: whole groups, half of them the same prompts in every epoch; what is refused."""

from collections import Counter

import numpy as np
import pytest

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.core.step import rows_to_keep as chosen

PROMPTS = [(f"prompt {i}", str(i)) for i in range(200)]


def batch(prompts, group=8):
    return [prompt for prompt in prompts for _ in range(group)]


def kept_prompts(prompts, step, keep, group=8):
    rows = batch(prompts, group)
    return Counter(rows[row] for row in chosen(rows, step, keep))


def test_groups_are_kept_whole():
    found = kept_prompts(PROMPTS[:16], 1, 64)
    assert set(found.values()) == {8} and len(found) == 8


@pytest.mark.parametrize("keep", [1, 2, 3, 63, 64, 65, 127, 128, 1000, None])
def test_as_many_as_asked_for_in_the_order_of_the_rows(keep):
    rows = chosen(batch(PROMPTS[:16]), 3, keep)
    assert len(rows) == len(set(rows.tolist())) == min(128, 128 if keep is None else keep)
    assert rows.tolist() == sorted(rows)
    assert chosen([], 1, keep).tolist() == [] and chosen(batch(PROMPTS), 1, 0).tolist() == []


def test_half_of_them_are_followed_over_the_epochs_and_in_time_all_are_seen():
    order = np.random.default_rng(7)
    seen, counts = set(), Counter()
    for epoch in range(200):
        places = order.permutation(len(PROMPTS))
        for start in range(0, 200, 50):  # four steps of 50 prompts
            step = 1 + 4 * epoch + start // 50
            found = kept_prompts([PROMPTS[i] for i in places[start : start + 50]], step, 64)
            seen |= set(found)
            counts.update(found.keys())
    assert seen == set(PROMPTS)
    # Four groups of eight are followed in each step: the prompts that come first by their hash, in every epoch.
    always = [prompt for prompt, count in counts.items() if count == 200]
    assert 4 <= len(always) <= 16  # the four lowest hashes of all, at least
    # Drawn anew: about 4 of the other 46 groups of a step, so about 200 * 4 / 46 = 17 times in 200 epochs.
    others = np.array(sorted(counts.values()))[:150]
    assert 12 < others.mean() < 20


def test_the_choice_does_not_depend_on_the_order_of_the_groups():
    rows = PROMPTS[:30]
    assert kept_prompts(rows, 5, 64) == kept_prompts(rows[::-1], 5, 64)
    assert kept_prompts(rows, 5, 64) != kept_prompts(rows, 6, 64)


@pytest.fixture
def posteriors(new_url):
    with Posteriors.create(new_url("sqlite"), "run", ["a", "b"], ["1", "2"]) as made:
        yield made


def test_a_trainer_hands_over_its_texts(posteriors):
    asked = []

    class Texts(list):
        def __getitem__(self, place):
            asked.append(place)
            return super().__getitem__(place)

    texts = Texts(["a right", "b wrong", "a missing", "b right"])
    posteriors.observe(
        1, ["a", "b", "a", "b"], ["1", "2", "1", "2"], [1, 0, None, 1],
        extras=StepExtras(tokens=[3, 4, 5, 6], responses=Responses(
            texts, truncated=[False, True, False, False], log_probs=[-1, -2, np.nan, -4], keep=3)),
    )  # fmt: skip
    posteriors.settle()
    rows = posteriors.store.query(
        "SELECT prompt_id, sample, reward, missing, length, truncated, log_prob, text FROM rollouts "
        "ORDER BY prompt_id, sample"
    )
    by_text = {row.text: tuple(row)[:-1] for row in rows}
    everything = {
        "a right": (1, 0, 1.0, 0, 3, 0, -1.0),
        "a missing": (1, 1, None, 1, 5, 0, None),
        "b wrong": (2, 0, 0.0, 0, 4, 1, -2.0),
        "b right": (2, 1, 1.0, 0, 6, 0, -4.0),
    }
    assert by_text.items() <= everything.items() and len(by_text) == 3
    assert len(asked) == 3  # the others are never decoded


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (Responses(["only one"]), r"response texts has shape \(1,\)"),
        (
            Responses(["a", "b"], truncated=[True]),
            r"truncated has shape \(1,\); pass one value for each of the 2 rollouts",
        ),
        (Responses(["a", "b"], log_probs=[[1, 2]]), r"log_probs has shape \(1, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(posteriors, responses, message):
    with pytest.raises(ValueError, match=message):
        posteriors.observe(1, ["a", "a"], ["1", "1"], [1, 0], extras=StepExtras(responses=responses))
    scored = posteriors.observe(1, ["a", "a"], ["1", "1"], [1, 0])
    assert posteriors.step == 1 and scored.mean.tolist() == [0.5, 0.5]


def test_metrics_of_a_step_are_stored_with_it(posteriors):
    posteriors.observe(1, ["a", "a"], ["1", "1"], [1, 0])
    posteriors.record_metrics(1, {"policy_loss": 0.25, "samples": ["text"]})
    posteriors.settle()
    assert posteriors.store.query("SELECT metrics FROM steps") == [('{"policy_loss": 0.25}',)]
