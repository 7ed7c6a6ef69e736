"""What OpenRLHF, DeepSpeed and vLLM need where there is CUDA: nothing compiled at start, and what makes them fast.

This file: machines and combinations of flags that cannot work, the environment of Ray's workers.

attention  which attention the policy is trained with, and the proof that it computes what it should
defaults   flag values that make training fast, chosen for the machine

What of it has been run on a GPU: docs/machines.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import attention, machine
from openrlhf_dbb.platform.shims import is_real

# Flag -> the package it needs, which the locks leave out.
_PACKAGES = {
    "ds.use_liger_kernel": "liger_kernel",
    "ds.load_in_4bit": "bitsandbytes",
}


def check_machine() -> None:
    """Refuse a machine on which the installed stack cannot run: without a GPU it does not run on the processor either.

    Raises:
        UsageError: what is lacking, and what to do.
    """
    built_for = machine.torch_cuda()
    why = machine.no_gpus(machine.look(), built_for) if built_for else None
    if why:
        raise UsageError(
            f"the installed torch is built for CUDA {built_for}, and {why}; to train without a GPU, set up another "
            "environment: OPENRLHF_DBB_PLATFORM=cpu bash scripts/setup_env.sh"
        )
    lacking = machine.lacks()
    if lacking:
        raise UsageError("; ".join(lacking))


def check_flags(
    args: SimpleNamespace, gpus: Sequence[machine.Gpu], environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse what cannot run with CUDA on these GPUs.

    Raises:
        UsageError: names the flag, the reason, and what to do.
    """
    why = attention.unavailable(args.ds.attn_implementation, gpus)
    if why:
        name, _ = attention.choose(gpus)
        raise UsageError(f"--ds.attn_implementation {args.ds.attn_implementation}: {why}; use {name}, or leave it out")
    _check_packages(args)
    _check_compiler(args)
    memory = environment.get("PYTORCH_CUDA_ALLOC_CONF") or environment.get("PYTORCH_ALLOC_CONF") or ""
    if "expandable_segments:True" in memory and args.train.colocate_all and not args.train.async_enable:
        raise UsageError(
            f"PYTORCH_CUDA_ALLOC_CONF={memory}: with --train.colocate_all weights go to vLLM by CUDA IPC, which "
            "expandable segments can break; unset it"
        )


def _check_packages(args: SimpleNamespace) -> None:
    for flag, package in _PACKAGES.items():
        section, name = flag.split(".")
        if getattr(getattr(args, section), name) and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"--{flag} needs the package {package}, which is not installed; install it, or leave it out"
            )
    if args.ds.ring_attn_size > 1:
        missing = [name for name in ("ring_flash_attn", "flash_attn_2_cuda") if not is_real(name)]
        if missing:
            raise UsageError(
                f"--ds.ring_attn_size {args.ds.ring_attn_size} needs {' and '.join(missing)}, which cannot be found; "
                "install ring_flash_attn and a compiled flash-attn, or leave it out"
            )


def _check_compiler(args: SimpleNamespace) -> None:
    compiled = {
        "--ds.adam_offload": (args.ds.adam_offload, "leave it out; --ds.zero_stage 3 also saves memory"),
        "--actor.optim muon": (args.actor.optim == "muon", "leave it out"),
        "--ds.deepcompile": (args.ds.deepcompile, "leave it out"),
    }
    if args.ds.deepcompile and args.train.dynamic_batch_enable:
        raise UsageError("--ds.deepcompile does not go with --train.dynamic_batch_enable; leave one of them out")
    for flag, (asked, instead) in compiled.items():
        if asked and machine.nvcc() is None:
            raise UsageError(f"{flag}: DeepSpeed compiles this with nvcc, and there is none; install it, or {instead}")


def worker_environment() -> dict[str, str]:
    """Environment variables for every Ray worker (and so for the vLLM engines in them)."""
    if "VLLM_USE_FLASHINFER_SAMPLER" in os.environ or machine.nvcc() is not None:
        return {}
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would be compiled at the first top-p, without a look for nvcc
