"""A reward file is tried before a training: a broken one is refused, and one that pays for the prompt warns."""

import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILE, reward_file

CONTAINS = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(labels[0] in queries[0])]}\n"
FORM = '; return {"rewards": [one number or None for each response]}'
FINITE = "; finite numbers are allowed, and None for a response that could not be verified"


def returning(value):
    library = "torch" if "torch" in value else "numpy as np"
    return f"import sys, {library}\ndef reward_func(queries, prompts, labels):\n    return {value}\n"


@pytest.fixture
def check(tmp_path):
    """Function: try a file with this source on some prompts and labels."""

    def run(source, prompts=("5 or 7?",), labels=("6",), estimator="dbb"):
        (tmp_path / "mine.py").write_text(source)
        used = estimator and estimators.build(estimator)
        return reward_file.check(str(tmp_path / "mine.py"), prompts, labels, used)

    return run


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("\ndef reward_func(queries:\n", "{} failed: SyntaxError: '(' was never closed (mine.py:2)"),
        ("import foo\n", "{} failed: ModuleNotFoundError: No module named 'foo' (mine.py:1)"),
        ("import os\nos._exit(7)\n", "{}: its process ended with code 7"),
        ("reward_func = 5\n", "{} has no function reward_func; define reward_func(queries, prompts, labels, **kwargs)"),
        (returning("1 / 0"), "reward_func of mine.py failed: ZeroDivisionError: division by zero (mine.py:3)"),
        (returning("sys.exit('no\\nkey')"), "reward_func of mine.py failed: SystemExit: no key (mine.py:3)"),
        ("def reward_func(a, b): ...\n",
         "reward_func of mine.py failed: TypeError: reward_func() takes 2 positional arguments but 3 were given"),
        (returning("None"), f"reward_func of mine.py returned None{FORM}"),
        (returning("[1.0]"), f"reward_func of mine.py returned [1.0]{FORM}"),
        (returning("{'scores': [1.0]}"), f"reward_func of mine.py returned {{'scores': [1.0]}}{FORM}"),
        (returning("{'rewards': [1, 0]}"), f'reward_func of mine.py returned 2 "rewards" for 1 response{FORM}'),
        (returning("{'rewards': np.ones(3)}"), f'reward_func of mine.py returned 3 "rewards" for 1 response{FORM}'),
        (returning("{'rewards': 1, 'scores': []}"), f'reward_func of mine.py returned 0 "scores" for 1 response{FORM}'),
        (returning("{'rewards': torch.ones(1, 1)}"), f'reward_func of mine.py returned [1.0] in "rewards"{FINITE}'),
        (returning("{'rewards': ['1.0']}"), f"""reward_func of mine.py returned '1.0' in "rewards"{FINITE}"""),
        (returning("{'rewards': [1j]}"), f'reward_func of mine.py returned 1j in "rewards"{FINITE}'),
        (returning("{'rewards': [float('nan')]}"), f'reward_func of mine.py returned nan in "rewards"{FINITE}'),
        (returning("{'rewards': [10**400]}"), f'reward_func of mine.py returned 1{79 * "0"} in "rewards"{FINITE}'),
        (
            returning("{'rewards': [1], 'extra_logs': [1]}"),
            'reward_func of mine.py returned [1] as "extra_logs"; return a dictionary, or leave it out',
        ),
        (returning("{'rewards': None}"), "reward_func of mine.py returned None for all responses that were tried"),
        (
            returning("{'rewards': [0.5]}"),
            "reward_func of mine.py returned the score 0.5, and --estimator dbb needs 0 or 1; change it, or give "
            "--dbb.partial_credit or --estimator point (docs/rewards.md)",
        ),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_in_one_line(check, tmp_path, source, problem):
    with pytest.raises(UsageError) as refused:
        check(source)
    assert str(refused.value) == problem.replace("{}", f"{tmp_path}/mine.py", 1)


def test_a_function_that_hangs_is_refused_also_with_a_child_that_stays(check, monkeypatch):
    monkeypatch.setattr(reward_file, "LIMIT_S", 5.0)
    with pytest.raises(UsageError, match=r"mine.py gave no verdict within 5 s; does its reward_func end\?"):
        check("import os, time\ndef reward_func(*_):\n    os.fork()\n    time.sleep(1000)\n")


FORK = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"


@pytest.mark.parametrize("source", ["print('hello')\n", "import beside\n", THREAD, FORK])
def test_a_file_that_works_is_accepted_whatever_else_it_does(check, tmp_path, monkeypatch, source):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    assert check(source + CONTAINS) is None


@pytest.mark.parametrize(
    "value", ["{'rewards': queries[0] == ''}", "{'rewards': torch.zeros(1)}", "{'rewards': [-7.5]}"]
)
def test_rewards_that_an_estimator_can_take_are_accepted(check, value):
    assert check(returning(value), estimator="point") is check(returning(value), estimator=None) is None


def test_a_reward_that_pays_for_the_prompt_is_named_with_the_share(check):
    warning = check(CONTAINS, ["5 or 7?", "2 + 3 ="] * 2, ["5", "5"] * 2)
    assert warning.startswith("mine.py, given the prompt itself as the response, scores 50% of 4 sampled prompts")
    prompts = [f"{number}?" for number in range(1000)]
    assert "100% of 16 sampled prompts" in check(CONTAINS, prompts, [str(number) for number in range(1000)])


@pytest.mark.parametrize("name", ["math_answer", "exact_match"])
def test_the_rewards_of_this_package_are_tried_too(name):
    file = MATH_FILE.with_name(f"{name}.py")
    asked = ["What is 2+1? (answer: 3)", "2+1="] if name == "math_answer" else ["yes", "2+1="]
    warning = reward_file.check(str(file), asked, ["3" if name == "math_answer" else "yes"] * 2, None)
    assert warning.startswith(f"{name}.py, given the prompt itself as the response, scores 50% of 2 sampled prompts")
