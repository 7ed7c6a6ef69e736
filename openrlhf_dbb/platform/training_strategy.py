"""DeepSpeed strategy of the policy, with CUDA and without. OpenRLHF sends a strategy to every model actor."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy
from transformers import AutoConfig


class TrainingStrategy(DeepspeedStrategy):
    """Upstream's strategy with torch's Adam, and with dynamic batches that train on all of their micro-batches."""

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Save a model in the precision of the one that the training began with, and tied weights once.

        A policy trained in float32 would otherwise be saved with twice the bytes of its bfloat16 original.
        """
        policy = self._unwrap_model(model)
        dtype = _dtype_of(self.args.actor.model_name_or_path) or policy.dtype
        trained, save = policy.config.dtype, policy.save_pretrained

        def save_as_it_came(folder: str, state_dict: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
            if state_dict is not None:  # None: an adapter, whose weights are its own
                state_dict = _without_copies(policy, state_dict, dtype)
            save(folder, state_dict=state_dict, **options)
            policy.config.dtype = dtype  # of the weights in memory until here; upstream writes it once more

        # Upstream hands copies of the weights to save_pretrained, which then cannot see that two were one.
        policy.save_pretrained = save_as_it_came
        try:
            super().save_model(model, tokenizer, output_dir, **kwargs)
        finally:
            del policy.save_pretrained
            policy.config.dtype = trained

    def get_ds_train_config(
        self, optim_dict: dict[str, Any] | None = None, *, max_norm: float | None = None
    ) -> dict[str, Any]:
        config = super().get_ds_train_config(optim_dict, max_norm=max_norm)
        if optim_dict is not None and optim_dict["type"] == "AdamW" and not self.adam_offload:
            # DeepSpeed's own is compiled at start: a minute or more, with nvcc.
            config["optimizer"]["params"]["torch_adam"] = True
            if torch.cuda.is_available():
                config["optimizer"]["params"]["fused"] = True  # else it needs the weights' memory once more
        if self.use_dynamic_batch:
            # Upstream tells DeepSpeed that each micro-batch is a step of its own: with ZeRO 1 and 2 it then keeps the
            # gradients of the last one alone. So it is the call of step() that ends one.
            config["managed_gradient_accumulation"] = False
        return config


def _dtype_of(model: str) -> torch.dtype | None:
    """The precision that a model's configuration names; None if it names none."""
    dtype = AutoConfig.from_pretrained(model, trust_remote_code=True).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _without_copies(policy: Any, copies: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copies of a model's weights in ``dtype``, of weights that share their memory in the model only the first."""
    first: dict[int, str] = {}
    live = policy.state_dict()
    # Partitioned weights (ZeRO 3) have no memory here; upstream has left out the tied ones already.
    repeated = {
        name for name, weight in live.items() if weight.numel() and first.setdefault(weight.data_ptr(), name) != name
    }
    return {
        name: weight.to(dtype) if weight.is_floating_point() else weight
        for name, weight in copies.items()
        if name not in repeated
    }
