"""Weight broadcast from DeepSpeed rank 0 to the vLLM workers over gloo: the receiving end.

:mod:`openrlhf_dbb.platform.weight_buckets` packs many parameters into a message; OpenRLHF's own message has one.
Imported in vLLM workers, so it must not import openrlhf or deepspeed, which take seconds and patch other packages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm.model_executor.layers.utils as vllm_layers

from openrlhf_dbb.platform.gloo import connect
from openrlhf_dbb.platform.weight_buckets import Receiver


def _use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


# vLLM packs linear weights for oneDNN at load and drops the originals, so that later updates would
# miss them. Replaced when vLLM imports this extension, which is before it loads the model.
vllm_layers.dispatch_cpu_unquantized_gemm = _use_plain_linear


class WorkerExtension(Receiver):
    """Mixed into vLLM's worker: the receiving end, with the method names OpenRLHF calls."""

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the group whose rank 0 is DeepSpeed's rank 0."""
        rank = dist.get_rank() + rank_offset
        self._model_update_group = connect(master_address, master_port, rank, world_size, None)

    def update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False) -> None:
        """Receive one parameter and load it into the model; raises as :meth:`receive_weights` does."""
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self._load([(name, weight)])
