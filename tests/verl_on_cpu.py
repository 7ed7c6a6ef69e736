"""Lets verl train on a CPU: a platform with PyTorch's CPU device, and its FSDP engine registered for it."""

from __future__ import annotations

import contextlib
import sys
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

sys.modules["trl"] = None  # verl 0.9.1 would import a class from it that TRL 1.16 does not have


def answering(values):
    """Functions by name that return these values, whatever they are asked."""
    return {name: lambda *_, value=value, **__: value for name, value in values.items()}


NOTHING = dict.fromkeys((
    "set_device", "synchronize", "set_allocator_settings", "empty_cache", "profiler_start", "profiler_stop", "cudart",
    "ipc_collect", "reset_peak_memory_stats", "set_per_process_memory_fraction",
))  # fmt: skip
HERE = NOTHING | {"is_available": True, "device_count": 1, "current_device": torch.device("cpu")}
MEMORY = dict.fromkeys(
    ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0
)

device = types.ModuleType("verl_on_cpu.device")
vars(device).update(
    answering(HERE | MEMORY | {"mem_get_info": (2**34, 2**34), "get_device_name": "CPU"})
)
for _name in ("synchronize", "current_stream", "stream", "Stream"):
    setattr(device, _name, getattr(torch.cpu, _name))
device.get_rng_state = lambda *_: torch.get_rng_state()
device.set_rng_state = lambda state, *_: torch.set_rng_state(state)

PLATFORM = {
    "device_name": "cpu", "vendor_name": "none", "device_module": device,
    "manual_seed": lambda self, seed: torch.manual_seed(seed),
    "manual_seed_all": lambda self, seed: torch.manual_seed(seed),
    "nvtx_range": lambda self, msg: contextlib.nullcontext(),
}  # fmt: skip
ANSWERS = {
    "get_device_capability": (None, None), "communication_backend_name": "gloo", "ray_resource_name": "GPU",
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES", "ray_noset_envvars": [], "is_ipc_supported": False,
}  # fmt: skip
PlatformCPU = type("PlatformCPU", (PlatformBase,), answering(HERE | ANSWERS) | PLATFORM)
set_platform(PlatformRegistry.register(platform="cpu")(PlatformCPU)())

_init_process_group = torch.distributed.init_process_group


def _init(backend=None, **kwargs):
    """verl asks for "cpu:gloo,DEVICE:BACKEND", which torch refuses if DEVICE is cpu too."""
    return _init_process_group(
        backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs
    )


torch.distributed.init_process_group = _init

from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def _use_plain_linear(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


if "vllm" in sys.modules:
    # vLLM packs linear weights for oneDNN at load and drops the originals, so that later updates would miss them.
    import vllm.model_executor.layers.utils as _layers

    _layers.dispatch_cpu_unquantized_gemm = _use_plain_linear
