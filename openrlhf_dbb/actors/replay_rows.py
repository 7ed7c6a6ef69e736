"""Between OpenRLHF's experiences and the replay cache: fresh rollouts in, training rows out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, remove_padding_in_sequences, split_experience_batch

from openrlhf_dbb.core.replay.cache import CachedRollout


def cached(experience: Experience) -> list[CachedRollout]:
    """All B rollouts of a batch, in its order.

    Args:
        experience: batched and padded on the right, with ``action_log_probs`` and ``rewards``; not changed.

    Returns:
        B rollouts; the reward of one that could not be verified (its score is NaN) is NaN.
    """
    # On a shallow copy: splitting removes the index.
    rows = split_experience_batch(dataclasses.replace(experience))
    return [_cached(row) for row in remove_padding_in_sequences(rows)]


def _cached(row: Experience) -> CachedRollout:
    actions = row.action_mask.bool()
    missing = row.scores is not None and bool(row.scores.isnan())
    return CachedRollout(
        tokens=row.sequences.numpy().astype(np.int32),
        actions=actions.numpy(),
        log_probs=row.action_log_probs[actions].float().numpy(),
        reward=math.nan if missing else row.rewards.item(),
    )


def replay_row(rollout: CachedRollout, like: Experience, advantage: float) -> Experience:
    """One row for OpenRLHF's replay buffer, as it would have made it from a fresh rollout.

    Rows are batched by the fields and info keys of the first one, so a replayed row needs those of a fresh one.

    Args:
        rollout: its stored log-probs are the old policy's.
        like: a batch of fresh rollouts whose advantages are computed.
        advantage: of every token up to the last generated one; no KL penalty.

    Returns:
        An experience without a batch axis; in ``info`` the reward is "reward" and "score", all else is 0.

    Raises:
        ValueError: fresh rows hold something that is not cached: values (a critic), or log-probs of the reference
            model or of the engine.
    """
    tensors = _tensors(rollout, advantage)
    row: dict[str, Any] = {}
    for field in dataclasses.fields(Experience):
        value = getattr(like, field.name)
        if value is None or field.name == "index":
            row[field.name] = None
        elif isinstance(value, torch.Tensor):
            if field.name not in tensors:
                raise ValueError(
                    f"fresh rollouts have {field.name}, replayed ones do not; replay needs no critic, no "
                    "--algo.kl.use_loss and --algo.advantage.is_correction_level off"
                )
            row[field.name] = tensors[field.name].to(value.dtype)
        elif isinstance(value, dict):
            row[field.name] = {key: _logged(key, values[0], rollout.reward) for key, values in value.items()}
        else:  # texts and images, which training does not read
            row[field.name] = [None] if len(value) == len(like.sequences) else list(value)
    return Experience(**row)


def _tensors(rollout: CachedRollout, advantage: float) -> dict[str, torch.Tensor]:
    """The tensors of a row, by field; shapes (T,), (T - 1,) and ()."""
    sequences = torch.tensor(rollout.tokens)
    actions = torch.tensor(rollout.actions)
    log_probs = torch.zeros(len(actions))
    log_probs[actions] = torch.tensor(rollout.log_probs)
    generated = actions.nonzero().flatten()
    # Upstream sums rewards from the end, and the only one is at the last action: prompt tokens get it, too.
    advantages = advantage * (actions.flip(0).cumsum(0).flip(0) > 0)
    return {
        "sequences": sequences,
        "attention_mask": torch.ones_like(sequences),
        "action_mask": actions,
        "action_log_probs": log_probs,
        "advantages": advantages,
        "returns": advantages.clone(),
        "rewards": torch.tensor(rollout.reward),
        "scores": torch.tensor(rollout.reward),
        "response_length": generated[-1] - generated[0] + 1 if len(generated) else torch.tensor(0),
        "truncated": torch.tensor(False),
        "total_length": torch.tensor(len(sequences)),
    }


def _logged(key: str, fresh: torch.Tensor, reward: float) -> torch.Tensor:
    return torch.full_like(fresh, reward if key in ("reward", "score") else 0)
