"""The tiny task: right answers, no prompt in two splits."""

import pytest

from openrlhf_dbb.rewards.values import canonical, read
from openrlhf_dbb.tiny.task import SPLITS, generate


def recomputed(prompt):
    body = prompt.removesuffix("=")
    if body.startswith("s"):
        return "".join(sorted(body[1:]))
    if "+" in body:
        left, right = body.split("+")
        return str(int(left) + int(right))[::-1]
    left, right = body.split("-")
    return str(int(left) - int(right))[::-1]


@pytest.fixture(scope="module", params=list(SPLITS))
def rows(request):
    return generate(request.param, 3000, seed=0)


def test_answers_are_right(rows):
    assert [row["label"] for row in rows] == [recomputed(row["input"]) for row in rows]


def test_prompts_out_of_distribution_sort_three_to_seven_digits_of_which_some_repeat():
    digits = [row["input"].removeprefix("s").removesuffix("=") for row in generate("ood", 3000, seed=0)]
    assert {len(each) for each in digits} == {3, 4, 5, 6, 7}
    assert all(each.isdigit() and "0" not in each and 1 < len(set(each)) < len(each) for each in digits)
    assert len(set(digits)) == 3000


def test_labels_are_integers_whose_value_and_text_agree_and_copying_the_question_is_never_right(rows):
    for row in rows:
        label = row["label"]
        assert str(int(label)) == label
        assert canonical(read(label)) == label
        assert 2 <= len(label) <= 7
        question = row["input"].removesuffix("=")
        if not question.startswith("s"):
            assert int(label) != int(label[::-1])


def test_prompts_differ_within_a_split_and_between_splits_whatever_the_seeds():
    prompts = [
        {row["input"] for row in generate(split, 6000, seed)}
        for split, seed in (("train", 0), ("heldout", 1), ("sft", 2), ("ood", 3))
    ]
    assert [len(split) for split in prompts] == [6000, 6000, 6000, 6000]
    assert len(set.union(*prompts)) == 24_000
