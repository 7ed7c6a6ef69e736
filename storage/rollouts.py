"""Kept rollouts of a step: what the model wrote, with its reward and advantage; and the step's metrics.

Axis in comments: K kept rollouts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.bulk import Columns
from storage.checks import counts, integers, policy_versions, reals
from storage.errors import StoreError
from storage.prompts import storable

DIGITS = 7
"""Significant digits of a stored metric."""


_FLOATS = ("reward", "score", "advantage", "truncated", "log_prob")


@dataclass
class RolloutRows:
    """Some rollouts of one training step, with their texts.

    Attributes:
        prompt_ids: (K,) int.
        sample: (K,) int, >= 0, place among the rollouts of the prompt in this step; unique for each prompt.
        reward: (K,) float, what was optimized; NaN where it could not be verified.
        score: (K,) float, the verifier's, before penalties; NaN where it could not be verified.
        advantage: (K,) float, finite.
        length: (K,) int, >= 0, response tokens.
        truncated: (K,) float, 1 if cut at the length limit, else 0; NaN if not known.
        log_prob: (K,) float, sum of the response tokens' log-probabilities when they were sampled; NaN if not known.
        text: (K,) responses.
        policy_version: (K,) float, in [0, step - 1], training steps that the policy had seen when it wrote them; NaN:
            step - 1, the step's own policy; None: of that policy all.
    """

    prompt_ids: NDArray[np.int64]
    sample: NDArray[np.int64]
    reward: NDArray[np.float64]
    score: NDArray[np.float64]
    advantage: NDArray[np.float64]
    length: NDArray[np.int64]
    truncated: NDArray[np.float64]
    log_prob: NDArray[np.float64]
    text: Sequence[str]
    policy_version: NDArray[np.float64] | None = None

    def checked(self, step: int) -> RolloutRows:
        """A copy with exact types, sorted by prompt id and sample.

        Raises:
            StoreError: a wrong shape or type, a rollout that is there twice, an infinite value, no finite advantage, or
                a policy version out of range.
        """
        ids, sample = integers("rollouts.prompt_ids", self.prompt_ids), integers("rollouts.sample", self.sample)
        size = len(ids)
        counts(step, "rollouts.sample", sample, size, 0)
        order = np.lexsort((sample, ids))
        ids, sample = ids[order], sample[order]
        twice = (ids[1:] == ids[:-1]) & (sample[1:] == sample[:-1])
        if twice.any():
            at = int(twice.argmax())
            raise StoreError(
                f"step {step}: rollouts holds sample {sample[at]} of prompt {ids[at]} more than once; number them"
            )
        if len(self.text) != size or not all(isinstance(each, str) for each in self.text):
            raise StoreError(f"step {step}: rollouts.text must be {size} texts, one for each of rollouts.prompt_ids")
        floats_5_K = np.stack([reals(step, f"rollouts.{name}", getattr(self, name), (size,)) for name in _FLOATS])[
            :, order
        ]
        allowed_5_K = ~np.isinf(floats_5_K)
        allowed_5_K[_FLOATS.index("advantage")] &= ~np.isnan(floats_5_K[_FLOATS.index("advantage")])
        if not allowed_5_K.all():
            which, at = np.argwhere(~allowed_5_K)[0]
            raise StoreError(
                f"step {step}: rollouts.{_FLOATS[which]} of prompt {ids[at]}, sample {sample[at]}, is "
                f"{floats_5_K[which, at]}; it must be finite"
            )
        length = counts(step, "rollouts.length", self.length, size, 0)[order]
        texts = [storable(self.text[at]) for at in order.tolist()]
        versions = policy_versions(step, "rollouts.policy_version", self.policy_version, ids, order)
        return RolloutRows(
            prompt_ids=ids, sample=sample, length=length, text=texts, policy_version=versions,
            **dict(zip(_FLOATS, floats_5_K, strict=True)),
        )  # fmt: skip

    def add_to(self, digest: hashlib.blake2b) -> None:
        """Let a step's digest stand for these rows too; only of checked rows."""
        for values in (v for v in vars(self).values() if isinstance(v, np.ndarray)):
            digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes())
        digest.update(np.array([len(text) for text in self.text], dtype="<i8").tobytes())
        digest.update(hashlib.sha256("".join(self.text).encode()).digest())  # twice as fast where processors know it


def rollout_columns(run_id: int, step: int, rows: RolloutRows) -> Columns:
    """The columns of ``dbb_rollout``."""
    unknown = np.isnan(rows.truncated)
    zeros_and_ones = np.where(unknown, 0, rows.truncated).astype(np.int64)
    truncated: Any = np.ma.array(zeros_and_ones, mask=unknown)  # type: ignore[no-untyped-call]
    texts = np.empty(len(rows.text), dtype=object)
    texts[:] = rows.text
    versions = {} if rows.policy_version is None else {"policy_version": rows.policy_version}
    return {
        "run_id": run_id,
        "step": step,
        "prompt_id": rows.prompt_ids,
        "sample": rows.sample,
        "reward": rows.reward,
        "score": rows.score,
        "advantage": rows.advantage,
        "length": rows.length,
        "truncated": truncated,
        "log_prob": rows.log_prob,
        "text": texts,
        **versions,
    }


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """The numbers among a step's metrics as JSON, names sorted; what is not finite becomes null.

    Example:
        >>> metrics_text({"kl": 0.12345678, "loss": float("nan"), "note": "text"})
        '{"kl": 0.1234568, "loss": null}'
    """
    numbers = {name: value for name, value in sorted(metrics.items()) if isinstance(value, (int, float, np.number))}
    return json.dumps(
        {name: float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for name, value in numbers.items()}
    )
