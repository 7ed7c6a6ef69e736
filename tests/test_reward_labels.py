"""Labels that Math-Verify cannot read, found before a training, and what is remembered of the others."""

import json
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("math_verify")

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import labels
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

NO_ANSWER = "no $ number"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The file of readable labels, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "openrlhf_dbb" / "readable_labels.json"


@pytest.fixture
def asked(monkeypatch):
    """What Math-Verify was asked for."""
    found = []
    real = VerifierPool.why_unreadable
    monkeypatch.setattr(VerifierPool, "why_unreadable", lambda pool, label: found.append(label) or real(pool, label))
    return found


def test_unreadable_labels_are_found_with_the_reason(cache):
    given = ["5", r"\frac{1}{2}", NO_ANSWER, "x" * 70 + " $", r"\{1,2\}", "(0,1]"]
    found = labels.unreadable(given)
    assert found == {
        NO_ANSWER: "'no $ number', understood as []",
        "x" * 70 + " $": f"'{'x' * 57}...', understood as []",
    }
    assert json.loads(cache.read_text())["labels"] == ["(0,1]", r"\frac{1}{2}", r"\{1,2\}"]


def test_integers_need_no_verifier_and_what_was_read_is_not_asked_again(asked, cache):
    assert labels.unreadable(["5", "-12", " 7 ", "0"]) == {}
    assert asked == [] and not cache.exists()
    assert labels.unreadable([r"\sqrt{2}", r"\sqrt{2}", "5"]) == {}
    assert asked == [r"\boxed{\sqrt{2}}"]
    assert labels.unreadable([r"\sqrt{2}", r"\sqrt{3}", NO_ANSWER]).keys() == {NO_ANSWER}
    assert labels.unreadable([r"\sqrt{2}", r"\sqrt{3}", NO_ANSWER]).keys() == {NO_ANSWER}
    assert asked[1:] == [r"\boxed{\sqrt{3}}", NO_ANSWER, NO_ANSWER]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"labels": ["\\\\pi"]}', '{"math-verify": "0.1", "labels": ["\\\\pi"]}']
)
def test_a_broken_file_or_one_of_another_version_is_made_anew(asked, cache, content):
    cache.parent.mkdir()
    cache.write_text(content)
    assert labels.unreadable([r"\pi"]) == {}
    assert asked == [r"\boxed{\pi}"]
    assert json.loads(cache.read_text())["labels"] == [r"\pi"]


def test_a_folder_that_cannot_be_written_is_no_error(asked, cache, caplog):
    cache.parent.write_text("a file where the folder would be")
    assert labels.unreadable([r"\pi"]) == {}
    assert "the next start has to check the labels again" in caplog.text


def test_several_processes_write_the_file_at_once(cache):
    code = "import sys; from openrlhf_dbb.rewards import labels; print(labels.unreadable(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, label], env=environment, stdout=subprocess.PIPE, text=True)
        for label in (r"\sqrt{2}", r"\sqrt{3}")
    ]
    assert [process.communicate(timeout=200)[0] for process in processes] == ["{}\n", "{}\n"]
    kept = set(json.loads(cache.read_text())["labels"])
    assert kept and kept <= {r"\sqrt{2}", r"\sqrt{3}"}
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_several_verifiers_work_at_once(monkeypatch):
    """Each of two requests waits until the other one is there."""
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_PROCESSES", "2")
    both = threading.Barrier(2, timeout=100)

    def ask(pool, request):
        both.wait()
        return {}

    monkeypatch.setattr(VerifierPool, "_ask", ask)
    assert labels.unreadable([r"\pi", r"\sqrt{2}"]) == {}


def test_a_label_that_takes_too_long_is_unreadable_and_not_remembered(monkeypatch, cache):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_SECONDS", "0.001")
    assert labels.unreadable([r"\frac{355}{113}"]) == {
        r"\frac{355}{113}": r"'\\frac{355}{113}', no reply within 0.001 s",
    }
    assert json.loads(cache.read_text())["labels"] == []


def test_a_verifier_that_cannot_start_ends_the_check_in_one_line(monkeypatch, tmp_path):
    script = tmp_path / "broken_worker.py"
    script.write_text("import no_such_module_anywhere")
    monkeypatch.setattr(VerifierPool, "from_environment", lambda: VerifierPool(2, 5.0, script))
    with pytest.raises(UsageError) as refused:
        labels.unreadable([rf"\sqrt{{{i}}}" for i in range(20)])
    assert str(refused.value) == (
        "the labels cannot be checked: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_settings_out_of_range_are_named(monkeypatch):
    monkeypatch.setenv("OPENRLHF_DBB_VERIFIER_PROCESSES", "0")
    with pytest.raises(UsageError, match=r"the labels cannot be checked: OPENRLHF_DBB_VERIFIER_PROCESSES=0"):
        labels.unreadable([r"\pi"])
