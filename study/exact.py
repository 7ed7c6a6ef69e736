"""Accuracy without sampling: the probability that the policy answers right, by its own token probabilities.

A right answer has one form, the label and the end token, so that its probability at temperature 1 is a product of token
probabilities. Acc@n estimates this number; n = 8 samples of 512 prompts leave a standard error of some .4 points.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_dbb.errors import UsageError
from study.policy_gradient import NOTHING, Tokens, log_probabilities


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
        folder = model or self.model
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} holds no model (config.json); name the folder a run's policy was saved to")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def accuracy(self, policy: Any) -> float:
        """Mean probability of the labels of the held-out prompts, in [0, 1]."""
        with torch.no_grad():
            every = np.arange(len(self.heldout.prompts))
            logs_P = log_probabilities(policy, self.heldout, every, self.heldout.answers_P_L)
        return float(logs_P.exp().mean())

    def ends_at_once(self, policy: Any) -> float:
        """Mean probability, over the held-out prompts, that the first token of a response is the end token."""
        every = np.arange(len(self.heldout.prompts))
        first_P_1 = torch.full((len(every), 1), self.heldout.end)
        with torch.no_grad():
            logs_P = log_probabilities(policy, self.heldout, every, first_P_1)
        return float(logs_P.exp().mean())


def read(folder: Path) -> Task:
    """The task that :func:`study.tasks.prepare` made in a folder.

    Raises:
        UsageError: there is none.
    """
    if not (folder / "eval.jsonl").is_file():
        raise UsageError(f"{folder} holds no task of the study (eval.jsonl); name a folder of study/tasks")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    train, evaluation = (_rows(folder / name) for name in ("train.jsonl", "eval.jsonl"))
    heldout = [row for row in evaluation if row["datasource"] == "heldout"]
    return Task(folder / "model", _tokens(train, tokenizer), _tokens(heldout, tokenizer))


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


LONGEST = 10  # tokens of a response, as in training


def _tokens(rows: list[dict[str, str]], tokenizer: Any) -> Tokens:
    answers_P_L = torch.full((len(rows), LONGEST), NOTHING)
    for place, row in enumerate(rows):
        answer = [*tokenizer.encode(row["label"], add_special_tokens=False), tokenizer.eos_token_id]
        answers_P_L[place, : len(answer)] = torch.tensor(answer)
    questions = [tokenizer.encode(row["input"], add_special_tokens=False) for row in rows]
    return Tokens(questions, answers_P_L, int(tokenizer.eos_token_id))
