"""What both ends of a verification share: its error, and the shapes in which a reward comes."""

from __future__ import annotations

from typing import Any

import torch


class RewardError(RuntimeError):
    """The reward function raised, or returned something that is not a reward."""


def single_value(value: Any) -> Any:
    """The number in a scalar, a one-element list or a one-element tensor; None stays None."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, torch.Tensor):
        value = value.item()
    return value
