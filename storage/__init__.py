"""Per-prompt reward posteriors in SQL (SQLite or PostgreSQL), for any trainer; needs numpy, SQLAlchemy, Alembic.

    store       open_store, PosteriorStore: prompts, runs, who may write
    run         Run: the owner's side; steps, checkpoints, roll back, warm start
    steps       a step into the tables
    roll_back   steps undone, every posterior as it was
    events      notes of what happened to a run
    records     what goes in and comes out: StepRows, ProbeRows, PosteriorTable, RunRecord, WarmStart
    usage       UsageRows: where the rollouts of a step went; their sums
    checks      columns that do not fit are refused
    shared      the estimator's run-wide state, as text in the database
    prompts     identity of a prompt: prompt_hash, registration
    warm_start  posteriors carried over from another run, of this or another database
    evaluations what models answered to benchmarks: EvaluationRows, their writing, read_evaluations
    log         reading for analysis: read_log, read_posteriors, read_probes, read_usage; a run as numpy columns
    inspection  reading for people: progress, rollouts by step, run-wide state, prompts, steps, one prompt's history
    owner       which process writes a run, and does it live
    schema      the tables, every column once; creation and version check
    views       the views
    migrations  migrate: older databases to this schema, by explicit command
    retention   prune: the history of old steps is deleted
    engine      transactions on either database; large results in parts; errors in one line
    bulk        numpy columns into a table, many rows at once
    retry       transactions that an outage cut short are repeated
    invariants  check: everything that must hold between the tables, and where it does not
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
from storage.migrations import migrate
from storage.prompts import prompt_hash
from storage.records import PosteriorTable, ProbeRows, RunRecord, StepRows, WarmStart
from storage.retention import PruneResult, prune
from storage.run import Run
from storage.store import PosteriorStore, open_store
from storage.url import DEFAULT_URL, URL_VARIABLE, mask_url
from storage.usage import UsageRows

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
    "PruneResult",
    "Run",
    "RunRecord",
    "StepLog",
    "StepRows",
    "StoreError",
    "UsageLog",
    "UsageRows",
    "WarmStart",
    "mask_url",
    "migrate",
    "open_store",
    "prompt_hash",
    "prune",
    "read_evaluations",
    "read_log",
    "read_posteriors",
    "read_probes",
    "read_usage",
]
