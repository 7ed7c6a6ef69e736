"""The reward that compares texts: exact_match."""

import runpy
from pathlib import Path

import pytest

import openrlhf_dbb.rewards

reward_func = runpy.run_path(str(Path(openrlhf_dbb.rewards.__file__).with_name("exact_match.py")))["reward_func"]


def test_only_the_label_itself_counts_and_a_query_without_its_prompt_raises():
    responses, labels = [" 21 <eos>", "21<eos>", "21.0<eos>", "12+9=21<eos>", "01<eos>"], [" 21", 21, "21", "21", "1"]
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0]  # Math-Verify would take 21.0 for 21
    result = reward_func(["12+9=" + response for response in responses], ["12+9="] * 5, labels)
    assert result == {"rewards": rewards, "scores": rewards, "extra_logs": {}, "read": [None] * len(rewards)}
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["2+9=11<eos>"], ["12+9="], ["11"])
