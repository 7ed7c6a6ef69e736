"""Which part of a text is the answer."""

import pytest

from openrlhf_dbb.rewards.answers import boxed, label_expression, last_box, response_text, same_integer


@pytest.mark.parametrize(
    ("query", "response"),
    [
        ("Q: 1+1=2<eos>", "2"),
        ("Q: 1+1= 2 <|im_end|>\n<|endoftext|><pad><pad>", "2"),
        ("Q: 1+1=</s>", ""),
        ("Q: 1+1=a</s>b", "a</s>b"),
    ],
)
def test_response_is_what_follows_the_prompt_without_trailing_special_tokens(query, response):
    assert response_text(query, "Q: 1+1=") == response


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"an open { and \boxed{6}", "6"),
        (r"\boxed{8} or rather \boxed{9", "8"),
        (r"\boxed{}", ""),
        ("9", None),
    ],
)
def test_last_box_is_the_last_one_whose_braces_close(text, content):
    assert last_box(text) == content


def test_latex_thousands_separator_is_dropped_only_between_thousands():
    assert boxed(r"1\,234\,567") == r"\boxed{1234567}"
    assert boxed(r"1\,23") == r"\boxed{1\,23}"
    assert boxed(r"5\,\text{cm}") == r"\boxed{5\,\text{cm}}"


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("50\u00b0", r"50^\circ"),
        ("5.", "5"),
        ("$5.$", "5"),
        (r"\boxed{1,234.}", "1234"),
        ("\u20135", "-5"),
        ("2 1/2", "5/2"),
    ],
)
def test_a_label_that_is_a_value_is_boxed_as_math_verify_reads_it(label, value):
    assert label_expression(label) == f"\\boxed{{{value}}}"


@pytest.mark.parametrize("label", ["(0,1]", " (0,1] ", "$(0,1]$", r"\boxed{(0,1]}", r"Thus $x = \boxed{(0,1]}$."])
def test_label_is_boxed_however_it_is_written(label):
    assert label_expression(label) == r"\boxed{(0,1]}"


def test_label_with_dollars_inside_is_left_to_math_verify_and_money_is_not():
    assert label_expression("$1$ and $2$") == "$1$ and $2$"
    assert label_expression(r"\$5") == r"\boxed{5}"


def test_only_plain_integers_are_compared_without_math_verify():
    assert same_integer("19", "19") is same_integer("1" * 16, "1" * 16) is True
    assert same_integer("27", "19") is False
    for answer in ("019", "+19", "19.0", "\u0661\u0669", ""):
        assert same_integer(answer, "19") is same_integer("19", answer) is None
