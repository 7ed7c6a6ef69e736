"""DeepSpeed strategy for CPU ranks. OpenRLHF sends it to every model actor, which calls it before anything else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import deepspeed
import torch
from openrlhf.utils.utils import convert_to_torch_dtype

from openrlhf_dbb import upstream
from openrlhf_dbb.platform import gloo
from openrlhf_dbb.platform.training_strategy import TrainingStrategy


class _CpuDevice(str):
    """What ``torch.cuda.current_device()`` returns here: a device name that also formats as an index.

    OpenRLHF passes the value to ``tensor.to()`` and builds ``f"cuda:{...}"`` from it.
    """

    def __format__(self, spec: str) -> str:
        return "0"


def _nothing(*_: Any) -> None:
    return None


def stand_in_for_torch_cuda() -> None:
    """Give the four ``torch.cuda`` functions that OpenRLHF calls unconditionally a meaning on CPU."""
    torch.cuda.current_device = lambda: _CpuDevice("cpu")  # replay_buffer, ppo_actor, launcher, deepspeed
    torch.cuda.set_device = _nothing  # DeepspeedStrategy.setup_distributed
    torch.cuda.synchronize = _nothing  # torch_dist_barrier_and_cuda_sync, BaseModelActor.empty_cache
    torch.cuda.current_stream = _nothing  # ActorPPOTrainer.broadcast_to_vllm


def torch_dtype(param_dtype: str) -> torch.dtype:
    """Upstream's, which knows no fp32."""
    return torch.float32 if param_dtype == "fp32" else convert_to_torch_dtype(param_dtype)


class CpuStrategy(TrainingStrategy):
    """Upstream's strategy, set up for gloo and without just-in-time compiled extensions."""

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        stand_in_for_torch_cuda()
        # Without this PyNccl disables itself and every weight broadcast silently does nothing.
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import utils

        upstream.replace(ppo_actor, "stateless_init_process_group", gloo.connect)
        upstream.replace(utils, "convert_to_torch_dtype", torch_dtype)  # looked up when a model is loaded
        # The shared-memory op would be compiled at start, which takes a minute and 8 GiB.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().setup_distributed(timeout)
