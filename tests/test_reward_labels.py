"""Labels that Math-Verify cannot read, found before a training."""

import pytest

pytest.importorskip("math_verify")

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import labels
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

NO_ANSWER = "no $ number"


def test_unreadable_labels_are_named_with_the_reason():
    assert labels.unreadable(["5", r"\frac{1}{2}", NO_ANSWER, "x" * 70 + " $", r"\{1,2\}", "(0,1]"]) == {
        NO_ANSWER: "'no $ number', understood as []",
        "x" * 70 + " $": f"'{'x' * 57}...', understood as []",
    }


def test_values_need_no_verifier_and_equal_labels_are_read_once(monkeypatch):
    read = []
    real = VerifierPool.why_unreadable
    monkeypatch.setattr(VerifierPool, "why_unreadable", lambda pool, label: read.append(label) or real(pool, label))
    assert labels.unreadable(["5", "-12", " 7 ", "0", "1/2", r"5\text{ cm}"]) == {}
    assert read == []
    assert labels.unreadable([r"\sqrt{2}", r"\sqrt{2}", "5"]) == {}
    assert read == [r"\boxed{\sqrt{2}}"]


def test_a_label_that_takes_too_long_is_unreadable(monkeypatch):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_SECONDS", "0.001")
    label = r"\sqrt{355}"
    assert labels.unreadable([label]) == {label: f"{label!r}, no reply within 0.001 s"}


def test_a_verifier_that_does_not_start_is_one_line(monkeypatch):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_PROCESSES", "none")
    with pytest.raises(UsageError, match="OPENRLHF_DBB_VERIFIER_PROCESSES=none") as error:
        labels.unreadable([r"\sqrt{2}"])
    assert len(str(error.value).splitlines()) == 1
