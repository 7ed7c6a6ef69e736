"""Are there CUDA devices that torch can use? Answered without an import of torch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path


def cuda_devices() -> int:
    """CUDA devices of this process (``CUDA_VISIBLE_DEVICES`` counts); 0 if torch is built without CUDA, or absent."""
    return _driver_devices() if torch_has_cuda() else 0


def torch_has_cuda() -> bool:
    """Whether torch is installed, and built for CUDA; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def _driver_devices() -> int:
    """What NVIDIA's driver says; 0 if there is none, or if it does not work."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
