"""Warnings about a run that learns nothing or gets worse."""

import re

import pytest

pytest.importorskip("ray")

from openrlhf_dbb import Posteriors, upstream
from openrlhf_dbb.actors.progress import Progress, StepOutcome
from openrlhf_dbb.driver import arguments, prepare
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.platform import machine


@pytest.mark.parametrize(
    ("outcomes", "kinds"),
    [
        # Of the last 512 rollouts 0 are right, or 12 (2.3 %), above the 2 % of the rule. Other rewards say nothing.
        ([(512, 4, 0), (512, 9, 0), (512, 3, 0), (512, 0, 0)], {"rare"}),
        ([(512, 4, 0), (512, 17, 0), (512, 15, 0), (512, 12, 0)], set()),
        ([(512, float("nan"), 0)], set()),
        # Too few say nothing; several steps count together: 4 of 256, and 8 of 256, which are 3.1 %.
        ([(64, 0, 0)] * 3, set()),
        ([(64, 60, 0)] * 9 + [(64, 1, 0)] * 4, {"rare"}),
        ([(64, 1, 0)] * 9 + [(64, 2, 0)] * 4, set()),
        # More than half of the responses are cut; more than one in twenty has no verdict.
        ([(64, 32, 20)], set()),
        ([(64, 32, 40)], {"cut"}),
        ([(76, 60, 0, 4)], set()),
        ([(75, 60, 0, 5)], {"missing"}),
        ([(0, 0, 6, 8)], {"missing", "cut"}),  # nothing could be verified
    ],
)
def test_steps_that_teach_little_are_named(outcomes, kinds):
    assert warned(outcomes=[StepOutcome(*each) for each in outcomes]).keys() == kinds


def warned(samples=512, **progress):
    return Progress(**progress).troubles(
        held_out_samples=samples, max_new_tokens=24, punishes_failures=True
    )


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Function: OpenRLHF's trainer of a new run with these flags, before its first step; it has no actors."""
    monkeypatch.chdir(tmp_path)
    machine.add_shims()
    with upstream.imports_for_driver():
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
    words = [
        "--preset",
        "tiny",
        "--data.max_samples",
        "64",
        "--run_name",
        "mine",
        "--logger.tensorboard_dir",
        "",
    ]

    def begin(*flags, progress):
        prepared = prepare.begin(prepare.prepare(arguments.parse([*words, *flags]), None))
        args = prepared.settings.openrlhf_args()
        before_training(prepared)
        return PosteriorTrainer(
            args.actor.model_name_or_path,
            LightBackend(args),
            *[None] * 5,
            store_url=prepared.store_url,
            run_uuid=prepared.run.uuid,
            checkpoint=None,
            rows=prepared.prompts.rows,
            sources=None,
            benchmarks={},
            progress=progress,
        )

    return begin


def before_training(prepared):
    """Three visits to one prompt yield no score."""
    texts = prepared.prompts.texts
    labels = prepared.prompts.labels
    with Posteriors.resume(prepared.store_url, prepared.run.uuid, texts, labels) as posteriors:
        for step in (1, 2, 3):
            posteriors.observe(step, [texts[0]] * 2, [labels[0]] * 2, [None, None])


@pytest.mark.parametrize(
    ("estimator", "form", "advised"),
    [("dbb", "group_norm", True), ("point", "group_norm", False), ("dbb", "batch_centered", False)],
)
def test_another_method_is_advised_where_the_advantages_of_a_step_do_not_sum_to_0(
    trainer, estimator, form, advised
):
    flags = ["--estimator", estimator, "--algo.advantage.estimator", form]
    lines = trainer(*flags, progress=Progress(outcomes=[StepOutcome(512, 0, 0)])).warnings()
    assert ("--method centered" in lines["rare"]) == advised


def test_a_prompt_that_no_visit_could_score_is_named_with_the_command_that_lists_all(trainer):
    lines = trainer(progress=Progress()).warnings()
    assert re.search(r"\b1 prompts .* such as '[^']+'; the command prompts", lines["unverified"])


def test_held_out_accuracy_falls_if_it_is_lower_by_two_standard_errors():
    # 3.2 -> 0.2 % of 256: 3.0 points, standard error of the difference 1.1 points
    assert warned(accuracy={0: 0.032, 4: 0.05, 8: 0.002}, samples=256).keys() == {"falling"}
    # 40 -> 38 % of 512: 2 points, standard error 3 points
    assert warned(accuracy={0: 0.40, 8: 0.38}) == {}


def test_log_probs_that_are_far_apart_mean_other_weights_in_vllm():
    assert (warned(difference=0.05), warned(difference=0.3).keys()) == ({}, {"weights"})


def test_a_cut_response_is_the_cause_of_rare_successes_and_a_missing_end_token_that_of_cuts():
    outcomes = [StepOutcome(512, 0, 400)]
    said = warned(outcomes=outcomes)
    assert said.keys() == {"cut"} and "raise --rollout.max_new_tokens" in said["cut"]
    said = warned(outcomes=outcomes, has_end_token=False)
    assert "no end token" in said["cut"] and "max_new_tokens" not in said["cut"]
