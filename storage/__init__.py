"""Per-prompt reward posteriors in SQL (SQLite or PostgreSQL), for any trainer; needs numpy, SQLAlchemy, Alembic.

    store       open_store, PosteriorStore: prompts, runs, who may write them
    run         Run: what its owner may do; steps, checkpoints, roll back, warm start
    steps       writing a step
    roll_back   undoing steps: every posterior as it was
    warm_start  posteriors carried over from another run, in this or another database
    evaluations results of benchmarks: EvaluationRows, and writing them
    records     what goes in and comes out: StepRows, ProbeRows, PosteriorTable, RunRecord, WarmStart
    rollouts    RolloutRows: kept rollouts of a step with their texts; its metrics as text
    usage       Usage: what is counted of the rollouts of a step
    checks      refusing columns that do not fit
    shared      the estimator's run-wide state, as text in the database
    prompts     identity of a prompt: prompt_hash, registration
    events      what happened to a run besides steps
    log         reading for analysis, as numpy columns: read_log, read_posteriors, read_probes, read_usage,
                read_evaluations
    inspection  reading for people: progress, run-wide state, prompts, rollouts, one prompt's history
    held_out    held-out accuracy of a run during its training, by step and by prompt
    owner       which process owns a run, and whether it is still alive
    schema      the tables, every column once; creation and version check
    views       the views
    engine      transactions on either database; large results in parts; one-line errors
    bulk        inserting numpy columns, many rows at once
    retry       repeating transactions that an outage cut short
    errors      StoreError
    url         addresses: default, parsing, masking

Example:
    >>> import numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = open_store(f"sqlite:///{folder.name}/posteriors.db")
    >>> ids = store.register_prompts(["1 + 1 = ?", "2 + 2 = ?"], ["2", "4"])
    >>> run = store.create_run(
    ...     "first", estimator="dbb", estimator_version=1, parameters={"discount": 0.5},
    ...     state_fields=("alpha", "beta"), model="tiny", dataset="sums", dataset_digest="",
    ...     reward="exact", config={})
    >>> before = run.load(ids)
    >>> before.step
    array([-1, -1])
    >>> run.record_step(1, StepRows(
    ...     prompt_ids=ids, rollouts=np.array([4, 4]), successes=np.array([4.0, 1.0]),
    ...     mean=np.array([0.9, 0.3]), variance=np.array([0.09, 0.21]),
    ...     state=np.array([[4.5, 0.5], [1.5, 3.5]]),
    ...     previous_state=before.state, previous_step=before.step))
    >>> run.load(ids).state
    array([[4.5, 0.5],
           [1.5, 3.5]])
    >>> read_log(store, run.record).rollouts
    array([4, 4])
    >>> store.close(); folder.cleanup()
"""

from storage.errors import StoreError
from storage.evaluations import EvaluationRows
from storage.log import (
    EvaluationRecord,
    PosteriorLog,
    ProbeLog,
    StepLog,
    UsageLog,
    read_evaluations,
    read_log,
    read_posteriors,
    read_probes,
    read_usage,
)
from storage.prompts import prompt_hash
from storage.records import PosteriorTable, ProbeRows, RunRecord, StepRows, WarmStart
from storage.rollouts import RolloutRows
from storage.run import Run
from storage.store import PosteriorStore, open_store
from storage.url import DEFAULT_URL, URL_VARIABLE, mask_url
from storage.usage import Usage

__all__ = [
    "DEFAULT_URL",
    "URL_VARIABLE",
    "EvaluationRecord",
    "EvaluationRows",
    "PosteriorLog",
    "PosteriorStore",
    "PosteriorTable",
    "ProbeLog",
    "ProbeRows",
    "RolloutRows",
    "Run",
    "RunRecord",
    "StepLog",
    "StepRows",
    "StoreError",
    "Usage",
    "UsageLog",
    "WarmStart",
    "mask_url",
    "open_store",
    "prompt_hash",
    "read_evaluations",
    "read_log",
    "read_posteriors",
    "read_probes",
    "read_usage",
]
