"""What this host has for CUDA: GPUs, driver, compiler. Answered without an import of torch, which takes seconds.

Whether a process trains with CUDA follows from the build of torch that is installed (:func:`torch_cuda`): that is the
same in every process of a run, also in one that is given no GPU. Set-up runs this file by its path, before anything is
installed, so that it needs the standard library alone:

    python openrlhf_dbb/platform/machine.py 13.0    prints what the host lacks for CUDA 13.0; exit code 1 if anything
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import re
import runpy
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
LEAST_GLIBC = (2, 31)  # of the wheels in requirements/cuda.lock
_DRIVERS = {12: 525, 13: 580}  # the first NVIDIA driver for a CUDA
_TOTAL_MEMORY, _CAPABILITY = "cuDeviceTotalMem_v2", (75, 76)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device.

    Attributes:
        name: as NVIDIA calls it.
        memory: bytes in all.
        capability: compute capability, (9, 0) for Hopper.
    """

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The CUDA devices of this process (``CUDA_VISIBLE_DEVICES`` counts), and why there are none.

    Attributes:
        gpus: the devices.
        driver_cuda: newest CUDA that the driver can run, (13, 0); None without a driver.
    """

    gpus: tuple[Gpu, ...] = ()
    driver_cuda: tuple[int, int] | None = None

    def describe(self) -> str:
        """In one line."""
        names = dict.fromkeys((gpu.name, gpu.memory) for gpu in self.gpus)
        kinds = [
            f"{sum((gpu.name, gpu.memory) == kind for gpu in self.gpus)} x {kind[0]} ({kind[1] / GIB:.0f} GiB)"
            for kind in names
        ]
        return ", ".join(kinds)


@functools.cache
def torch_cuda() -> str | None:
    """The CUDA that the installed torch is built for; None if for none, or without torch. It is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


@functools.cache
def look() -> Machine:
    """What NVIDIA's driver shows this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Machine()
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = (version.value // 1000, version.value % 1000 // 10)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return Machine((), cuda)
    return Machine(tuple(_gpu(driver, number) for number in range(count.value)), cuda)


def _gpu(driver: ctypes.CDLL, number: int) -> Gpu:
    device, memory, name = ctypes.c_int(0), ctypes.c_size_t(0), ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    getattr(driver, _TOTAL_MEMORY)(ctypes.byref(memory), device)
    capability = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(), memory.value, (capability[0], capability[1]))


def no_gpus(machine: Machine, cuda: str) -> str | None:
    """Why torch, built for ``cuda``, finds no GPU; None if it should find some."""
    old = old_driver(machine, cuda)
    if old or machine.gpus:
        return old
    if machine.driver_cuda is None:
        return "there is no NVIDIA driver (libcuda.so.1); a container needs `docker run --gpus all`"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"the driver shows no GPU, and CUDA_VISIBLE_DEVICES is {hidden!r}; unset it, or name GPUs that exist"
    return "the driver shows no GPU; `nvidia-smi -L` must list one"


def old_driver(machine: Machine, cuda: str) -> str | None:
    """That the driver is too old for ``cuda``; None if it is not, or if there is none."""
    major = int(cuda.partition(".")[0])
    if machine.driver_cuda is None or machine.driver_cuda[0] >= major:
        return None
    has = f"{driver_version() or 'here'} (CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]})"
    return (
        f"NVIDIA's driver {has} is too old for CUDA {cuda}; update it to {_DRIVERS.get(major, 'a newer one')} or later"
    )


def driver_version() -> str | None:
    """Version of NVIDIA's kernel driver, such as 580.65.06; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def lacks() -> list[str]:
    """What the compiled parts of vLLM, Triton and torch need and is not here, a line each."""
    lines = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lines.append("there is no C compiler, with which Triton makes kernels callable; install gcc (build-essential)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        lines.append(f"there is no {header}, which Triton compiles against; install {version}-dev (or -devel)")
    library, glibc = platform.libc_ver()
    if library == "glibc" and tuple(map(int, glibc.split("."))) < LEAST_GLIBC:
        least = ".".join(map(str, LEAST_GLIBC))
        lines.append(f"glibc is {glibc}, the pinned wheels need {least} or later; use a newer system or a container")
    return lines


def nvcc() -> str | None:
    """Where FlashInfer and DeepSpeed would find NVIDIA's compiler; None if nowhere."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        return shutil.which("nvcc") or _executable("/usr/local/cuda/bin/nvcc")
    return _executable(f"{home}/bin/nvcc")


def _executable(path: str) -> str | None:
    return path if os.access(path, os.X_OK) else None


if __name__ == "__main__":
    found = [line for line in [old_driver(look(), sys.argv[1]), *lacks()] if line]
    print("\n".join(found))
    sys.exit(bool(found))
