"""Prepares the processes of a run where torch is built without CUDA."""

import contextlib
import os
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.platform import machine

# OpenRLHF's defaults of these flags cannot work, or are slow, without CUDA.
FLAG_DEFAULTS: dict[str, Any] = {
    "vllm.sync_backend": "gloo",
    "vllm.enforce_eager": True,
    "vllm.enable_prefix_caching": True,  # a group's prompt is then computed once, but for its last block
    "ds.attn_implementation": "eager",
    "ds.param_dtype": "fp32",  # most processors emulate bf16, which takes 6 to 8 times as long
    "vllm.num_engines": 1,
    "train.colocate_all": True,
    # here a "GPU" is a DeepSpeed rank
    **{f"{model}.num_gpus_per_node": 1 for model in ("actor", "ref", "reward", "critic")},
}

# Tokens that vLLM's cache of keys and values holds together: the least that its attention takes in bfloat16 with AMX,
# and in float32. Of a prompt the rollouts of a group share whole blocks only; each of them computes the rest.
BLOCK = 32
BLOCK_FP32 = 16

# The only values that work here.
_ONLY: dict[str, Any] = {
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "vllm.enforce_eager": True,
    "vllm.sync_backend": "gloo",
    "vllm.tensor_parallel_size": 1,
    **dict.fromkeys(
        ("ds.use_liger_kernel", "ds.deepcompile", "ds.enable_sleep", "ds.load_in_4bit"), False
    ),
    **dict.fromkeys(("train.enable_ema", "vllm.enable_sleep", "vllm.sync_with_ray"), False),
}


# Modules that these processes import and do not use here. The policy would import vLLM with the engines' handles.
_UNUSED = {
    "policy": ("datasets", "scipy", "vllm"),
    "engine": ("pandas", "scipy", "vllm.model_executor.warmup.kernel_warmup"),
}
_COMPILER = "torch._inductor.lowering"  # vLLM patches it if it can be imported


def active() -> bool:
    """Return whether the installed torch is built without CUDA."""
    return machine.torch_cuda() is None


@contextlib.contextmanager
def without_unused(process: str) -> Iterator[None]:
    """Let a "policy" or an "engine" import its packages without what it does not use here: 3 s and 200 MB each."""
    if not active():
        yield
        return
    hides = os.environ.get("TORCHDYNAMO_DISABLE") == "1" and _COMPILER not in sys.modules
    if hides:
        sys.modules[_COMPILER] = None  # type: ignore[assignment]  # its import fails
    try:
        with upstream.deferring(*_UNUSED[process]):
            yield
    finally:
        if hides:
            del sys.modules[_COMPILER]


CPU: Rules[SimpleNamespace] = Rules()
"""Why a run cannot train without CUDA; of OpenRLHF's arguments."""


@CPU.add
def needs_cuda(args: SimpleNamespace) -> Refusal:
    """The run would fail minutes later, in an actor."""
    for flag in ("ds.attn_implementation", *_ONLY):
        value = attrgetter(flag)(args)
        if value != _ONLY.get(flag, value) or "flash_attention" in str(value):
            return f"--{flag} {value} needs CUDA, and there is none here; leave it out"
    return None


def prepare_driver() -> None:
    """Set the environment of the driver process, before ``import ray`` or OpenRLHF."""
    if machine.ray_cluster() is None:
        # Ray then binds every socket to 127.0.0.1: a laptop is not a cluster.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Otherwise DeepSpeed searches for one and prints two warnings
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Ray's future default; silences its warning
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's 15 loses to every other process of the machine
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The deepspeed launcher sets it to "0" on CPU; ray.init would refuse more than one logical GPU.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    machine.add_shims()


def worker_environment() -> dict[str, str]:
    """Return the environment variables of every Ray worker, and so of the vLLM engines."""
    return {
        # More OpenMP threads spin against each other: 2 threads were slower than 1 on two cores.
        # driver/fit.py sets others for larger models
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A thread that spins at a barrier takes the core from the thread that it waits for. Beside another busy process
        # a training step would take many times as long. Alone, a step takes a tenth longer with this limit.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),
        # Otherwise each large tensor gets new pages from the kernel, which takes a quarter of a training step.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**28),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise engines pin themselves to the same cores
        # With 1, vLLM starts a process for its worker, which imports torch and vllm again; see cpu_engine.py.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",  # no compiler is needed; the first generation takes 0.3 s in place of 3 s
    }


def prepare_worker() -> None:
    """Import what the policy and the engines share; Ray calls this in each worker before its actor is made."""
    machine.add_shims()
    with without_unused("engine"):
        import transformers.modeling_utils  # noqa: F401


def has_bf16() -> bool:
    """Return whether the processor multiplies bfloat16; emulation takes 6 to 8 times as long."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    return any(flag in cpuinfo for flag in ("avx512_bf16", "amx_bf16"))


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's engine arguments with values that work without CUDA."""
    return {
        "max_num_seqs": 1024,  # an engine step costs about the same for few and for many sequences
        # vLLM would take a share of all RAM. VLLM_CPU_KVCACHE_SPACE (GiB) wins over this.
        "kv_cache_memory_bytes": 256 * 2**20,
        "block_size": BLOCK_FP32 if arguments.get("dtype") == "float32" else BLOCK,
        **arguments,
        "worker_extension_cls": "openrlhf_dbb.platform.vllm_worker.WeightWorker",
        "disable_log_stats": True,
    }
