"""Evaluations as the store holds them, prompt by prompt."""

import json
from types import SimpleNamespace

import numpy as np

from openrlhf_dbb.storage import EvaluationRows

COUNTS, SCORES = ("samples", "verified", "tokens", "truncated"), ("successes", "best", "majority")


def read_evaluations(store, run=None):
    """Return the evaluations of a run, or all, oldest first; ``results`` are EvaluationRows by benchmark."""
    rows = store.query("SELECT * FROM dbb_evaluation ORDER BY evaluation_id")
    evaluations = [row._asdict() for row in rows if run is None or row.run_id == run.run_id]
    for values in evaluations:
        values["config"] = json.loads(values["config"])
        query = "SELECT * FROM dbb_evaluation_result WHERE evaluation_id = :id ORDER BY benchmark, repeat, place"
        results = store.query(query, id=values["evaluation_id"])
        names = sorted({row.benchmark for row in results})
        values["results"] = {name: _rows(name, [row for row in results if row.benchmark == name]) for name in names}
    return [SimpleNamespace(**values) for values in evaluations]


def _rows(benchmark, results):
    shape = (results[-1].repeat + 1, results[-1].place + 1)
    columns = {
        name: np.array([getattr(row, name) for row in results], dtype=np.int64 if name in COUNTS else float)
        for name in (*COUNTS, *SCORES)
    }
    ids = np.array([row.prompt_id for row in results[: shape[1]]])
    return EvaluationRows(benchmark, ids, **{name: values.reshape(shape) for name, values in columns.items()})
