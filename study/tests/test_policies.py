"""Policies without the pipeline: accuracy, sampling and gradients in closed form, and the control's training."""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from study import control, exact, protocol  # noqa: E402
from study.sampling import NOTHING, Tokens, sample, token_log_probabilities  # noqa: E402

END = 3  # of the tokens 0 to 3


class Bigram(torch.nn.Module):
    """A policy whose next token depends only on the last one: row a of the table holds the logits after token a."""

    def __init__(self, seed=None):
        super().__init__()
        table = (
            np.zeros((4, 4)) if seed is None else np.random.default_rng(seed).normal(size=(4, 4))
        )
        self.logits = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32))

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.logits[input_ids])


@dataclass(frozen=True)
class Copying(exact.Task):
    """Prompts 0 and 1; the answer to a prompt is the prompt and the end token. The policy is a table."""

    def policy(self, model=None):
        return Bigram()


def tokens(prompts, longest=3):
    answers = [[prompt, END] + [NOTHING] * (longest - 2) for prompt in prompts]
    return Tokens([[prompt] for prompt in prompts], torch.tensor(answers), END)


@pytest.fixture
def task():
    return Copying(Path(), tokens([0, 1] * 64), tokens([0, 1]))


def test_accuracy_is_the_probability_of_the_answer(task):
    # A quarter for the digit, a quarter for the end after it.
    assert task.accuracy(Bigram()) == pytest.approx(1 / 16)
    policy = Bigram()
    with torch.no_grad():
        policy.logits[0, 0] = torch.tensor(3.0).log()  # after 0: 0 with 3/6, the end with 1/6
    assert task.accuracy(policy) == pytest.approx((3 / 6 * 1 / 6 + 1 / 16) / 2)
    assert task.ends_at_once(policy) == pytest.approx((1 / 6 + 1 / 4) / 2)


def test_a_response_is_right_if_it_is_the_answer_and_ends(task):
    responses = [
        (0, END, NOTHING),
        (1, END, NOTHING),
        (0, 0, END),
        (0, 1, 1),
        (END, NOTHING, NOTHING),
    ]
    right = task.right(torch.tensor([responses] * 2), task.heldout)
    assert right.tolist() == [
        [True, False, False, False, False],
        [False, True, False, False, False],
    ]


# The answer is token 1, then the end, within two tokens.
ONE_PROMPT = Tokens([[0]], torch.tensor([[1, END]]), END)
ALL_RESPONSES = [(END, NOTHING), *itertools.product((0, 1, 2), range(4))]


def probability_of(policy, response, last=0):
    """By hand: the product of the table entries along the response, starting at the prompt's ``last`` token."""
    table = policy.logits.detach().double().softmax(-1).numpy()
    first = table[last, response[0]]
    return first if response[1] == NOTHING else first * table[response[0], response[1]]


def test_samples_follow_the_policy():
    policy, draws = Bigram(0), 20_000
    two = Tokens([[0], [1, 1, 2]], torch.tensor([[1, END], [1, END]]), END)  # of different lengths
    responses = sample(policy, two, draws, torch.Generator().manual_seed(1))
    for last, drawn in ((0, responses[0]), (2, responses[1])):
        for response in ALL_RESPONSES:
            expected = probability_of(policy, response, last)
            share = float((drawn == torch.tensor(response)).all(-1).double().mean())
            assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)


def test_log_probabilities_are_those_of_the_table():
    policy = Bigram(0)
    logs = token_log_probabilities(
        policy, ONE_PROMPT, np.zeros(13, dtype=np.int64), torch.tensor(ALL_RESPONSES)
    )
    expected = [probability_of(policy, response) for response in ALL_RESPONSES]
    np.testing.assert_allclose(logs.detach().sum(-1).exp(), expected, rtol=1e-5)
    assert sum(expected) == pytest.approx(1)  # these are all possible responses


def test_the_loss_of_an_arm_by_hand():
    there = torch.tensor([[True, True], [True, False]])
    log_ratio = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    advantages = torch.tensor([[2.0], [-1.0]])
    # Ratios 1 and e, the latter clipped to 1.28; then e^-1, clipped to 0.8, where the advantage is negative.
    gains = [2 * 1 + 2 * 1.28, -0.8]
    grpo = control.Arm("point", control.NARROW)
    assert control._loss(log_ratio, advantages, there, grpo).item() == pytest.approx(
        -(gains[0] / 2 + gains[1] / 1) / 2
    )
    dr_grpo = control.Arm("point", control.NARROW, form="dr_grpo")
    assert control._loss(log_ratio, advantages, there, dr_grpo).item() == pytest.approx(
        -(sum(gains) / 2) / 2
    )


@pytest.mark.parametrize("arm", sorted(control.ARMS))
def test_every_arm_learns_an_easy_task(task, arm):
    rollouts = 1 if "single" in (arm, control.ARMS[arm].like) else 4
    accuracy, _ = control.train(
        task, control.ARMS[arm], rollouts=rollouts, seed=1, rate=0.1, epochs=20
    )
    assert accuracy[0] == pytest.approx(1 / 16) and len(accuracy) == 1 + control.POINTS
    assert 0.15 < accuracy[-1] <= 0.25  # one token decides both whether to go on and whether to end


def test_a_seed_repeats_a_training_and_a_rate_of_0_changes_nothing(task):
    one, other = (
        control.train(task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.1, epochs=4)
        for _ in range(2)
    )
    assert one == other
    accuracy, at_once = control.train(
        task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.0, epochs=4
    )
    assert accuracy == pytest.approx([1 / 16] * 5) and at_once == pytest.approx(1 / 4)


def test_prompts_are_drawn_by_the_exact_variance_of_the_present_policy():
    """128 prompts in two halves, batches of 32; probabilities of a batch by hand."""
    halves = Copying(Path(), tokens([0] * 64 + [1] * 64), tokens([0, 1]))
    policy = Bigram()
    drawn = control._drawn(halves, policy, 32, np.random.default_rng(0))
    assert np.mean(np.concatenate([next(drawn) for _ in range(200)]) < 64) == pytest.approx(
        1 / 2, abs=0.01
    )
    with torch.no_grad():
        # After 0: 0 or the end, p = 1/4; after 1: 1/16
        policy.logits[0] = torch.tensor([0.0, -30.0, -30.0, 0.0])
    # p (1 - p) = 48/256 and 15/256: of the nine tenths that follow it, 48/63 are of the first half; half of the others.
    share = 0.9 * 48 / 63 + 0.1 / 2
    assert np.mean(np.concatenate([next(drawn) for _ in range(200)]) < 64) == pytest.approx(
        share, abs=0.01
    )


def test_starts_of_a_seed_share_prompts_and_differ_in_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.tiny.WARMUP_ROWS", 60)
    monkeypatch.setattr(exact, "PROMPTS", {"train_prompts": 8, "heldout_prompts": 4})
    short = {
        start: protocol.STARTS[start] | {"warmup_steps": steps}
        for start, steps in (("medium", 2), ("hard", 1))
    }
    monkeypatch.setattr(exact, "STARTS", short)
    medium, hard = (exact.prepare(tmp_path / start, 1, start) for start in short)
    assert medium.train.read_text() == hard.train.read_text()
    assert (medium.model / "model.safetensors").read_bytes() != (
        hard.model / "model.safetensors"
    ).read_bytes()
    assert exact.prepare(tmp_path / "medium", 1, "medium") == medium  # nothing is added twice
    added = [json.loads(line) for line in medium.heldout.read_text().splitlines()]
    assert [row["datasource"] for row in added] == ["heldout"] * 4 + ["ood"] * exact.OOD_PROMPTS
    digits = [row["input"].removeprefix("s").removesuffix("=") for row in added[4:]]
    assert {len(each) for each in digits} == {3, 4, 5, 6, 7}
    assert all(
        each.isdigit() and "0" not in each and 1 < len(set(each)) < len(each) for each in digits
    )
    read = exact.read(tmp_path / "medium")
    assert len(read.train.prompts) == 8 and len(read.heldout.prompts) == 4
    assert 0 <= read.accuracy(read.policy()) <= 1
