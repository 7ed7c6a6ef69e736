"""Rows of TRL's generation batches: cut out of what TRL returns, and joined into another batch.

TRL pads prompts on the left and completions on the right. Axes: B rows of a batch.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import pad

Row = dict[str, torch.Tensor]
"""What TRL's batch holds of one rollout, by TRL's names, without padding, on the CPU."""

# At padding the loss is multiplied by 0. These values keep it finite there: the KL term has
# exp(ref - own), and a padding token may have the log-prob -100.
_PADDING = {"tool_mask": 1, "importance_sampling_ratio": 1.0, "ref_per_token_logps": -1e4}
_OF_IMAGES = {"pixel_values", "num_images", "token_type_ids", "mm_token_type_ids"}


def cut(output: dict[str, Any], lengths_B: Sequence[int]) -> list[Row]:
    """Return the rows of a batch that TRL has generated; ``lengths_B`` are the completions' tokens.

    Raises:
        ValueError: the batch has images.
    """
    if not _OF_IMAGES.isdisjoint(output):
        problem = "rows with images cannot be joined into another batch"
        raise ValueError(f"{problem}; use strategy='plain' without replay")
    prompt_width = output["prompt_ids"].shape[1]
    width = output["completion_ids"].shape[1]
    prompts_B = output["prompt_mask"].sum(dim=1).tolist()
    rows: list[Row] = []
    for place, length in enumerate(lengths_B):
        row: Row = {}
        for name, values in output.items():
            if values.ndim == 0:  # of the whole batch
                continue
            value = values[place]
            if name in ("prompt_ids", "prompt_mask"):
                value = value[prompt_width - prompts_B[place] :]
            elif values.ndim == 2 and values.shape[1] == width:
                value = value[:length]
            row[name] = value.detach().cpu().clone()
        rows.append(row)
    return rows


def join(
    rows: Sequence[Row], padding_token: int, multiple: int | None, device: Any
) -> dict[str, Any]:
    """Return a batch of rows as TRL makes it, without its number of items."""
    padding = _PADDING | {"prompt_ids": padding_token, "completion_ids": padding_token}
    output: dict[str, Any] = {}
    for name in rows[0]:
        values_B = [row[name] for row in rows]
        is_ratio = name == "importance_sampling_ratio"
        is_of_rows = is_ratio and all(value.numel() == 1 for value in values_B)
        if is_of_rows or values_B[0].ndim == 0:
            output[name] = torch.stack(values_B).to(device)
            continue
        side = "left" if name in ("prompt_ids", "prompt_mask") else "right"
        joined = pad(values_B, padding.get(name, 0), padding_side=side, pad_to_multiple_of=multiple)
        output[name] = joined.to(device)
    return output


def items(output: dict[str, Any]) -> torch.Tensor:
    """Return the number of tokens of a batch that are trained on, on this process."""
    mask = output["completion_mask"]
    if "tool_mask" in output:
        mask = mask * output["tool_mask"]
    return mask.sum()


def batch_of(trainer: Any, rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as TRL's batch of this process; on all processes."""
    padding = trainer._tokenizer.pad_token_id
    output = join(rows, padding, trainer.pad_to_multiple_of, trainer.accelerator.device)
    output["num_items_in_batch"] = trainer.accelerator.gather(items(output)).sum()
    return output


class StepMetrics:
    """Makes one value of each of TRL's metrics of a step that took several generations."""

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        """Begin a step; ``metrics`` are TRL's lists, to which each generation adds."""
        self._metrics = metrics
        self._before = {name: len(values) for name, values in metrics.items()}
        self.rollouts: list[int] = []  # of each generation

    def join(self) -> None:
        """Replace the values of this step by their mean, their least or their largest value."""
        for name, values in self._metrics.items():
            before = self._before.get(name, 0)
            added = values[before:]
            if len(added) > 1:
                values[before:] = [self._joined(name, added)]

    def _joined(self, name: str, added: list[float]) -> float:
        weights = self.rollouts
        if len(added) != len(weights):
            weights = [1] * len(added)
        weighted = zip(added, weights, strict=True)
        known = [(value, weight) for value, weight in weighted if not math.isnan(value)]
        if not known:
            return math.nan
        word = name.rsplit("/", 1)[-1]
        if word.startswith("min"):
            return min(value for value, _ in known)
        if word.startswith("max"):
            return max(value for value, _ in known)
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
