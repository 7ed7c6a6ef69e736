"""The policy's weights on their way to vLLM: LoRA adapters merged, and a bucket of parameters in each message.

A layer's merged weight is ``W + alpha / rank * B A``. It has the name of W in a model without adapters.

vLLM's workers import this file, so it must not import openrlhf or deepspeed: these take seconds and patch packages.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# A message is at most this long, unless one parameter is longer. Sender and receiver need as much additional memory.
BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}  # by the device of the weights

# If one end dies, the other end fails after this time. Gloo's default is 30 minutes.
GLOO_TIMEOUT = timedelta(minutes=3)


class Weight:
    """A weight and its adapter, if any, with what the weight sync reads of a parameter."""

    def __init__(self, weight: torch.Tensor, layer: Any = None) -> None:
        # The parameters of which the merged weight is made. ZeRO 3 partitions them.
        self.parts = [weight] if layer is None else list(layer.parameters())
        self.requires_grad = any(part.requires_grad for part in self.parts)
        self.dtype = weight.dtype
        self.device = weight.device
        self.shape = tuple(getattr(weight, "ds_shape", weight.shape))
        self.ds_shape = self.shape
        self._weight = weight
        self._layer = layer

    def detach(self) -> torch.Tensor:
        """Return the merged weight. Under ZeRO 3 the caller has to gather the parts."""
        weight = self._weight.detach()
        if self._layer is None:
            return weight
        return (weight + self._layer.get_delta_weight("default")).detach()

    @property
    def data(self) -> torch.Tensor:
        """A copy of the merged weight. Under ZeRO 3 all ranks have to ask for it."""
        with contextlib.ExitStack() as gathered:
            gather(gathered, self.parts)
            return self.detach().clone()


def gather(gathered: contextlib.ExitStack, parts: Sequence[torch.Tensor]) -> None:
    """Let all ranks have whole parameters under ZeRO 3 until the stack is closed."""
    import deepspeed

    # One by one: of several at once DeepSpeed waits for the last alone, and gloo ends them in any order.
    for part in parts:
        gathered.enter_context(deepspeed.zero.GatheredParameters([part]))


def merged(model: torch.nn.Module) -> dict[str, Weight]:
    """Return the weights of a model by their names without adapters; weights that are tied come once."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    parameters = dict(model.named_parameters())
    if not isinstance(model, PeftModel):
        return {name: Weight(weight) for name, weight in parameters.items()}
    weights = {}
    for name, weight in parameters.items():
        if ".lora_" not in name:
            weights[_plain(name)] = Weight(weight)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weights[_plain(f"{name}.weight")] = Weight(layer.get_base_layer().weight, layer)
    return weights


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


class Parameter(NamedTuple):
    """Describes a parameter; the receiver needs this before the message with the bytes."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def space(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def buckets(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Split the parameters, in order, into buckets of at most ``limit`` bytes; a larger parameter is alone in one."""
    filled: list[list[Parameter]] = []
    room = 0
    for parameter in parameters:
        if not filled or parameter.space > room:
            filled.append([])
            room = limit
        filled[-1].append(parameter)
        room -= parameter.space
    return filled


def pack(
    bucket: Sequence[Parameter], weights: Mapping[str, Any], *, copy: bool = False
) -> torch.Tensor:
    """Return the bytes of a bucket (uint8), on the device of its weights.

    The bytes of one weight alone are that weight's memory, unless ``copy``.
    """
    parts = [weights[parameter.name].detach().reshape(-1).view(torch.uint8) for parameter in bucket]
    return torch.cat(parts) if copy or len(parts) > 1 else parts[0]


def unpack(bucket: Sequence[Parameter], packed: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and weight of each parameter; the weights are views of ``packed`` where they can be."""
    spaces = [parameter.space for parameter in bucket]
    for parameter, part in zip(bucket, packed.split(spaces), strict=True):
        # A view of a dtype has to begin at a multiple of the dtype's size.
        placed = part.clone() if part.storage_offset() % parameter.dtype.itemsize else part
        yield parameter.name, placed.view(parameter.dtype).view(tuple(parameter.shape))


class Receiver:
    """Receives buckets in vLLM's worker: by a broadcast, or from the policy's memory on the same GPU."""

    # Parameters of the policy that vLLM's model has loaded once
    _known: frozenset[str] = frozenset()

    def receive_weights(self, bucket: Sequence[Sequence[Any]], handles: Any = None) -> None:
        """Receive a bucket, the values of each :class:`Parameter`, and load it into the model.

        Args:
            bucket: the values of each parameter, in the order of their bytes.
            handles: by GPU, what torch's ``reduce_tensor`` returned for the bucket in the policy's
                memory there. None: the bucket comes in one broadcast over OpenRLHF's group.

        Raises:
            RuntimeError: the model has no such parameter, so that it would keep an old weight.
        """
        parameters = [Parameter(*values) for values in bucket]
        packed = self._broadcast(parameters) if handles is None else self._on_this_gpu(handles)
        self.load(list(unpack(parameters, packed)))
        if handles is not None:
            torch.cuda.synchronize()  # the policy frees the memory once this returns

    def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, *_: Any
    ) -> None:
        """Load one parameter, as upstream sends it under tensor parallelism; raises as above."""
        self.load([(name, self._on_this_gpu(ipc_handles))])
        torch.cuda.synchronize()

    def _broadcast(self, parameters: Sequence[Parameter]) -> torch.Tensor:
        size = sum(parameter.space for parameter in parameters)
        packed = torch.empty(size, dtype=torch.uint8, device=self.device)  # type: ignore[attr-defined]
        stream = torch.cuda.current_stream() if packed.is_cuda else None
        self._model_update_group.broadcast(packed, src=0, stream=stream)  # type: ignore[attr-defined]
        return packed

    def _on_this_gpu(self, handles: Any) -> torch.Tensor:
        """Return the tensor in the policy's memory on this worker's GPU."""
        from openrlhf.trainer.ray.utils import get_physical_gpu_id

        rebuild, values = handles[get_physical_gpu_id()]
        place = self.device.index  # type: ignore[attr-defined]  # the policy's process may number the GPUs otherwise
        return rebuild(*values[:6], place, *values[7:])

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load weights by name into vLLM's model; raises as :meth:`receive_weights`."""
        dtype = self.model_config.dtype  # type: ignore[attr-defined]
        model = self.model_runner.model  # type: ignore[attr-defined]
        weights = [(name, weight.to(dtype)) for name, weight in weights]
        names = {name for name, _ in weights}
        if names <= self._known:
            model.load_weights(weights=weights)
            return
        # load_weights returns names of vLLM's own parameters, which merge several of the policy's. So
        # the first time each weight goes alone: an empty answer then says that vLLM ignored it.
        for name, weight in weights:
            if not model.load_weights(weights=[(name, weight)]):
                raise RuntimeError(
                    f"weight sync: vLLM's model loaded nothing from {name!r} {tuple(weight.shape)}"
                )
        self._known |= names


class GlooCommunicator:
    """Stands in for OpenRLHF's ``stateless_init_process_group``, which needs NCCL; takes the same arguments."""

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, device: Any = None
    ) -> None:
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=GLOO_TIMEOUT)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, GLOO_TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast ``tensor`` (contiguous, any dtype) from rank ``src`` in place, and wait."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast(
            [tensor.detach().contiguous().view(-1).view(torch.uint8)], options
        ).wait()
