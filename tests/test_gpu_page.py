"""The page of a GPU check: from a report in view, and from scripts/gpu_check.sh itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACE = "\n".join(f"line {number} of /home/me/src &lt;x&gt;" for number in range(1, 51))
REPORT = f"""<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>
<testcase name="test_tiny_preset_eager" time="61.04">
<properties><property name="vllm_kl" value="0.0011" /><property name="accuracy" value="40 % | 41 %" /></properties>
</testcase>
<testcase name="test_attention[sdpa]" time="2.0"><failure message="AssertionError">{TRACE}</failure></testcase>
<testcase name="test_speed" time="0.5"><error message="failed on setup">E   no</error></testcase>
<testcase name="test_two_gpus" time="0.0"><skipped message="needs 2 GPUs, here is 1" /></testcase>
</testsuite></testsuites>"""
HEAD = """\
# GPU check: 1 passed, 2 failed, 1 skipped

| check | result | seconds | figures |
| --- | --- | --- | --- |
| tiny_preset_eager | passed | 61 | vllm_kl 0.0011; accuracy 40 % / 41 % |
| attention[sdpa] | failed | 2 |  |
| speed | failed | 0 |  |
| two_gpus | skipped | 0 |  |

attention[sdpa]:

    line 11 of ~/src <x>
"""
END = """\
    line 50 of ~/src <x>

speed:

    E   no

two_gpus:

    needs 2 GPUs, here is 1
"""


def test_a_page_has_figures_failures_and_skips(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    command = [sys.executable, str(ROOT / "scripts/gpu_page.py"), str(tmp_path / "report.xml")]
    environment = os.environ | {"HOME": "/home/me"}
    page = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert page.startswith(HEAD) and page.endswith(END)


@pytest.mark.slow
def test_one_command_writes_the_page_to_the_current_folder(tmp_path: Path) -> None:
    rehearsal = {"OPENRLHF_DBB_VENV": sys.prefix, "OPENRLHF_DBB_REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), "--no-setup", "-k", "machine or compiled"],
        cwd=tmp_path, env=os.environ | rehearsal, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("gpu-check-*.md")
    assert done.stdout.splitlines()[-1].endswith(str(written))
    lines = written.read_text().splitlines()
    assert lines[0] == "# GPU check: 1 passed, 0 failed, 1 skipped"
    # A rehearsal must not be taken for a GPU.
    assert any(line.startswith("| machine |") and "rehearsal without CUDA" in line for line in lines)
