"""What the page shows of where the rollouts went, step by step and prompt by prompt.

Axes: T steps with recorded usage, S points of a curve over steps, P prompts, V rows of the usage log.
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
from storage.usage import TOTALS

Whole = NDArray[np.int64]

_PER_PROMPT = ("generated", "trained", "skipped", "replayed")


def section(by_step: StepUsage, totals: Mapping[str, Any], edges: Whole) -> dict[str, Any] | None:
    """The section "Where the rollouts went"; None for a run whose usage was not recorded.

    Args:
        by_step: the run's steps.
        totals: as ``storage.inspection.progress`` gives them.
        edges: (S,) last step of each point.
    """
    if not len(by_step.step):
        return None
    point_T = np.searchsorted(edges, by_step.step)

    def total(counts_T: Whole) -> dict[str, str]:
        return packed(np.bincount(point_T, counts_T, minlength=len(edges)).astype(np.int64))

    return {
        "totals": {name: totals[name] for name in (*TOTALS, "filtered", "unused_rollouts")},
        "rollouts_per_group": rollouts_per_group(totals),
        "tokens_per_group": tokens_per_group(totals),
        "recorded_steps": len(by_step.step),
        "step": packed(edges),
        "span": int(edges[0]),
        "steps": total(np.ones_like(by_step.step)),
        # Every generated rollout is in one of these four.
        "mixed": total(by_step.informative - by_step.rescued),
        "rescued": total(by_step.rescued),
        "no_advantage": total(by_step.trained - by_step.informative),
        "filtered": total(by_step.filtered),
        "replayed": total(by_step.replayed),
        "skipped": total(by_step.skipped),
    }


def generated_total(by_step: StepUsage, last_step: int) -> dict[str, str] | None:
    """Rollouts generated from the start of the run to the end of each step; None unless recorded for all steps."""
    if not last_step or len(by_step.step) < last_step:
        return None
    return packed(np.cumsum(by_step.generated))


def per_prompt(log: UsageLog, ids: Whole) -> dict[str, dict[str, str]]:
    """What became of the rollouts of some prompts, summed over the steps.

    Args:
        ids: (P,) prompt ids, ascending.
    """
    row_V = np.minimum(np.searchsorted(ids, log.prompt_id), len(ids) - 1)
    wanted = ids[row_V] == log.prompt_id
    return {
        name: packed(np.bincount(row_V[wanted], getattr(log, name)[wanted], minlength=len(ids)).astype(np.int64))
        for name in _PER_PROMPT
    }
