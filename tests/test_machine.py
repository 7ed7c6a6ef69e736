"""What a host has for CUDA, told by a stand-in for NVIDIA's driver, and the flag values that follow from it."""

import ctypes
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from openrlhf_dbb import upstream
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine

ROOT = Path(__file__).parents[1]
GPU = machine.Gpu("NVIDIA H100", 80 * 2**30, (9, 0))


class Driver:
    """The functions of libcuda.so.1 that are called, for an H100 and an A100."""

    def __init__(self, started):
        self.cuInit = lambda flags: started
        self.cuDriverGetVersion = lambda version: self.put(version, 13010)
        self.cuDeviceGetCount = lambda count: self.put(count, 2)
        self.cuDeviceGet = self.put
        self.cuDeviceTotalMem_v2 = lambda size, device: self.put(size, (80, 40)[device.value] << 30)
        self.cuDeviceGetAttribute = lambda value, attribute, device: self.put(
            value, {75: (9, 8), 76: (0, 0)}[attribute][device.value]
        )

    @staticmethod
    def put(pointer, value):
        pointer._obj.value = value
        return 0

    @staticmethod
    def cuDeviceGetName(name, length, device):
        name.value = (b"NVIDIA H100", b"NVIDIA A100")[device.value]


def test_the_driver_tells_name_memory_and_capability(monkeypatch):
    looked = []
    for started in (0, 100):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, started=started: {"libcuda.so.1": Driver(started)}[name])
        looked.append(machine.look.__wrapped__())
    assert looked[0] == machine.Machine((GPU, machine.Gpu("NVIDIA A100", 40 * 2**30, (8, 0))), (13, 1))
    assert looked[0].describe() == "1 x NVIDIA H100 (80 GiB), 1 x NVIDIA A100 (40 GiB)"
    assert looked[1] == machine.Machine((), (13, 1))


def test_setup_runs_the_same_file_before_anything_is_installed():
    program = [sys.executable, "-I", "-S", str(ROOT / "openrlhf_dbb/platform/machine.py"), "13.0"]
    done = subprocess.run(program, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("there is no C compiler")
    assert subprocess.run(program, env={"CC": "cc"}).returncode == 0


def test_an_environment_without_cuda_says_that_it_leaves_a_gpu_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "torch_cuda", lambda: None)
    monkeypatch.setattr(machine, "look", lambda: machine.Machine((GPU,), (13, 0)))
    monkeypatch.chdir(tmp_path)
    assert train_grpo.main(["--preset", "tiny", "--dry_run"]) == 0
    assert "warning: there is 1 x NVIDIA H100 (80 GiB), but" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "visible", "why"),
    [
        (machine.Machine((), None), None, "there is no NVIDIA driver"),
        (machine.Machine((GPU,), (12, 4)), None, r"\(CUDA 12.4\) is too old for CUDA 13.0; update it to 580"),
        (machine.Machine((), (13, 0)), None, "the driver shows no GPU; `nvidia-smi -L`"),
        (machine.Machine((), (13, 0)), "", "CUDA_VISIBLE_DEVICES is ''; unset it"),
    ],
)
def test_a_stack_for_cuda_never_trains_without_a_gpu(monkeypatch, host, visible, why):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: host)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=why):
        cuda.check_machine()


def test_a_host_without_what_triton_needs_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: machine.Machine((GPU,), (13, 0)))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UsageError, match=r"there is no .*/Python.h"):
        cuda.check_machine()


@pytest.mark.parametrize(("build", "expected"), [("None", "None True"), ("'12.9'", "12.9 False")])
def test_the_version_of_torch_tells_its_cuda_without_an_import(tmp_path, build, expected):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch/version.py").write_text(f"cuda = {build}")
    code = "from openrlhf_dbb.platform import cpu, machine; print(machine.torch_cuda(), cpu.active())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == expected


def test_a_compiled_module_comes_before_its_shim(tmp_path):
    code = (
        "from openrlhf_dbb.platform import machine; machine.add_shims(); import flash_attn_2_cuda; "
        "print(machine.is_real('flash_attn_2_cuda'), flash_attn_2_cuda.__file__)"
    )
    run = [sys.executable, "-c", code]
    shim = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert shim == ["False", str(ROOT / "openrlhf_dbb/platform/shims/flash_attn_2_cuda.py")]
    (tmp_path / "flash_attn_2_cuda.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    compiled = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert compiled == ["True", f"{tmp_path}/flash_attn_2_cuda.py"]


@pytest.mark.parametrize(("home", "expected"), [("with", "with/bin/nvcc"), ("without", None), (None, "bin/nvcc")])
def test_nvcc_is_found_where_deepspeed_looks_for_it(tmp_path, monkeypatch, home, expected):
    for place in (tmp_path / "with/bin/nvcc", tmp_path / "bin/nvcc"):
        place.parent.mkdir(parents=True)
        place.touch(mode=0o755)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert machine.nvcc() == (str(tmp_path / expected) if expected else None)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_USE_FLASHINFER_SAMPLER", "0"), ("VLLM_WSL2_ENABLE_PIN_MEMORY", "1")]
)
def test_vllm_compiles_nothing_and_may_pin_memory_unless_the_user_says_otherwise(monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    for found in (None, "/usr/local/cuda/bin/nvcc"):
        monkeypatch.setattr(machine, "nvcc", lambda found=found: found)
        assert cuda.worker_environment()[name] == value
    monkeypatch.setenv(name, "7")
    assert cuda.worker_environment()[name] == "7"


HOPPER, TURING, BLACKWELL = ((machine.Gpu("G", 1, (major, minor)),) for major, minor in ((9, 0), (7, 5), (10, 0)))


@pytest.mark.parametrize(
    ("there", "gpus", "chosen"),
    [
        (False, HOPPER, "sdpa"),
        (True, HOPPER, "flash_attention_2"),
        (True, BLACKWELL, "sdpa"),
        (True, (*HOPPER, *TURING), "sdpa"),
    ],
)
def test_the_attention_follows_from_what_is_installed_and_from_the_gpus(monkeypatch, there, gpus, chosen):
    monkeypatch.setattr(machine, "is_real", lambda module: there)
    attention, why = cuda.choose_attention(gpus)
    assert attention == chosen and why.startswith("CUDA, ")


def args(**given):
    """OpenRLHF's arguments by their flags."""
    flags = {
        "ds.attn_implementation": "sdpa",
        "ds.ring_attn_size": 1, "ds.tensor_parallel_size": 1, "ds.param_dtype": "fp32", "vllm.enforce_eager": True,
        "vllm.sync_backend": "gloo", "vllm.tensor_parallel_size": 1, **dict.fromkeys(cpu.NEED_CUDA, False),
        **{flag.replace("__", "."): value for flag, value in given.items()},
    }  # fmt: skip
    return upstream.nested(flags)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"vllm__enable_sleep": True}, "--vllm.enable_sleep"),
        ({"vllm__enforce_eager": False}, "--vllm.enforce_eager False"),
        ({"ds__attn_implementation": "flash_attention_2"}, "--ds.attn_implementation flash_attention_2"),
        ({"ds__tensor_parallel_size": 2}, "--ds.tensor_parallel_size 2"),
    ],
)
def test_flags_that_cannot_work_without_cuda_are_refused(given, flag):
    cpu.check_flags(args())
    with pytest.raises(UsageError, match=f"^{flag}"):
        cpu.check_flags(args(**given))
