"""The chains of the task with steps: right results, lengths, no prompt in two splits, the same prompts for a seed."""

import hashlib
import json
import re

import pytest

from openrlhf_dbb.tiny.task import CHARACTERS
from study.steps import generate


def results(prompt):
    """All results of a prompt, as Python computes them from its text."""
    pieces = re.findall("[+-]?[0-9]+", prompt)
    return [eval("".join(pieces[:end])) for end in range(2, len(pieces) + 1)]


def tens(prompt):
    """The tens digits of the first number and of all results."""
    return {number // 10 for number in (int(re.match("[0-9]+", prompt)[0]), *results(prompt))}


@pytest.mark.parametrize(
    ("split", "lengths", "carries"),
    # Of a share s, "sft" keeps 1/64, of the rest all: s / (s + 64 (1 - s)), 0.037 for s = 0.71.
    [
        ("train", {3, 4}, (0.65, 0.75)),
        ("heldout", {3, 4}, (0.65, 0.75)),
        ("sft", {3, 4}, (0.025, 0.055)),
        ("ood", {5}, (0.5, 0.9)),
    ],
)
def test_the_chains_of_a_split(split, lengths, carries):
    rows = generate(split, 2000, 0)
    for row in rows:
        backwards = [str(result)[::-1] for result in results(row["input"])]
        assert row["label"] == ("=".join(backwards) if split == "sft" else backwards[-1])
        assert len(backwards) in lengths and set(results(row["input"])) <= set(range(20))
        assert set(row["input"] + row["label"]) <= set(CHARACTERS)
    share = sum(len(tens(row["input"])) > 1 for row in rows) / 2000
    assert carries[0] < share < carries[1]


def test_prompts_differ_within_a_split_and_between_splits_and_follow_the_seed():
    prompts = [
        {row["input"] for row in generate(split, 3000, seed)}
        for split, seed in (("train", 0), ("heldout", 1), ("sft", 2), ("ood", 3))
    ]
    assert len(set.union(*prompts)) == 12_000
    assert generate("train", 50, 3) == generate("train", 50, 3) != generate("train", 50, 4)


def test_the_prompts_of_a_seed_never_change():
    assert hashlib.md5(json.dumps(generate("train", 500, 0)).encode()).hexdigest() == "387a1408a3ae768bf0356e821602016c"
