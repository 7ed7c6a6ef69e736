"""A reward file is tried before a training: a broken one is refused in one line, one that pays for nothing warns."""

import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import reward_file

FUNCTION = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n"


@pytest.fixture
def check(tmp_path):
    """Function: import a file with this source; what is wrong with it, after its name."""

    def run(source):
        file = tmp_path / "my_reward.py"
        file.write_text(textwrap.dedent(source))
        with pytest.raises(UsageError) as refused, reward_file.tried(str(file)):
            pass
        start = f"--reward.remote_url {file}: "
        assert str(refused.value).startswith(start)
        return str(refused.value).removeprefix(start)

    return run


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os\n\nimport foo\n", "line 3: ModuleNotFoundError: No module named 'foo'"),
        ("import os\ndef reward_func(queries:\n", "line 2: "),
        ("def load():\n    return open('/no/such/file')\n\nload()\n", "line 2: FileNotFoundError: [Errno 2]"),
        ("x = 1\nraise SystemExit(3)\n", "line 2: SystemExit: 3"),
        ("def rewards(queries, prompts, labels): ...\n", "it defines no reward_func(queries, prompts, labels)"),
        ("reward_func = 5\n", "its reward_func is no function but int"),
        ("async def reward_func(queries, prompts, labels): ...\n", "its reward_func is async, which OpenRLHF does"),
        (
            "def reward_func(queries, prompts): ...\n",
            "its reward_func is not called as reward_func(queries, prompts, labels): too many positional arguments",
        ),
        ("import os\nos._exit(7)\n", "its import ended Python with exit code 7"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(check, source, problem):
    said = check(source)
    assert said.startswith(problem)
    assert "\n" not in said


@pytest.mark.parametrize(
    "source",
    [
        FUNCTION,
        "print('hello')\n" + FUNCTION,
        "def reward_func(queries, prompts, labels, **options): ...\n",
        "class Reward:\n    def __call__(self, queries, prompts, labels): ...\nreward_func = Reward()\n",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n" + FUNCTION,
        "import beside\n" + FUNCTION,
    ],
)
def test_a_file_that_works_is_accepted_and_nothing_of_it_stays(tmp_path, monkeypatch, source):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    (tmp_path / "reward.py").write_text(source)
    before = set(sys.modules)
    with reward_file.tried(str(tmp_path / "reward.py")):
        pass
    assert set(sys.modules) == before


def test_an_import_that_does_not_end_is_given_up(check, monkeypatch):
    monkeypatch.setattr(reward_file, "IMPORT_LIMIT_S", 0.5)
    assert check("import time\ntime.sleep(1000)\n") == "its import has not ended after 0.5 s"


def test_what_else_is_refused_meanwhile_ends_the_import(tmp_path):
    (tmp_path / "reward.py").write_text("import time\ntime.sleep(1000)\n")
    began = time.monotonic()
    with pytest.raises(UsageError, match="the data"), reward_file.tried(str(tmp_path / "reward.py")):
        raise UsageError("the data")
    assert time.monotonic() - began < 100
    children = [child for child in psutil.Process().children() if "reward_file.py" in " ".join(child.cmdline())]
    assert children == []


def test_without_a_file_nothing_is_imported():
    with reward_file.tried(None):
        assert not any("reward_file.py" in " ".join(child.cmdline()) for child in psutil.Process().children())


@pytest.fixture
def warning(tmp_path):
    """Function: the warning about a file with this source, or about one of ours, on prompts with their labels."""

    def run(source, prompts, labels):
        if source.endswith(".py"):
            file = Path(reward_file.__file__).with_name(source)
        else:
            file = tmp_path / "my_reward.py"
            file.write_text(source)
        with reward_file.tried(str(file)) as trial:
            return trial.repeated_questions(prompts, labels)

    return run


CONTAINS = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(labels[0] in queries[0])]}\n"


def test_a_reward_that_pays_for_the_prompt_is_named_with_the_share(warning):
    said = warning(CONTAINS, ["5 or 7?", "2 + 3 ="] * 2, ["5", "5"] * 2)
    assert said.startswith("my_reward.py, given the prompt itself as the response, scores 50% of 4 sampled prompts")
    assert "\n" not in said


def test_of_many_prompts_a_sample_is_scored(warning):
    prompts = [f"{number}?" for number in range(1000)]
    assert "100% of 32 sampled prompts" in warning(CONTAINS, prompts, [str(number) for number in range(1000)])


def test_math_answer_does_not_pay_for_the_prompt_and_the_generous_reward_does(warning):
    pytest.importorskip("math_verify")
    prompts, labels = ["What is 7 + 4 - 6 =", "Compute 2 * 3"], ["5", "6"]
    assert warning("math_answer.py", prompts, labels) is None
    assert "100% of 2 sampled prompts" in warning("math_answer_generous.py", prompts, labels)


def test_a_function_that_fails_on_prompts_is_a_warning_and_one_that_takes_long_too(warning, monkeypatch):
    failing = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1 / 0]}\n"
    assert warning(failing, ["1"], ["1"]).endswith("failed: line 2: ZeroDivisionError: division by zero")
    monkeypatch.setattr(reward_file, "TRIAL_LIMIT_S", 0.5)
    slow = "import time\ndef reward_func(queries, prompts, labels):\n    time.sleep(1000)\n"
    assert "took over 0.5 s for 1 prompts" in warning(slow, ["1"], ["1"])
