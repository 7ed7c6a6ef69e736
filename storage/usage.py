"""Rollout usage: where the rollouts of a step went, prompt by prompt, and the sums of it.

:class:`UsageCounts` is the one list of what is counted; columns, views, sums and checks follow from it.

Axis in comments: U prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from storage.bulk import Columns
from storage.checks import counts, sorted_ids
from storage.errors import StoreError


@dataclass(frozen=True)
class UsageCounts:
    """What is counted, each as int64, >= 0; the comments are those of the columns of ``dbb_usage``."""

    generated: NDArray[np.int64] = field(metadata={"comment": "rollouts generated"})
    generated_tokens: NDArray[np.int64] = field(metadata={"comment": "their response tokens"})
    trained: NDArray[np.int64] = field(metadata={"comment": "of these, rollouts trained on; the rest: filtered out"})
    trained_tokens: NDArray[np.int64] = field(metadata={"comment": "their response tokens"})
    zero_variance: NDArray[np.int64] = field(metadata={"comment": "generated rollouts in zero-variance groups"})
    informative: NDArray[np.int64] = field(
        metadata={"comment": "trained rollouts of groups in which some advantage is not 0"}
    )
    rescued: NDArray[np.int64] = field(metadata={"comment": "of these, rollouts in zero-variance groups"})
    replayed: NDArray[np.int64] = field(metadata={"comment": "rollouts of earlier steps trained on again"})
    replayed_tokens: NDArray[np.int64] = field(metadata={"comment": "their response tokens"})
    skipped: NDArray[np.int64] = field(metadata={"comment": "times drawn and skipped before generation"})


COUNTS = {each.name: str(each.metadata["comment"]) for each in fields(UsageCounts)}
"""What is counted of each prompt, with the comment of its column in ``dbb_usage``."""

GROUPS = {
    "groups": ("generated", "prompts with generated rollouts"),
    "informative_groups": ("informative", "prompts with informative rollouts"),
}
"""How many prompts of a step have such rollouts: the count that is not 0, and the comment of the column."""

TOTALS = (*COUNTS, *GROUPS)
"""What ``dbb_step`` holds of a step: the sums of ``COUNTS``, and ``GROUPS``."""

# Of each pair the first is at most the second.
_AT_MOST = (
    ("trained", "generated"),
    ("zero_variance", "generated"),
    ("informative", "trained"),
    ("rescued", "informative"),
    ("rescued", "zero_variance"),
)
_TOKENS_OF = ("generated", "trained", "replayed")


@dataclass(frozen=True)
class UsageRows(UsageCounts):
    """Where the rollouts of one training step went, prompt by prompt.

    Attributes, besides those of :class:`UsageCounts`, each (U,):
        prompt_ids: int, unique. A prompt need not be in the step's posterior rows (one that was only skipped is not).
    """

    prompt_ids: NDArray[np.int64]

    def checked(self, step: int) -> UsageRows:
        """A copy as int64, sorted by prompt id.

        Raises:
            StoreError: a wrong shape or type, a negative count, a part that is more than its whole, tokens without
                rollouts, or a duplicate prompt.
        """
        ids, order = sorted_ids(step, "usage.prompt_ids", self.prompt_ids)
        columns = {name: counts(step, f"usage.{name}", getattr(self, name), len(ids), 0)[order] for name in COUNTS}
        for part, whole in _AT_MOST:
            _refuse(step, ids, columns, part, whole, columns[part] > columns[whole], f"at most usage.{whole}")
        for name in _TOKENS_OF:
            none = (columns[name] == 0) & (columns[f"{name}_tokens"] > 0)
            _refuse(step, ids, columns, f"{name}_tokens", name, none, "0 without rollouts")
        return UsageRows(prompt_ids=ids, **columns)

    def check_covers(self, step: int, ids: NDArray[np.int64], rollouts: NDArray[np.int64]) -> None:
        """Raise StoreError if a prompt of the step has more rollouts than were generated; only for checked rows."""
        generated = np.zeros_like(rollouts)
        _, at, found = np.intersect1d(ids, self.prompt_ids, assume_unique=True, return_indices=True)
        generated[at] = self.generated[found]
        short = generated < rollouts
        if short.any():
            raise StoreError(
                f"step {step}: prompt {ids[short][0]} has {rollouts[short][0]} rollouts, but usage.generated is "
                f"{generated[short][0]}; count every rollout of the step as generated"
            )

    def totals(self) -> dict[str, int]:
        """The ``TOTALS`` of the step."""
        return {
            **{name: int(getattr(self, name).sum()) for name in COUNTS},
            **{name: int(np.count_nonzero(getattr(self, count))) for name, (count, _) in GROUPS.items()},
        }


def bounds_sql() -> str:
    """SQL that is true of the rows of ``dbb_usage`` that :meth:`UsageRows.checked` accepts."""
    return " AND ".join(
        [f"{name} >= 0" for name in COUNTS]
        + [f"{part} <= {whole}" for part, whole in _AT_MOST]
        + [f"({name} > 0 OR {name}_tokens = 0)" for name in _TOKENS_OF]
    )


def usage_columns(run_id: int, step: int, usage: UsageRows) -> Columns:
    """The columns of ``dbb_usage``."""
    columns: Columns = {name: getattr(usage, name) for name in COUNTS}
    return {"run_id": run_id, "step": step, "prompt_id": usage.prompt_ids, **columns}


def _refuse(
    step: int,
    ids: NDArray[np.int64],
    columns: dict[str, NDArray[np.int64]],
    name: str,
    other: str,
    bad: NDArray[np.bool_],
    allowed: str,
) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise StoreError(
            f"step {step}: usage.{name} of prompt {ids[at]} is {columns[name][at]}, its usage.{other} is "
            f"{columns[other][at]}; it must be {allowed}"
        )
