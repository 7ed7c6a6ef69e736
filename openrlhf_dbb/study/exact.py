"""Accuracy without sampling: the probability that the policy answers right, from its own token probabilities.

There is one right answer, the label and the end token, so its probability at temperature 1 is a product of token
probabilities. Acc@n estimates this number; with n = 8 samples of 512 prompts its standard error is about 0.4 points.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.study.policy_gradient import log_probabilities
from openrlhf_dbb.study.tokens import Tokens, load_policy, tokenize

LONGEST = 10  # tokens of a response, as in training


@dataclass(frozen=True)
class Task:
    """A task of the study as token ids.

    Attributes:
        model: folder of the model that training starts from.
        train: training prompts.
        heldout: prompts to evaluate with.
    """

    model: Path
    train: Tokens
    heldout: Tokens

    def policy(self, model: Path | None = None) -> Any:
        """A model in float32, by default the one that training starts from.

        Raises:
            UsageError: there is none.
        """
        return load_policy(model or self.model)

    def accuracy(self, policy: Any) -> float:
        """Mean probability of the labels of the held-out prompts, in [0, 1]."""
        return self._mean_probability(policy, self.heldout.answers_P_L)

    def ends_at_once(self, policy: Any) -> float:
        """Mean probability, over the held-out prompts, that the first token of a response is the end token."""
        return self._mean_probability(policy, torch.full((len(self.heldout.prompts), 1), self.heldout.end))

    def _mean_probability(self, policy: Any, responses_P_L: torch.Tensor) -> float:
        with torch.no_grad():
            every = np.arange(len(responses_P_L))
            return float(log_probabilities(policy, self.heldout, every, responses_P_L).exp().mean())


def read(folder: Path) -> Task:
    """The task that :func:`openrlhf_dbb.study.tasks.prepare` made in a folder.

    Raises:
        UsageError: there is none.
    """
    if not (folder / "eval.jsonl").is_file():
        raise UsageError(f"{folder} holds no task of the study (eval.jsonl); name a folder below tasks/")
    model = folder / "model"
    train, evaluation = (_rows(folder / name) for name in ("train.jsonl", "eval.jsonl"))
    heldout = [row for row in evaluation if row["datasource"] == "heldout"]
    train_tokens, heldout_tokens = (
        tokenize(model, [row["input"] for row in rows], [row["label"] for row in rows], LONGEST)
        for rows in (train, heldout)
    )
    return Task(model, train_tokens, heldout_tokens)


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
