"""What the page shows of the rollout ledger: where the rollouts of the steps and of each prompt went.

Axes: T steps with a ledger, S points of a curve over steps, P prompts, V rows of the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.inspect.costs import rollouts_per_group, tokens_per_group
from openrlhf_dbb.inspect.page import packed
from storage import UsageLog
from storage.inspection import StepUsage

Whole = NDArray[np.int64]

_PER_PROMPT = ("generated", "trained", "skipped", "replayed")


def section(by_step: StepUsage, totals: Mapping[str, Any], edges: Whole) -> dict[str, Any] | None:
    """The section "Where the rollouts went"; None for a run without a ledger.

    Args:
        by_step: the run's steps.
        totals: as ``storage.inspection.progress`` gives it.
        edges: (S,) last step of each point.
    """
    if not len(by_step.step):
        return None
    point_T = np.searchsorted(edges, by_step.step)

    def total(counts_T: Whole) -> dict[str, str]:
        return packed(np.bincount(point_T, counts_T, minlength=len(edges)).astype(np.int64))

    names = ("generated_tokens", "generated", "trained", "filtered", "replayed", "skipped", "zero_variance",
             "informative", "rescued", "groups", "informative_groups", "unused_rollouts")  # fmt: skip
    return {
        "totals": {name: totals[name] for name in names},
        "rollouts_per_group": rollouts_per_group(totals),
        "tokens_per_group": tokens_per_group(totals),
        "with_ledger": len(by_step.step),
        "step": packed(edges),
        "span": int(edges[0]),
        "steps": total(np.ones_like(by_step.step)),
        # Every rollout that was generated is in one of these.
        "informative": total(by_step.informative - by_step.rescued),
        "rescued": total(by_step.rescued),
        "no_advantage": total(by_step.trained - by_step.informative),
        "filtered": total(by_step.filtered),
        "replayed": total(by_step.replayed),
        "skipped": total(by_step.skipped),
    }


def generated_total(by_step: StepUsage, last_step: int) -> dict[str, str] | None:
    """Rollouts generated from the start of the run to the end of each step; None unless all steps have a ledger."""
    if not last_step or len(by_step.step) < last_step:
        return None
    return packed(np.cumsum(by_step.generated))


def per_prompt(log: UsageLog, ids: Whole) -> dict[str, dict[str, str]]:
    """Sums over the steps of what became of the rollouts of some prompts.

    Args:
        ids: (P,) ascending.
    """
    row_V = np.minimum(np.searchsorted(ids, log.prompt_id), len(ids) - 1)
    wanted = ids[row_V] == log.prompt_id
    return {
        name: packed(np.bincount(row_V[wanted], getattr(log, name)[wanted], minlength=len(ids)).astype(np.int64))
        for name in _PER_PROMPT
    }
