"""What a trainer's evaluation found, prompt by prompt, into the store.

Axes: P prompts, N samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import storage
from openrlhf_dbb.core.step import Key
from openrlhf_dbb.evaluation.record import rows
from openrlhf_dbb.evaluation.results import Results
from storage.evaluations import TRAINING


class Sample(NamedTuple):
    """One response to a held-out prompt.

    Attributes:
        prompt: its text and label.
        score: the verifier's; NaN where missing.
        tokens: length of the response.
        truncated: whether it was cut at the limit.
    """

    prompt: Key
    score: float
    tokens: int
    truncated: bool


@dataclass
class HeldOut:
    """The evaluations after one step, benchmark by benchmark.

    Attributes:
        step: of the run.
        rows: what was stored, by benchmark.
    """

    step: int = -1
    rows: dict[str, storage.EvaluationRows] = field(default_factory=dict)

    def record(
        self,
        store: storage.PosteriorStore,
        run: storage.RunRecord,
        step: int,
        benchmark: str,
        samples: Sequence[Sample],
        per_prompt: int,
        *,
        model: str,
        config: Mapping[str, Any],
    ) -> None:
        """Store a benchmark's samples beside those of other benchmarks after the same step.

        Args:
            run: may be finished.
            step: of the run, after which was evaluated; evaluated once more, it is replaced.
            per_prompt: N. A prompt's further samples are left out: some trainers fill up their last batch.
            model, config: as for :meth:`storage.PosteriorStore.record_evaluation`.

        Raises:
            storage.StoreError: the store cannot be written, or the run has not got to the step.
        """
        if step != self.step:
            self.step, self.rows = step, {}
        found: dict[Key, list[Sample]] = {}
        for sample in samples:
            found.setdefault(sample.prompt, []).append(sample)
        kept = [samples_N[:per_prompt] for samples_N in found.values()]
        texts, labels = zip(*found, strict=True)
        results = Results(
            benchmark=benchmark,
            ids=[str(place) for place in range(len(kept))],
            scores_R_P_N=np.array([[[sample.score for sample in samples_N] for samples_N in kept]], dtype=np.float64),
            answers_R_P_N=np.full((1, len(kept), per_prompt), None, dtype=object),
            labels=list(labels),
            tokens_R_P_N=np.array([[[sample.tokens for sample in samples_N] for samples_N in kept]]),
            truncated_R_P_N=np.array([[[sample.truncated for sample in samples_N] for samples_N in kept]]),
        )
        self.rows[benchmark] = rows(results, store.register_prompts(texts, labels))
        stored = list(self.rows.values())
        store.record_evaluation(TRAINING, stored, model=model, config=config, run=run, step=step)
