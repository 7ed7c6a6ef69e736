"""Lays a micro-batch out so that a prompt is computed once for all of its rollouts, where this is less work.

A sequence is then a prompt with its responses beside each other. A response attends to the prompt and to itself, and
its positions continue the prompt's. Log-probs and gradients are those of one row a rollout, to rounding.

Source: Prefix Grouper (Liu et al. 2025, arXiv 2506.05433), which splits attention in two instead.
"""

from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# Tokens of a sequence at which attention costs as much as the rest of a layer. On a processor that is eager
# attention's memory. On an H100 any value from 1,100 to 15,000 chose the quicker way in the six shapes above LEAST.
SPAN = {"cpu": 400, "cuda": 2500}
LEAST = {"cpu": 0, "cuda": 8192}  # tokens of a micro-batch; with fewer an H100 waits for launches and gains nothing
# A sequence has a multiple of so many tokens. Without CUDA every new length compiles the matrix products anew, for
# SmolLM2 in 40 ms and 7 MB, which stay.
ROUND = 8
_ATTENTION = ("eager", "sdpa")  # these take any mask
_LAYERS = {"full_attention", "sliding_attention"}


def longest_row(model: Any) -> int:
    """Return how long a row may be to share its prompt: 0 if the model takes no such mask; at most a sliding window."""
    config = model.config
    takes_masks = model._supports_attention_backend and not model._is_stateful
    takes_masks &= config._attn_implementation in _ATTENTION
    takes_masks &= _LAYERS.issuperset(getattr(config, "layer_types", None) or ())
    balances_experts = hasattr(config, "output_router_logits")  # by each row's own tokens
    return (getattr(config, "sliding_window", None) or 2**31) if takes_masks and not balances_experts else 0


def laid_out(
    sequences: torch.Tensor, attention: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens to compute for the log-probs of the wanted ones, and their attention mask.

    Args:
        sequences, attention, wanted: (B, T); ``wanted`` is bool.
        dtype: of the model; None if its rows cannot share a prompt.

    Returns:
        Places (G, L) in the flattened batch, -1 for padding. A mask (G, L), or (G, 1, L, L) to add to the scores.
    """
    rows, columns = wanted.any(dim=1), wanted.any(dim=0).nonzero()
    end = int(columns[-1]) if len(columns) else wanted.shape[1] - 1
    rows[0] |= not len(columns)  # every rank needs a pass
    places = torch.arange(wanted.numel(), device=wanted.device).view_as(wanted)
    plain = places[rows, :end]
    if dtype is not None and len(columns) and plain.numel() >= LEAST[places.device.type]:
        shared, width = _by_prompt(sequences, attention, wanted, places)
        shared = pad(shared, (0, -shared.shape[1] % ROUND), value=-1)
        span = SPAN[places.device.type]
        if shared.numel() * (shared.shape[1] + span) < plain.numel() * (plain.shape[1] + span):
            column, row = torch.arange(shared.shape[1], device=places.device), shared // wanted.shape[1]
            seen = (column < width) | (row[:, :, None] == row[:, None, :])
            seen &= (shared >= 0)[:, None, :] & (column <= column[:, None])
            return shared, torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
    return plain, attention[rows, :end]


def _by_prompt(
    sequences: torch.Tensor, attention: torch.Tensor, wanted: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return the places (G, L) of each prompt and then its responses, and the number of columns of the prompts."""
    first, end = wanted.int().argmax(dim=1), wanted.shape[1] - wanted.flip(1).int().argmax(dim=1)
    begin = attention.argmax(dim=1).minimum(first - 1)
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for row in wanted.any(dim=1).nonzero()[:, 0].tolist():
        prompt, last = sequences[row, begin[row] : first[row]], first[row] - 1
        # The prompt's last token goes with each response: a place predicts one token.
        parts = groups.setdefault(tuple(prompt.tolist()), [places[row, begin[row] : last]])
        parts.append(places[row, last : end[row] - 1])
    prompts = pad_sequence([prompt for prompt, *_ in groups.values()], True, -1, padding_side="left")
    responses = pad_sequence([torch.cat(responses) for _, *responses in groups.values()], True, -1)
    return torch.cat([prompts, responses], dim=1), prompts.shape[1]


def prompt_of(row: Any) -> tuple[int, list[int]]:
    """Return the length and the tokens of a row's prompt; sorted by them, prompts of equal length need no padding."""
    length = len(row.sequences) - len(row.action_mask) + int(row.action_mask.int().argmax())
    return length, row.sequences[:length].tolist()
