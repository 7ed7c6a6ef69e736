"""OpenRLHF's strategy object as the driver has it: made without DeepSpeed, which only the model actors import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class DriverStrategy:
    """What OpenRLHF's loaders and its trainer use of the strategy; the model actors receive the strategy itself.

    Args:
        args: OpenRLHF's arguments.
        on_cpu: train without CUDA.
    """

    def __init__(self, args: SimpleNamespace, *, on_cpu: bool) -> None:
        self.args = args
        self._on_cpu = on_cpu

    def __reduce__(self) -> Any:
        return strategy, (self.args, self._on_cpu)

    def print(self, *msg: Any) -> None:
        print(*msg)

    def is_rank_0(self) -> bool:
        return True

    def setup_dataloader(
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Any = None,
        drop_last: bool = True,
        sampler: Any = None,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> Any:
        """A data loader of prompts; these are texts, so that there is nothing to pin."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(
            replay_buffer,
            batch_size=batch_size,
            shuffle=shuffle if sampler is None else False,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )


def strategy(args: SimpleNamespace, on_cpu: bool) -> Any:
    """OpenRLHF's strategy for a model actor; without CUDA ours."""
    from openrlhf.utils import get_strategy

    made = get_strategy(args)
    if on_cpu:
        from openrlhf_dbb.cpu.deepspeed_strategy import CpuStrategy

        made.__class__ = CpuStrategy  # same attributes; upstream's factory names its class itself
    return made
