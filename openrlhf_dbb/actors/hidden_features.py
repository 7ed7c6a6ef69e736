"""Features of the prompts for estimators that read them: the policy's last hidden states.

Axes: P prompts, S of them on a rank, H hidden units, D features.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from estimators import FEATURES


def of_prompts(policy: Any, tokens: Sequence[list[int]]) -> NDArray[np.float64]:
    """Return features (P, D) of all prompts, given as token ids: one forward pass, shared by the policy's ranks.

    ``policy`` is OpenRLHF's group of actors, without tensor or ring parallelism.
    """
    ranks = len(policy._actor_handlers)
    # As many on every rank, since all take part in each forward pass under ZeRO-3: some prompts come twice.
    shares = (np.arange(-(-len(tokens) // ranks) * ranks) % len(tokens)).reshape(-1, ranks).T
    shared_out = [[tokens[place] for place in share] for share in shares]
    parts = ray.get(policy.async_run_method_batch(method_name="prompt_features", tokens=shared_out))
    features = np.empty((len(tokens), FEATURES["hidden"]))
    for share, [part] in zip(shares, parts, strict=True):
        features[share] = part
    return features


def last_hidden(model: Any, tokens: Sequence[list[int]], size: int) -> NDArray[np.float32]:
    """Return the final-norm hidden state (S, H) at the last token of each prompt, ``size`` prompts at a time."""
    device = torch.cuda.current_device()
    by_length = sorted(range(len(tokens)), key=lambda place: -len(tokens[place]))
    # The logits of all positions would take more memory than all else.
    module = getattr(model, "module", model)
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(module.forward).parameters else {}
    parts = []
    for start in range(0, len(tokens), size):
        rows = [tokens[place] for place in by_length[start : start + size]]
        width = len(rows[0])
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            output = model(
                ids, attention_mask=mask, position_ids=places, output_hidden_states=True, use_cache=False, **fewer
            )
        parts.append(output["hidden_states"][-1][:, -1].float().cpu())
    hidden = torch.empty((len(tokens), parts[0].shape[1]))
    hidden[torch.tensor(by_length)] = torch.cat(parts)
    return hidden.numpy()


def projected(hidden_S_H: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return hidden states (S, D): scaled to a mean square of 1, on random directions that are the same in all runs."""
    scale = np.sqrt(np.mean(hidden_S_H.astype(np.float64) ** 2, axis=1, keepdims=True))
    width = hidden_S_H.shape[1]
    # RandomState, unlike newer generators, draws the same numbers in every version of numpy.
    directions_H_D = np.random.RandomState(0).standard_normal((width, FEATURES["hidden"])) / np.sqrt(width)
    return (hidden_S_H / np.maximum(scale, 1e-6) @ directions_H_D).astype(np.float32)
