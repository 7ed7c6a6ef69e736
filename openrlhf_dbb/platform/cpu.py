"""What OpenRLHF, DeepSpeed and vLLM need on a machine without CUDA. Does nothing where CUDA is available.

This file: is it needed, flag defaults, what cannot be had, the environment of the driver and of Ray's workers.

deepspeed_strategy  DeepSpeed strategy: the four torch.cuda calls OpenRLHF makes, no compiled optimizer, fp32
engine              vLLM's engine in the process of its Ray actor
gloo                the process group of the weight broadcast from DeepSpeed to vLLM
weight_sync         its receiving end, in vLLM's workers

Nothing is patched in a process unless :func:`active` is true there, which the build of torch decides. Ray workers get
their settings through Ray's runtime environment, model actors through the strategy object that OpenRLHF sends them,
vLLM workers through vLLM's ``worker_extension_cls``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import machine, ray_address, shims
from openrlhf_dbb.upstream.deferred import deferring

# Flags whose defaults in OpenRLHF cannot work without CUDA, and values that can.
FLAG_DEFAULTS: dict[str, Any] = {
    "vllm.sync_backend": "gloo",
    "vllm.enforce_eager": True,
    "ds.attn_implementation": "eager",
    "ds.param_dtype": "fp32",  # most CPUs emulate bf16, at 6 to 8 times the time
    "vllm.num_engines": 1,
    "train.colocate_all": True,
    "actor.num_gpus_per_node": 1,  # one "GPU" is one DeepSpeed rank here
    "ref.num_gpus_per_node": 1,
    "reward.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
}

# Flag -> why it is not available here; what turns another one on comes before it.
UNSUPPORTED: dict[str, str] = {
    "ds.use_liger_kernel": "its kernels are compiled for a GPU",
    "ds.deepcompile": "DeepSpeed compiles it against CUDA",
    "train.enable_ema": "OpenRLHF moves the averaged model to 'cuda'",
    "vllm.enable_sleep": "vLLM has no sleep mode on CPU",
    "ds.enable_sleep": "there is no second memory to offload to",
    "ds.load_in_4bit": "bitsandbytes quantization needs CUDA",
    "vllm.sync_with_ray": "Ray's gloo collectives need the default process group",
}

_UNUSED = ("openai", "pandas", "scipy", "datasets", "bitsandbytes", "networkx", "deepspeed.compile")


def active() -> bool:
    """True where the installed torch is built without CUDA, whatever devices a process is shown."""
    return machine.torch_cuda() is None


def lean_imports(*more: str) -> AbstractContextManager[None]:
    """For an actor's imports: without what vLLM, DeepSpeed and transformers import, and a run here never uses.

    See :func:`openrlhf_dbb.upstream.deferred.deferring`; does nothing where there is CUDA.

    Args:
        more: modules that this actor does not use either.
    """
    return deferring(*_UNUSED, *more) if active() else nullcontext()


def check_flags(args: SimpleNamespace) -> None:
    """Refuse what cannot run without CUDA.

    Raises:
        UsageError: names the flag and the reason.
    """
    if args.ds.ring_attn_size > 1:
        raise UsageError(
            f"--ds.ring_attn_size {args.ds.ring_attn_size} is not available without CUDA: it needs flash attention; "
            "leave it out"
        )
    for flag, reason in UNSUPPORTED.items():
        section, name = flag.split(".")
        if getattr(getattr(args, section), name):
            raise UsageError(f"--{flag} is not available without CUDA: {reason}; leave it out")
    if not args.vllm.enforce_eager:
        raise UsageError("--no-vllm.enforce_eager needs CUDA: vLLM compiles nothing here; leave it out")
    if args.vllm.sync_backend != "gloo":
        raise UsageError(f"--vllm.sync_backend {args.vllm.sync_backend} needs CUDA; without it use gloo")
    if "flash_attention" in args.ds.attn_implementation:
        raise UsageError(f"--ds.attn_implementation {args.ds.attn_implementation} needs CUDA; use eager or sdpa")
    if args.vllm.tensor_parallel_size > 1:
        raise UsageError("--vllm.tensor_parallel_size above 1 is not available without CUDA; use more engines")
    if args.ds.tensor_parallel_size > 1 and args.ds.param_dtype != "bf16":
        raise UsageError(
            f"--ds.tensor_parallel_size {args.ds.tensor_parallel_size} needs --ds.param_dtype bf16, "
            f"not {args.ds.param_dtype}; give both, or use more ranks"
        )


def prepare_driver() -> None:
    """Settings of the driver process; call before ``import ray`` or anything of OpenRLHF."""
    if ray_address.joined() is None:
        # Ray then binds every socket to 127.0.0.1: a laptop is not a cluster.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find out by itself, after two warnings
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default, without a warning
    # The deepspeed launcher sets it to "0" on CPU; ray.init would refuse more than one logical GPU.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    shims.add()


def worker_environment() -> dict[str, str]:
    """Environment variables for every Ray worker (and so for the vLLM engines in them)."""
    return {
        # More OpenMP threads spin against each other: 2 threads were slower than 1 on two cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise engines pin themselves to the same cores
        # With 1, vLLM starts a process for its worker, which imports torch and vllm once more; see engine.py.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",  # no compiler needed; the first generation takes 0.3 s, not 3 s
    }


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """vLLM engine arguments with ours in place of what needs CUDA."""
    # An engine step costs about the same for few and many sequences.
    return (
        {"max_num_seqs": 1024}
        | arguments
        | {
            "worker_extension_cls": "openrlhf_dbb.platform.cpu_weight_sync.WorkerExtension",
            # vLLM would take a share of all RAM. VLLM_CPU_KVCACHE_SPACE (GiB) wins over this.
            "kv_cache_memory_bytes": 256 * 2**20,
            "disable_log_stats": True,  # nobody reads them
        }
    )
