"""Extends vLLM's worker by the methods that receive the policy's weights, and without CUDA by quicker operations.

vLLM imports this file in each worker before it loads the model.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from openrlhf_dbb.platform import cpu
from openrlhf_dbb.platform.weights import GlooCommunicator, Receiver
from openrlhf_dbb.secrets import mask_process

mask_process()

if torch.version.cuda is not None:
    from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap as Upstream
else:
    import vllm.model_executor.layers.utils as vllm_layers
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.sample.ops import topk_topp_sampler

    def _use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    # vLLM packs linear weights for oneDNN and drops the originals, so that later updates would not reach them.
    vllm_layers.dispatch_cpu_unquantized_gemm = _use_plain_linear

    def _sampled(logits: torch.Tensor) -> torch.Tensor:
        """Sample a token of each row of logits, (B, V) to (B,), by one uniform number each.

        vLLM draws an exponential number for each token of the vocabulary, which takes a quarter of a generation step.
        """
        cumulated = logits.softmax(dim=-1, dtype=torch.float32).cumsum(dim=-1, dtype=torch.float64)
        level = cumulated[:, -1:] * torch.rand(len(logits), 1, dtype=torch.float64)
        # A token without probability adds nothing, so that no level lies at it.
        return (
            torch.searchsorted(cumulated, level, right=True)
            .clamp_(max=logits.shape[1] - 1)
            .view(-1)
        )

    def _normed(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Call vLLM's kernel for processors, where vLLM takes six operations of torch."""
        plain = (
            layer.has_weight
            and layer.variance_size_override is None
            and layer.weight.dtype == x.dtype
        )
        if not plain or not x.is_contiguous():
            return layer.forward_native(x, residual)
        if residual is None:
            normed = torch.empty_like(x)
            torch.ops._C.rms_norm(normed, x, layer.weight.data, layer.variance_epsilon)
            return normed
        torch.ops._C.fused_add_rms_norm(x, residual, layer.weight.data, layer.variance_epsilon)
        return x, residual

    topk_topp_sampler.compiled_random_sample = _sampled
    RMSNorm.forward_cpu = _normed
    # vLLM names multiples of 32 alone and has kernels for multiples of 16.
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda: [MultipleOf(cpu.BLOCK_FP32)]
    )

    # Not OpenRLHF's own: it needs NCCL, and its import takes seconds in each engine.
    class Upstream:  # type: ignore[no-redef]
        """The methods of OpenRLHF's ``WorkerWrap`` that broadcast weights, over gloo."""

        def init_process_group(
            self,
            master_address: str,
            master_port: int,
            rank_offset: int,
            world_size: int,
            *_: Any,
            **__: Any,
        ) -> None:
            rank = dist.get_rank() + rank_offset
            self._model_update_group = GlooCommunicator(
                master_address, master_port, rank, world_size
            )

        def update_weight(
            self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False
        ) -> None:
            weight = torch.empty(shape, dtype=dtype)
            self._model_update_group.broadcast(weight, src=0)
            self.load([(name, weight)])  # type: ignore[attr-defined]


class WeightWorker(Receiver, Upstream):
    """OpenRLHF's worker extension, which can also receive many parameters in one message."""
