"""Ways to spend equal rollouts: their outcomes by hand, and each arm trained on a model of one step."""

import numpy as np
import pandas as pd
import pytest
import torch

from openrlhf_dbb import tiny
from study import exact, rows, spend


def test_outcomes_are_the_area_below_a_curve_and_its_end():
    grid_E = np.linspace(0, spend.BUDGET, 17)
    curves = {("a", 1): (0.1, 0.3), ("b", 1): (0.2, 0.2)}  # straight from the first to the second
    points = [
        spend.SpendRow(seed, arm, 1e-3, int(rollouts), accuracy, 9, 0.0)
        for (arm, seed), (first, last) in curves.items()
        for rollouts, accuracy in zip(grid_E, np.linspace(first, last, 17), strict=True)
    ]
    means, ends = spend.outcomes(pd.DataFrame(points))
    assert means.loc[1, "a"] == pytest.approx(0.2)
    assert ends.loc[1, "a"] == pytest.approx(0.3)
    assert means.loc[1, "b"] == ends.loc[1, "b"] == pytest.approx(0.2)


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tiny.prepare(folder, 1, tiny.Recipe(train_prompts=32, heldout_prompts=8, warmup_steps=2))
    return folder


@pytest.mark.parametrize("name", ["grpo", "two-stage", "draws", "allocate"])
def test_an_arm_spends_its_budget_on_groups_of_its_size(name, task_folder, monkeypatch):
    monkeypatch.setattr(spend, "BUDGET", 300)
    monkeypatch.setattr(spend, "TRAINED", 32)
    monkeypatch.setattr(spend, "_GRID_E", np.array([0.0, 300.0]))
    sizes = []

    def update(self, step):
        sizes.append([len(group.rollouts) for group in step.groups])

    monkeypatch.setattr(spend.Prompts, "update", update)
    # A prompt is right half of the time, whatever the model says.
    random = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        exact.Task,
        "right",
        lambda task, responses, tokens: torch.rand(responses.shape[:2], generator=random) < 0.5,
    )
    before, after = spend.train(task_folder, name, 1e-3, 1)
    assert [before.rollouts, after.rollouts] == [0, 300]
    assert before.mixed == 0
    assert 0 < after.mixed <= sum(map(len, sizes))
    # 300 rollouts allow nine steps of 32; those that look at more prompts than they train on have fewer.
    assert after.steps == len(sizes)
    assert 1 <= after.steps <= 9
    assert all(sum(of_step) == 32 for of_step in sizes)
    if name == "allocate":
        assert min(map(min, sizes)) >= 2
    else:
        assert {size for of_step in sizes for size in of_step} == {spend.ARMS[name].group}
    assert before.accuracy == after.accuracy  # nothing was trained


def test_finished_curves_are_not_trained_again(task_folder, tmp_path, monkeypatch):
    trained = []

    def train(folder, name, rate, seed):
        trained.append((name, rate, seed))
        return [spend.SpendRow(seed, name, rate, 0, 0.1, 1, 0.0)]

    monkeypatch.setattr(spend, "train", train)
    monkeypatch.setattr(spend.tiny, "prepare", lambda *args: None)
    spend.run(tmp_path, [1], ["grpo", "draws"], [1e-3])
    spend.run(tmp_path, [1, 2], ["grpo"], [1e-3])
    assert trained == [("grpo", 1e-3, 1), ("draws", 1e-3, 1), ("grpo", 1e-3, 2)]
    assert len(rows.read(tmp_path / "spend.csv", spend.SpendRow._fields)) == 3
