"""Responses of a causal language model and gradients of their log-probabilities, for models that are tiny.

Axes: P prompts, G responses to a prompt, L tokens of the longest response, E weightings, D parameters of the policy,
R responses in one list, U distinct ones, T tokens of a prompt with its response, V tokens known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from estimators.base import Floats
from study.tokens import NOTHING, Tokens

_ROWS = 1024  # responses differentiated at a time; bounds the memory


@torch.no_grad()
def sample(policy: Any, tokens: Tokens, group: int, generator: torch.Generator, *, shortest: int = 0) -> torch.Tensor:
    """``group`` responses to each prompt at temperature 1, (P, G, L): up to the end token, then ``NOTHING``.

    A response without an end token fills all L places. Responses share prefixes; each distinct prefix is run once.

    Args:
        shortest: tokens before the end token is allowed (vLLM's ``min_tokens``). Above 0 this is not the policy's own
            distribution.
    """
    longest = tokens.answers_P_L.shape[1]
    rows_R_T, starts_R = _rows(tokens, np.repeat(np.arange(len(tokens.prompts)), group), longest)
    responses_R_L = torch.full((len(rows_R_T), longest), NOTHING)
    live = torch.arange(len(rows_R_T))
    for place in range(longest):
        ends = starts_R[live] + place
        prefixes, which = torch.unique(
            torch.column_stack([ends, rows_R_T[live, : int(ends.max())]]), dim=0, return_inverse=True
        )
        logits = policy(input_ids=prefixes[:, 1:], use_cache=False).logits
        last = logits[torch.arange(len(prefixes)), prefixes[:, 0] - 1]
        if place < shortest:
            last[:, tokens.end] = -torch.inf
        drawn = torch.multinomial(last.softmax(-1)[which], 1, generator=generator)[:, 0]
        rows_R_T[live, ends] = drawn
        responses_R_L[live, place] = drawn
        live = live[drawn != tokens.end]
        if not len(live):
            break
    return responses_R_L.view(-1, group, longest)


def weights(advantages_P_G: Floats, responses_P_G_L: torch.Tensor, form: str) -> Floats:
    """Weight of each response's log-probability in the policy gradient, (P, G).

    "group_norm": mean over a response's tokens, then over responses. "dr_grpo": sum over the tokens; the constant
    length it is divided by is left out, as it does not change the direction.
    """
    length_P_G = (responses_P_G_L != NOTHING).sum(-1).numpy()
    return advantages_P_G / (length_P_G if form == "group_norm" else 1) / advantages_P_G.size


def gradients(policy: Any, tokens: Tokens, responses_P_G_L: torch.Tensor, weights_E_P_G: Floats) -> torch.Tensor:
    """Gradient of the sum of weight * log-probability over the responses, for each weighting: (E, D) float32.

    One forward pass for all weightings and one backward pass for each; equal responses to a prompt are merged.
    """
    group, longest = responses_P_G_L.shape[1:]
    prompt_R = torch.arange(len(responses_P_G_L)).repeat_interleave(group)
    distinct, which_R = torch.unique(
        torch.column_stack([prompt_R, responses_P_G_L.view(-1, longest)]), dim=0, return_inverse=True
    )
    weights_E_R = torch.from_numpy(weights_E_P_G.reshape(len(weights_E_P_G), -1))
    weights_E_U = torch.zeros(len(weights_E_R), len(distinct), dtype=torch.float64)
    weights_E_U = weights_E_U.index_add(1, which_R, weights_E_R).float()
    parameters = list(policy.parameters())
    total_E_D = torch.zeros(len(weights_E_U), sum(parameter.numel() for parameter in parameters))
    for part_U, part_E_U in zip(distinct.split(_ROWS), weights_E_U.split(_ROWS, dim=1), strict=True):
        logs_U = log_probabilities(policy, tokens, part_U[:, 0].numpy(), part_U[:, 1:])
        for number, weights_U in enumerate(part_E_U):
            found = torch.autograd.grad(logs_U, parameters, weights_U, retain_graph=number + 1 < len(part_E_U))
            total_E_D[number] += torch.cat([gradient.flatten() for gradient in found])
    return total_E_D


def log_probabilities(
    policy: Any, tokens: Tokens, prompt_R: NDArray[np.int64], responses_R_L: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each whole response to prompt ``prompt_R``, including its end token: (R,)."""
    return token_log_probabilities(policy, tokens, prompt_R, responses_R_L).sum(-1)


def token_log_probabilities(
    policy: Any, tokens: Tokens, prompt_R: NDArray[np.int64], responses_R_L: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each token of each response, (R, L); 0 after its end."""
    longest = responses_R_L.shape[1]
    rows_R_T, starts_R = _rows(tokens, prompt_R, longest)
    places_R_L = starts_R[:, None] + torch.arange(longest)
    there = responses_R_L != NOTHING
    targets_R_L = torch.where(there, responses_R_L, tokens.end)
    rows_R_T.scatter_(1, places_R_L, targets_R_L)
    logits = policy(input_ids=rows_R_T[:, :-1], use_cache=False).logits
    logs_R_L_V = logits[torch.arange(len(rows_R_T))[:, None], places_R_L - 1].log_softmax(-1)
    return logs_R_L_V.gather(-1, targets_R_L[..., None])[..., 0] * there


def cosine(one_D: torch.Tensor, other_D: torch.Tensor) -> float:
    """Cosine of the angle between two directions; NaN if one of them is 0."""
    one, other = one_D.double(), other_D.double()
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size > 0 else math.nan


@contextmanager
def one_thread() -> Iterator[None]:
    """With a model this small a second thread mostly waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows(tokens: Tokens, prompt_R: NDArray[np.int64], room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-aligned prompts, (R, T), with ``room`` for a response, and the position where it begins, (R,).

    The padding comes after the response, where a causal model does not look.
    """
    width = max(map(len, tokens.prompts)) + room
    rows_P_T = torch.tensor([prompt + [tokens.end] * (width - len(prompt)) for prompt in tokens.prompts])
    lengths_P = torch.tensor([len(prompt) for prompt in tokens.prompts])
    at = torch.from_numpy(prompt_R)
    return rows_P_T[at], lengths_P[at]
