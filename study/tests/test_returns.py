"""Prompts that return: pools of their kinds, the arm that keeps the first pass's mixed prompts, shares by hand."""

import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from openrlhf_dbb import tiny
from study import exact, returns, spend

SHORT = tiny.Recipe(train_prompts=600, heldout_prompts=600, warmup_steps=2)


@pytest.fixture
def small(monkeypatch):
    for name, pool in returns.POOLS.items():
        monkeypatch.setitem(returns.POOLS, name, replace(pool, size=16, budget=512, trained=32))
    monkeypatch.setattr(returns, "_SHARES_E", np.array([0.0, 0.25, 1.0]))
    monkeypatch.setattr(returns, "MASTERED", 0.0)  # a model of two steps has mastered nothing
    prepare = tiny.prepare
    monkeypatch.setattr(
        returns.tiny, "prepare", lambda folder, seed, _: prepare(folder, seed, SHORT)
    )


def prompts(path):
    return [json.loads(line)["input"] for line in path.read_text().splitlines()]


def test_a_pool_in_parts_is_mastered_hopeless_and_learnable_prompts(small, tmp_path):
    folder = returns.prepare(tmp_path, "parts", 1)
    train = prompts(folder / "train.jsonl")
    assert all(prompt.startswith("s") for prompt in train[:4])
    assert all(returns.THREE_DIGITS.fullmatch(prompt) for prompt in train[4:12])
    assert all(map(returns.is_learnable, train[12:]))
    heldout = prompts(folder / "heldout.jsonl")
    assert len(train) == len(heldout) == 16
    assert all(map(returns.is_learnable, heldout))
    assert not set(train) & set(heldout)


def test_a_pool_of_one_template_has_one_kind_of_prompt(small, tmp_path):
    folder = returns.prepare(tmp_path, "one", 1)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert all(returns.TWO_DIGITS.fullmatch(prompt) for prompt in prompts(folder / name))


def test_a_model_that_masters_too_little_gets_the_sorting_prompts_that_it_solves_best(
    small, tmp_path, monkeypatch
):
    monkeypatch.setattr(returns, "MASTERED", 1.1)
    folder = returns.prepare(tmp_path, "parts", 1)
    whole = exact.read(tmp_path / "tasks" / "candidates-s1")
    texts = prompts(tmp_path / "tasks" / "candidates-s1" / "train.jsonl")
    right = dict(zip(texts, whole.probabilities(whole.policy()), strict=True))
    chosen = prompts(folder / "train.jsonl")[:4]
    others = [text for text in texts if text.startswith("s") and text not in chosen]
    assert min(right[text] for text in chosen) >= max(right[text] for text in others)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("15+6=", True), ("54-31=", True), ("485-2=", True), ("8+5=", False), ("s361=", False), ("91+963=", False)],
)  # fmt: skip
def test_what_can_be_learned_is_a_sum_or_difference_of_five_or_six_characters(prompt, expected):
    assert returns.is_learnable(prompt) is expected


def test_the_first_pass_chooses_the_prompts_of_the_later_ones(small, tmp_path, monkeypatch):
    folder = returns.prepare(tmp_path, "one", 1)
    trained = []
    monkeypatch.setattr(
        spend.Prompts,
        "update",
        lambda self, step: trained.append([group.rollouts[0][0] for group in step.groups]),
    )

    def right(task, responses, tokens):
        """The first half of a list of rollouts alternates between right and wrong, the second half is wrong."""
        rows = len(responses)
        return np_to_torch((np.arange(rows) % 2 == 0) & (np.arange(rows) < rows // 2))

    monkeypatch.setattr(exact.Task, "right", right)
    curve = returns.train(folder, "one", returns.FIRST_PASS, 1e-3, 1, "abc")
    # 16 prompts, 4 of them a step: a pass has four steps. The first two prompts of each were mixed.
    first_pass = trained[:4]
    assert sorted(row for rows in first_pass for row in rows) == list(range(16))
    mixed = {row for rows in first_pass for row in rows[:2]}
    assert len(trained) == 16
    assert {row for rows in trained[4:] for row in rows} == mixed
    assert {row.commit for row in curve} == {"abc"}
    assert [row.groups for row in curve] == [0, 16, 64]
    assert [row.mixed for row in curve] == [0, 8, 32]


def np_to_torch(right):
    import torch

    return torch.from_numpy(right)[:, None]


def test_shares_are_of_the_second_half():
    counts = ((0, 0, 0, 0), (500, 100, 10, 20), (1000, 300, 60, 170))
    points = pd.DataFrame(
        [
            returns.ReturnsRow(
                "parts", 3, "draws", 1e-3, rollouts, 0.1, 9, groups, mixed, learnable, "abc"
            )
            for rollouts, groups, mixed, learnable in counts
        ]
    )
    assert returns.second_half(points, "mixed")[3] == pytest.approx(0.25)  # 50 of 200
    assert returns.second_half(points, "learnable")[3] == pytest.approx(0.75)


def test_a_report_has_a_table_for_each_pool_and_differences_to_grpo(tmp_path):
    """GRPO's accuracy rises from 0.1 to 0.2, the others' to 0.3: 5 points more in the mean, 10 at the end."""
    make = functools.partial(returns.ReturnsRow, steps=4, commit="")
    for pool, facts in returns.POOLS.items():
        lines = []
        for seed, arm, share in itertools.product((1, 2, 3), returns.ARMS, returns._SHARES_E):
            end = 0.2
            if arm != returns.GRPO:
                end = 0.3
            if arm == "none":
                end += seed / 1000
            accuracy = 0.1 + (end - 0.1) * share
            counts = {"groups": 100 * share, "mixed": 30 * share, "learnable": 60 * share}
            own = {
                "pool": pool,
                "seed": seed,
                "arm": arm,
                "rate": 8e-4,
                "rollouts": int(share * facts.budget),
            }
            lines.append(make(accuracy=accuracy, **own, **counts))
        pd.DataFrame(lines).to_csv(tmp_path / f"{pool}.csv", index=False)
    parts, one, rates = returns.report(tmp_path, tmp_path)
    by_arm = {row[0]: row for row in parts.rows}
    drawn = by_arm[returns.ARMS["none"].label]
    assert drawn[4].startswith("+5.10")  # half of 10.2 points, the mean of 10.1, 10.2 and 10.3
    assert drawn[6].startswith("+10.20")
    assert drawn[-2:] == ["30", "60"]
    assert len(one.rows) == len(returns.ARMS)
    assert one.rows[-1][-1] == "30"  # all of its prompts can be learned
    assert len(rates.rows) == 2 * len(returns.ARMS)
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")
