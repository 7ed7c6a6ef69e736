"""What TRL's trainer has as every host has it: the rows of the table in docs/hosts.md that no other test shows."""

import numpy as np
import pytest
from test_trl import ROLLOUTS, Reward, model, prompts, trainer, watched  # noqa: F401
from trainings import check_questions, in_ones_own_loop

from openrlhf_dbb import estimators


@pytest.mark.parametrize("estimator", estimators.available())
def test_every_estimator_gives_what_it_gives_in_ones_own_loop(model, tmp_path, watched, estimator):  # noqa: F811
    reward = Reward()
    made = trainer(model, tmp_path, reward, max_steps=1, ours={"estimator": estimator})
    made.train()
    [(texts, scores, _)] = reward.calls
    expected = in_ones_own_loop(tmp_path, estimator, "group_norm", texts, [""] * len(texts), scores, None)
    np.testing.assert_allclose(watched[0]["ours"], expected, rtol=1e-5, atol=1e-6)


def test_explain_and_the_page_show_a_step(model, tmp_path, watched, capsys):  # noqa: F811
    reward = Reward(missing=False)
    data = prompts(4)
    made = trainer(model, tmp_path, reward, data=data, max_steps=1, ours={"label_column": "answer"})
    made.train()
    texts = reward.calls[0][0]
    check_questions(tmp_path, capsys, "run", texts[0], watched[0]["ours"][:ROLLOUTS])
