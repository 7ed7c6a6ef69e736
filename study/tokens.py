"""Prompts and their right answers as token ids, and the policies to measure on them.

Axes: P prompts, L tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError

NOTHING = -1  # in token arrays: no token here, the response has ended


@dataclass(frozen=True)
class Tokens:
    """P prompts as token ids, the right answers (with the end token, then ``NOTHING``) and the end token's id."""

    prompts: list[list[int]]
    answers_P_L: torch.Tensor
    end: int

    def batch(self, members: NDArray[np.int64]) -> Tokens:
        """Only these prompts."""
        return Tokens([self.prompts[i] for i in members], self.answers_P_L[torch.from_numpy(members)], self.end)


def tokenize(folder: Path, prompts: Sequence[str], labels: Sequence[str], longest: int) -> Tokens:
    """Prompts and labels as the tokenizer in a model's folder encodes them.

    Args:
        folder: of the model and its tokenizer.
        prompts, labels: P texts each.
        longest: L, tokens of a response with its end token.

    Raises:
        UsageError: the tokenizer has no end token, or a label is longer than any response.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer in {folder} has no end token, so responses would never end; use another one")
    answers_P_L = torch.full((len(labels), longest), NOTHING)
    for row, label in enumerate(labels):
        answer = [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]
        if len(answer) > longest:
            raise UsageError(
                f"label {label[:80]!r} has {len(answer)} tokens with its end, a response at most {longest}; such a "
                "prompt cannot be solved, leave it out of the training"
            )
        answers_P_L[row, : len(answer)] = torch.tensor(answer)
    questions = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    return Tokens(questions, answers_P_L, int(tokenizer.eos_token_id))


def load_policy(folder: Path) -> Any:
    """The model in a folder, in float32.

    Raises:
        UsageError: the folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model (config.json); name the folder a run's policy was saved to")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for a file of 0.2 MB
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
