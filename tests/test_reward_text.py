"""The reward that compares texts: exact_match."""

import runpy
from pathlib import Path

import pytest

import openrlhf_dbb.rewards

FOLDER = Path(openrlhf_dbb.rewards.__file__).parent
reward_func = runpy.run_path(str(FOLDER / "exact_match.py"))["reward_func"]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (" 21 <eos>", " 21", 1.0),
        ("21<eos>", 21, 1.0),
        ("21.0<eos>", "21", 0.0),  # Math-Verify would take this for 21
        ("12+9=21<eos>", "21", 0.0),
    ],
)
def test_only_the_label_itself_counts(response, label, reward):
    result = reward_func(["12+9=" + response], ["12+9="], [label])
    assert result == {"rewards": [reward], "scores": [reward], "extra_logs": {}}


def test_each_response_meets_its_own_label_and_a_query_without_its_prompt_raises():
    queries, prompts = ["1+9=01<eos>", "s21=12<eos>", "s31=12<eos>"], ["1+9=", "s21=", "s31="]
    assert reward_func(queries, prompts, ["01", "12", "13"])["rewards"] == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["2+9=11<eos>"], ["12+9="], ["11"])
