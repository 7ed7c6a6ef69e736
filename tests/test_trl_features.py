"""What TRL's trainer has as every host has it: the rows of the table in docs/hosts.md that no other test shows."""

import json

import numpy as np
import pytest
import test_trl
from test_trl import ROLLOUTS, GRPOTrainer, Reward, arguments, prompts, remember, trainer
from trainings import check_questions, in_ones_own_loop, rows

from openrlhf_dbb import estimators

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
