"""Warnings about a run that learns nothing or gets worse."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from openrlhf_dbb import estimators, upstream
from openrlhf_dbb.actors.progress import Progress, StepOutcome
from openrlhf_dbb.platform import machine


def warned(outcomes=(), accuracy=None, samples=512, difference=0.0):
    progress = Progress(outcomes=outcomes, accuracy=accuracy or {}, difference=difference)
    return progress.troubles(held_out_samples=samples, max_new_tokens=24, punishes_failures=True)


@pytest.mark.parametrize(
    ("right", "kinds"),
    [([4, 9, 3, 0], {"rare"}), ([4, 17, 15, 12], set()), ([float("nan")], set())],
)
def test_rare_successes_among_the_last_rollouts_are_named(right, kinds):
    # Of the last 512 rollouts 0 are right, or 12 (2.3 %), above the 2 % of the rule. Other rewards say nothing.
    assert warned([StepOutcome(512, count, 0) for count in right]).keys() == kinds


@pytest.mark.parametrize(
    ("estimator", "form", "advised"),
    [("dbb", "group_norm", True), ("point", "group_norm", False), ("auto", "group_norm", False),
     ("dbb", "batch_centered", False)],
)
def test_another_method_is_advised_where_the_advantages_of_a_step_do_not_sum_to_0(estimator, form, advised):
    machine.add_shims()
    with upstream.imports_for_driver():
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
    args = {"algo": SimpleNamespace(advantage=SimpleNamespace(estimator=form)),
            "eval": SimpleNamespace(n_samples_per_prompt=1), "rollout": SimpleNamespace(max_new_tokens=24)}  # fmt: skip
    run = SimpleNamespace(
        _posteriors=SimpleNamespace(estimator=estimators.build(estimator)),
        _held_out=None,
        args=SimpleNamespace(**args),
        progress=Progress(outcomes=[StepOutcome(512, 0, 0)]),
        _sampler=SimpleNamespace(note="drawn evenly"),
    )
    said = PosteriorTrainer.warnings(run)
    assert ("--method centered" in said["rare"], "drawn evenly" in said.values()) == (advised, True)


def test_too_few_rollouts_say_nothing_and_several_steps_count_together():
    assert warned([StepOutcome(64, 0, 0)] * 3) == {}
    assert warned([StepOutcome(64, 60, 0)] * 9 + [StepOutcome(64, 1, 0)] * 4).keys() == {"rare"}  # 4 of 256
    assert warned([StepOutcome(64, 1, 0)] * 9 + [StepOutcome(64, 2, 0)] * 4) == {}  # 8 of 256 are 3.1 %


def test_held_out_accuracy_falls_if_it_is_lower_by_two_standard_errors():
    # 3.2 -> 0.2 % of 256: 3.0 points, standard error of the difference 1.1 points
    assert warned(accuracy={0: 0.032, 4: 0.05, 8: 0.002}, samples=256).keys() == {"falling"}
    # 40 -> 38 % of 512: 2 points, standard error 3 points
    assert warned(accuracy={0: 0.40, 8: 0.38}) == {}
    assert warned(accuracy={0: 0.40}) == {}


def test_responses_that_are_mostly_cut_are_named_with_the_limit():
    said = warned([StepOutcome(64, 32, 40)])
    assert said.keys() == {"cut"} and "62% of the last 64 responses" in said["cut"]
    assert warned([StepOutcome(64, 32, 20)]) == {}


def test_more_than_one_rollout_in_twenty_without_a_verdict_is_named():
    assert warned([StepOutcome(76, 60, 0, missing=4)]) == {}
    said = warned([StepOutcome(75, 60, 0, missing=5)])["missing"]
    assert said.startswith("6.2 % of the last 80 rollouts could not be verified")


def test_log_probs_far_apart_mean_other_weights_in_vllm():
    assert warned(difference=0.05) == {}
    assert "differ by 0.3 nats a token" in warned(difference=0.3)["weights"]
