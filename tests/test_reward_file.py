"""A reward file of the user's is imported before a training: what is wrong with it is said in one line."""

import sys
import textwrap
import time

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
        with pytest.raises(UsageError) as refused, reward_file.imported(str(file)):
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
    with reward_file.imported(str(tmp_path / "reward.py")):
        pass
    assert set(sys.modules) == before


def test_an_import_that_does_not_end_is_given_up(check, monkeypatch):
    monkeypatch.setattr(reward_file, "LIMIT_S", 0.5)
    assert check("import time\ntime.sleep(1000)\n") == "its import has not ended after 0.5 s"


def test_what_else_is_refused_meanwhile_ends_the_import(tmp_path):
    (tmp_path / "reward.py").write_text("import time\ntime.sleep(1000)\n")
    began = time.monotonic()
    with pytest.raises(UsageError, match="the data"), reward_file.imported(str(tmp_path / "reward.py")):
        raise UsageError("the data")
    assert time.monotonic() - began < 100
    children = [each for each in psutil.Process().children() if "reward_file.py" in " ".join(each.cmdline())]
    assert children == []


def test_without_a_file_nothing_is_imported():
    with reward_file.imported(None):
        assert not any("reward_file.py" in " ".join(each.cmdline()) for each in psutil.Process().children())
