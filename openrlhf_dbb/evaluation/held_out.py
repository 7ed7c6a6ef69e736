"""Stores held-out samples of a training with its run, for a trainer that is not OpenRLHF, or a loop of one's own.

    record(posteriors, {"aime": {(prompt, label): [Sample(1.0), Sample(0.0)], ...}}, model="step 40")

Axes: P held-out prompts of a benchmark, N samples of a prompt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Key
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.results import Results


class Sample(NamedTuple):
    """A response to a held-out prompt."""

    score: float  # the verifier's; NaN where missing
    tokens: int = 0
    truncated: bool = False


MISSING = Sample(math.nan)


def record(
    posteriors: Posteriors,
    benchmarks: Mapping[str, Mapping[Key, Sequence[Sample]]],
    *,
    model: str = "",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Store an evaluation after the last step of a run. One of the same step is replaced.

    Args:
        benchmarks: samples by name of the benchmark, and by text and label of the prompt. A prompt with fewer
            samples than another one gets missing ones.
        model, config: what was evaluated, and how; stored for people.

    Raises:
        ValueError: there are no samples.
        storage.StoreError: the database fails, or another process owns the run now.
    """
    results = [_results(name, samples) for name, samples in benchmarks.items()]
    if not results:
        raise ValueError("there are no held-out samples; pass a benchmark at least")
    posteriors.settle()
    posteriors.run.record_evaluation(
        posteriors.step,
        storage.TRAINING,
        [stored_rows(result, posteriors.store) for result in results],
        model=model,
        config=config or {},
    )


def _results(name: str, samples: Mapping[Key, Sequence[Sample]]) -> Results:
    """Return the samples of a benchmark as arrays (1, P, N)."""
    most = max((len(of_prompt) for of_prompt in samples.values()), default=0)
    if most == 0:
        raise ValueError(f"benchmark {name!r} has no samples; leave it out")
    filled_P_N = []
    for of_prompt in samples.values():
        missing = most - len(of_prompt)
        filled_P_N.append([*of_prompt, *[MISSING] * missing])
    scores, tokens, truncated = np.moveaxis(np.array([filled_P_N], dtype=np.float64), 3, 0)
    return Results(
        benchmark=name,
        ids=[],
        scores_R_P_N=scores,
        answers_R_P_N=np.full(scores.shape, None),
        labels=[label for _, label in samples],
        tokens_R_P_N=tokens.astype(np.int64),
        truncated_R_P_N=truncated > 0,
        prompts=[text for text, _ in samples],
    )
