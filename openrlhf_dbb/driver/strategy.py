"""OpenRLHF's strategy object as the driver has it: made without DeepSpeed, which only the model actors import."""

from __future__ import annotations

import functools
import socket
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.core.checkpoints import LOADED
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform.machine import use_rays_interface

NEWEST = "newest"


class DriverStrategy:
    """What OpenRLHF's loaders and its trainer use of the strategy; the model actors receive the strategy itself.

    Args:
        args: OpenRLHF's arguments.
        on_cpu: train without CUDA.
        loads: the checkpoint that model actors load, and no other; None: none. NEWEST: as OpenRLHF does it.
    """

    def __init__(self, args: SimpleNamespace, *, on_cpu: bool, loads: str | None = NEWEST) -> None:
        self.args = args
        self._on_cpu, self._loads = on_cpu, loads

    def __reduce__(self) -> Any:
        return strategy, (self.args, self._on_cpu, self._loads)

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


def strategy(args: SimpleNamespace, on_cpu: bool, loads: str | None = NEWEST) -> Any:
    """OpenRLHF's strategy for a model actor, as ours. Arguments as of :class:`DriverStrategy`."""
    from openrlhf.utils import get_strategy

    use_rays_interface()
    made = get_strategy(args)
    from openrlhf_dbb.platform.backend import Backend, CpuBackend

    # Same attributes; upstream's factory names its class itself.
    made.__class__ = CpuBackend if on_cpu else Backend
    if loads != NEWEST:
        made.load_ckpt = functools.partial(_load, made, made.load_ckpt, loads)
    return made


def _load(made: Any, load_ckpt: Any, tag: str | None, model: Any, folder: str, **options: Any) -> Any:
    """Upstream's ``load_ckpt`` for one checkpoint; upstream goes on with the weights it has if there is none.

    Returns:
        Its folder and its states, which say under LOADED that it was loaded.

    Raises:
        RunError: this rank cannot load it.
    """
    if tag is None:
        return None, {}
    here = f"rank {made.get_rank()} on host {socket.gethostname()}"
    try:
        loaded, states = load_ckpt(model, folder, tag=tag, **options)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RunError(f"{here} cannot load checkpoint {tag} in {folder}: {type(error).__name__}: {reason}") from error
    if loaded is None:
        raise RunError(f"{here} finds no checkpoint {tag} in {folder}; --ckpt.path must be shared by all hosts")
    return loaded, {**states, LOADED: tag}
