"""Probes in TRL: further rollouts of some prompts of a step, of which TRL's batch and log know nothing.

Axes: R rollouts of a generation batch on all processes, Q probed prompts of a step with M samples each.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from openrlhf_dbb.core.arrays import Key
from openrlhf_dbb.core.step import Probes
from openrlhf_dbb.integrations.trl_filling import generate_rows


def probe(memory: Any, keys: Iterable[Key], columns: Sequence[str], most: int) -> Probes | None:
    """Generate and score further rollouts of the chosen prompts among those of a step; on all processes.

    Args:
        memory: :class:`openrlhf_dbb.integrations.trl_memory.Memory`.
        columns: those of the data set that reward functions see.
        most: rollouts that are generated at a time, R.

    Returns:
        The probes, alike on all processes; None if no prompt of the step is probed.
    """
    asked = [key for key in dict.fromkeys(keys) if key in memory.probed]
    if not asked:
        return None
    samples = memory.settings.probe_samples
    processes = memory.trainer.accelerator.num_processes
    scores_Q_M = np.full((len(asked), samples), np.nan)
    with _without_trace(memory.trainer):
        for place, key in enumerate(asked):
            for start in range(0, samples, most):
                part = min(most, samples - start)
                rows = part + -part % processes  # the last ones of a part are not used
                generate_rows(memory.trainer, columns, [memory.probed[key]] * rows, rows)
                scores_Q_M[place, start : start + part] = memory.scores_now(rows)[:part]
    return Probes(asked, scores_Q_M)


@contextmanager
def _without_trace(trainer: Any) -> Iterator[None]:
    """Keep TRL's metrics, its table of completions and its count of tokens as they are."""
    logs = trainer._logs
    metrics = trainer._metrics["train"]
    tokens = trainer.state.num_input_tokens_seen
    trainer._logs = copy.deepcopy(logs)
    trainer._metrics["train"] = defaultdict(list)
    try:
        yield
    finally:
        trainer._logs = logs
        trainer._metrics["train"] = metrics
        trainer.state.num_input_tokens_seen = tokens
