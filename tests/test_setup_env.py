"""How setup_env.sh refuses, and how it finds the platform."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Answers as a Python 3.11 that makes no environment: setup stops there.
PYTHON = """case "$*" in *python_version*) echo 3.11.0;; "-m venv"*) echo no room; exit 1;; esac"""
GPUS, BROKEN = "echo GPU 0: NVIDIA H200", "echo NVIDIA-SMI has failed; exit 9"


def setup(venv, *arguments, **variables):
    command = ["bash", ROOT / "scripts/setup_env.sh", *arguments]
    environment = os.environ | {"OPENRLHF_DBB_VENV": str(venv)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "platform", "nvidia_smi", "line"),
    [
        ([], "tpu", GPUS, "OPENRLHF_DBB_PLATFORM=tpu is not cpu or cuda"),
        (["--tests"], "cpu", GPUS, "unknown argument '--tests'; allowed: --test"),
        ([], "", BROKEN, "nvidia-smi lists no GPU: "),  # a broken driver must not end in a stack without CUDA
        ([], "", GPUS, "setup: cuda stack for"),
    ],
)
def test_setup_refuses_or_takes_cuda_where_a_gpu_is_listed(tmp_path, arguments, platform, nvidia_smi, line):
    for name, script in (("nvidia-smi", nvidia_smi), ("python3.11", PYTHON)):
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = setup(tmp_path / "venv", *arguments, OPENRLHF_DBB_PLATFORM=platform, PATH=path)
    assert done.returncode == 1
    assert line in done.stdout + done.stderr


def test_setup_leaves_a_folder_that_it_did_not_make(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    done = setup(tmp_path)
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (1, ["mine.txt"])
    assert done.stderr.startswith(f"setup: error: {tmp_path} exists and this script did not make it; remove it or set")
