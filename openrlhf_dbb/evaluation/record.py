"""Stores evaluations in the posterior store, prompt by prompt.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import storage
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.results import Results, read_evaluation

_NOT_STORED = ("model", "status")  # a column of its own; always "finished"


def record(store_url: str | None, run: str, evaluation: Path) -> None:
    """Store the results of a finished evaluation with a run; results stored before under its name are replaced.

    Args:
        store_url: None for the default store.
        run: name, number or start of the uuid.
        evaluation: its folder.

    Raises:
        UsageError: the folder is not an evaluation, it is not finished, or its files do not fit together.
        storage.StoreError: there is no such store, or no such run in it.
    """
    read = read_evaluation(evaluation)
    manifest = read.manifest
    with storage.open_store(store_url, create=False) as store:
        trained = store.find_run(run)
        results = [
            rows(of, store.register_prompts(_prompts(evaluation, of), of.labels)) for of in read.results.values()
        ]
        config = {name: value for name, value in manifest.items() if name not in _NOT_STORED}
        store.record_evaluation(read.name, results, model=manifest["model"], config=config, run=trained)
        print(f"stored with run {trained.name} in {store.location} (views evaluations, evaluation_results)")


def rows(results: Results, prompt_ids: NDArray[np.int64]) -> storage.EvaluationRows:
    """Results as they are stored, summed over the samples of each prompt.

    Args:
        prompt_ids: (P,) of the prompts in the store.
    """
    scores_R_P_N = results.scores_R_P_N
    verified_R_P_N = ~np.isnan(scores_R_P_N)
    return storage.EvaluationRows(
        benchmark=results.benchmark,
        prompt_ids=prompt_ids,
        samples=np.full(scores_R_P_N.shape[:2], scores_R_P_N.shape[2]),
        verified=verified_R_P_N.sum(axis=-1),
        successes=np.where(verified_R_P_N, scores_R_P_N, 0.0).sum(axis=-1),
        best=metrics.best(scores_R_P_N),
        majority=metrics.majority(scores_R_P_N, results.answers_R_P_N),
        tokens=results.tokens_R_P_N.sum(axis=-1),
        truncated=results.truncated_R_P_N.sum(axis=-1),
    )


def _prompts(evaluation: Path, results: Results) -> list[str]:
    """The prompts of a benchmark as the model saw them."""
    from pyarrow import parquet

    table = parquet.read_table(evaluation / f"{results.benchmark}.parquet", columns=["prompt"])
    return list(table["prompt"].to_pylist()[: len(results.labels)])
