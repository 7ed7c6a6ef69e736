"""The study's tasks as token ids, their policies, and the exact accuracy of a policy at temperature 1.

The right response to a prompt is its label and the end token. Its probability is a product of token probabilities.
Acc@n estimates this number; with n = 8 samples of 512 prompts its standard error is about 0.4 points.

Axes: P prompts, G responses to a prompt, L tokens of the longest response.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openrlhf_dbb import tiny
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from study.protocol import STARTS
from study.sampling import NOTHING, Tokens, token_log_probabilities

PROMPTS: dict[str, Any] = {"train_prompts": 2048, "heldout_prompts": 512}
OOD_PROMPTS = 128
LONGEST = 10  # tokens of a response with its end


def prepare(folder: Path, seed: int, start: str) -> tiny.TinyAssets:
    """Make a task's model and data unless they exist, in 15 to 90 s. They are the same for a seed and a start.

    The evaluation data has held-out prompts and then out-of-distribution ones, with a column "datasource", "heldout" or
    "ood". No prompt is in two of the data sets, whatever their seeds.
    """
    assets = tiny.prepare(folder, seed, tiny.Recipe(**(PROMPTS | STARTS[start])))
    heldout = [json.loads(line) for line in assets.heldout.read_text(encoding="utf-8").splitlines()]
    if "datasource" not in heldout[0]:
        labelled = (("heldout", heldout), ("ood", out_of_distribution(OOD_PROMPTS, seed)))
        rows = [row | {"datasource": source} for source, of_source in labelled for row in of_source]
        whole = assets.heldout.with_suffix(".new")
        whole.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        whole.replace(assets.heldout)
    return assets


def out_of_distribution(size: int, seed: int) -> list[dict[str, str]]:
    """Return prompts to sort three to seven digits of which some repeat; those of the preset are all different."""
    draw = random.Random(f"ood {seed}")
    rows: dict[str, str] = {}
    while len(rows) < size:
        count = draw.randint(3, 7)
        digits = draw.choices("123456789", k=count)
        while len(set(digits)) == count:
            digits = draw.choices("123456789", k=count)
        label = "".join(sorted(digits))
        if label != label[::-1]:
            rows[f"s{''.join(digits)}="] = label
    result = [{"input": prompt, "label": label} for prompt, label in rows.items()]
    draw.shuffle(result)
    return result


@dataclass(frozen=True)
class Task:
    """A task: the folder of the model that training starts from, training prompts, and prompts to evaluate with."""

    model: Path
    train: Tokens
    heldout: Tokens

    def policy(self, model: Path | None = None) -> Any:
        """Load a model in float32, by default the one that training starts from.

        Raises:
            UsageError: there is none.
        """
        folder = model or self.model
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"{folder} holds no model (config.json); name the folder a run's policy was saved to"
            )
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # for a file of 0.2 MB
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def accuracy(self, policy: Any) -> float:
        """Return the mean probability of the right answers to the held-out prompts."""
        return float(_probabilities(policy, self.heldout, self.heldout.answers_P_L).mean())

    def ends_at_once(self, policy: Any) -> float:
        """Return the mean probability, over the held-out prompts, that a response is empty."""
        empty_P_1 = torch.full((len(self.heldout.prompts), 1), self.heldout.end)
        return float(_probabilities(policy, self.heldout, empty_P_1).mean())

    def probabilities(self, policy: Any) -> Floats:
        """Return the probability of the right answer to each training prompt, (P,)."""
        return _probabilities(policy, self.train, self.train.answers_P_L)

    def right(self, responses_P_G_L: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return which responses to P prompts are right, (P, G) bool."""
        return (responses_P_G_L == tokens.answers_P_L[:, None]).all(-1)


def read(folder: Path) -> Task:
    """Read the task that :func:`prepare` made in a folder.

    Raises:
        UsageError: there is none.
    """
    if not (folder / "heldout.jsonl").is_file():
        raise UsageError(
            f"{folder} holds no task of the study (heldout.jsonl); name a folder below tasks/"
        )
    train, evaluation = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    heldout = [row for row in evaluation if row.get("datasource", "heldout") == "heldout"]
    return Task(
        folder / "model", _tokenize(folder / "model", train), _tokenize(folder / "model", heldout)
    )


def _tokenize(folder: Path, rows: Sequence[dict[str, str]]) -> Tokens:
    """Encode prompts and labels with the tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers_P_L = torch.full((len(rows), LONGEST), NOTHING)
    for place, row in enumerate(rows):
        answer = [*tokenizer.encode(row["label"], add_special_tokens=False), tokenizer.eos_token_id]
        answers_P_L[place, : len(answer)] = torch.tensor(answer)
    prompts = [tokenizer.encode(row["input"], add_special_tokens=False) for row in rows]
    return Tokens(prompts, answers_P_L, int(tokenizer.eos_token_id))


@torch.no_grad()
def _probabilities(policy: Any, tokens: Tokens, responses_P_L: torch.Tensor) -> Floats:
    """Return the probability of one response to each prompt, (P,)."""
    every: NDArray[np.int64] = np.arange(len(responses_P_L))
    logs_P = token_log_probabilities(policy, tokens, every, responses_P_L).sum(-1)
    return np.asarray(logs_P.double().exp().numpy())
