"""The page of a GPU check: from a report in view, and from scripts/gpu_check.sh itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASE = '<testcase classname="tests.test_cuda" name="{name}" time="{time}">{inside}</testcase>'


def report(*cases: tuple[str, str, str]) -> str:
    """pytest's, of (name, seconds, what is inside)."""
    inside = "".join(CASE.format(name=name, time=time, inside=inside) for name, time, inside in cases)
    begun = 'timestamp="2026-11-22T15:04:05.678901+00:00"'
    return f'<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite {begun}>{inside}</testsuite></testsuites>'


def properties(**figures: str) -> str:
    each = "".join(f'<property name="{name}" value="{value}" />' for name, value in figures.items())
    return f"<properties>{each}</properties>"


def page(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/gpu_page.py"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOME": "/home/me"}, timeout=60)


def page_of(folder: Path, text: str) -> str:
    (folder / "report.xml").write_text(text)
    done = page(folder / "report.xml")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


MACHINE = ("test_machine", "5.25", properties(GPU="8 x NVIDIA H100 80GB HBM3", torch="2.13.0"))
EAGER = ("test_tiny_preset_eager", "61.04", properties(vllm_kl="0.0011 (median)", accuracy="40.0 % | 41.0 %"))
TRACE = "\n".join(f"line {number} of /home/me/src &lt;x&gt;" for number in range(1, 51))
FAILED = ("test_attention[sdpa-tiny]", "2.0", f'<failure message="AssertionError">{TRACE}</failure>')
BROKEN = ("test_speed", "0.5", '<error message="failed on setup">tests/test_cuda.py:1: in eager\nE   no</error>')
SKIPPED = ("test_an_engine_over_two_gpus", "0.0", '<skipped message="needs 2 GPUs, here is 1">at line 1</skipped>')

EXPECTED = """\
# GPU check: 2 of 4 passed on 8 x NVIDIA H100 80GB HBM3

2 passed, 2 failed, 1 skipped; 69 s; begun 2026-11-22 15:04

## Machine

| what | version |
| --- | --- |
| GPU | 8 x NVIDIA H100 80GB HBM3 |
| torch | 2.13.0 |

## Entries

| entry | result | seconds | figures |
| --- | --- | --- | --- |
| machine | passed | 5.2 |  |
| tiny preset eager | passed | 61.0 | vllm_kl 0.0011 (median); accuracy 40.0 % \\| 41.0 % |
| attention (sdpa-tiny) | failed | 2.0 |  |
| speed | failed | 0.5 |  |
| an engine over two gpus | skipped | 0.0 |  |

## What failed

### attention (sdpa-tiny)

{trace}

### speed

    tests/test_cuda.py:1: in eager
    E   no

## What was skipped

- an engine over two gpus: needs 2 GPUs, here is 1
"""


def test_a_page_has_machine_entries_failures_and_skips(tmp_path: Path) -> None:
    trace = "\n".join(f"    line {number} of ~/src <x>" for number in range(11, 51))  # the last 40
    found = page_of(tmp_path, report(MACHINE, EAGER, FAILED, BROKEN, SKIPPED))
    assert found == EXPECTED.format(trace=trace)


def test_a_rehearsal_is_not_taken_for_a_gpu(tmp_path: Path) -> None:
    machine = ("test_machine", "5.0", properties(GPU="none", rehearsal="without CUDA"))
    lines = page_of(tmp_path, report(machine, EAGER)).splitlines()
    assert lines[0] == "# GPU check: rehearsal without CUDA: nothing here was run on a GPU (2 of 2 passed)"
    assert "| GPU | none |" in lines and not any(line.startswith("| rehearsal") for line in lines)


def test_a_machine_without_a_gpu_has_passed_nothing(tmp_path: Path) -> None:
    reason = '<skipped message="needs CUDA" />'
    machine = ("test_machine", "2.0", properties(GPU="none") + reason)
    lines = page_of(tmp_path, report(machine, ("test_tiny_preset_eager", "0.0", reason))).splitlines()
    assert lines[0] == "# GPU check: 0 of 0 passed on a machine where torch finds no GPU"
    assert lines[-2:] == ["- machine: needs CUDA", "- tiny preset eager: needs CUDA"]


def test_without_the_first_entry_the_machine_is_unknown(tmp_path: Path) -> None:
    lines = page_of(tmp_path, report(EAGER)).splitlines()
    assert lines[0] == "# GPU check: 1 of 1 passed on a machine that was not looked at"
    assert "## Machine" not in lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "error: there is no {file}; pytest has not come to its end"),
        ("", "error: {file} is no JUnit report: no element found: line 1, column 0"),
        (report(), "error: {file} has no entries; was any test chosen?"),
    ],
    ids=["missing", "empty", "without entries"],
)
def test_no_report_is_one_line(text: str | None, line: str, tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    if text is not None:
        file.write_text(text)
    done = page(file)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line.format(file=file) + "\n")


@pytest.mark.slow
def test_one_command_writes_the_page_to_the_current_folder(tmp_path: Path) -> None:
    rehearsal = {"OPENRLHF_DBB_VENV": sys.prefix, "OPENRLHF_DBB_REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), "--no-setup", "-k", "machine or compiled"],
        cwd=tmp_path, env=os.environ | rehearsal, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("gpu-check-*.md")
    last = re.fullmatch(r"gpu_check: \d+ s, exit status 0; the page is (.*)", done.stdout.splitlines()[-1])
    assert last is not None and last[1] == str(written)
    lines = written.read_text().splitlines()
    assert lines[0] == "# GPU check: rehearsal without CUDA: nothing here was run on a GPU (1 of 1 passed)"
    assert f"| python | {'.'.join(map(str, sys.version_info[:3]))} |" in lines
    assert "- tiny preset compiled: rehearsal: vLLM compiles nothing on CPU" in lines
