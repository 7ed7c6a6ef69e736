"""The study without its pipeline: exact accuracy, sampling from the full policy, and the control's training."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_dbb import cpu

cpu.prepare_driver()

from openrlhf_dbb.errors import UsageError  # noqa: E402
from openrlhf_dbb.study import control, exact, protocol  # noqa: E402
from openrlhf_dbb.study.policy_gradient import sample  # noqa: E402
from openrlhf_dbb.study.tokens import NOTHING, Tokens  # noqa: E402

END = 3  # of the tokens 0 to 3


class Bigram(torch.nn.Module):
    """A policy whose logits depend on the last token only; all tokens are equally likely at first."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(END + 1, END + 1))

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.logits[input_ids])


@dataclass(frozen=True)
class Copying(exact.Task):
    """Prompts 0 and 1, in turn; the answer to a prompt is the prompt and the end token."""

    def policy(self, model=None):
        return Bigram()


def tokens(prompts):
    return Tokens([[p] for p in prompts], torch.tensor([[p, END, NOTHING] for p in prompts]), END)


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


def test_sampling_follows_the_policy_except_that_it_may_not_end_yet():
    policy, generator = Bigram(), torch.Generator().manual_seed(0)
    first = sample(policy, tokens([0]), 4000, generator)[0, :, 0]
    assert (first == END).double().mean().item() == pytest.approx(1 / 4, abs=0.03)  # 4 standard errors
    first = sample(policy, tokens([0]), 4000, generator, shortest=1)[0, :, 0]
    assert not (first == END).any()
    assert (first == 0).double().mean().item() == pytest.approx(1 / 3, abs=0.03)


def test_the_loss_of_an_arm_by_hand():
    there = torch.tensor([[True, True], [True, False]])
    log_ratio = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    advantages = torch.tensor([[2.0], [-1.0]])
    # Ratios 1 and e, the latter clipped to 1.28; then e^-1, clipped to 0.8, where the advantage is negative.
    gains = [2 * 1 + 2 * 1.28, -0.8]
    grpo = control.Arm("point", control.NARROW)
    assert control._loss(log_ratio, advantages, there, grpo).item() == pytest.approx(-(gains[0] / 2 + gains[1] / 1) / 2)
    dr_grpo = control.Arm("point", control.NARROW, form="dr_grpo")
    assert control._loss(log_ratio, advantages, there, dr_grpo).item() == pytest.approx(-(sum(gains) / 2) / 2)


@pytest.mark.parametrize("arm", sorted(control.ARMS))
def test_every_arm_learns_an_easy_task(task, arm):
    found, _ = control.train(task, control.ARMS[arm], rollouts=4, seed=1, rate=0.1, epochs=20)
    assert found[0] == pytest.approx(1 / 16)
    assert len(found) == 21
    assert 0.15 < found[-1] <= 0.25  # one token decides both whether to go on and whether to end


def test_a_seed_repeats_a_training_and_a_rate_of_0_changes_nothing(task):
    one, other = (control.train(task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.1, epochs=2) for _ in range(2))
    assert one == other
    found, at_once = control.train(task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.0, epochs=2)
    assert found == pytest.approx([1 / 16] * 3)
    assert at_once == pytest.approx(1 / 4)


def test_a_folder_without_task_or_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no task of the study"):
        exact.read(tmp_path)
    with pytest.raises(UsageError, match="holds no model"):
        exact.Task(tmp_path, tokens([0]), tokens([0])).policy()


def test_the_arms_are_those_of_the_protocol():
    from openrlhf_dbb.study import protocol

    runs = {run.arm: run.flags for run in protocol.load("cpu").runs if run.experiment == "n2"}
    assert sorted(runs) == sorted(control.ARMS)
    for name, arm in control.ARMS.items():
        assert runs[name]["estimator"] == arm.estimator
        assert runs[name]["method"] == ("dr_grpo" if arm.form == "dr_grpo" else "grpo")
    assert np.allclose(control.WIDE, (0.98, 0.98))


def test_a_run_is_repeated_with_its_passes_rollouts_and_learning_rate(monkeypatch, tmp_path):
    given = {}

    def train(task, arm, **more):
        given.update(more)
        return [0.1, 0.2, 0.3], 0.0

    monkeypatch.setattr(control, "read", lambda folder, kind: None)
    monkeypatch.setattr(control, "train", train)
    run = next(run for run in protocol.load("cpu").runs if run.name == "long-n2-dbb-s1")
    row = control.measure(tmp_path, run, 5, 0)
    assert given == {"epochs": 16, "rollouts": 2, "rate": 2e-4, "seed": 5, "shortest": 0}
    assert (row.start_accuracy, row.half_accuracy, row.accuracy) == (0.1, 0.2, 0.3)
