"""Teacher-forced outcome of SmolLM2's policies: the probability of the right answer, without sampling.

The right response is a space and the label; the end of the turn or a full stop follows. Its probability is a product of
token probabilities, so that one forward pass replaces samples. Other spellings count as wrong: of 100 right samples
of the model before training and of GRPO's first steps, 95 were of these two spellings.

Axes: P prompts, T tokens of a prompt behind the prefix and of its answer, L tokens of an answer, V tokens known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_dbb import tasks
from openrlhf_dbb.estimators.base import Floats

_TOGETHER = 128  # prompts in one forward pass


@dataclass(frozen=True)
class Problems:
    """P problems as token ids: the prefix that all prompts share, then each prompt's rest and its answer.

    One of the tokens ``ends`` follows the answer.
    """

    prefix: list[int]
    rests: list[list[int]]
    answers: list[list[int]]
    ends: list[int]


def read(spec: str, template: str, tokenizer: Any, *, without: str = "") -> Problems:
    """Return the problems of a spec of :mod:`openrlhf_dbb.tasks`, each question once.

    Args:
        spec: the task with its settings.
        template: of a prompt, with ``{}`` where the question stands.
        tokenizer: of the model.
        without: a spec whose problems are left out.
    """
    labels = {row["prompt"]: row["label"] for row in tasks.problems(spec, instruction="")}
    if without:
        for row in tasks.problems(without, instruction=""):
            labels.pop(row["prompt"], None)
    prompts = []
    answers = []
    for question, label in labels.items():
        prompt = template.format(question)
        prompts.append(tokenizer.encode(prompt, add_special_tokens=False))
        answers.append(tokenizer.encode(f" {tasks.answer(label)}", add_special_tokens=False))
    shared = _shared(prompts)
    rests = [prompt[shared:] for prompt in prompts]
    full_stop = tokenizer.encode(".", add_special_tokens=False)
    return Problems(prompts[0][:shared], rests, answers, [tokenizer.eos_token_id, *full_stop])


def _shared(prompts: Sequence[list[int]]) -> int:
    """Return how many first tokens all prompts share; each prompt keeps one token of its own."""
    least = min(prompts)
    most = max(prompts)
    shared = 0
    while shared < min(len(least), len(most)) - 1 and least[shared] == most[shared]:
        shared += 1
    return shared


@torch.no_grad()
def probabilities(policy: Any, problems: Problems) -> Floats:
    """Return the probability of each right answer, (P,) in [0, 1], at temperature 1."""
    from transformers import DynamicCache

    parts = []
    for start in range(0, len(problems.rests), _TOGETHER):
        rests = problems.rests[start : start + _TOGETHER]
        answers = problems.answers[start : start + _TOGETHER]
        cache = DynamicCache()
        prefix_1_T = torch.tensor([problems.prefix])
        policy(input_ids=prefix_1_T, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(rests))
        rows = [[*rest, *answer] for rest, answer in zip(rests, answers, strict=True)]
        logits_P_T_V = policy(input_ids=_padded(rows), past_key_values=cache, use_cache=True).logits
        for place, (rest, answer) in enumerate(zip(rests, answers, strict=True)):
            # The logits at a token are of the token after it.
            logits_L_V = logits_P_T_V[place, len(rest) - 1 : len(rest) + len(answer)]
            tokens_L_V = logits_L_V.double().softmax(-1)
            of_answer = tokens_L_V[torch.arange(len(answer)), torch.tensor(answer)].prod()
            parts.append(float(of_answer * tokens_L_V[-1, problems.ends].sum()))
    return np.array(parts)


def _padded(rows: Sequence[list[int]]) -> torch.Tensor:
    """Return the rows with padding behind them, where a causal model does not look, (P, T)."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def measure(
    model: Path, specs: Mapping[str, str], template: str, *, without: str
) -> dict[str, float]:
    """Return the mean probability of the right answer over the problems of each spec, by its name.

    The model is loaded in float32. Problems of ``pool`` that are in the training's data, ``without``, are left out;
    the training itself leaves out those of ``heldout``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    means = {}
    for name, spec in specs.items():
        trained = without if name == "pool" else ""
        problems = read(spec, template, tokenizer, without=trained)
        means[name] = float(probabilities(policy, problems).mean())
    return means
