"""A process group over gloo, between DeepSpeed rank 0 and the vLLM workers; knows neither of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Each end fails after this long if the other one has died, rather than after gloo's 30 minutes.
TIMEOUT = timedelta(minutes=3)


class GlooCommunicator:
    """A process group of its own, beside the default one, with the one operation OpenRLHF uses."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast ``tensor`` (contiguous, any dtype) from rank ``src``, in place; blocks."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast([tensor.detach().contiguous().view(-1).view(torch.uint8)], options).wait()


def connect(host: str, port: int, rank: int, world_size: int, device: Any) -> GlooCommunicator:
    """Same arguments as OpenRLHF's ``stateless_init_process_group``, which needs NCCL."""
    return GlooCommunicator(host, port, rank, world_size)
