"""The public Posteriors: text in, advantages out, on both databases, without a training framework."""

import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from store_invariants import check

import estimators
from estimators import RewardEstimator
from openrlhf_dbb import Posteriors, StepExtras
from storage import StoreError, open_store

ROOT = Path(__file__).parents[1]
PROMPTS, LABELS = ["1+1=", "2+2=", "3+3="], ["2", "4", "6"]
DATA = PROMPTS, LABELS
HALF = {"discount": 0.5}
BY_UPDATES = HALF | {"forgetting": "updates", "updates_per_epoch": 1.0}


def group(prompt, rewards):
    """The columns of one group, as ``observe`` takes them."""
    return [PROMPTS[prompt]] * len(rewards), [LABELS[prompt]] * len(rewards), rewards


def history(url, run="demo"):
    with open_store(url) as store:
        rows = store.query(
            "SELECT step, prompt, rollouts, successes, alpha, beta FROM posterior_history "
            "JOIN prompts USING (prompt_id) JOIN runs USING (run_id) WHERE runs.name = :run ORDER BY step, prompt",
            run=run,
        )
    return [tuple(row) for row in rows]


def test_two_steps_by_hand(url):
    with Posteriors.create(url, "demo", *DATA, parameters=HALF) as posteriors:
        first = posteriors.observe(1, *group(0, [1, 1, 1, 1]))
        # alpha, beta = 0.5 + 4, 0.5: all rollouts succeed, and each still gets sqrt(beta / alpha)
        assert first.mean.tolist() == [0.9] * 4 and first.variance == pytest.approx([0.09] * 4)
        assert first.advantages == pytest.approx([1 / 3] * 4)
        assert first.zero_variance.tolist() == first.rescued.tolist() == [1.0] * 4
        second = posteriors.observe(2, *group(0, [0, 0, 1, None]))
        # 2.25 + 1, 0.25 + 2 of the three that were verified
        mean = 3.25 / 5.5
        assert second.mean == pytest.approx([mean] * 4)
        deviation = math.sqrt(mean * (1 - mean))
        assert second.advantages == pytest.approx([-mean / deviation] * 2 + [(1 - mean) / deviation, 0])
        assert second.metrics["estimator/missing"] == 0.25
        assert posteriors.step == 2
    assert history(url) == [(1, "1+1=", 4, 4.0, 4.5, 0.5), (2, "1+1=", 3, 1.0, 3.25, 2.25)]


def test_rows_of_a_prompt_form_one_group_wherever_they_stand(url):
    with Posteriors.create(url, "demo", *DATA, estimator="point") as posteriors:
        texts, labels = ["1+1=", "2+2=", "1+1=", "2+2="], ["2", "4", "2", "4"]
        scored = posteriors.observe(1, texts, labels, np.array([1.0, 5.0, 0.0, 7.0]), form="dr_grpo")
    assert scored.advantages.tolist() == [0.5, -1, -0.5, 1]
    assert scored.group_std == pytest.approx([math.sqrt(0.5), math.sqrt(2)] * 2)


def test_a_resume_undoes_the_steps_after_the_checkpoint(url):
    with Posteriors.create(url, "demo", *DATA, parameters=HALF) as posteriors:
        posteriors.observe(1, *group(0, [1, 0]))
        posteriors.checkpoint(1, "step1")
        posteriors.observe(2, *group(0, [0, 0]))
        lost = posteriors.observe(3, *group(1, [1, 1]))
    with Posteriors.resume(url, "demo", *DATA, step=1) as posteriors:
        assert (posteriors.step, posteriors.estimator) == (1, estimators.build("dbb", discount=0.5))
        posteriors.observe(2, *group(1, [1, 1]))
        again = posteriors.observe(3, *group(0, [1, 1]))
        posteriors.finish()
    assert history(url) == [
        (1, "1+1=", 2, 1.0, 1.5, 1.5), (2, "2+2=", 2, 2.0, 2.5, 0.5), (3, "1+1=", 2, 2.0, 2.75, 0.75),
    ]  # fmt: skip
    assert lost.mean.tolist() == [2.5 / 3] * 2 and again.mean == pytest.approx([2.75 / 3.5] * 2)


def test_roll_back_in_the_middle_of_a_run(url):
    with Posteriors.create(url, "demo", *DATA, parameters=HALF) as posteriors:
        for step in (1, 2, 3):
            posteriors.observe(step, *group(0, [1, 1]))
        posteriors.roll_back(1)
        assert posteriors.step == 1
        assert posteriors.observe(2, *group(0, [0, 0])).mean == pytest.approx([1.25 / 3.5] * 2)


def test_without_a_step_a_resume_continues_after_the_last_one(url):
    with Posteriors.create(url, "demo", *DATA, estimator="auto") as posteriors:
        posteriors.observe(1, *group(0, [1, 0]))
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        assert posteriors.step == 1
        posteriors.observe(2, *group(0, [1, 0]))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_warm_start_begins_with_another_runs_posteriors(url, new_url, kind, elsewhere):
    source = new_url(kind) if elsewhere else url
    with Posteriors.create(source, "old", *DATA, parameters=HALF) as old:
        old.observe(1, *group(0, [1, 1, 1, 1]))
        old.finish()
    options = {"warm_start": "old", "warm_start_weight": 0.5} | ({"warm_start_store": source} if elsewhere else {})
    with Posteriors.create(url, "new", *DATA, parameters=HALF, **options) as new:
        assert (new.warm_start.matched, new.warm_start.unmatched) == (1, 2)
        # 0.5 * 0.5 * 4.5 + 2, 0.5 * 0.5 * 0.5
        assert new.observe(1, *group(0, [1, 1])).mean == pytest.approx([3.125 / 3.25] * 2)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_warm_start_goes_on_with_the_count_of_updates(url, new_url, kind, elsewhere):
    """So that the groups of the new run are later than all of the old one, and none moves a prior back."""
    source = new_url(kind) if elsewhere else url
    with Posteriors.create(source, "old", *DATA, parameters=BY_UPDATES) as old:
        old.observe(1, *group(0, [1, 1, 1, 1]))
        old.observe(2, *group(1, [0, 0]))
    options = {"warm_start": "old"} | ({"warm_start_store": source} if elsewhere else {})
    with Posteriors.create(url, "new", *DATA, parameters=BY_UPDATES, **options) as new:
        new.observe(1, *group(1, [1, 1]))
        new.settle()
        ids = np.array([new.prompt_ids[key] for key in zip(*DATA, strict=True)])
        state = dict(zip(new.estimator.state_fields, new.run.load(ids[:2]).state.T, strict=True))
        state |= new.run.load_shared()
        # (0.5 + 4, 0.5) at update 1; (0.5, 0.5 + 2) at update 2, half of it left at update 3
        wanted = {"alpha": [4.5, 2.25], "beta": [0.5, 1.25], "seen_at": [1, 3], "first_at": [1, 2], "updates": [3]}
        assert {field: values.tolist() for field, values in state.items()} == wanted
        # Observed in the new run's second step, generated in its first: update 3.
        new.estimator.observe_at(state, np.array([0]), [[0.0, 0.0]], [1.0])
    wanted = {"alpha": [1.125, 2.25], "beta": [2.125, 1.25], "seen_at": [3, 3], "first_at": [1, 2], "updates": [4]}
    assert {field: values.tolist() for field, values in state.items()} == wanted


def test_a_state_without_the_earliest_update_is_refused(new_url):
    url = new_url("sqlite")
    with open_store(url) as store:
        store.create_run(
            "old", estimator="dbb", estimator_version=1, parameters=BY_UPDATES,
            state_fields=("alpha", "beta", "seen_at"), model="", dataset="", dataset_digest="", reward="", config={},
        )  # fmt: skip
    kept = r"by version 1 of estimator 'dbb' \(state alpha, beta, seen_at\), installed is version 1 "
    with pytest.raises(ValueError, match=kept + r"\(alpha, beta, seen_at, first_at\); start a new run"):
        Posteriors.resume(url, "old", *DATA)
    with pytest.raises(StoreError, match=r"'old' keeps \['alpha', 'beta', 'seen_at'\] .*; name a run with the same"):
        Posteriors.create(url, "new", *DATA, parameters=BY_UPDATES, warm_start="old")


def test_a_warm_start_that_does_not_fit_leaves_no_run(url):
    with Posteriors.create(url, "old", ["other"], [""]) as old:
        old.observe(1, ["other"], [""], [1])
    with pytest.raises(StoreError, match="none of the 3 prompts of run 'new'"):
        Posteriors.create(url, "new", *DATA, warm_start="old")
    with pytest.raises(StoreError, match="there is no run 'nobody'"):
        Posteriors.create(url, "new", *DATA, warm_start="nobody")
    with open_store(url) as store:
        assert [run.name for run in store.runs()] == ["old"]


def test_an_open_store_is_shared_and_stays_open(store):
    with Posteriors.create(store, "demo", *DATA) as posteriors:
        posteriors.observe(1, *group(0, [1, 0]))
    assert store.find_run("demo").last_step == 1


@dataclass(frozen=True)
class Halved(RewardEstimator):
    """Half the success rate of the last group: an estimator that this package does not know."""

    part: float = field(default=0.5, metadata={"help": "factor"})
    name: ClassVar[str] = "halved"
    state_fields: ClassVar[tuple[str, ...]] = ("rate",)

    def initial_state(self, num_prompts):
        return {"rate": np.zeros(num_prompts)}

    def update(self, state, rewards_P_G):
        return {"rate": self.part * np.nanmean(rewards_P_G, axis=1)}

    def estimate(self, state, rewards_P_G):
        return estimators.Estimate(state["rate"], np.ones(len(state["rate"])))


def test_an_estimator_of_ones_own_is_an_object_and_is_found_again(url, monkeypatch):
    monkeypatch.setitem(sys.modules, Halved.__module__, sys.modules[Halved.__module__])
    with Posteriors.create(url, "demo", *DATA, estimator=Halved(part=0.25)) as posteriors:
        assert posteriors.observe(1, *group(0, [1, 1])).advantages.tolist() == [0.75, 0.75]
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        assert posteriors.estimator == Halved(part=0.25)


def test_what_was_not_trained_on_is_counted_and_estimated_from(url):
    with Posteriors.create(url, "demo", *DATA, parameters=HALF) as posteriors:
        texts, labels, rewards = (a + b for a, b in zip(group(0, [1, 0]), group(1, [0, 0]), strict=True))
        scored = posteriors.observe(
            1, texts, labels, rewards, extras=StepExtras(
                tokens=[3, 4, 5, 6], trained=[True, True, False, False],
                skipped={("3+3=", "6"): 2}, replayed={("1+1=", "2"): (1, 7)},
        ))  # fmt: skip
        posteriors.settle()
        used = posteriors.store.query(
            "SELECT generated, generated_tokens, trained, trained_tokens, replayed, replayed_tokens, skipped FROM steps"
        )
    assert [tuple(row) for row in used] == [(4, 18, 2, 7, 1, 7, 2)]
    assert scored.metrics["rollout/filtered"] == 0.5 and scored.metrics["rollout/skipped"] == 2
    assert scored.metrics["estimator/zero_variance"] == 0  # of the rollouts that are trained on
    assert [row[1] for row in history(url)] == ["1+1=", "2+2="]


BAD = [
    ((2, *group(0, [1])), {}, "run 'demo' is at step 0; the next step is 1, not 2"),
    ((1, [], [], []), {}, "none of the 0 rollouts"),
    ((1, ["1+1="], ["2"], [1, 0]), {}, r"rewards has shape \(2,\); pass one value for each of the 1 rollouts"),
    ((1, ["1+1="], [], [1]), {}, r"labels has shape \(0,\)"),
    ((1, *group(0, [1, 0])), {"extras": StepExtras(tokens=[1])}, r"tokens has shape \(1,\)"),
    ((1, ["who?"], ["2"], [1]), {}, "prompt 'who[?]' with label '2' is not in the data set"),
    ((1, *group(0, [None, math.nan])), {}, "none of the 2 rollouts of the step could be verified; fix the verifier"),
    ((1, *group(0, [0.5])), {}, r"score 0.5 of prompt '1\+1=' is not 0 or 1, as dbb needs; with partial_credit"),
    ((1, *group(0, [2])), {}, r"score 2 of prompt '1\+1=' is not 0 or 1, as dbb needs; use an estimator of real"),
    (
        (1, *group(0, [1])),
        {"form": "gae"},
        "unknown advantage form 'gae'; known: dr_grpo, group_norm, reinforce_baseline, rloo",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_bad_input_is_one_error_and_changes_nothing(new_url, arguments, options, message):
    url = new_url("sqlite")
    with Posteriors.create(url, "demo", *DATA, parameters=HALF) as posteriors:
        with pytest.raises(ValueError, match=message):
            posteriors.observe(*arguments, **options)
        assert posteriors.observe(1, *group(0, [1, 1, 1, 1])).mean.tolist() == [0.9] * 4
    assert history(url) == [(1, "1+1=", 4, 4.0, 4.5, 0.5)]


def test_what_cannot_be_opened_is_one_error(new_url):
    url = new_url("sqlite")
    with pytest.raises(ValueError, match="unknown estimator 'dbbb'"):
        Posteriors.create(url, "demo", *DATA, estimator="dbbb")
    with pytest.raises(ValueError, match="belong to an estimator's name"):
        Posteriors.create(url, "demo", *DATA, estimator=estimators.build("dbb"), parameters=HALF)
    with pytest.raises(StoreError, match="there is no store at"):
        Posteriors.resume(new_url("sqlite"), "demo", *DATA)
    with Posteriors.create(url, "demo", *DATA) as posteriors:
        posteriors.finish()
    with pytest.raises(StoreError, match="there is a run named 'demo'"):
        Posteriors.create(url, "demo", *DATA)
    with pytest.raises(StoreError, match="run 'demo' finished at step 0"):
        Posteriors.resume(url, "demo", *DATA)
    with open_store(url) as store:
        store.create_run(
            "old", estimator="dbb", estimator_version=0, parameters={}, state_fields=("alpha", "beta"), model="",
            dataset="", dataset_digest="", reward="", config={},
        )  # fmt: skip
    with pytest.raises(ValueError, match="run 'old' was written by version 0 of estimator 'dbb'"):
        Posteriors.resume(url, "old", *DATA)


def test_it_needs_no_training_framework(new_url):
    code = (
        "from openrlhf_dbb import Posteriors; import sys; "
        f"Posteriors.create({new_url('sqlite')!r}, 'demo', ['p'], ['1']).close(); "
        "print(*sorted({'torch', 'ray', 'openrlhf', 'vllm', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


PREDICTED = {"estimator": "predicted_prior", "parameters": {"updates_per_epoch": 2.0}}


def test_text_features_come_from_the_prompts_and_the_weights_from_the_store(url):
    """A run that is interrupted and taken back goes on as one that is not, to the last bit."""
    steps = [group(0, [1, 1]), group(1, [0, 1]), group(0, [1, 0]), group(2, [0, 0]), group(1, [1, 1])]

    def observe(posteriors, first, last):
        return [posteriors.observe(step, *steps[step - 1]).mean[0] for step in range(first, last + 1)]

    with Posteriors.create(url, "whole", *DATA, **PREDICTED) as whole:
        wanted = observe(whole, 1, 5)
        whole.settle()
        weights = whole.run.load_shared()["weights"]
    with Posteriors.create(url, "parts", *DATA, **PREDICTED) as parts:
        assert observe(parts, 1, 4) == wanted[:4]
        parts.roll_back(2)
        assert observe(parts, 3, 3) == wanted[2:3]
    with Posteriors.resume(url, "parts", *DATA, step=1) as parts:
        assert observe(parts, 2, 5) == wanted[1:]
        parts.settle()
        np.testing.assert_array_equal(parts.run.load_shared()["weights"], weights)
    assert len(weights) == estimators.FEATURES["text"] + 1 and np.abs(weights[:-1]).max() > 0
    with open_store(url) as store:
        assert check(store) == []


def test_a_first_visit_profits_from_prompts_that_read_alike(url):
    """Prompts with ? succeed, those with ! fail: the first visit of one more is scored accordingly."""
    prompts = [f"{number} {mark}" for number in range(40) for mark in "?!"]
    data = prompts, ["1"] * len(prompts)
    with Posteriors.create(url, "demo", *data, **PREDICTED) as posteriors:
        for step in (1, 2, 3):
            seen = prompts[20 * step : 20 * step + 20]
            posteriors.observe(step, seen, ["1"] * 20, [float("?" in prompt) for prompt in seen])
        alike = posteriors.observe(4, ["0 ?", "0 ?", "0 !", "0 !"], ["1"] * 4, [1, 0, 1, 0])
    assert alike.mean[0] > 0.6 and alike.mean[2] < 0.4  # (2 m + 1) / 4, 0.5 without a prediction


def test_a_warm_start_takes_the_weights_along_and_refuses_other_features(url):
    none = {"estimator": "predicted_prior", "parameters": {"updates_per_epoch": 2.0, "features": "none"}}
    with Posteriors.create(url, "old", *DATA, **PREDICTED) as old:
        for step in (1, 2):
            old.observe(step, *group(step, [1, 1]))
        old.settle()
        learnt = old.run.load_shared()
    with Posteriors.create(url, "new", *DATA, warm_start="old", **PREDICTED) as new:
        assert new.run.load_shared()["weights"].tolist() == learnt["weights"].tolist()
        found = new.observe(1, *group(0, [1, 0])).mean[0]
    assert found > 0.6  # (2 m + 1) / 4 with m above 0.7, since all others succeeded
    with pytest.raises(StoreError, match="run 'old' predicts from features 'text', and this run from 'none'"):
        Posteriors.create(url, "other", *DATA, warm_start="old", **none)
    with open_store(url) as store:
        assert [run.name for run in store.runs()].count("other") == 0


HIDDEN = {"estimator": "predicted_prior", "parameters": {"updates_per_epoch": 2.0, "features": "hidden"}}


def hidden_of(values):
    """Features that are the first column alone, (prompts, 64)."""
    features = np.zeros((len(values), estimators.FEATURES["hidden"]))
    features[:, 0] = values
    return features


def test_hidden_features_come_from_outside_in_the_order_of_the_prompts(url):
    # The third row is the first prompt again; the first of equal ones counts.
    data = [PROMPTS[1], PROMPTS[0], PROMPTS[1], PROMPTS[2]], [LABELS[1], LABELS[0], LABELS[1], LABELS[2]]
    with Posteriors.create(url, "demo", *data, **HIDDEN) as posteriors:
        with pytest.raises(ValueError, match="reads features 'hidden', which only a trainer has; pass them to"):
            posteriors.observe(1, *group(0, [1, 1]))
        posteriors.set_features(hidden_of([-1.0, 1.0, 99.0, 1.0]))
        for step, (prompt, rewards) in enumerate([(0, [1, 1, 1, 1]), (1, [0, 0, 0, 0])], start=1):
            posteriors.observe(step, *group(prompt, rewards))
        # Seen were 1 with successes and -1 with failures, and the third prompt is at 1.
        found = posteriors.observe(3, *group(2, [1, 0])).mean[0]
        assert found > 0.55
        posteriors.roll_back(2)
        assert posteriors.observe(3, *group(2, [1, 0])).mean[0] == found
        posteriors.roll_back(2)
        posteriors.set_features(hidden_of([-1.0, 1.0, 99.0, -1.0]))
        assert posteriors.observe(3, *group(2, [1, 0])).mean[0] < 0.45


@pytest.mark.parametrize(
    "features", [np.zeros((3, 5)), np.zeros((2, 64)), hidden_of([0.0, np.nan, 0.0])], ids=["width", "rows", "nan"]
)
def test_features_that_do_not_fit_are_refused(url, features):
    with (
        Posteriors.create(url, "demo", *DATA, **HIDDEN) as posteriors,
        pytest.raises(ValueError, match="pass finite numbers of shape"),
    ):
        posteriors.set_features(features)


def test_features_that_are_not_read_are_refused(url):
    with (
        Posteriors.create(url, "demo", *DATA, **PREDICTED) as posteriors,
        pytest.raises(ValueError, match="estimator 'predicted_prior' reads features 'text', not 'hidden'"),
    ):
        posteriors.set_features(hidden_of([0.0, 0.0, 0.0]))


def test_a_taken_name_gets_a_number_where_that_is_asked_for(new_url):
    url = new_url("sqlite")
    for wanted in ("demo", "demo-2", "demo-3"):
        with Posteriors.create(url, "demo", *DATA, if_exists="new") as posteriors:
            assert posteriors.run.record.name == wanted
