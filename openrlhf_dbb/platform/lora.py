"""Merges LoRA adapters into the weights that are sent to vLLM and saved.

A layer's merged weight is ``W + alpha / rank * B A``. It has the name of W in a model without adapters.
"""

from typing import Any

import deepspeed
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

_ADAPTER = "default"  # the name that OpenRLHF's get_peft_model gives


class Weight:
    """A weight and its adapter, if any, with what the weight sync reads of a parameter."""

    def __init__(self, weight: torch.Tensor, layer: Any = None) -> None:
        # The parameters of which the merged weight is made. ZeRO 3 partitions them.
        self.parts = [weight] if layer is None else list(layer.parameters())
        self.requires_grad = any(part.requires_grad for part in self.parts)
        self.dtype, self.device = weight.dtype, weight.device
        self.shape = self.ds_shape = tuple(getattr(weight, "ds_shape", weight.shape))
        self._weight, self._layer = weight, layer

    def detach(self) -> torch.Tensor:
        """Return the merged weight. Under ZeRO 3 the caller has to gather the parts."""
        weight = self._weight.detach()
        return weight if self._layer is None else (weight + self._layer.get_delta_weight(_ADAPTER)).detach()

    @property
    def data(self) -> torch.Tensor:
        """A copy of the merged weight. Under ZeRO 3 all ranks have to ask for it."""
        with deepspeed.zero.GatheredParameters(self.parts):
            return self.detach().clone()


def weights(model: torch.nn.Module) -> dict[str, Weight]:
    """Return the weights of a model by their names without adapters; weights that are tied come once."""
    named = dict(model.named_parameters())
    if not isinstance(model, PeftModel):
        return {name: Weight(weight) for name, weight in named.items()}
    found = {_plain(name): Weight(weight) for name, weight in named.items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            found[_plain(f"{name}.weight")] = Weight(layer.get_base_layer().weight, layer)
    return found


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


class MergedModel:
    """A policy with adapters, as ``save_model`` reads one without. All ranks make it; rank 0 has its weights."""

    def __init__(self, model: PeftModel, *, keep: bool) -> None:
        self._weights = {}
        for name, weight in weights(model).items():
            whole = weight.data  # ZeRO 3 gathers it on every rank
            if keep:
                self._weights[name] = whole.cpu()
        self.base: Any = model.get_base_model()
        self.config, self.dtype = self.base.config, self.base.dtype

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._weights)

    _consolidated_16bit_state_dict = state_dict  # what ``save_model`` asks instead under ZeRO 3

    def save_pretrained(self, folder: str, **options: Any) -> None:
        self.base.save_pretrained(folder, **options)
