"""Weights from the policy to vLLM, a bucket of parameters in a message: both ends, but for the messages themselves.

Imported in vLLM workers, so it must not import openrlhf or deepspeed, which take seconds and patch other packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

BUCKET_BYTES = 512 * 2**20
"""Of a message, unless one parameter alone is larger: sender and receiver need as much memory in addition."""

_ALIGNMENT = 16
"""Bytes; a parameter begins at a multiple, as a view of its dtype has to."""


class Parameter(NamedTuple):
    """What a receiver needs to know of a parameter before the message with its bytes."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def space(self) -> int:
        """Bytes in a bucket."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def buckets(parameters: Sequence[Parameter], limit: int = BUCKET_BYTES) -> list[list[Parameter]]:
    """The parameters in their order, in buckets of at most ``limit`` bytes; a larger one is alone in its bucket."""
    made: list[list[Parameter]] = []
    room = 0
    for parameter in parameters:
        if not made or parameter.space > room:
            made.append([])
            room = limit
        made[-1].append(parameter)
        room -= parameter.space
    return made


def pack(bucket: Sequence[Parameter], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bucket's bytes, on the device of its weights (by name)."""
    packed = empty(bucket, weights[bucket[0].name].device)
    for name, weight in unpack(bucket, packed):
        weight.copy_(weights[name].detach())
    return packed


def empty(bucket: Sequence[Parameter], device: Any) -> torch.Tensor:
    """Room for the bucket's bytes."""
    return torch.empty(sum(parameter.space for parameter in bucket), dtype=torch.uint8, device=device)


def unpack(bucket: Sequence[Parameter], packed: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of each parameter; the weights are views of ``packed``."""
    start = 0
    for parameter in bucket:
        size = math.prod(parameter.shape) * parameter.dtype.itemsize
        yield parameter.name, packed[start : start + size].view(parameter.dtype).view(tuple(parameter.shape))
        start += parameter.space


class Receiver:
    """Mixed into vLLM's worker: the receiving end, over the ``_model_update_group`` that OpenRLHF has made there."""

    _known: frozenset[str] = frozenset()

    def receive_weights(self, bucket: Sequence[Sequence[Any]]) -> None:
        """Receive the parameters of a bucket in one broadcast, and load them into the model.

        Args:
            bucket: the values of each :class:`Parameter`, which may have lost its type on the way.

        Raises:
            RuntimeError: the model has no such parameter, so that it would keep an old one.
        """
        parameters = [Parameter(*values) for values in bucket]
        packed = empty(parameters, self.device)  # type: ignore[attr-defined]
        stream = torch.cuda.current_stream() if packed.is_cuda else None
        self._model_update_group.broadcast(packed, src=0, stream=stream)  # type: ignore[attr-defined]
        self._load(list(unpack(parameters, packed)))

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        dtype, model = self.model_config.dtype, self.model_runner.model  # type: ignore[attr-defined]
        weights = [(name, weight.to(dtype)) for name, weight in weights]
        names = {name for name, _ in weights}
        if names <= self._known:
            model.load_weights(weights=weights)
            return
        # One by one, since vLLM names what it has loaded as its own model does, with several of ours in one.
        for name, weight in weights:
            if not model.load_weights(weights=[(name, weight)]):
                raise nothing_loaded(name, weight.shape)
        self._known |= names


def nothing_loaded(name: str, shape: Sequence[int]) -> RuntimeError:
    """That vLLM's model has ignored a parameter, and keeps an old one."""
    return RuntimeError(f"weight sync: vLLM's model loaded nothing from parameter {name!r} {tuple(shape)}")
