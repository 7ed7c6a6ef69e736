"""How setup_env.sh refuses, how it finds the platform and a Python, the image, and the table of gpu_check.sh."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def setup_env(venv: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup_env.sh where it must refuse before it installs anything."""
    command = ["bash", ROOT / "scripts/setup_env.sh", *arguments]
    variables = os.environ | {"OPENRLHF_DBB_VENV": str(venv)} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done


def test_setup_refuses_in_one_line_and_leaves_a_folder_that_it_did_not_make(tmp_path: Path) -> None:
    new, mine = tmp_path / "venv", tmp_path / "mine.txt"
    mine.write_text("keep")
    for done, message in [
        (setup_env(new, OPENRLHF_DBB_PLATFORM="tpu"), "OPENRLHF_DBB_PLATFORM=tpu is not cpu or cuda"),
        (setup_env(new, "--tests"), "unknown argument '--tests'; allowed: --test"),
        (setup_env(tmp_path), f"{tmp_path} exists and this script did not make it; remove it or set OPENRLHF_DBB_VENV"),
    ]:
        assert done.stderr == f"setup: error: {message}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def command(folder: Path, name: str, script: str) -> None:
    """Put a bash script under a command's name."""
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("nvidia_smi", "platform"),
    [
        ("for gpu in {0..7}; do echo GPU $gpu: NVIDIA H200; done", "cuda"),
        ("echo NVIDIA-SMI has failed because it could not reach the driver; exit 9", None),
    ],
)
def test_setup_takes_cuda_where_a_gpu_is_listed(tmp_path: Path, nvidia_smi: str, platform: str | None) -> None:
    # The Python answers as 3.11 but makes no environment: setup stops there, and shows that step's output.
    python = """case "$*" in *python_version*) echo 3.11.0;; "-m venv"*) echo no room; exit 1;; esac"""
    command(tmp_path, "nvidia-smi", nvidia_smi)
    command(tmp_path, "python3.11", python)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    result = setup_env(tmp_path / "venv", PATH=path, OPENRLHF_DBB_PLATFORM="")

    if platform is None:  # a broken driver must not end in a stack without CUDA
        assert re.fullmatch(r"setup: error: nvidia-smi lists no GPU: .*\n", result.stderr)
    else:
        assert result.stdout.startswith(f"setup: {platform} stack for")
        assert "no room" in result.stderr


def test_image_has_the_cuda_that_torch_was_built_for() -> None:
    (image,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-base-", (ROOT / "Dockerfile").read_text(), re.M)
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)\.", (ROOT / "requirements/cuda.lock").read_text(), re.M)
    assert image == runtime
