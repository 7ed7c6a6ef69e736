"""What TRL's trainer has as every host has it: the rows of the table in docs/hosts.md that no other test shows."""

import json
import re

import numpy as np
import pytest
import test_trl
from datasets import Dataset
from test_trl import (
    ROLLOUTS,
    TEMPLATE,
    GRPOTrainer,
    Reward,
    arguments,
    prompts,
    remember,
    trainer,
)
from trainings import check_questions, in_ones_own_loop, rows

from openrlhf_dbb import estimators
from openrlhf_dbb.rewards.for_trl import math_answer

model = test_trl.model  # fixtures
watched = test_trl.watched


@pytest.mark.parametrize("estimator", estimators.available())
def test_every_estimator_gives_what_it_gives_in_ones_own_loop(model, tmp_path, watched, estimator):
    reward = Reward()
    made = trainer(model, tmp_path, reward, max_steps=1, ours={"estimator": estimator})
    made.train()
    [(texts, scores, _)] = reward.calls
    expected = in_ones_own_loop(
        tmp_path, estimator, "group_norm", texts, [""] * len(texts), scores, None
    )
    np.testing.assert_allclose(watched[0]["ours"], expected, rtol=1e-5, atol=1e-6)


def test_explain_and_the_page_show_a_step(model, tmp_path, watched, capsys):
    reward = Reward(missing=False)
    data = prompts(4)
    made = trainer(model, tmp_path, reward, data=data, max_steps=1, ours={"label_column": "answer"})
    made.train()
    texts = reward.calls[0][0]
    check_questions(tmp_path, capsys, "run", texts[0], watched[0]["ours"][:ROLLOUTS])


def test_remember_thins_nothing(model, tmp_path):
    made = GRPOTrainer(model, [Reward()], arguments(tmp_path), prompts())
    with pytest.raises(
        ValueError, match=r"thin = 0\.5 changes a training, and remembering changes none"
    ):
        remember(made, store=f"sqlite:///{tmp_path}/openrlhf_dbb.db", run_name="run", thin=0.5)


def test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored(
    model, tmp_path, watched
):
    reward = Reward(missing=False)
    ours = {"label_column": "answer", "thin": 2.0, "keep_rollouts": None}
    made = trainer(model, tmp_path, reward, data=prompts(4), max_steps=1, ours=ours)
    made.train()
    assert set(np.abs(watched[0]["ours"])) == {0.0, 2.0}
    [(texts, scores, columns)] = reward.calls
    expected = in_ones_own_loop(
        tmp_path, "dbb", "group_norm", texts, columns["answer"], scores, None
    )
    kept = rows(tmp_path, "SELECT advantage FROM rollouts")
    assert sorted(value for (value,) in kept) == pytest.approx(sorted(expected))


def test_sources_have_their_shares_of_each_batch(model, tmp_path):
    """Two of eight prompts are of the source that gets half of the draws."""
    data = prompts(8).add_column("origin", ["sums"] * 2 + ["other"] * 6)
    ours = {
        "label_column": "answer", "strategy": "shares", "source_column": "origin",
        "strategy_parameters": {"of": "sums=0.5,rest"},
    }  # fmt: skip
    made = trainer(
        model, tmp_path, Reward(missing=False), data=data, max_steps=2, ours=ours,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    made.train()
    for (metrics,) in rows(tmp_path, "SELECT metrics FROM steps"):
        logged = json.loads(metrics)
        assert logged["source/sums/groups"] == logged["source/other/groups"] == 2
    assert logged["shares/sums/passes"] == 2


def test_known_pass_rates_and_sources_are_columns_of_the_data_set(model, tmp_path):
    """Prompts begin with 3 of 4 right; the first and the third are of one source."""
    data = (
        prompts(4)
        .add_column("rate", [0.75] * 4)
        .add_column("origin", ["sums", "other", "sums", "other"])
    )
    ours = {
        "label_column": "answer",
        "parameters": {"prior_alpha": 1.0, "prior_beta": 1.0, "discount": 1.0},
        "pass_rate_column": "rate",
        "pass_rate_attempts": 4,
        "source_column": "origin",
    }
    made = trainer(model, tmp_path, Reward(missing=False), data=data, max_steps=1, ours=ours)
    known = made.posteriors.predictive()
    np.testing.assert_allclose(known.alpha / (known.alpha + known.beta), (1 + 3) / (2 + 4))
    made.train()
    [(metrics,)] = rows(tmp_path, "SELECT metrics FROM steps")
    assert {"source/sums/groups", "source/other/groups"} & set(json.loads(metrics))


@pytest.mark.parametrize("strategy", ["plain", "dynamic"])
def test_what_a_reward_function_logs_as_read_is_stored(model, tmp_path, strategy):
    def half_right(completions, log_extra, **_):
        log_extra(
            "read", [f"of {text}" if place % 2 else "" for place, text in enumerate(completions)]
        )
        return [float(place % 2) for place in range(len(completions))]

    ours = {"label_column": "answer", "strategy": strategy, "keep_rollouts": None}
    made = trainer(model, tmp_path, half_right, data=prompts(4), max_steps=1, ours=ours)
    made.train()
    kept = rows(tmp_path, "SELECT text, score, read FROM rollouts")
    assert kept and {score for _, score, _ in kept} == {0.0, 1.0}
    for text, score, read in kept:
        assert read == (f"of {text}" if score else None)


def test_our_verifier_tells_trl_what_it_read():
    logged = {}
    scores = math_answer(
        prompts=["1 + 2 = ", [{"role": "user", "content": "2 + 2 = "}]],
        completions=["\\boxed{3}", [{"role": "assistant", "content": "no idea"}]],
        label=["3", "4"],
        log_extra=logged.__setitem__,
    )
    assert scores == [1.0, 0.0]
    assert logged["read"][0] == "3" and logged["read"][1].startswith("no answer")


def test_two_functions_that_tell_what_was_read_are_refused(model, tmp_path):
    def one(completions, log_extra, **_):
        log_extra("read", ["x"] * len(completions))
        return [0.0] * len(completions)

    def other(completions, log_extra, **_):
        return one(completions, log_extra)

    ours = {"label_column": "answer", "verifier": "one"}
    made = trainer(model, tmp_path, [one, other], data=prompts(4), max_steps=1, ours=ours)
    with pytest.raises(ValueError, match=r"log_extra\(\"read\".*; log it from one reward function"):
        made.train()


@pytest.mark.parametrize("strategy", ["plain", "dynamic"])
def test_chosen_prompts_are_probed_and_probes_train_nothing(model, tmp_path, strategy):
    """Of ten probe samples of a prompt, generated eight and two at a time, half are right."""
    asked = []

    def half_right(completions, answer, **_):
        asked.append(len(completions))
        return [float(place % 2) for place in range(len(completions))]

    ours = {
        "label_column": "answer",
        "strategy": strategy,
        "probe_fraction": 1.0,
        "probe_samples": 10,
    }
    made = trainer(
        model, tmp_path, half_right, data=prompts(4), max_steps=1, ours=ours,
        per_device_train_batch_size=2 * ROLLOUTS, gradient_accumulation_steps=1,
    )  # fmt: skip
    made.train()
    assert asked == [2 * ROLLOUTS, 8, 2, 8, 2] and ROLLOUTS == 4
    found = rows(tmp_path, "SELECT samples, successes FROM probes")
    assert found == [(10, 5.0), (10, 5.0)]
    assert rows(tmp_path, "SELECT generated, trained FROM dbb_step") == [(8, 8)]
    [(metrics,)] = rows(tmp_path, "SELECT metrics FROM steps")
    assert json.loads(metrics)["probe/groups"] == 2
    assert {len(made._logs[name]) for name in ("prompt", "completion", "advantages")} == {8}
    assert len(made._logs["extra"]["posterior_mean"]) == 8
    # The prior's 2 rollouts, halved, and the group's 4
    assert rows(tmp_path, "SELECT alpha + beta FROM dbb_history") == [(5.0,), (5.0,)]


def test_remember_probes_nothing(model, tmp_path):
    made = GRPOTrainer(model, [Reward()], arguments(tmp_path), prompts())
    with pytest.raises(ValueError, match=r"probe_fraction = 0\.5 changes a training"):
        remember(made, run_name="run", probe_fraction=0.5)


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize(("opened", "is_paid"), [("", True), ("<think>", False)])
def test_a_thought_that_the_template_opens_and_nobody_ends_earns_nothing(
    model, tmp_path, is_remembered, opened, is_paid
):
    """An untrained model writes one character. A digit is its own label here."""
    scores = []

    def digit(prompts, completions, log_extra, **_):
        labels = [(re.findall(r"\d", said[0]["content"]) or ["x"])[0] for said in completions]
        scores.extend(math_answer(prompts, completions, labels, log_extra))
        return scores

    chats = [[{"role": "user", "content": f"{number}+{number}="}] for number in range(4)]
    data = Dataset.from_dict({"prompt": chats})
    changed = {"max_steps": 1, "max_completion_length": 1}
    if is_remembered:
        made = GRPOTrainer(model, [digit], arguments(tmp_path, **changed), data)
        remember(made, store=f"sqlite:///{tmp_path}/openrlhf_dbb.db", run_name="run")
    else:
        made = trainer(model, tmp_path, digit, data=data, **changed)
    made.processing_class.chat_template = TEMPLATE.replace("}={%", f"}}={opened}{{%")
    made.train()
    assert (1.0 in scores) == is_paid
