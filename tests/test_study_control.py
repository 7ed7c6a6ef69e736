"""The study without its pipeline: exact accuracy, sampling from the full policy, and the control's training."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf_dbb.errors import UsageError  # noqa: E402
from study import __main__ as study  # noqa: E402
from study import control, exact, files, measure, protocol  # noqa: E402
from study.data import ControlRow, PointRow  # noqa: E402
from study.policy_gradient import sample  # noqa: E402
from study.tokens import NOTHING, Tokens  # noqa: E402

END = 3  # of the tokens 0 to 3
PROMPTS = SimpleNamespace(train=SimpleNamespace(prompts=[None] * 2048))


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
    rollouts = 1 if "single" in (arm, control.ARMS[arm].like) else 4
    found, _ = control.train(task, control.ARMS[arm], rollouts=rollouts, seed=1, rate=0.1, epochs=20)
    assert found[0] == pytest.approx(1 / 16)
    assert len(found) == 1 + control.POINTS
    assert 0.15 < found[-1] <= 0.25  # one token decides both whether to go on and whether to end


def test_a_seed_repeats_a_training_and_a_rate_of_0_changes_nothing(task):
    one, other = (control.train(task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.1, epochs=4) for _ in range(2))
    assert one == other
    found, at_once = control.train(task, control.ARMS["dbb"], rollouts=2, seed=5, rate=0.0, epochs=4)
    assert found == pytest.approx([1 / 16] * 5)
    assert at_once == pytest.approx(1 / 4)


def test_a_folder_without_task_or_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no task of the study"):
        exact.read(tmp_path)
    with pytest.raises(UsageError, match="holds no model"):
        exact.Task(tmp_path, tokens([0]), tokens([0])).policy()


def test_the_arms_are_those_of_the_protocol():
    from study import protocol

    runs = {run.arm: run.flags for run in protocol.load("cpu").runs if run.experiment == "n2"}
    runs["single"] = next(run.flags for run in protocol.load("fewer").runs if run.arm == "single")
    assert sorted(runs) == sorted(name for name, arm in control.ARMS.items() if not arm.like)
    for name, flags in runs.items():
        arm = control.ARMS[name]
        assert flags["estimator"] == arm.estimator
        assert flags["method"] == {"dr_grpo": "dr_grpo", "rloo": "single"}.get(arm.form, "grpo")
    assert np.allclose(control.WIDE, (0.98, 0.98))


@pytest.mark.parametrize(
    "arm, other", [("drawn-exact", {"exact": True}), ("no-history", {"estimator": "empirical_bayes"}),
                   ("group-norm", {"form": "group_norm"})]
)  # fmt: skip
def test_an_arm_that_is_like_another_differs_from_it_in_one_thing(arm, other):
    assert control.ARMS[arm] == dataclasses.replace(control.ARMS["single"], like="single", **other)


def test_prompts_are_drawn_by_the_exact_variance_of_the_present_policy():
    """128 prompts in two halves, batches of 32; probabilities of a batch by hand."""
    halves = Copying(Path(), tokens([0] * 64 + [1] * 64), tokens([0, 1]))
    policy = Bigram()
    drawn = control._drawn(halves, policy, 32, np.random.default_rng(0))
    batches = [next(drawn) for _ in range(200)]
    assert all(len(set(batch)) == 32 for batch in batches)
    assert np.mean(np.concatenate(batches) < 64) == pytest.approx(1 / 2, abs=0.01)  # p is 1/16 for both
    with torch.no_grad():
        policy.logits[0] = torch.tensor([0.0, -30.0, -30.0, 0.0])  # after 0: 0 or the end, p = 1/4; after 1: 1/16
    # p (1 - p) = 48/256 and 15/256: of the nine tenths that follow it, 48/63 are of the first half; half of the others.
    share = 0.9 * 48 / 63 + 0.1 / 2
    batches = [next(drawn) for _ in range(200)]
    assert np.mean(np.concatenate(batches) < 64) == pytest.approx(share, abs=0.01)


def test_exact_probabilities_are_refused_where_many_responses_are_right(task):
    with pytest.raises(UsageError, match="only where the whole response is the answer"):
        dataclasses.replace(task, mark=2).probabilities(Bigram())


def test_a_run_is_repeated_with_its_passes_rollouts_and_learning_rate(monkeypatch, tmp_path):
    given = {}

    def train(task, arm, **more):
        given.update(more)
        return [0.1, 0.2, 0.3, 0.4, 0.5], 0.0

    monkeypatch.setattr(control, "read", lambda folder, kind: PROMPTS)
    monkeypatch.setattr(control, "train", train)
    run = next(run for run in protocol.load("cpu").runs if run.name == "long-n2-dbb-s1")
    row, points = control.measure(tmp_path, run, "dbb", 5, 0)
    sizes = {"epochs": 16, "prompts": 128, "mini_batch": 64}
    assert given == {"rollouts": 2, "rate": 2e-4, "seed": 5, "shortest": 0, **sizes}
    assert (row.start_accuracy, row.half_accuracy, row.accuracy) == (0.1, 0.3, 0.5)
    # 2,048 prompts, 16 passes in batches of 128: 256 steps of 256 rollouts.
    assert [(point.step, point.rollouts, point.accuracy) for point in points] == [
        (0, 0, 0.1), (64, 16384, 0.2), (128, 32768, 0.3), (192, 49152, 0.4), (256, 65536, 0.5)
    ]  # fmt: skip
    assert {(point.run, point.experiment, point.arm) for point in points} == {
        ("control-long-n2-dbb-s5", "control-long-n2", "dbb")
    }
    assert control.measure(tmp_path, run, "dbb", 5, 1)[1] == []  # not the policy's own distribution


def test_single_rollouts_are_repeated_in_their_own_batches(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(control, "read", lambda folder, kind: PROMPTS)
    monkeypatch.setattr(control, "train", lambda task, arm, **more: given.update(more, arm=arm) or ([0.0] * 5, 0.0))
    run = next(run for run in protocol.load("fewer").runs if run.name == "few-n1-single-s21")
    _, points = control.measure(tmp_path, run, "drawn-exact", 21, 0)
    assert given["arm"] is control.ARMS["drawn-exact"]
    assert {name: given[name] for name in ("rollouts", "epochs", "prompts", "mini_batch")} == {
        "rollouts": 1, "epochs": 32, "prompts": 256, "mini_batch": 128
    }  # fmt: skip
    assert (points[-1].step, points[-1].rollouts) == (256, 65536)


def test_the_seeds_of_a_control_are_those_of_its_experiments_and_none_is_trained_twice(monkeypatch, tmp_path):
    def trained(folder, run, name, seed, shortest):
        key = (f"control-{run.experiment}-{name}-s{seed}", f"control-{run.experiment}", name, run.n, seed, 0.1)
        row = ControlRow(run.experiment, name, run.n, seed, 0.1, shortest, 0.1, 0.2, 0.3, 0.0)
        return row, [PointRow(*key, 4, 4.0, 0.3)]

    def side_by_side(jobs, lanes, title):
        for _, arguments, _ in jobs:
            asked.append(arguments[2:4])
            yield trained(*arguments)

    asked = []
    monkeypatch.setattr(measure, "prepare_tasks", lambda *_: None)
    monkeypatch.setattr(measure, "_side_by_side", side_by_side)
    chosen = protocol.load("fewer").choose(["few-n8", "few-n1"])
    for seeds in (1, 2):
        measure.measure_control(chosen, tmp_path, 1, seeds, 0)
    arms = ("grpo", "single", "drawn-exact", "no-history", "group-norm")
    assert asked == [(arm, seed) for seed in (21, 22) for arm in arms]
    assert len(files.read(tmp_path / "control.csv", ControlRow)) == 10
    found = files.read(tmp_path / "points.csv", PointRow)
    assert [point.run for point in found[:3]] == [
        "control-few-n8-grpo-s21", "control-few-n1-single-s21", "control-few-n1-drawn-exact-s21"
    ]  # fmt: skip


def test_listing_a_control_is_refused_before_anything_is_made(capsys, tmp_path):
    assert study.main(["--protocol", "fewer", "--output", str(tmp_path / "made"), "--list", "control"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
