"""The shape of a dense model, and the disk space that its checkpoints take."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.platform.machine import GIB

WEIGHT, OPTIMIZER = 2, 12  # bytes a parameter: bfloat16, as its gradient; in 32 bits the weight and Adam's two moments


@dataclass(frozen=True)
class Shape:
    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    key_values: int  # numbers in a token's keys and values
    adapter: int  # parameters of adapters of rank 1 to all linear layers

    @classmethod
    def of(cls, config: Any) -> "Shape | None":
        """Return the shape in a transformers configuration; None for a mixture of experts or another kind."""
        if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
            return None
        try:
            hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
            heads, inner = config.num_attention_heads, config.intermediate_size
        except AttributeError:
            return None
        size = getattr(config, "head_dim", None) or hidden // heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        layer = 2 * hidden * size * (heads + keys) + 3 * hidden * inner
        embeddings = vocabulary * hidden * (1 if config.tie_word_embeddings else 2)
        adapter = layers * (4 * hidden + 2 * size * (heads + keys) + 3 * (hidden + inner))
        return cls(embeddings + layers * layer, layers, hidden, vocabulary, 2 * layers * keys * size, adapter)

    def trained(self, args: SimpleNamespace) -> int:
        """Return the number of parameters that are trained; these alone have gradients and optimizer states."""
        return self.adapter * args.ds.lora.rank or self.parameters


def checkpoint_warnings(shape: Shape, args: SimpleNamespace) -> list[str]:
    """Return a note if no checkpoints are saved, or a warning if the disk has no room for them."""
    if args.ckpt.save_steps <= 0 or args.ckpt.disable_ds:
        return ["note: no checkpoints are saved (--ckpt.save_steps, --ckpt.disable_ds); a run that stops starts over"]
    # Of what is trained: weights, and in 32 bits the weights and Adam's two moments.
    size = (OPTIMIZER + WEIGHT * (2 if args.ds.param_dtype == "fp32" else 1)) * shape.trained(args)
    kept, folder = int(max(1, min(args.ckpt.max_num, args.ckpt.max_mem * GIB / size))), Path(args.ckpt.path)
    free = shutil.disk_usage(next(parent for parent in [folder, *folder.parents] if parent.exists())).free
    if kept * size <= free:
        return []
    return [
        f"warning: {kept} checkpoints of {size / 1e9:.2g} GB are kept in {folder}, where only {free / 1e9:.2g} GB are "
        "free; make room, or lower --ckpt.max_num"
    ]
