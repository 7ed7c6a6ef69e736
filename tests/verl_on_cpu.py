"""Lets verl train on a CPU: a platform with PyTorch's CPU device, and its FSDP engine registered for it."""

from __future__ import annotations

import contextlib
import sys
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

sys.modules["trl"] = None  # verl 0.9.1 would import a class from it that TRL 1.16 does not have

device = types.ModuleType("verl_on_cpu.device")
for _name in ("synchronize", "current_stream", "stream", "Stream"):
    setattr(device, _name, getattr(torch.cpu, _name))


def _nothing(*_, **__):
    """What there is to do on a CPU."""


device.is_available = lambda: True
device.device_count = lambda: 1
device.current_device = lambda: torch.device("cpu")
device.set_device = device.empty_cache = device.ipc_collect = device.reset_peak_memory_stats = _nothing
device.set_per_process_memory_fraction = _nothing
device.memory_allocated = device.memory_reserved = lambda *a: 0
device.max_memory_allocated = device.max_memory_reserved = lambda *a: 0
device.mem_get_info = lambda *a: (2**34, 2**34)
device.get_rng_state = lambda *a: torch.get_rng_state()
device.set_rng_state = lambda state, *a: torch.set_rng_state(state)
device.get_device_name = lambda *a: "CPU"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = device

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False


set_platform(PlatformCPU())

_init_process_group = torch.distributed.init_process_group


def _init(backend=None, **kwargs):
    """verl asks for "cpu:gloo,DEVICE:BACKEND", which torch refuses if DEVICE is cpu too."""
    return _init_process_group(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


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
