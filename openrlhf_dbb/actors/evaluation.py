"""Evaluations during training: samples of held-out data and of benchmarks become measures, and are stored.

A data source is a part of ``--eval.dataset``, by OpenRLHF's column ``datasource``, or one of ``--eval.benchmarks``.

Axes: P prompts of a data source, N samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import storage
from openrlhf_dbb import rewards
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.answering import answer_once
from openrlhf_dbb.evaluation.engines import Finished, Request, SamplingSettings
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.evaluation.verifiers import mathematics
from storage.evaluations import TRAINING

Answer = Callable[[str], "str | None"]
"""The answer in a response, normalized so that equal answers are equal texts; None if there is none."""


@dataclass(frozen=True)
class Evaluated:
    """What the model answered.

    Attributes:
        results: by data source, in the order of the data.
        prompts: by data source, P texts as the model saw them.
        read: data sources whose answers are read, so that there are majorities.
    """

    results: dict[str, Results]
    prompts: dict[str, list[str]]
    read: frozenset[str]

    def __or__(self, other: Evaluated) -> Evaluated:
        """Both; their data sources differ."""
        return Evaluated(self.results | other.results, self.prompts | other.prompts, self.read | other.read)

    @property
    def rollouts(self) -> int:
        """Responses that were sampled."""
        return sum(results.scores_R_P_N.size for results in self.results.values())

    @property
    def accuracy(self) -> float:
        """Acc@N, mean over data sources."""
        return metrics.macro_average([summary.accuracy for summary in self._summaries]).mean

    def logs(self) -> dict[str, float]:
        """Measures to be logged beside OpenRLHF's, whose names they follow: ``eval_DATASOURCE_MEASURE``.

        mean@N, best@N, pass@k (scores 0 and 1 only), majority@N (where answers are read) and missing; in [0, 1] as
        scores are, NaN where nothing is verified. response_length_mean, in tokens, and truncated_rate as OpenRLHF's.
        And ``eval_mean@N``, ``eval_best@N``: their means over data sources.
        """
        found: dict[str, float] = {}
        for summary in self._summaries:
            n, of = summary.samples, f"eval_{summary.benchmark}_"
            found |= {f"{of}mean@{n}": summary.accuracy.mean, f"{of}best@{n}": summary.best.mean}
            found |= {f"{of}pass@{k}": measure.mean for k, measure in summary.pass_at.items()}
            if summary.benchmark in self.read:
                found[f"{of}majority@{n}"] = summary.majority.mean
            found |= {f"{of}missing": summary.missing.mean, f"{of}truncated_rate": summary.truncated.mean}
            found[f"{of}response_length_mean"] = summary.length.mean
        best = metrics.macro_average([summary.best for summary in self._summaries]).mean
        return found | {f"eval_mean@{n}": self.accuracy, f"eval_best@{n}": best}

    @cached_property
    def _summaries(self) -> list[metrics.Summary]:
        return [metrics.summarize(results) for results in self.results.values()]

    def record(
        self,
        store: storage.PosteriorStore,
        run: storage.Run,
        step: int,
        *,
        model: str,
        config: Mapping[str, Any],
        generated_total: int,
    ) -> None:
        """Store each prompt's results, as of the model after ``step``.

        Args:
            model, config, generated_total: as for :meth:`storage.Run.record_evaluation`.

        Raises:
            storage.StoreError: the store cannot be written, or the run is no longer this owner's.
        """
        results = [
            stored_rows(of, store.register_prompts(self.prompts[source], of.labels))
            for source, of in self.results.items()
        ]
        run.record_evaluation(step, TRAINING, results, model=model, config=config, generated_total=generated_total)


def collect(data: Any, samples: Sequence[Any], tokenizer: Any, answer: Answer | None) -> Evaluated:
    """Sort samples by data source.

    Args:
        data: OpenRLHF's evaluation data set, with ``prompts``, ``labels`` and ``datasources``.
        samples: an ``Experience`` for each, N side by side for each prompt, in the order of the data.
        tokenizer: decodes responses where ``answer`` is to read them.
        answer: reads the answer in a response; None if that is unknown.

    Raises:
        UsageError: a sample has no score.
    """
    shape = (1, len(data.prompts), len(samples) // len(data.prompts))
    scores = np.array([_score(sample) for sample in samples]).reshape(shape)
    answers = np.array([answer and answer(_response(sample, tokenizer)) for sample in samples], dtype=object)
    tokens = np.array([int(sample.response_length.item()) for sample in samples]).reshape(shape)
    truncated = np.array([bool(sample.truncated.item()) for sample in samples]).reshape(shape)
    sources = [str(source) for source in data.datasources]
    places = {source: np.nonzero(np.array(sources) == source)[0] for source in dict.fromkeys(sources)}
    prompts = {source: [data.prompts[place] for place in places_P] for source, places_P in places.items()}
    results = {
        source: Results(
            benchmark=source,
            ids=[str(place) for place in places_P],
            scores_R_P_N=scores[:, places_P],
            answers_R_P_N=answers.reshape(shape)[:, places_P],
            labels=[str(data.labels[place]) for place in places_P],
            tokens_R_P_N=tokens[:, places_P],
            truncated_R_P_N=truncated[:, places_P],
        )
        for source, places_P in places.items()
    }
    return Evaluated(results, prompts, frozenset(results if answer is not None else ()))


def validate(
    prompts: Mapping[str, BenchmarkPrompts],
    sampling: SamplingSettings,
    sample: Callable[[Sequence[Request], SamplingSettings], Iterable[list[Finished]]],
) -> Evaluated:
    """Evaluate benchmarks as the command ``evaluate`` does, once: each response verified by its benchmark's verifier.

    Args:
        prompts: by benchmark.
        sample: of :class:`openrlhf_dbb.actors.generation.RolloutGenerator`.
    """
    results = answer_once(prompts, lambda requests: sample(requests, sampling))
    return Evaluated(results, {name: of.texts for name, of in prompts.items()}, frozenset(results))


def answer_of(reward_urls: Sequence[str] | None) -> Answer | None:
    """How to read the answer that a reward function judges; None if only the function knows."""
    asks_math_verify = any(Path(url) == rewards.MATH_FILE for url in reward_urls or [])
    return mathematics.answer if asks_math_verify else None


def best_measure(key: str, logs: Mapping[str, float]) -> str | None:
    """The measure that ``--ckpt.best_metric_key`` chooses the best model by; None if none is to be kept.

    Without a key it is the mean over data sources, ``eval_mean@N``; OpenRLHF takes pass1 of the first one, which counts
    a missing score as 0.

    Raises:
        UsageError: there is no such measure, where OpenRLHF would silently keep nothing; lists the available ones.
    """
    if key == "none":
        return None
    if not key:
        return next(name for name in logs if name.startswith("eval_mean@"))
    if key not in logs:
        raise UsageError(
            f"--ckpt.best_metric_key {key} is not a measure of this evaluation; available: {', '.join(sorted(logs))}; "
            "or none, for no best model"
        )
    return key


def _score(sample: Any) -> float:
    """The verifier's score, or else the reward; NaN where missing."""
    value = sample.rewards if sample.scores is None else sample.scores
    if value is None:
        raise UsageError("an evaluation needs rewards at generation; give --reward.remote_url, or --eval.steps -1")
    return float(value.item())


def _response(sample: Any, tokenizer: Any) -> str:
    tokens = sample.sequences[0, 1:][sample.action_mask[0].bool()]  # the mask covers predicted tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
