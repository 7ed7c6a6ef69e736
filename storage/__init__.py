"""Per-prompt reward posteriors in SQL (SQLite or PostgreSQL), for any trainer; needs numpy, SQLAlchemy and msgspec.

    store    open_store, PosteriorStore: prompts, runs, who may write a run
    run      Run: what the owner of a run may do; warm starts from another run, in this or another database
    records  what goes in and comes out: StepRows, RolloutRows, EvaluationRows, RunRecord and others; their checks
    write    writing and undoing steps, writing evaluations and events, prompt_hash, many rows at once
    read     columns of numpy for analysis, rows for people, held-out accuracy
    owner    which process owns a run, and whether it is still alive
    schema   the tables, every column once, and the views; creation and version check
    engine   connections and transactions on either database; large results in parts
    decode   JSON and times of rows that may have been edited by hand
    damage   numbers that no run has written, by the bounds of their columns
    files    whether the files of SQLite are still there and undamaged
    address  URLs and names of files; network file systems
    errors   StoreError; repeats after an outage

Example:
    >>> import numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = open_store(f"sqlite:///{folder.name}/posteriors.db")
    >>> ids = store.register_prompts(["1 + 1 = ?", "2 + 2 = ?"], ["2", "4"])
    >>> run = store.create_run(
    ...     "first", estimator="dbb", estimator_version=1, parameters={}, state_fields=("alpha", "beta"), model="tiny",
    ...     dataset="sums", dataset_digest="", reward="exact", config={})
    >>> before, state = run.load(ids), np.array([[4.5, 0.5], [1.5, 3.5]])
    >>> mean, variance = state[:, 0] / 5, state.prod(axis=1) / 25
    >>> run.record_step(1, StepRows(
    ...     ids, np.array([4, 4]), np.array([4.0, 1.0]), mean, variance, state, before.state, before.step))
    >>> read_log(store, run.record).alpha
    array([1.5, 4.5])
    >>> store.close(); folder.cleanup()
"""

from openrlhf_dbb.storage.address import DEFAULT_URL, URL_VARIABLE
from openrlhf_dbb.storage.errors import StoreError
from openrlhf_dbb.storage.read import TRAINING, read_log, read_probes
from openrlhf_dbb.storage.records import (
    EvaluationRows,
    ProbeRows,
    Replayed,
    RolloutRows,
    RunRecord,
    StepRows,
    Usage,
    WarmStart,
)
from openrlhf_dbb.storage.run import Run
from openrlhf_dbb.storage.store import PosteriorStore, open_store
from openrlhf_dbb.storage.write import prompt_hash

__all__ = [
    "DEFAULT_URL", "TRAINING", "URL_VARIABLE", "EvaluationRows", "PosteriorStore", "ProbeRows", "Replayed",
    "RolloutRows", "Run", "RunRecord", "StepRows", "StoreError", "Usage", "WarmStart", "open_store", "prompt_hash",
    "read_log", "read_probes",
]  # fmt: skip
