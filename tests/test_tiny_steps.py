"""Chains to work out step by step: right results, lengths, no prompt in two splits, the same prompts for a seed."""

import re

import pytest

from openrlhf_dbb.tiny.steps import MAX_SIZE, generate
from openrlhf_dbb.tiny.task import CHARACTERS, SPLITS


def numbers(prompt):
    return [int(number) for number in re.findall("[+-]?[0-9]+", prompt)]


def results(prompt):
    """All results of a prompt, as Python computes them from its text."""
    pieces = re.findall("[+-]?[0-9]+", prompt)
    return [eval("".join(pieces[:end])) for end in range(2, len(pieces) + 1)]


@pytest.mark.parametrize("split", ["train", "heldout", "ood"])
def test_the_label_is_the_last_result_written_from_the_last_digit_on(split):
    for row in generate(split, 1000, 0):
        assert row["label"] == str(results(row["input"])[-1])[::-1]


def test_the_warm_up_shows_every_result():
    for row in generate("sft", 1000, 0):
        assert row["label"] == "=".join(str(result)[::-1] for result in results(row["input"]))


@pytest.mark.parametrize("split", ["train", "heldout", "sft"])
def test_half_have_three_terms_and_half_four_and_no_result_leaves_0_to_19(split):
    prompts = [row["input"] for row in generate(split, 1000, 0)]
    assert [len(results(prompt)) for prompt in prompts].count(3) == 500
    assert [len(results(prompt)) for prompt in prompts].count(4) == 500
    assert {result for prompt in prompts for result in results(prompt)} == set(range(20))
    assert {numbers(prompt)[0] for prompt in prompts} == set(range(1, 20))
    assert {abs(term) for prompt in prompts for term in numbers(prompt)[1:]} == set(range(1, 10))


def test_prompts_out_of_distribution_have_five_terms():
    assert {len(results(row["input"])) for row in generate("ood", 200, 0)} == {5}


@pytest.mark.parametrize("split", list(SPLITS))
def test_texts_are_short_and_use_the_characters_of_the_tokenizer(split):
    rows = generate(split, 3000, 0)
    assert set("".join(row["input"] + row["label"] for row in rows)) <= set(CHARACTERS)
    assert max(len(row["input"]) for row in rows) <= len("19-9+9-9+9-9=")
    # All results of five terms, two digits each, and the end.
    assert max(len("=".join(str(result) for result in results(row["input"]))) for row in rows) + 1 <= 15


def tens(prompt):
    """The tens digits of the first number and of all results."""
    return {number // 10 for number in (numbers(prompt)[0], *results(prompt))}


def test_most_prompts_carry_and_few_of_the_warm_up_do():
    share = {
        split: sum(len(tens(row["input"])) > 1 for row in generate(split, 2000, 0)) / 2000
        for split in ("train", "heldout", "sft")
    }
    # Of a share s, 1/64 is kept, of the rest all: s / (s + 64 (1 - s)), 0.037 for s = 0.71.
    assert 0.65 < share["train"] < 0.75 and 0.65 < share["heldout"] < 0.75
    assert 0.025 < share["sft"] < 0.055


def test_which_steps_carry_follows_from_the_results_and_not_from_the_terms():
    carries = {term: set() for term in range(-9, 10) if term}
    for row in generate("heldout", 1000, 0):
        first, *terms = numbers(row["input"])
        for before, term in zip([first, *results(row["input"])[:-1]], terms, strict=True):
            carries[term].add(before // 10 != (before + term) // 10)
    assert all(found == {True, False} for found in carries.values())


def test_prompts_differ_within_a_split_and_between_splits_whatever_the_seeds():
    prompts = [
        {row["input"] for row in generate(split, 3000, seed)}
        for split, seed in (("train", 0), ("heldout", 1), ("sft", 2), ("ood", 3))
    ]
    assert [len(split) for split in prompts] == [3000] * 4
    assert len(set.union(*prompts)) == 12_000


def test_same_seed_same_prompts_and_another_seed_others():
    assert generate("train", 50, 3) == generate("train", 50, 3)
    assert generate("train", 50, 3) != generate("train", 50, 4)


def test_largest_size_works_in_the_smallest_split_and_more_is_refused():
    assert len(generate("heldout", MAX_SIZE, 0)) == MAX_SIZE
    assert generate("heldout", 0, 0) == []
    with pytest.raises(ValueError, match=f"size must be 0 to {MAX_SIZE}, got {MAX_SIZE + 1}"):
        generate("heldout", MAX_SIZE + 1, 0)
    with pytest.raises(ValueError, match="got -1"):
        generate("heldout", -1, 0)


def test_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown split 'test'; allowed: train, heldout, sft, ood"):
        generate("test", 1, 0)
