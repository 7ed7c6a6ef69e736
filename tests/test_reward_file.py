"""A reward file is tried before a training: a broken one is refused, and one that pays for the prompt warns."""

import pytest

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILE, reward_file

CONTAINS = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(labels[0] in queries[0])]}\n"


@pytest.fixture
def check(tmp_path):
    """Function: try a file with this source on some prompts and labels."""

    def run(source, prompts=("5 or 7?",), labels=("6",)):
        (tmp_path / "my_reward.py").write_text(source)
        return reward_file.check(str(tmp_path / "my_reward.py"), prompts, labels)

    return run


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def reward_func(queries:\n", "SyntaxError: "),
        ("import foo\n", "ModuleNotFoundError: No module named 'foo'"),
        ("def rewards(queries, prompts, labels): ...\n", "KeyError: 'reward_func'"),
        ("import os\nos._exit(7)\n", "its process ended with code 7"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(check, tmp_path, source, problem):
    with pytest.raises(UsageError) as refused:
        check(source)
    assert str(refused.value).startswith(f"--reward.remote_url {tmp_path}/my_reward.py: {problem}")
    assert "\n" not in str(refused.value)


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"


@pytest.mark.parametrize("source", ["print('hello')\n", "import beside\n", THREAD])
def test_a_file_that_works_is_accepted_whatever_else_it_does(check, tmp_path, monkeypatch, source):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    assert check(source + CONTAINS) is None


def test_a_reward_that_pays_for_the_prompt_is_named_with_the_share(check):
    warning = check(CONTAINS, ["5 or 7?", "2 + 3 ="] * 2, ["5", "5"] * 2)
    assert warning.startswith("my_reward.py, given the prompt itself as the response, scores 50% of 4 sampled prompts")
    prompts = [f"{number}?" for number in range(1000)]
    assert "100% of 16 sampled prompts" in check(CONTAINS, prompts, [str(number) for number in range(1000)])
    assert reward_file.check(str(MATH_FILE), ["5"], ["5"]) is None  # the rewards of this package are not tried


def test_a_function_that_fails_on_prompts_or_hangs_is_a_warning(check, monkeypatch):
    failing = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1 / 0]}\n"
    assert check(failing).endswith("failed: ZeroDivisionError: division by zero")
    monkeypatch.setattr(reward_file, "LIMIT_S", 0.5)
    assert "no result within 0.5 s" in check("import time\ntime.sleep(1000)\n")
