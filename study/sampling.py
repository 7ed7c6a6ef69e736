"""Samples responses of a tiny causal language model, and computes their log-probabilities.

Axes: P prompts, G responses to a prompt, L tokens of the longest response, R responses in one list, T tokens of a
prompt with its response, V tokens known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NOTHING = -1  # in token arrays: no token here, the response has ended


@dataclass(frozen=True)
class Tokens:
    """P prompts as token ids, the right answers (with the end token, then ``NOTHING``) and the end token's id."""

    prompts: list[list[int]]
    answers_P_L: torch.Tensor
    end: int

    def batch(self, members: NDArray[np.int64]) -> Tokens:
        """Return these prompts alone."""
        return Tokens(
            [self.prompts[i] for i in members],
            self.answers_P_L[torch.from_numpy(members)],
            self.end,
        )


@torch.no_grad()
def sample(policy: Any, tokens: Tokens, group: int, generator: torch.Generator) -> torch.Tensor:
    """Sample ``group`` responses to each prompt at temperature 1, (P, G, L): up to the end, then ``NOTHING``.

    A response without an end token fills all L places. Responses share prefixes; each distinct prefix is run once.
    """
    longest = tokens.answers_P_L.shape[1]
    rows_R_T, starts_R = _rows(tokens, np.repeat(np.arange(len(tokens.prompts)), group), longest)
    responses_R_L = torch.full((len(rows_R_T), longest), NOTHING)
    live = torch.arange(len(rows_R_T))
    for place in range(longest):
        ends = starts_R[live] + place
        prefixes, which = torch.unique(
            torch.column_stack([ends, rows_R_T[live, : int(ends.max())]]),
            dim=0,
            return_inverse=True,
        )
        logits = policy(input_ids=prefixes[:, 1:], use_cache=False).logits
        last = logits[torch.arange(len(prefixes)), prefixes[:, 0] - 1]
        drawn = torch.multinomial(last.softmax(-1)[which], 1, generator=generator)[:, 0]
        rows_R_T[live, ends] = drawn
        responses_R_L[live, place] = drawn
        live = live[drawn != tokens.end]
        if not len(live):
            break
    return responses_R_L.view(-1, group, longest)


def token_log_probabilities(
    policy: Any, tokens: Tokens, prompt_R: NDArray[np.int64], responses_R_L: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of each token of each response to prompt ``prompt_R``, (R, L); 0 after its end."""
    longest = responses_R_L.shape[1]
    rows_R_T, starts_R = _rows(tokens, prompt_R, longest)
    places_R_L = starts_R[:, None] + torch.arange(longest)
    there = responses_R_L != NOTHING
    targets_R_L = torch.where(there, responses_R_L, tokens.end)
    rows_R_T.scatter_(1, places_R_L, targets_R_L)
    logits = policy(input_ids=rows_R_T[:, :-1], use_cache=False).logits
    logs_R_L_V = logits[torch.arange(len(rows_R_T))[:, None], places_R_L - 1].log_softmax(-1)
    return logs_R_L_V.gather(-1, targets_R_L[..., None])[..., 0] * there


def _rows(
    tokens: Tokens, prompt_R: NDArray[np.int64], room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-aligned prompts, (R, T), with ``room`` for a response, and the position where it begins, (R,).

    The padding comes after the response, where a causal model does not look.
    """
    width = max(map(len, tokens.prompts)) + room
    rows_P_T = torch.tensor(
        [prompt + [tokens.end] * (width - len(prompt)) for prompt in tokens.prompts]
    )
    lengths_P = torch.tensor([len(prompt) for prompt in tokens.prompts])
    at = torch.from_numpy(prompt_R)
    return rows_P_T[at], lengths_P[at]
