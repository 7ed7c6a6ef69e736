"""The reward function as OpenRLHF calls it: loaded by path, in threads, one rollout at a time."""

import importlib.util
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

import openrlhf_dbb.rewards
from openrlhf_dbb.rewards.answers import boxed, label_expression, same_integer


@pytest.fixture(scope="module")
def module():
    path = Path(openrlhf_dbb.rewards.__file__).with_name("math_answer.py")
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module._pool.close()


@pytest.fixture(scope="module")
def reward(module):
    def score(response, label, prompt="Q: "):
        result = module.reward_func([prompt + response + "<|im_end|>"], [prompt], [label])
        assert result["rewards"] == result["scores"]
        return result["rewards"][0]

    return score


SUM, SUM_LABEL = "What is 7 + 4 - 6 =", "5"
SIMPLIFY, SIMPLIFY_LABEL = r"Simplify $\sqrt{12}$.", r"2\sqrt{3}"
# What a person would say of each response: right or wrong.
TABLE = [
    # a sum whose terms are repeated, and other ways to be paid without an answer
    (SUM, SUM_LABEL, "To find the final answer of 7 + 4 - 6, we would need", False),
    (SUM, SUM_LABEL, "7 + 4 - 6", False),
    (SUM, SUM_LABEL, "= (5) - ", False),  # cut where it goes on
    (SUM, SUM_LABEL, r"\boxed{7+4-6}", False),
    (SUM, SUM_LABEL, r"$7 + 4 - 6$", False),
    (SUM, SUM_LABEL, r"\boxed{10/2}", False),
    (SUM, SUM_LABEL, "The answer is not 5 but 12.", False),
    (SUM, SUM_LABEL, "It isn't 5.", False),
    (SUM, SUM_LABEL, "3, 4 or 5", False),
    (SUM, SUM_LABEL, r"\boxed{3, 4, 5}", False),
    (SUM, SUM_LABEL, "Is it 5?", False),
    (SUM, SUM_LABEL, "5. First, add the numbers", False),
    (SUM, SUM_LABEL, r"The answer is \boxed{5", False),
    ("Compute 0 + 6.", "6", "We compute 0 + 6", False),
    # honest answers to the same sum
    (SUM, SUM_LABEL, "5", True),
    (SUM, SUM_LABEL, "The answer is 3. No wait, 5.", True),
    (SUM, SUM_LABEL, "7 + 4 = 11, and 11 - 6 = 5.", True),
    (SUM, SUM_LABEL, "The answer is **5**, not 12.", True),
    (SUM, SUM_LABEL, "The answer is 5 (that is 7 + 4 - 6).", True),
    (SUM, SUM_LABEL, r"\boxed{7 + 4 - 6 = 5}", True),
    (SUM, SUM_LABEL, "5.0", True),
    # fractions, LaTeX, units, money, signs
    ("What is 3 - 8?", "-5", "3 - 8 = \u22125", True),
    ("How far is it?", r"5\text{ cm}", "It is 5 cm.", True),
    ("How much is 2 + 3 dollars?", r"\$5", "You pay $5 and not $7.", True),
    (SIMPLIFY, SIMPLIFY_LABEL, r"It is $2\sqrt{3}$.", True),
    ("Expand $(x+1)^2$.", "x^2+2x+1", r"\boxed{x^2 + 2x + 2}", False),
    # a formula copied from the question, where its value is the answer
    (SIMPLIFY, SIMPLIFY_LABEL, r"\boxed{\sqrt{12}}", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", r"It is $(x+1)^2$.", False),
    ("Write 12/24 in lowest terms.", "1/2", "12/24", False),
]


@pytest.mark.parametrize(("question", "label", "response", "right"), TABLE)
def test_verdict_is_a_persons(reward, question, label, response, right):
    assert reward(response, label, question) == float(right)


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"\boxed{\dfrac{1}{2}}", "1/2", True),
        (r"\boxed{\left(0, 1\right]}", "(0,1]", True),
        (r"\boxed{\{3,2,1\}}", r"\{1,2,3\}", True),
        (r"\boxed{50\%}", "0.5", True),
        (r"\boxed{5 \text{ cm}}", "5", True),
        (r"\boxed{90^\circ}", "90", True),
        (r"\boxed{1{,}234}", "1234", True),
        (r"\boxed{ x^2 \, + \; 1 }", "x^2+1", True),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", True),
        (r"\boxed{x=3}", "3", True),
        (r"\boxed{\text{east}}", r"\text{east}", True),
        (r"\boxed{5}", 5, True),
        (r"it is $\frac{3}{4}$", "0.75", True),
        ("019", "19", True),
        (r"\boxed{[0,1]}", "(0,1]", False),
        (r"\boxed{1} \boxed{2}", r"\{1,2\}", False),
        ("", "5", False),
        (r"\boxed{???}", "5", False),
        (r"\boxed{" + "1" * 10_000 + "}", "5", False),
        (r"\boxed{1/" + "3" * 4301 + "}", "5", False),
        (r"\boxed{" * 20_000 + "5" + "}" * 20_000, "5", False),
        (r"\boxed{" * 5_000, "5", False),
        ("$ " * 20_000, "5", False),
    ],
)
def test_answers_as_models_write_them(reward, response, label, right):
    assert reward(response, label) == float(right)


def test_label_that_cannot_be_read_is_an_error_that_names_it(reward):
    with pytest.raises(ValueError, match=r"cannot read the label .*\?\?\?"):
        reward("5", "???")
    with pytest.raises(ValueError, match=r"--data\.label_key"):
        reward("5", " ")


def test_batch_keeps_its_order_and_lengths_must_agree(module):
    prompts = ["a=", "b=", "c="]
    result = module.reward_func(["a=1", "b=2", r"c=\boxed{3.0}"], prompts, ["1", "1", "3"])
    assert result == {"rewards": [1.0, 0.0, 1.0], "scores": [1.0, 0.0, 1.0], "extra_logs": {}}
    with pytest.raises(ValueError, match="shorter"):
        module.reward_func(["a=1"], ["a="], [])


def test_eight_threads_get_their_own_verdicts(reward):
    cases = [(rf"\boxed{{\frac{{{n}}}{{7}}}}", f"{n % 5}/7") for n in range(80)]
    with ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(lambda case: reward(*case), cases))
    # n/7 equals (n mod 5)/7 for n = 0..4 only.
    assert rewards == [1.0] * 5 + [0.0] * 75


def test_comparison_without_math_verify_gives_math_verifys_verdict(module):
    random.seed(0)
    numbers = ["0", "7", "-7", "70", "2024", "999999999999999", "-100000000000000"]
    numbers += [str(random.randint(-(10**k), 10**k)) for k in range(1, 15)]
    for label, number in itertools.product(numbers[::2], numbers):
        assert same_integer(number, label) is module._pool.verify(boxed(number), label_expression(label))


def test_labels_that_math_verify_cannot_read_are_found_before_a_training(module, monkeypatch):
    no_answer = "no $ number"
    labels = ["5", r"\frac{1}{2}", no_answer, r"\{1,2\}", "(0,1]", no_answer, "50\u00b0", "\uff15"]
    unreadable = {no_answer: "understood as []", "\uff15": "understood as ['\uff15']"}
    assert module.unreadable_labels(labels) == unreadable
    asked = []
    monkeypatch.setattr(module._pool, "why_unreadable", asked.append)
    assert module.unreadable_labels(["5", "-12", " 7 ", r"\sqrt{2}", r"\sqrt{2}"]) == {}
    assert asked == [r"\boxed{\sqrt{2}}"]  # plain integers need no check, and equal labels one
