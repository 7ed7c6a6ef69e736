"""The grammar reads texts as values, and compares values; exact_match compares texts."""

import re
import runpy
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import openrlhf_dbb.rewards
from openrlhf_dbb.rewards.answers import last_box, read_label
from openrlhf_dbb.rewards.values import Equation, Formula, Items, Number, canonical, equal, read


def test_exact_match_compares_what_follows_the_prompt_without_special_tokens_at_the_end():
    path = Path(openrlhf_dbb.rewards.__file__).with_name("exact_match.py")
    reward_func = runpy.run_path(str(path))["reward_func"]
    right = {"21<eos>": 21, " 21 <|im_end|>\n<|endoftext|><pad><pad>": " 21", "a</s>b": "a</s>b"}
    right["<think>20?</think>\n\n21"] = "21"
    wrong = {
        "21.0<eos>": "21",
        "12+9=21<eos>": "21",
        "01<eos>": "1",
        "</s>": "1",
    }  # Math-Verify would take 21.0 for 21
    queries, labels = zip(
        *((f"12+9={response}", label) for response, label in (right | wrong).items()), strict=True
    )
    rewards = [1.0] * len(right) + [0.0] * len(wrong)
    result = reward_func(queries, ["12+9="] * len(queries), labels)
    assert result == {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {},
        "read": [None] * len(rewards),
    }
    unfinished = reward_func(["12+9=<think>21"], ["12+9="], ["21"])
    assert unfinished["rewards"] == [0.0] and "thought" in unfinished["read"][0]
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["2+9=11<eos>"], ["12+9="], ["11"])


def test_last_box_is_the_last_one_whose_braces_close():
    contents = {
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}", r"\boxed{\boxed{3}}": r"\boxed{3}", r"\boxed{\{1, 2\}}": r"\{1, 2\}",
        r"an open { and \boxed{6}": "6", r"\boxed{8} or rather \boxed{9": "8", r"\boxed{}": "", "9": None,
    }  # fmt: skip
    assert {text: last_box(text) for text in contents} == contents


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("1e-5", "1/100000"), ("2.5e10", "25000000000"), (r"6.02 \times 10^{23}", "602000000000000000000000"),
        ("50\u00b0", "50"), ("5.", "5"), ("$5.$", "5"), (r"\boxed{1,234.}", "1234"), ("\u20135", "-5"),
        ("2 1/2", "5/2"), ("x=3", "3"), ("-1./3", "-1/3"), (r"111, \! 111", "111111"), ("6\\frac15", "31/5"),
        ("She sold 48/2.\n#### 72", "72"), ("\uff15", "5"), ("{3\\over 4}", "3/4"),
        # prose and torn texts are not read
        ("???", None), ("There are $12$ ways for $n=3$.", None), ("It is 7 because 3 plus 4 is 7", None),
        ("5 is right", None), ("1" * 5000, None), ("(1,2", None),
    ],
)  # fmt: skip
def test_labels_that_are_numbers(label, number):
    value = read_label(label)
    assert (value and canonical(value)) == number


@pytest.mark.parametrize(
    "text",
    [
        "1 2",
        "1\n2",
        "5!",
        r"\sin 4",
        "10^{-7}m+1",
        "x^2",
        r"\sqrt{16}",
        "7+4-6",
        r"\log_2 8",
        "2^3",
        "3x",
        "1e99999",
    ],
)
def test_what_is_no_number_is_not_read_in_part(text):
    assert not isinstance(read(text), (Number, Equation))


def same(label, answer):
    label = read_label(label)
    answer = read(answer, label.value if isinstance(label, Equation) else label)
    return answer is not None and equal(label, answer, lambda *_: pytest.fail("asked Math-Verify"))


@pytest.mark.parametrize(
    ("label", "equals", "differs"),
    [
        ("28", ["28 apples", r"\text{28 ways}", "x = 28", "(28)", "7+21=28"], ["2 8", "-28", "x>28", "28!"]),
        ("28", ["f(3) = 28", "m + n = 28"], ["28%", "27 = 28", "28 = 28", "28.1"]),
        ("5\\text{ km}", ["5 kilometers", "5 km", "5"], ["5 m", "5 \\text{ kg}", "5000", "5000 m"]),
        ("9\\text{ cm}^2", ["9 square centimetres", "9 sq. cm"], ["9 cm", "9 \\text{ cm}^3"]),
        ("18.50", [r"\$18.5", "18.5 dollars", "18,50"], ["1850", "18.05"]),
        ("50^{\\circ}", ["50", "50 degrees"], ["50 radians"]),
        ("0.5", [r"\frac12", r"\frac 1 2", r"$\tfrac{1}{2}$.", "50\\%", ".5"], ["5", "0.05"]),
        (r"\frac{27}{35}", [r"\frac{27}{35} \approx 0.771", "P = 27/35 = 0.7714"], [r"\frac{27}{35} = 0.76", "0.7714"]),
        (r"\frac{2017}{2018}", ["4034/4036"], [r"\frac{2016}{2017}", "1", "0.9995"]),
        ("3.162", ["3.162", "3.1620"], ["3.1628", "3.16"]),
        ("0.1234567", [".1234567"], ["0.1234568"]),
        ("9 (apples)", ["9", "9 apples", r"9 \text{ (apples)}"], ["9 (a + b)", "9 (ab)"]),
        ("B = C", ["C = B", "B=C"], ["B = D", "B"]),
        ("0.5", ["50%"], ["0.5%"]),
        ("1/9, 4/9", ["4/9 and 1/9.", r"\frac49, \frac19"], ["1/9, 1/9"]),
        ("1234", ["1,234", "1{,}234", r"1\,234", r"1,\!234", "+1234.0", r"\$1234", "01234"], ["234"]),
        ("(1,2)", ["x=1, y=2", r"\left(1,\,2\right)", r"\langle 1,2\rangle"], ["(2,1)", "[1,2]", "(1,2,3)"]),
        (r"\{1,2,3\}", ["3, 2, 1", "{3,2,1}", "1 and 2 and 3", "x=1, x=2, x=3"], ["1,2", r"\{1,2,3,4\}"]),
        (r"(-\infty,2]", [r"x\in(-\infty,2]"], [r"(-\infty,2)", "(2,\\infty)"]),
        (r"(-\infty,1)\cup(3,\infty)", ["(3,\\infty)\\cup(-\\infty,1)"], [r"(-\infty,1)"]),
        (r"\pm 12", ["12, -12", r"x=\pm 12"], ["12", "-12"]),
        ("12:30", ["12:30 PM"], ["12:03", "12.5"]),
        ("24", ["24"], ["24 dozen", "2 dozen", "24 million"]),
        (r"9.8\text{ m/s}^2", ["9.8", "9.8 metres per second squared"], [r"9.8\text{ m/s}", r"980\text{ cm/s}^2"]),
        ("12:30 pm", ["12:30 p.m.", r"12:30 \text{ PM}"], ["12:30 am"]),
        (r"\infty", ["+\u221e", "infinite"], [r"-\infty"]),
        ("Quadrant I", [r"\text{quadrant I}", "Quadrant~I"], ["Quadrant II", "I"]),
    ],
)  # fmt: skip
def test_values_in_other_spellings(label, equals, differs):
    assert [text for text in [label, *equals] if not same(label, text)] == []
    assert [text for text in differs if same(label, text)] == []


def test_formulas_are_asked_one_by_one_and_an_answer_that_cannot_be_told_is_none():
    asked = []
    label = read(r"(\pi, 2, \sqrt{8})")
    answer = read(r"(\pi, 2, 2\sqrt{2})")
    assert isinstance(label, Items) and isinstance(label.items[0], Formula)
    assert equal(label, answer, lambda *pair: asked.append(pair)) is None
    assert asked == [(r"\sqrt{8}", r"2\sqrt{2}")]


def test_items_of_a_list_are_matched_one_to_one_in_any_order():
    label = read(r"\sqrt{2}, \sqrt{2}, \sqrt{3}")
    turned = read(r"\sqrt3, \sqrt2, \sqrt2")
    wrong = read(r"\sqrt2, \sqrt3, \sqrt3")
    same_root = lambda *roots: len({re.sub(r"\D", "", root) for root in roots}) == 1  # noqa: E731
    assert equal(label, turned, same_root) is True
    assert equal(label, wrong, same_root) is False


SPELLINGS = [
    "{}",
    " {}.",
    "+{}",
    "${}$",
    r"\text{{{}}}",
    "x = {}",
    r"\boxed{{{}}}",
    "({})",
    r"{} \text{{ apples}}",
]
integers = st.integers(1, 10**5)


@settings(deadline=None)  # the first call imports
@given(integers, st.integers(-40, 40), st.sampled_from(SPELLINGS), st.integers(2, 9))
def test_a_value_equals_itself_in_any_spelling_and_nothing_that_is_changed(
    digits, exponent, spelling, other
):
    number = f"{digits}e{exponent}"
    power = f"10^{{{exponent}}}"
    written = [
        number,
        rf"{digits} \times {power}",
        rf"{digits}\cdot {power}",
        f"{digits} x {power}",
    ]
    assert all(
        same(number, spelling.format(text)) for text in [*written, f"{digits}0E{exponent - 1}"]
    )
    changed = [
        f"-{number}",
        f"{digits}e{exponent + 1}",
        f"{digits}{other}e{exponent}",
        f"{digits + 1}e{exponent}",
    ]
    assert not any(same(number, text) for text in changed)
    assert not same(rf"{number} \text{{ km}}", rf"{number} \text{{ kg}}")


@settings(deadline=None)
@given(integers, integers, integers)
def test_a_fraction_equals_itself_in_any_spelling(above, below, whole):
    value = Fraction(above, below)
    label = str(value)
    mixed = str(whole + value)
    spelled = [rf"\frac{{{above}}}{{{below}}}", f"{above}/{below}"]  # 10/2 is a calculation
    assert [same(label, text) for text in spelled] == [value.denominator > 1 or below == 1] * 2
    assert not same(label, f"-{label}") and not same(label, str(value + 1))
    if 0 < value < 1:
        assert same(f"{whole} {label}", mixed)
        assert same(mixed, rf"{whole}\frac{{{value.numerator}}}{{{value.denominator}}}")


@settings(deadline=None)
@given(st.text(alphabet=r"0123456789.,-+*/^_(){}[]\$%= xyabefr<>|:;!" + "\n", max_size=40))
def test_no_text_breaks_the_grammar_and_what_it_reads_equals_itself(text):
    value = read(text)
    assert value is None or equal(value, value, lambda *_: True)
