"""Evaluations during training: measures of the samples of held-out data and of benchmarks.

A data source is a part of ``--eval.dataset``, by OpenRLHF's column ``datasource``, or one of
``--eval.benchmarks``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openrlhf_dbb.actors.generation import RolloutGenerator, scores
from openrlhf_dbb.actors.progress import EVALUATING, Progress
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.answering import Asked, answer_once
from openrlhf_dbb.evaluation.results import Results

_SHOWN = 256  # tokens; more than a line of a terminal shows


def measure(
    generator: RolloutGenerator,
    benchmarks: Asked,
    sampling: Any,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Results]]:
    """Measure the policy that the engines have.

    Returns:
        The measures by name, and the results by data source.

    Raises:
        UsageError: a sample has no score.
    """
    from openrlhf.trainer.ppo_trainer import compute_eval_metrics  # imports vLLM

    logs = {}
    results = {}
    size = sampling["n_samples_per_prompt"]
    data = generator.eval_dataloader.dataset if generator.eval_dataloader else ()
    progress.enter(EVALUATING, size * len(data))
    if data:
        samples = generator.generate_eval_samples(**sampling)
        results = collect(data, samples)
        progress.after = answers(samples[::size], generator.tokenizer)
        as_one_batch = [(data.datasources, data.prompts, None, None)]  # of the data loader
        logs = compute_eval_metrics(as_one_batch, samples, size)
    if benchmarks:
        settings = {
            "n": size,
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
        }
        results |= answer_once(benchmarks, lambda requests: generator.sample(requests, settings))
    return logs | logged(results), results


def logged(results: Mapping[str, Results]) -> dict[str, float]:
    """Return ``eval_SOURCE_MEASURE``, and the means over sources ``eval_mean@N``, ``eval_best@N``.

    Args:
        results: by data source, all of N samples.
    """
    logs = {}
    measured = []
    for source, of_source in results.items():
        measures = metrics.measures(of_source)
        measured.append(measures)
        for name, values_R in measures.items():
            logs[f"eval_{source}_{name}"] = float(values_R.mean())
    samples = next(iter(results.values())).scores_R_P_N.shape[2]
    for name in (f"mean@{samples}", f"best@{samples}"):
        logs[f"eval_{name}"] = float(np.mean([measures[name] for measures in measured]))
    return logs


def collect(data: Any, samples: Sequence[Any]) -> dict[str, Results]:
    """Sort samples, N side by side for each prompt of the data in its order, by data source.

    Raises:
        UsageError: the samples have no scores.
    """
    shape = (1, len(data.prompts), len(samples) // len(data.prompts))
    scores_R = scores(samples)
    if scores_R is None:
        raise UsageError(
            "an evaluation needs rewards at generation; "
            "give --reward.remote_url, or --eval.steps -1"
        )
    tokens = np.array([int(sample.response_length.item()) for sample in samples])
    truncated = np.array([bool(sample.truncated.item()) for sample in samples])
    sources = np.array([str(source) for source in data.datasources])
    results = {}
    for source in dict.fromkeys(sources.tolist()):
        places_P = np.flatnonzero(sources == source)
        results[source] = Results(
            benchmark=source,
            ids=[str(place) for place in places_P],
            scores_R_P_N=scores_R.reshape(shape)[:, places_P],
            # Only a verifier of ours could read them.
            answers_R_P_N=np.full((1, len(places_P), shape[2]), None),
            labels=[str(data.labels[place]) for place in places_P],
            tokens_R_P_N=tokens.reshape(shape)[:, places_P],
            truncated_R_P_N=truncated.reshape(shape)[:, places_P],
            prompts=[data.prompts[place] for place in places_P],
        )
    return results


def answers(samples: Sequence[Any], tokenizer: Any) -> list[tuple[str, float]]:
    """Return the end of each sample's text, without special tokens, and its score.

    NaN: not verified.
    """
    texts = []
    for sample in samples:
        tokens = sample.sequences[0, 1:][sample.action_mask[0].bool()]
        last = tokens[-_SHOWN:].tolist()
        texts.append(str(tokenizer.decode(last, skip_special_tokens=True)))
    return list(zip(texts, np.asarray(scores(samples)).tolist(), strict=True))


def best_measure(key: str, logs: Mapping[str, float]) -> str | None:
    """Return the measure that ``--ckpt.best_metric_key`` chooses the best model by.

    None for no best model. Without a key it is the mean over data sources.

    Raises:
        UsageError: the measure is not known; OpenRLHF would keep nothing by it.
    """
    if key == "none":
        return None
    if not key:  # OpenRLHF takes the pass1 of the first source, which counts a missing score as 0
        return next(name for name in logs if name.startswith("eval_mean@"))
    if key not in logs:
        available = ", ".join(sorted(logs))
        raise UsageError(
            f"--ckpt.best_metric_key {key} is not a measure of this evaluation; "
            f"available: {available}; or none, for no best model"
        )
    return key
