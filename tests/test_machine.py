"""What a host has for CUDA, told by a stand-in for NVIDIA's driver; and what a start makes of it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from openrlhf_dbb.driver import arguments
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cuda, machine, shims

ROOT = Path(__file__).parents[1]
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
int cuInit(unsigned flags) { return number("STUB_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = number("STUB_VERSION", 13010); return 0; }
int cuDeviceGetCount(int *count) { *count = number("STUB_GPUS", 2); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device ? "NVIDIA A100" : "NVIDIA H100", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device ? 40 : 80) << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (device ? 8 : 9) : attribute == 76 ? 0 : -1; return 0; }
"""
LOOK = "from openrlhf_dbb.platform import machine; found = machine.look(); print(found); print(found.describe())"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Function: run Python where libcuda.so.1 is the stand-in."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)

    def run(*command, **environment):
        path = f"{folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"LD_LIBRARY_PATH": path} | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_the_driver_is_asked_for_name_memory_and_capability(driver):
    h100, a100 = 80 * 2**30, 40 * 2**30
    assert driver("-c", LOOK).stdout.splitlines() == [
        f"Machine(gpus=(Gpu(name='NVIDIA H100', memory={h100}, capability=(9, 0)), "
        f"Gpu(name='NVIDIA A100', memory={a100}, capability=(8, 0))), driver_cuda=(13, 1))",
        "1 x NVIDIA H100 (80 GiB), 1 x NVIDIA A100 (40 GiB)",
    ]
    assert driver("-c", LOOK, STUB_INIT="100").stdout.startswith("Machine(gpus=(), driver_cuda=(13, 1)")


def test_setup_asks_the_same_file_before_anything_is_installed(driver):
    program = str(ROOT / "openrlhf_dbb/platform/machine.py")
    assert driver("-I", "-S", program, "13.0").returncode == 0
    old = driver("-I", "-S", program, "13.0", STUB_VERSION="12040")
    assert old.returncode == 1
    assert "(CUDA 12.4) is too old for CUDA 13.0; update it to 580 or later" in old.stdout
    nothing = driver("-I", "-S", program, "13.0", PATH="/nowhere", CC="")
    assert nothing.stdout.startswith("there is no C compiler, with which Triton makes kernels callable; install gcc")


def test_an_environment_without_cuda_says_that_it_leaves_a_gpu_alone(driver):
    if machine.torch_cuda() is not None:
        pytest.skip("the environment is for CUDA")
    shown = driver("-m", "openrlhf_dbb", "train", "--preset", "tiny", "--dry_run")
    assert (
        "warning: there is 1 x NVIDIA H100 (80 GiB), 1 x NVIDIA A100 (40 GiB), but the installed torch is built "
        in (shown.stdout)
    )


GPU = machine.Gpu("NVIDIA H100", 80 * 2**30, (9, 0))


@pytest.mark.parametrize(
    ("found", "visible", "why"),
    [
        (machine.Machine((), None), None, r"there is no NVIDIA driver \(libcuda.so.1\); a container needs `docker run"),
        (machine.Machine((GPU,), (12, 4)), None, r"\(CUDA 12.4\) is too old for CUDA 13.0; update it to 580 or later"),
        (machine.Machine((), (13, 0)), None, "the driver shows no GPU; `nvidia-smi -L` must list one"),
        (machine.Machine((), (13, 0)), "", "the driver shows no GPU, and CUDA_VISIBLE_DEVICES is ''; unset it"),
    ],
)
def test_a_stack_for_cuda_without_a_gpu_is_refused_and_never_trains_without(monkeypatch, found, visible, why):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=why) as caught:
        arguments.parse(["--preset", "tiny"])
    assert "OPENRLHF_DBB_PLATFORM=cpu bash scripts/setup_env.sh" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", machine.Machine)
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--help"])
    assert ended.value.code == 0 and "--estimator" in capsys.readouterr().out


def test_what_triton_needs_is_asked_for_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: machine.Machine((GPU,), (13, 0)))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.28"))
    with pytest.raises(
        UsageError, match=r"there is no .*/Python.h, which Triton .*; glibc is 2.28, .* need 2.31 or later"
    ):
        cuda.check_machine()


@pytest.mark.parametrize(("build", "wanted"), [("None", None), ("'12.9'", "12.9")])
def test_the_cuda_of_a_torch_is_told_by_its_version(tmp_path, build, wanted):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch/version.py").write_text(f"cuda = {build}")
    code = "from openrlhf_dbb.platform import cpu, machine; print(machine.torch_cuda(), cpu.active())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"{wanted} {wanted is None}"


def test_a_module_is_real_unless_it_is_one_of_the_stand_ins(tmp_path):
    code = (
        "import sys; from openrlhf_dbb.platform import shims; "
        "before = shims.is_real('flash_attn_2_cuda'); shims.add(); "
        "import flash_attn_2_cuda; print(before, shims.is_real('flash_attn_2_cuda'), flash_attn_2_cuda.__file__)"
    )
    run = [sys.executable, "-c", code]
    alone = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert alone == ["False", "False", f"{shims.FOLDER}/flash_attn_2_cuda.py"]
    (tmp_path / "flash_attn_2_cuda.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    compiled = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert compiled == ["True", "True", f"{tmp_path}/flash_attn_2_cuda.py"]


@pytest.mark.parametrize(
    ("home", "on_path", "found"),
    [("with", True, "home"), ("without", True, None), (None, True, "path"), (None, False, None)],
)
def test_nvcc_is_looked_for_where_flashinfer_would(tmp_path, monkeypatch, home, on_path, found):
    places = {"home": tmp_path / "with/bin/nvcc", "path": tmp_path / "bin/nvcc"}
    for place in places.values():
        place.parent.mkdir(parents=True)
        place.touch(mode=0o755)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if home:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else "/nowhere")
    monkeypatch.setattr(
        machine.os, "access", lambda path, mode: Path(path).is_relative_to(tmp_path) and Path(path).exists()
    )
    assert machine.nvcc() == (str(places[found]) if found else None)
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert cuda.worker_environment() == ({} if found else {"VLLM_USE_FLASHINFER_SAMPLER": "0"})
