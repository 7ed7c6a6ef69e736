"""A reward file is tried before a training: a broken one is refused, and one that pays for the prompt warns."""

import math
import re

import numpy as np
import pytest
import torch

from openrlhf_dbb import estimators
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.rewards import reward_file

CONTAINS = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(labels[0] in queries[0])]}\n"


def returning(value):
    return f"import sys\ndef reward_func(queries, prompts, labels):\n    return {value}\n"


@pytest.mark.parametrize(
    "value",
    [
        None, torch.ones(1), {"scores": [1.0]}, {"rewards": []}, {"rewards": ["1.0"]}, {"rewards": torch.ones(1, 1)},
        {"rewards": np.ones(3)}, {"rewards": [math.nan]}, {"rewards": [10**400]}, {"rewards": 1, "scores": []},
        {"rewards": 1, "extra_logs": [1]}, {"rewards": 1, "read": ["a", "b"]},
    ],
)  # fmt: skip
def test_what_is_no_reward_is_refused_in_the_same_words(value):
    with pytest.raises(RunError) as refused:
        reward_file.checked(value, "mine")
    shown = " ".join(repr(value).split())[:80]
    problem, way_on = str(refused.value).rsplit("; ", 1)
    assert problem == f"mine returned {shown}"
    assert way_on.startswith('return {"rewards": [')


@pytest.mark.parametrize(
    "one", [1, [1.0], (True,), torch.tensor(1), [np.float32(1)], np.array([True])]
)
def test_a_reward_may_be_a_number_or_hold_one(one):
    assert reward_file.checked({"rewards": one, "scores": None}, "mine") == (1.0, 1.0, {}, None)
    given = {"rewards": [-7.5], "scores": one, "extra_logs": {"a": 1}, "read": ["seven"]}
    assert reward_file.checked(given, "") == (-7.5, 1.0, {"a": 1}, "seven")
    assert reward_file.checked({"rewards": [None], "scores": one, "read": "?"}, "mine") == (
        None,
        None,
        {},
        "?",
    )


@pytest.fixture
def check(tmp_path):
    """Function: try a file with this source on some prompts and labels."""

    def run(source, prompts=("5 or 7?",), labels=("6",), estimator="dbb"):
        (tmp_path / "mine.py").write_text(source)
        return reward_file.check(
            str(tmp_path / "mine.py"), prompts, labels, estimators.build(estimator)
        )

    return run


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "\ndef reward_func(queries:\n",
            r"^/.*mine.py failed: SyntaxError: .* \(mine.py, line 2\)",
        ),
        ("import os\nos._exit(7)\n", r"reward_func of mine.py: .*ended; call it by hand"),
        ("reward_func = 5\n", r"^/.*mine.py has no reward_func; define reward_func\("),
        (returning("1 / 0"), r"of mine.py failed: ZeroDivisionError: .* \(mine.py, line 3\)"),
        (
            returning("sys.exit('no\\nkey')"),
            r"of mine.py failed: SystemExit: no key \(mine.py, line 3\)",
        ),
        (returning("{'rewards': None}"), r"of mine.py returned None for all responses"),
        (returning("{'rewards': [0.5]}"), r"score 0.5 .*mine.py .*0 or 1, .*memory 'dbb'"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(check, source, problem):
    with pytest.raises(UsageError, match=problem) as refused:
        check(source)
    assert "\n" not in str(refused.value)


def test_a_score_that_the_memory_beside_an_estimator_does_not_take_is_refused(check):
    with pytest.raises(
        UsageError,
        match=r"score -1 .*mine.py.*memory 'auto'.*--point.memory gaussian",
    ):
        check(returning("{'rewards': [-1]}"), estimator="point")


def test_a_function_that_hangs_is_refused_also_with_a_child_that_stays(check, monkeypatch):
    monkeypatch.setattr(reward_file, "LIMIT_S", 1.0)
    with pytest.raises(UsageError, match=r"^reward_func of mine.py: .*\b1.0 s; call it by hand"):
        check("import os, time\ndef reward_func(*_):\n    os.fork()\n    time.sleep(1000)\n")


FORK = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"


@pytest.mark.parametrize("source", ["print('hello')\n", "import beside\n", THREAD, FORK])
def test_a_file_that_works_is_accepted_whatever_else_it_does(check, tmp_path, monkeypatch, source):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    assert check(source + CONTAINS) == []


def test_a_reward_that_pays_for_the_prompt_is_named_with_the_share(check):
    [warning] = check(CONTAINS, ["5 or 7?", "2 + 3 ="] * 2, ["5", "5"] * 2)
    assert re.search(r"^mine.py, .*the prompt itself.*\b50% of 4 sampled prompts", warning)
    prompts = [f"{number}?" for number in range(1000)]
    assert (
        "100% of 16 sampled prompts"
        in check(CONTAINS, prompts, [str(number) for number in range(1000)])[0]
    )
