"""DeepSpeed strategy of the policy, with CUDA and without. OpenRLHF sends a strategy to every model actor."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy


class TrainingStrategy(DeepspeedStrategy):
    """Upstream's strategy with torch's Adam, and with dynamic batches that train on all of their micro-batches."""

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
