"""Verdicts on answers as models write them, and the answers that are taken out of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from openrlhf_dbb.evaluation.verifiers import VERIFIERS, normal_label
from openrlhf_dbb.evaluation.verifiers.statements import Verdict
from openrlhf_dbb.rewards import math_answer
from openrlhf_dbb.rewards.answers import normal
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

NEVER_FINISHES = r"\boxed{9^{9^{9^{9}}}}"


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        # boxes
        (r"\boxed{B}", "B"),
        (r"\[\boxed{\textbf{(B)}}\]", "B"),
        (r"\boxed{(B) 42}", "B"),
        (r"\boxed{A} is wrong, it is \boxed{C}", "C"),
        (r"The answer is (B). \boxed{42}", "B"),
        (r"The answer is A. No: \boxed{B}", "B"),
        (r"\boxed{A lone pair}", None),
        (r"\boxed{A, C}", None),
        (r"\boxed{B", None),
        # sentences
        ("The answer is B, A is wrong.", "B"),
        ("the final answer is **(H) 5 m/s**", "H"),
        ("The answer is not A but C.", "C"),
        ("Option C is correct.", "C"),
        ("(C) is the correct answer", "C"),
        ("The answer is I.", "I"),
        ("The answer is a lone pair of electrons.", None),
        ("The answer is not A.", None),
        ("The answer is (A) or (B).", None),
        ("The answer is option K", None),
        # no statement
        ("So it must be (C).", "C"),
        ("reasoning ...\n\n**D**", "D"),
        ("So (A) or (B)", None),
        ("Option C is incorrect", None),
        ("Let us see. (A) 1 (B) 2, and then", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_settles_on(response, letter):
    assert VERIFIERS["choice"](response, "B") == Verdict(float(letter == "B"), letter)


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
            [r"\boxed{8}", r"\boxed{8 \text{ objects}}", r"\boxed{3 + 5 = 8}", r"\boxed{8.0}",
             "The answer is 8. 3 are red.", "the answer is (-5 + 9) * 2 = 8.", "There are 8 objects."],
            [r"\boxed{18}", r"\boxed{-8}", "eight", "", "1" * 10_000, r"\boxed{" + "1" * 10_000 + "}"],
        ),
        ("-48", [r"\boxed{-48}", "The answer is \u221248."], [r"\boxed{48}"]),
        ("1234", [r"\boxed{1{,}234}", r"\boxed{1,234}"], [r"\boxed{234}"]),
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
        (r"\boxed{4.5\times10^{33}\ \text{erg/s}}", r"4.5 \times 10^{33}", (1.0, r"4.5\times10^{33}")),
        ("\\boxed{336\u00b0}", r"336^\circ", (1.0, r"336^\circ")),
        (r"it is $\frac{3}{4}$", "1/2", (0.0, "3/4")),
        ("no idea", "5", (0.0, None)),
    ],
)
def test_mathematics(response, label, verdict):
    assert VERIFIERS["math"](response, label) == VERIFIERS["math_or_text"](response, label) == verdict


def test_a_time_out_is_missing_and_keeps_its_answer(monkeypatch):
    pool = VerifierPool(size=2, time_limit_s=2.0)
    monkeypatch.setattr(math_answer, "_pool", pool)
    responses = [NEVER_FINISHES, r"\boxed{5.0}", NEVER_FINISHES, r"\boxed{6}"]
    assert [VERIFIERS["math"](response, r"\sqrt{25}") for response in responses] == [
        Verdict(None, "9^{9^{9^{9}}}"),
        Verdict(1.0, "5"),
        Verdict(None, "9^{9^{9^{9}}}"),
        Verdict(0.0, "6"),
    ]
    pool.close()


@pytest.mark.parametrize(
    "same",
    [
        ["1/2", r"\frac{1}{2}", r"\dfrac12", r"\frac 1 2", r"$\tfrac{1}{2}$", r"x = \frac{1}{2}", r"\frac{1}{2}."],
        ["1234", "1,234", "1{,}234", r"1\,234", r"1,\!234", "1234.0", "+1234", r"\$1234", "01234"],
        ["5", r"5 \text{ cm}", r"5\,\mathrm{cm}", r"5 \text{ cm}^2", "n=5"],
        ["-3", "\u22123", "\u20133"],
        ["0.5", ".50", "+0.50"],
        ["0", "-0", "0.0"],
        [r"(0,1]", r"\left( 0, \, 1 \right]", r"\big(0,1\big]"],
        [r"2\sqrt{3}", r"2 \sqrt {3}", r"2\,\sqrt{3}\,\text{m}"],
        ["east", r"\text{east}", r"\textbf{east}"],
        [r"4.5\times10^{33}", "4.5e33", r"4.5 \times 10^{33}", "4.5E+33"],
        [r"90^\circ", "90\u00b0"],
        [r"50\%", "50%", "$50 \\%$"],
    ],
)
def test_equal_answers_vote_together(same):
    assert len({normal(text) for text in same}) == 1


def test_different_answers_vote_apart():
    different = ["12", "1,2", "-12", "1/2", "12x", "x", "X", r"\sqrt{12}", "H_2O", "H_2", "(1,2)", "[1,2]", "12%"]
    assert len({normal(text) for text in different}) == len(different)


def test_a_label_that_math_verify_cannot_read_is_an_error_or_compared_as_text():
    label = r"K_{s p}=\left[\mathrm{A}^{2+}\right]\left[\mathrm{B}^{-}\right]"
    with pytest.raises(ValueError, match="cannot read the label"):
        VERIFIERS["math"](r"\boxed{5}", label)
    same = r"K_{sp} = [\text{A}^{2+}] \, [\text{B}^{-}]"
    responses = [rf"\boxed{{{same}}}", r"\boxed{K_{sp}}", "5", ""]
    assert [VERIFIERS["math_or_text"](response, label).score for response in responses] == [1.0, 0.0, 0.0, 0.0]


def test_labels_in_python_become_latex_for_mathematics_only():
    assert normal_label("math", " 7.26e-10 ") == r"7.26 \times 10^{-10}"
    assert normal_label("math_or_text", "np.arcsin(10/13)") == r"\arcsin(10/13)"
    assert normal_label("exact", "1e3 ") == "1e3"
    assert normal_label("math", "np.sqrt(2)/np.pi") == r"\sqrt{2}/\pi"
    # no numbers of this kind
    assert [normal_label("math", text) for text in ("2e^{3}", "x_1e5", "e")] == ["2e^{3}", "x_1e5", "e"]


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
