"""DeepSpeed strategy whose Adam is torch's. OpenRLHF sends a strategy to every model actor."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy


class TorchAdamStrategy(DeepspeedStrategy):
    """Upstream's strategy without DeepSpeed's own Adam, which is compiled at start: a minute or more, with nvcc."""

    def get_ds_train_config(
        self, optim_dict: dict[str, Any] | None = None, *, max_norm: float | None = None
    ) -> dict[str, Any]:
        config = super().get_ds_train_config(optim_dict, max_norm=max_norm)
        if optim_dict is not None and optim_dict["type"] == "AdamW" and not self.adam_offload:
            config["optimizer"]["params"]["torch_adam"] = True
            if torch.cuda.is_available():
                config["optimizer"]["params"]["fused"] = True  # else it needs the weights' memory once more
        return config
