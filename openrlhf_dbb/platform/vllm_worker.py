"""The receiving end of the weight sync in vLLM's workers where there is CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from openrlhf_dbb.platform.weight_buckets import Receiver, nothing_loaded


class BucketWorker(Receiver, WorkerWrap):
    """OpenRLHF's worker extension, which can also receive many parameters in one message, and checks what arrives."""

    def update_weight(self, name: str, dtype: Any, shape: Sequence[int], **rest: Any) -> None:
        """Upstream's.

        Raises:
            RuntimeError: the model has no such parameter, so that it would keep an old one.
        """
        with _loads(self.model_runner.model, name, shape):
            super().update_weight(name, dtype, shape, **rest)

    def update_weight_cuda_ipc(self, name: str, dtype: Any, shape: Sequence[int], **rest: Any) -> None:
        """Upstream's; raises as :meth:`update_weight`."""
        with _loads(self.model_runner.model, name, shape):
            super().update_weight_cuda_ipc(name, dtype, shape, **rest)


@contextmanager
def _loads(model: Any, name: str, shape: Sequence[int]) -> Iterator[None]:
    """Look at what ``model.load_weights`` returns within the block, which upstream drops."""
    loaded: list[Any] = []
    load_weights = model.load_weights
    model.load_weights = lambda **weights: loaded.append(load_weights(**weights))
    try:
        yield
    finally:
        del model.load_weights  # the instance's; the class has its own
    if not any(loaded):
        raise nothing_loaded(name, shape)
