"""Describes this host: its GPUs, driver and compiler, its Ray cluster, its compiled modules. Does not import torch.

The build of the installed torch decides whether a run trains with CUDA: it is the same in a process without a GPU.
The set-up script runs this file by its path before anything is installed:

    python openrlhf_dbb/platform/machine.py 13.0    prints what the host lacks for CUDA 13.0; exit code 1 if anything
"""

import ctypes
import functools
import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

GIB = 2**30
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_CAPABILITY_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
_SHIMS = str(Path(__file__).with_name("shims"))
NO_CUDA = "no CUDA"  # the reason for a flag's value
ALONE = "local"  # value of RAY_ADDRESS that keeps a command out of every cluster


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: NVIDIA's name, memory in bytes, compute capability ((9, 0) for Hopper)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The CUDA devices that this process may use; ``CUDA_VISIBLE_DEVICES`` counts."""

    gpus: tuple[Gpu, ...] = ()
    # Newest CUDA that the driver runs; None without a driver
    driver_cuda: tuple[int, int] | None = None

    def describe(self) -> str:
        """Return the GPUs in words, such as "8 x NVIDIA H200 (140 GiB)"; "" without one."""
        counts = Counter((gpu.name, gpu.memory) for gpu in self.gpus)
        return ", ".join(
            f"{count} x {name} ({memory / GIB:.0f} GiB)" for (name, memory), count in counts.items()
        )


@functools.cache
def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch is built for; None for a build without CUDA or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


@functools.cache
def look() -> Machine:
    """Return the machine as NVIDIA's driver shows it to this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Machine()
    version = ctypes.c_int(0)
    count = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    cuda = (version.value // 1000, version.value % 1000 // 10)
    return Machine(tuple(_gpu(driver, number) for number in range(count.value)), cuda)


def _gpu(driver: ctypes.CDLL, number: int) -> Gpu:
    device = ctypes.c_int(0)
    memory = ctypes.c_size_t(0)
    name = ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major = ctypes.c_int(0)
    minor = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return Gpu(name.value.decode(), memory.value, (major.value, minor.value))


def no_gpus(machine: Machine, cuda: str) -> str | None:
    """Return why a torch built for ``cuda`` finds no GPU that it can use; None if it should find one."""
    if machine.driver_cuda is None:
        return "there is no NVIDIA driver (libcuda.so.1); a container needs `docker run --gpus all`"
    if machine.driver_cuda[0] < int(cuda.partition(".")[0]):
        runs = ".".join(map(str, machine.driver_cuda))
        return f"NVIDIA's driver (CUDA {runs}) is too old for CUDA {cuda}; update it (CUDA 13.0 needs 580 or later)"
    if not machine.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"the driver shows no GPU (CUDA_VISIBLE_DEVICES is {visible!r}); `nvidia-smi -L` must list one"
    return None


def lacks() -> list[str]:
    """Return one line for each thing that vLLM, Triton or torch needs and this host does not have."""
    lines = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lines.append("there is no C compiler, and Triton needs one; install gcc (build-essential)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        lines.append(
            f"there is no {header}, and Triton needs it; install python{version}-dev (or -devel)"
        )
    return lines


def installed(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of those of these packages that are installed."""
    versions = {}
    for package in distributions():
        if package.name in packages:
            versions[package.name] = package.version
    return versions


def nvcc() -> str | None:
    """Return the path of NVIDIA's compiler; None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which(f"{home}/bin/nvcc") or shutil.which("nvcc")


def main_memory() -> int:
    """Return the bytes of this host's main memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def add_shims() -> None:
    """Let this process import ``shims/`` where a compiled module is missing. Ray calls this function in each worker."""
    # flash_attn imports its compiled extension, and the index has no wheel of it. Last: a real module comes first.
    if _SHIMS not in sys.path:
        sys.path.append(_SHIMS)


def is_real(module: str) -> bool:
    """Return whether a module can be found outside ``shims/``. The module is not imported."""
    spec = importlib.util.find_spec(module)
    return spec is not None and not (spec.origin or "").startswith(_SHIMS)


def ray_cluster() -> str | None:
    """Return the Ray cluster to join, of RAY_ADDRESS or noted by ``ray start``; None if a run starts Ray itself."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return None if address == ALONE else address
    # Where Ray itself looks
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    noted = Path(folder) / "ray" / "ray_current_cluster"
    return noted.read_text().strip() or None if noted.is_file() else None


def use_rays_interface() -> None:
    """Make gloo and NCCL use the network interface that Ray uses, unless the environment names another."""
    import psutil
    import ray

    # By themselves they use the address of the host's name, which /etc/hosts often sets to 127.0.1.1.
    address = ray.util.get_node_ip_address()
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if not address.startswith("127."):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


if __name__ == "__main__":
    # An image is built on a host without one
    faults = [no_gpus(look(), sys.argv[1])] if look().gpus else []
    missing = [line for line in [*faults, *lacks()] if line]
    print("\n".join(missing))
    sys.exit(bool(missing))
