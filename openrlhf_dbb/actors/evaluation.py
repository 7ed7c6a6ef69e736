"""Evaluations during training: measures of the samples of held-out data and of benchmarks.

A data source is a part of ``--eval.dataset``, by OpenRLHF's column ``datasource``, or one of ``--eval.benchmarks``.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from openrlhf_dbb import storage
from openrlhf_dbb.actors import model_card
from openrlhf_dbb.actors.generation import RolloutGenerator, scores
from openrlhf_dbb.actors.progress import EVALUATING, Progress
from openrlhf_dbb.core.best_model import CARD, Best, BestModel
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.answering import answer_once
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Results


class Evaluator:
    """Evaluates the policy, keeps the best model, and stores each prompt's results."""

    def __init__(
        self,
        generator: RolloutGenerator,
        posteriors: Posteriors,
        best: BestModel,
        benchmarks: Mapping[str, BenchmarkPrompts],
        progress: Progress,
        policy: Any,  # the group of the policy's actors
        generate_kwargs: Mapping[str, Any],
    ) -> None:
        self._generator, self._args, self._policy = generator, generator.args, policy
        self._store, self._run, self._best = posteriors.store, posteriors.run, best
        self._benchmarks, self._progress = benchmarks, progress
        given = ("temperature", "top_p", "n_samples_per_prompt")
        self._sampling = {**generate_kwargs, **{name: getattr(self._args.eval, name) for name in given}}

    @torch.no_grad()
    def evaluate(self, step: int, generated: int, trackers: Iterable[Any]) -> None:
        """Evaluate the policy after ``step``; ``generated``: training rollouts by then.

        The results are stored last: an evaluation that is in the store is complete.
        """
        began = time.monotonic()
        logs, results = self._measure(self._sampling["n_samples_per_prompt"])
        seconds = time.monotonic() - began
        if not step:
            self._progress.before = self._progress.after
        measure = best_measure(self._args.ckpt.best_metric_key, logs)
        if measure and step:  # as it was before the training, the model is there anyway
            candidate = Best(self._run.record.uuid, step, measure, logs[measure], list(results))
            if self._best.wants(candidate):
                self._progress.enter("saving the best model")
                folder = str(self._best.begin())
                listings = ray.get(self._policy.async_run_method(method_name="save_best", folder=folder))
                self._best.finish(candidate, listings)
        config = {
            "dataset": self._args.eval.dataset,
            "benchmarks": {name: prompts.about() for name, prompts in self._benchmarks.items()},
            "seconds": seconds,
            **self._sampling,
        }
        rows, model = [metrics.stored_rows(each, self._store) for each in results.values()], self._args.actor
        self._run.record_evaluation(
            step, storage.TRAINING, rows, model=model.model_name_or_path, config=config, generated_total=generated
        )
        if (best := self._best.newest()) is not None and best.step == step:
            card = model_card.text(self._store, self._run.record, step, best.measure)
            (self._best.link / CARD).write_text(card, encoding="utf-8")
        rollouts = sum(each.scores_R_P_N.size for each in results.values())
        for tracker in trackers:
            tracker.log_eval(step, logs | {"eval_rollouts": float(rollouts), "eval_seconds": seconds})
        self._progress.accuracy[step] = logs[f"eval_mean@{self._sampling['n_samples_per_prompt']}"]

    def _measure(self, samples_each: int) -> tuple[dict[str, float], dict[str, Results]]:
        from openrlhf.trainer.ppo_trainer import compute_eval_metrics  # imports vLLM

        logs, results = {}, {}
        data = self._generator.eval_dataloader.dataset if self._generator.eval_dataloader else None
        self._progress.enter(EVALUATING, samples_each * len(data) if data else 0)
        if data:
            samples = self._generator.generate_eval_samples(**self._sampling)
            results = collect(data, samples)
            self._progress.after = answers(samples[::samples_each], self._generator.tokenizer)
            as_one_batch = [(data.datasources, data.prompts, None, None)]  # of the data loader
            logs = compute_eval_metrics(as_one_batch, samples, samples_each)
        if self._benchmarks:
            sampling = {"n": samples_each} | {name: self._sampling[name] for name in ("temperature", "top_p")}
            results |= answer_once(self._benchmarks, lambda requests: self._generator.sample(requests, sampling))
        return logs | logged(results), results


def logged(results: Mapping[str, Results]) -> dict[str, float]:
    """Return ``eval_SOURCE_MEASURE``, and the means over sources ``eval_mean@N``, ``eval_best@N``."""
    measured = {source: metrics.measures(of_source) for source, of_source in results.items()}
    logs = {
        f"eval_{source}_{name}": float(values_R.mean())
        for source, measures in measured.items()
        for name, values_R in measures.items()
    }
    samples = next(iter(results.values())).scores_R_P_N.shape[2]
    for name in (f"mean@{samples}", f"best@{samples}"):
        logs[f"eval_{name}"] = float(np.mean([measures[name] for measures in measured.values()]))
    return logs


def collect(data: Any, samples: Sequence[Any]) -> dict[str, Results]:
    """Sort samples (N side by side for each prompt of the data, in its order) by data source; refuse unscored ones."""
    shape = (1, len(data.prompts), len(samples) // len(data.prompts))
    scores_R = scores(samples)
    if scores_R is None:
        raise UsageError("an evaluation needs rewards at generation; give --reward.remote_url, or --eval.steps -1")
    tokens = np.array([int(sample.response_length.item()) for sample in samples]).reshape(shape)
    truncated = np.array([bool(sample.truncated.item()) for sample in samples]).reshape(shape)
    sources = np.array([str(source) for source in data.datasources])
    results = {}
    for source in dict.fromkeys(sources.tolist()):
        places_P = np.flatnonzero(sources == source)
        results[source] = Results(
            benchmark=source,
            ids=[str(place) for place in places_P],
            scores_R_P_N=scores_R.reshape(shape)[:, places_P],
            answers_R_P_N=np.full((1, len(places_P), shape[2]), None),  # only a verifier of ours could read them
            labels=[str(data.labels[place]) for place in places_P],
            tokens_R_P_N=tokens[:, places_P],
            truncated_R_P_N=truncated[:, places_P],
            prompts=[data.prompts[place] for place in places_P],
        )
    return results


def answers(samples: Sequence[Any], tokenizer: Any) -> list[tuple[str, float]]:
    """Return the end of each sample's text, without special tokens, and its score; NaN: not verified."""
    # 256 tokens are more than a line of a terminal shows.
    tokens = (each.sequences[0, 1:][each.action_mask[0].bool()][-256:].tolist() for each in samples)
    texts = [str(tokenizer.decode(last, skip_special_tokens=True)) for last in tokens]
    return list(zip(texts, np.asarray(scores(samples)).tolist(), strict=True))


def best_measure(key: str, logs: Mapping[str, float]) -> str | None:
    """Return the measure that ``--ckpt.best_metric_key`` chooses the best model by; None for no best model.

    Without a key it is the mean over data sources. An unknown measure, by which OpenRLHF keeps nothing, is refused.
    """
    if key == "none":
        return None
    if not key:  # OpenRLHF takes the pass1 of the first data source, which counts a missing score as 0
        return next(name for name in logs if name.startswith("eval_mean@"))
    if key not in logs:
        raise UsageError(
            f"--ckpt.best_metric_key {key} is not a measure of this evaluation; available: {', '.join(sorted(logs))}; "
            "or none, for no best model"
        )
    return key
