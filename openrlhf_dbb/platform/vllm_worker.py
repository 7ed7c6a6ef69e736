"""Extends vLLM's worker by the methods that receive the policy's weights.

vLLM imports this file in each worker before it loads the model.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from openrlhf_dbb.platform.weights import GlooCommunicator, Receiver

if torch.version.cuda is not None:
    from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as Upstream
else:
    import vllm.model_executor.layers.utils as vllm_layers

    def _use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    # vLLM packs linear weights for oneDNN and drops the originals, so that later updates would not reach them.
    vllm_layers.dispatch_cpu_unquantized_gemm = _use_plain_linear

    # Not OpenRLHF's own: it needs NCCL, and its import takes seconds in each engine.
    class Upstream:  # type: ignore[no-redef]
        """The methods of OpenRLHF's ``WorkerWrap`` that broadcast weights, over gloo."""

        def init_process_group(
            self, master_address: str, master_port: int, rank_offset: int, world_size: int, *_: Any, **__: Any
        ) -> None:
            rank = dist.get_rank() + rank_offset
            self._model_update_group = GlooCommunicator(master_address, master_port, rank, world_size)

        def update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False) -> None:
            weight = torch.empty(shape, dtype=dtype)
            self._model_update_group.broadcast(weight, src=0)
            self.load([(name, weight)])  # type: ignore[attr-defined]


class WeightWorker(Receiver, Upstream):
    """OpenRLHF's worker extension, which can also receive many parameters in one message."""
