"""The reward for work shown step by step: only what follows the last "=" is compared with the label."""

import importlib.util
from pathlib import Path

import pytest

import openrlhf_dbb.rewards

PATH = Path(openrlhf_dbb.rewards.__file__).with_name("last_result.py")


@pytest.fixture(scope="module")
def reward_func():
    spec = importlib.util.spec_from_file_location("reward_func", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("93=41<eos>", 1.0),
        ("93=41", 1.0),
        ("93= 41 <eos><pad>", 1.0),
        ("41<eos>", 1.0),  # without steps
        ("7=7=7=41<eos>", 1.0),  # with wrong ones
        ("41=93<eos>", 0.0),
        ("93=41=<eos>", 0.0),
        ("93=141<eos>", 0.0),
        ("93=4 1<eos>", 0.0),
        ("93+41<eos>", 0.0),
        ("<eos>", 0.0),
    ],
)
def test_only_the_last_result_counts(reward_func, response, reward):
    result = reward_func(["30+9-25=" + response], ["30+9-25="], ["41"])
    assert result == {"rewards": [reward], "scores": [reward], "extra_logs": {}}


def test_each_response_meets_its_own_label_and_the_prompts_own_equals_sign_is_no_result(reward_func):
    queries, prompts = ["1+9=01=2<eos>", "8-6=2<eos>", "3-1=<eos>"], ["1+9=", "8-6=", "3-1="]
    assert reward_func(queries, prompts, [2, "3", "3-1"])["rewards"] == [1.0, 0.0, 0.0]


def test_what_cannot_be_judged_raises(reward_func):
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["2+9=11<eos>"], ["12+9="], ["11"])
    with pytest.raises(ValueError, match=r"--data\.label_key"):
        reward_func(["12+9=<eos>"], ["12+9="], [" "])
    with pytest.raises(ValueError, match=r"longer|shorter"):
        reward_func(["12+9=12<eos>"], ["12+9="], [])
    with pytest.raises(ValueError, match=r"longer|shorter"):
        reward_func(["12+9=12<eos>"], [], ["12"])
