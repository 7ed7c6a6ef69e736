"""Verdicts on answers as models write them, and the answers that are taken out of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from openrlhf_dbb.evaluation.verifiers import VERIFIERS, Verdict
from openrlhf_dbb.rewards import math_answer
from openrlhf_dbb.rewards.values import canonical, read

LETTERS = {
    "B": [r"\boxed{B}", r"\[\boxed{\textbf{(B)}}\]", r"\boxed{(B) 42}", r"The answer is (B). \boxed{42}",
          r"The answer is A. No: \boxed{B}", "The answer is B, A is wrong.", r"\boxed{\left(B\right)}"],
    "C": [r"\boxed{A} is wrong, it is \boxed{C}", "The answer is not A but C.", "Option C is correct.",
          "(C) is the correct answer", "So it must be (C)."],
    "D": ["reasoning ...\n\n**D**"],
    "H": ["the final answer is **(H) 5 m/s**"],
    "I": ["The answer is I."],
    None: [r"\boxed{A lone pair}", r"\boxed{A, C}", r"\boxed{B", "The answer is a lone pair of electrons.",
           "The answer is not A.", "The answer is (A) or (B).", "The answer is option K", "So (A) or (B)",
           "Option C is incorrect", "Let us see. (A) 1 (B) 2, and then", ""],
}  # fmt: skip


@pytest.mark.parametrize(("letter", "responses"), LETTERS.items())
def test_the_letter_that_a_response_settles_on(letter, responses):
    verdicts = {response: VERIFIERS["choice"](response, "B") for response in responses}
    assert verdicts == dict.fromkeys(responses, Verdict(float(letter == "B"), letter))


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("Yes", ["Yes.", "**Yes**", r"\boxed{\text{Yes}}", "The answer is yes.", "Yes, she lies."], ["No", ""]),
        ("no", [r"\boxed{No}", r"\boxed{Yes}, or rather \boxed{No}", "The answer is: No."], [r"\boxed{Yes}", "not no"]),
        ("yes", ["There is no way it is not, so the answer is yes."], ["There is no way that it is."]),
        ("False", [r"\boxed{False}", "not ( True ) is\nFalse"], [r"\boxed{True}", "The answer is not False."]),
        ("invalid", [r"\boxed{\text{invalid}}", "It is deductively invalid."], [r"\boxed{valid}", "Invalidated"]),
        (
            "8",
            [r"\boxed{8 \text{ objects}}", "The answer is 8. 3 are red.", "the answer is (-5 + 9) * 2 = 8."],
            [r"\boxed{18}", "eight", ""],
        ),
        (
            "] ) }",
            [r"\boxed{] ) }}", r"\boxed{] ) \}}", r"\boxed{\text{] ) }}}", "The answer is ] ) }.", "Answer: `]) }`"],
            [r"\boxed{] )}", r"\boxed{[ ( { } ) ]}", r"\boxed{\text{none}}", ""],
        ),
        ("> )", [r"$\boxed{\rangle )}$"], [r"\boxed{) >}"]),
        (
            "ant bee cat",
            [r"\boxed{\text{ant bee cat}}", r"\boxed{\text{ant}, \text{bee}, \text{cat}}", r"\boxed{ant \, bee \, cat}",
             "The answer is: ant bee cat.", "**Ant, bee, cat**"],
            [r"\boxed{bee ant cat}", r"\boxed{ant bee}", "antbee cat", ""],
        ),
        ("(A)", [r"\boxed{(A)}", r"\boxed{A}", "The answer is (A) Monday."], [r"\boxed{(B)}", "A man."]),
        ("(R)", ["The answer is (R).", r"\boxed{R}"], ["The answer is (Q)."]),
        ("Monsters, Inc", [r"\boxed{\text{Monsters, Inc}}", "The answer is Monsters, Inc."], [r"\boxed{(A)}"]),
    ],
)  # fmt: skip
def test_exact_rules_follow_the_labels_form(label, right, wrong):
    assert [VERIFIERS["exact"](response, label).score for response in right] == [1.0] * len(right)
    assert [VERIFIERS["exact"](response, label).score for response in wrong] == [0.0] * len(wrong)
    (answer,) = {VERIFIERS["exact"](response, label).answer for response in right}
    assert answer is not None


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        (r"\boxed{\dfrac{1}{2}}", "1/2", (1.0, "1/2")),
        (r"\boxed{4.5\times10^{33}\ \text{erg/s}}", "4.5e33", (1.0, "45" + "0" * 32)),
        ("\\boxed{336\u00b0}", r"336^\circ", (1.0, "336")),
        ("The answer is (B).", "B", (1.0, "B")),
        ("Yes, it is.", r"\text{Yes}", (1.0, "yes")),
        ("no idea", "5", (0.0, None)),
    ],
)
def test_training_and_evaluation_give_the_same_verdict(response, label, verdict):
    assert VERIFIERS["math"](response, label) == VERIFIERS["math_or_text"](response, label) == verdict
    assert math_answer.reward_func(["Q: " + response], ["Q: "], [label])["rewards"] == [verdict[0]]


@pytest.mark.parametrize(
    "same",
    [
        ["5", r"5 \text{ cm}", r"5 \text{ cm}^2", "n=5", "5\u00b0", "5.0", "10/2"],
        [r"(0,1]", r"\left( 0, \, 1 \right]", r"\big(0,1\big]"],
        ["1,2", "2 and 1"],
        [r"2\sqrt{3}", r"2 \sqrt {3}", r"2\,\sqrt{3}\,\text{m}"],
    ],
)
def test_equal_answers_vote_together(same):
    assert len({canonical(read(text)) for text in same}) == 1


def test_different_answers_vote_apart():
    different = ["12", "1,2", "-12", "1/2", "12x", "x", "X", r"\sqrt{12}", "H_2O", "H_2", "(1,2)", "[1,2]", "12%"]
    assert len({canonical(read(text)) for text in different}) == len(different)


def test_a_label_that_cannot_be_read_is_an_error_or_compared_as_text():
    label = "There are $12$ ways for $n=3$."
    with pytest.raises(ValueError, match="cannot read the label"):
        VERIFIERS["math"](r"\boxed{12}", label)
    responses = [rf"\boxed{{{label}}}", r"\boxed{12}", "12", ""]
    assert [VERIFIERS["math_or_text"](response, label).score for response in responses] == [1.0, 0.0, 0.0, 0.0]


FRAGMENTS = [
    "\\boxed{", "}", "{", "\\text{", "\\frac{", "$", "**", "answer is ", "Answer:", "option ", "A", "B", "(C)", " or ",
    "not ", "yes", "no", "8", "-", ",", ".", "1e9", "=", "\n", " ", "\\", "] )", "\u2212", "\u0661", "ant",
]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_no_text_breaks_a_rule(response):
    assert VERIFIERS["choice"](response, "B").answer in (None, *"ABCDEFGHIJ")
    for label in ("(B)", "yes", "8", "] )", "ant"):
        score, answer = VERIFIERS["exact"](response, label)
        assert score in (0.0, 1.0)
        assert (score == 1.0) <= (answer is not None)
    assert VERIFIERS["math"](response, "8").score in (0.0, 1.0)
    # what a response says last in a box is what it answers
    assert VERIFIERS["choice"](response.replace("{", "").replace("}", "") + "\n\\boxed{D}", "D").score == 1.0
