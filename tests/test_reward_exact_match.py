"""The reward for answers with one way of writing: the label itself or nothing."""

import importlib.util
from pathlib import Path

import pytest

import openrlhf_dbb.rewards

PATH = Path(openrlhf_dbb.rewards.__file__).with_name("exact_match.py")


@pytest.fixture(scope="module")
def reward_func():
    spec = importlib.util.spec_from_file_location("reward_func", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("21<eos>", "21", 1.0),
        ("21", "21", 1.0),
        ("21<eos><pad><pad>", "21", 1.0),
        ("21<|im_end|>\n", "21", 1.0),
        (" 21 <eos>", " 21", 1.0),
        ("21<eos>", 21, 1.0),
        # what Math-Verify would take for 21
        ("021<eos>", "21", 0.0),
        ("21.0<eos>", "21", 0.0),
        ("12+9=21<eos>", "21", 0.0),
        (r"\boxed{21}<eos>", "21", 0.0),
        ("2 1<eos>", "21", 0.0),
        ("12<eos>", "21", 0.0),
        ("2<eos>1", "21", 0.0),
        ("21<eos>5<eos>", "21", 0.0),
        ("<eos>", "21", 0.0),
    ],
)
def test_only_the_label_itself_is_right(reward_func, response, label, reward):
    result = reward_func(["12+9=" + response], ["12+9="], [label])
    assert result == {"rewards": [reward], "scores": [reward], "extra_logs": {}}


def test_each_response_meets_its_own_label(reward_func):
    queries, prompts = ["1+9=01<eos>", "s21=12<eos>", "s31=12<eos>"], ["1+9=", "s21=", "s31="]
    assert reward_func(queries, prompts, ["01", "12", "13"])["rewards"] == [1.0, 1.0, 0.0]


def test_what_cannot_be_judged_raises(reward_func):
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["2+9=11<eos>"], ["12+9="], ["21"])
    with pytest.raises(ValueError, match=r"--data\.label_key"):
        reward_func(["12+9=<eos>"], ["12+9="], [" "])
    with pytest.raises(ValueError, match="shorter"):
        reward_func(["12+9=21<eos>"], ["12+9="], [])


def test_command_line_finds_it_by_name_and_reads_no_answers_for_majorities():
    pytest.importorskip("openrlhf")
    from openrlhf_dbb.actors.evaluation import answer_of
    from openrlhf_dbb.driver import arguments
    from openrlhf_dbb.errors import UsageError

    urls = arguments.parse(["--preset", "tiny", "--reward.remote_url", "exact_match"]).args.reward.remote_url
    assert urls == [str(PATH)]
    assert answer_of(urls) is None
    with pytest.raises(UsageError, match=r"'exact_mach' is neither .* exact_match"):
        arguments.parse(["--preset", "tiny", "--reward.remote_url", "exact_mach"])
