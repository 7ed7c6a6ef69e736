"""OpenRLHF's DeepSpeed backend as the driver has it. Only the model actors import DeepSpeed."""

import functools
import socket
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.platform.machine import use_rays_interface
from openrlhf_dbb.secrets import without_secrets

NEWEST = "newest"


class LightBackend:
    """Has the methods of the backend that OpenRLHF's loaders and trainer call. An actor unpickles the whole backend."""

    def __init__(
        self, args: SimpleNamespace, *, loads: str | None = NEWEST, threads: int = 0
    ) -> None:
        # ``loads``: the only checkpoint that model actors load; None: none; NEWEST: OpenRLHF chooses.
        self.args = args
        self._made_by = backend, (args, loads, threads)

    def __reduce__(self) -> Any:
        return self._made_by

    def print(self, *msg: Any) -> None:
        """Print with secrets masked."""
        print(*map(without_secrets, msg))  # OpenRLHF prints all its arguments

    def is_rank_0(self) -> bool:
        """Return True: there is one driver."""
        return True

    def setup_dataloader(
        self,
        data: Any,
        batch_size: int,
        pin_memory: bool,
        shuffle: bool,
        collate_fn: Any,
        *,
        num_workers: int,
    ) -> Any:
        """Return a data loader of prompts. Prompts are texts, so nothing is pinned."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        return StatefulDataLoader(
            data, batch_size, shuffle, collate_fn=collate_fn, drop_last=True, **workers
        )


def backend(args: SimpleNamespace, loads: str | None = NEWEST, threads: int = 0) -> Any:
    """Return the backend of a model actor. Arguments as of :class:`LightBackend`."""
    import torch
    from openrlhf.utils import get_strategy

    if threads:  # the worker was started before the driver knew the model
        torch.set_num_threads(threads)
    use_rays_interface()
    upstream.mask_trackers()  # with --estimator none the trainer is an actor
    model_backend = get_strategy(args)
    from openrlhf_dbb.platform.backend import Backend, CpuBackend

    # OpenRLHF's factory names its class itself. Ours has the same attributes.
    model_backend.__class__ = CpuBackend if cpu.active() else Backend
    if loads != NEWEST:
        model_backend.load_ckpt = functools.partial(
            _load, model_backend, model_backend.load_ckpt, loads
        )
    return model_backend


def _load(
    model_backend: Any, load_ckpt: Any, tag: str | None, model: Any, folder: str, **options: Any
) -> Any:
    """Return the folder and the states of one checkpoint; raise RunError where OpenRLHF goes on without it."""
    if tag is None:
        return None, {}
    here = f"rank {model_backend.get_rank()} on host {socket.gethostname()}"
    try:
        loaded, states = load_ckpt(model, folder, tag=tag, **options)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RunError(
            f"{here} cannot load checkpoint {tag} in {folder}: {type(error).__name__}: {reason}"
        ) from error
    if loaded is None:
        raise RunError(
            f"{here} finds no checkpoint {tag} in {folder}; --ckpt.path must be shared by all hosts"
        )
    return loaded, states
