"""Accuracy of a policy at temperature 1: without sampling where there is one right response, else by sampling.

If the whole response is the answer, the right one is the label and the end token, and its probability is a product of
token probabilities. Acc@n estimates this number; with n = 8 samples of 512 prompts its standard error is about 0.4
points. If the answer follows steps, many responses are right; so responses are sampled.

Axes: P prompts, G responses to a prompt, L tokens of the longest response.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from estimators.base import Floats
from openrlhf_dbb.errors import UsageError
from study.policy_gradient import log_probabilities, sample
from study.tasks import TASKS, Kind
from study.tokens import NOTHING, Tokens, load_policy, tokenize

_PART = 32  # prompts sampled at a time; bounds the memory


@dataclass(frozen=True)
class Task:
    """A task of the study as token ids.

    Attributes:
        model: folder of the model that training starts from.
        train: training prompts.
        heldout: prompts to evaluate with.
        mark: the token after whose last occurrence the answer follows; None if the whole response is the answer.
    """

    model: Path
    train: Tokens
    heldout: Tokens
    mark: int | None = None

    def policy(self, model: Path | None = None) -> Any:
        """A model in float32, by default the one that training starts from.

        Raises:
            UsageError: there is none.
        """
        return load_policy(model or self.model)

    def accuracy(self, policy: Any) -> float:
        """Mean probability of the right answers to held-out prompts, in [0, 1]; with a mark, see ``sampled``."""
        if self.mark is not None:
            return self.sampled(policy)
        return self._mean_probability(policy, self.heldout.answers_P_L)

    def sampled(self, policy: Any, prompts: int = 256, group: int = 64, seed: int = 0) -> float:
        """Share of right responses to the first held-out prompts, in [0, 1].

        Its standard error is that of the sampling, at most 0.5 / sqrt(P G): policies are compared on the same prompts.

        Args:
            prompts: P, up to as many as there are.
            group: G, responses to each.
            seed: of the sampling.
        """
        generator = torch.Generator().manual_seed(seed)
        parts = [self.heldout.batch(each) for each in _parts(min(prompts, len(self.heldout.prompts)))]
        right_P_G = torch.cat([self.right(sample(policy, part, group, generator), part) for part in parts])
        return float(right_P_G.double().mean())

    def right(self, responses_P_G_L: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Which responses to P prompts have the right answer and end after it, (P, G) bool."""
        answers_P_G_L = responses_P_G_L
        if self.mark is not None:
            places_L = torch.arange(responses_P_G_L.shape[-1])
            begin_P_G_1 = torch.where(responses_P_G_L == self.mark, places_L + 1, 0).amax(-1, keepdim=True)
            longer = torch.cat([responses_P_G_L, torch.full_like(responses_P_G_L, NOTHING)], dim=-1)
            answers_P_G_L = longer.gather(-1, begin_P_G_1 + places_L)
        return (answers_P_G_L == tokens.answers_P_L[:, None]).all(-1)

    def ends_at_once(self, policy: Any) -> float:
        """Mean probability, over the held-out prompts, that the first token of a response is the end token."""
        return self._mean_probability(policy, torch.full((len(self.heldout.prompts), 1), self.heldout.end))

    def probabilities(self, policy: Any) -> Floats:
        """Probability of the right answer to each training prompt, (P,) in [0, 1]; not for a task with a mark.

        Raises:
            UsageError: the task has a mark, so many responses are right.
        """
        if self.mark is not None:
            raise UsageError("success probabilities are exact only where the whole response is the answer (task tiny)")
        return _probabilities(policy, self.train, self.train.answers_P_L)

    def _mean_probability(self, policy: Any, responses_P_L: torch.Tensor) -> float:
        return float(_probabilities(policy, self.heldout, responses_P_L).mean())


def read(folder: Path, kind: Kind = TASKS["tiny"]) -> Task:
    """The task that :func:`study.tasks.prepare` made in a folder.

    Args:
        kind: of the task, see :func:`study.tasks.kind`.

    Raises:
        UsageError: there is none.
    """
    if not (folder / "eval.jsonl").is_file():
        raise UsageError(f"{folder} holds no task of the study (eval.jsonl); name a folder below tasks/")
    model = folder / "model"
    train, evaluation = (_rows(folder / name) for name in ("train.jsonl", "eval.jsonl"))
    heldout = [row for row in evaluation if row["datasource"] == "heldout"]
    train_tokens, heldout_tokens = (
        tokenize(model, [row["input"] for row in rows], [row["label"] for row in rows], kind.longest)
        for rows in (train, heldout)
    )
    mark = int(tokenize(model, [kind.mark], [""], 1).prompts[0][0]) if kind.mark else None
    return Task(model, train_tokens, heldout_tokens, mark)


@torch.no_grad()
def _probabilities(policy: Any, tokens: Tokens, responses_P_L: torch.Tensor) -> Floats:
    """Of one response to each prompt, (P,)."""
    logs_P = log_probabilities(policy, tokens, np.arange(len(responses_P_L)), responses_P_L)
    return np.asarray(logs_P.double().exp().numpy())


def _parts(prompts: int) -> list[NDArray[np.int64]]:
    return np.split(np.arange(prompts), range(_PART, prompts, _PART))


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
