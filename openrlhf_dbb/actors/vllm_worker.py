"""The receiving end of the weight sync in vLLM's workers where there is CUDA. It has not been run on CUDA yet."""

from __future__ import annotations

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from openrlhf_dbb.weight_buckets import Receiver


class BucketWorker(Receiver, WorkerWrap):
    """OpenRLHF's worker extension, which can also receive many parameters in one message."""
