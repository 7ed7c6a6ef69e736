"""What the page asks of a store: every query of its views, and the check of the steps that they read.

SQLite keeps what somebody has written by hand. A view refuses a step that no run could have written.

Axes: P prompts, V visits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.damage import check_rows
from openrlhf_dbb.storage.engine import table
from openrlhf_dbb.storage.read import (
    ADVANTAGE,
    SUMS,
    columns,
    prompt_history,
    refuse_other_scores,
)
from openrlhf_dbb.storage.records import Floats, Integers
from openrlhf_dbb.storage.schema import MEAN, VARIANCE

Columns = dict[str, Floats]  # (V,) each, by name

_RECENT = 20  # steps, for the success rate in the list
_LATE = 16  # steps whose metrics may be written a moment after them
_SAMPLED_PROMPTS = 200
_TEXTS = 4_000_000  # characters of the responses of a step in an answer, about
MOST_ROLLOUTS = 5_000  # rollouts of a step in an answer
# One row per run; only tables that are small or keyed by run and step are read.
_MARKS = f"""
    SELECT r.uuid, r.name, r.run_id, r.status, r.last_step AS until, e.event,
           v.evaluations, v.evaluated_at,
           (SELECT count(s.metrics) FROM dbb_step s
            WHERE s.run_id = r.run_id AND s.step > CASE WHEN r.last_step > 0 THEN r.last_step - {_LATE} ELSE 0 END
           ) AS measured,
           (SELECT max(x.step) FROM dbb_rollout x WHERE x.run_id = r.run_id) AS kept
    FROM dbb_run r
    LEFT JOIN (SELECT run_id, max(event_id) AS event FROM dbb_event GROUP BY run_id) e ON e.run_id = r.run_id
    LEFT JOIN (SELECT run_id, count(*) AS evaluations, max(created_at) AS evaluated_at
               FROM dbb_evaluation GROUP BY run_id) v ON v.run_id = r.run_id
    ORDER BY r.run_id DESC"""
_LAST_STEPS = f"""
    SELECT step, rollouts, successes, metrics FROM dbb_step
    WHERE run_id = :run ORDER BY step DESC LIMIT {_RECENT}"""
_SAMPLE = f"""
    SELECT prompt FROM dbb_prompt WHERE prompt_id IN
    (SELECT prompt_id FROM dbb_posterior WHERE run_id = :run ORDER BY prompt_id LIMIT {_SAMPLED_PROMPTS})"""
_EVENTS = "SELECT created_at, kind, from_step, to_step FROM dbb_event WHERE run_id = :run ORDER BY event_id"
_THERE = "SELECT 1 FROM dbb_run WHERE uuid = :uuid"
_POINTS = f"""
    SELECT max(step) AS step, max(created_at) AS ended_at, CAST(sum(rollouts) AS BIGINT) AS rewards,
           sum(successes) AS successes, count(*) AS steps, {SUMS}
    FROM dbb_step WHERE run_id = :run AND step <= :last GROUP BY (step - 1) / :width ORDER BY 1"""
_METRICS = "SELECT step, metrics FROM dbb_step WHERE run_id = :run AND step <= :last ORDER BY step"
_OF_HISTORY = [
    ("step", "<f8"),
    ("prompt_id", "<f8"),
    ("successes", "<f8"),
    ("mean", "<f8"),
]
_PROMPT = [
    ("prompt_id", "<i8"),
    ("mean", "<f8"),
]
_VISITS = f"""
    SELECT step, prompt_id, successes, {MEAN}
    FROM dbb_history WHERE run_id = :run ORDER BY step, prompt_id"""
_NOW = "SELECT prompt_id, mean FROM posteriors WHERE run_id = :run ORDER BY prompt_id"
_OUTSIDE = "SELECT 1 FROM dbb_history WHERE run_id = :run AND ({condition}) LIMIT 1"
# The variance of N rewards in [0, 1] with a mean m is at most m (1 - m) N / (N - 1).
_TOO_FAR_APART = "variance > mean * (1 - mean) * rollouts / nullif(rollouts - 1.0, 0) + 1e-9"
_KEPT_SCORES = """
    SELECT score FROM dbb_rollout WHERE run_id = :run ORDER BY step {direction} LIMIT 1000"""
_SOME_SCORES = f"""
    SELECT min(score) AS low, max(score) AS high FROM
    (SELECT * FROM ({_KEPT_SCORES.format(direction="ASC")}) early
     UNION ALL SELECT * FROM ({_KEPT_SCORES.format(direction="DESC")}) late) kept"""
_MEAN = "SELECT mean FROM posteriors WHERE run_id = :run AND prompt_id = :prompt"
_ALL_VISITS = f"""
    FROM (SELECT prompt_id, step, rollouts, successes, alpha, beta,
                 {MEAN} AS mean, {VARIANCE} AS variance, lag
          FROM posterior_history WHERE run_id = :run AND {{of_prompts}}) visit
    ORDER BY prompt_id, step"""
_KEPT = """
    SELECT prompt_id, step, count(*) AS kept FROM dbb_rollout
    WHERE run_id = :run AND {chosen} GROUP BY prompt_id, step"""
_SHARE = f"CAST({_TEXTS} / count(*) OVER (PARTITION BY step) AS INTEGER)"
_ROLLOUTS = f"""
    SELECT * FROM (
        SELECT step, prompt_id, sample, reward, score, {ADVANTAGE}, baseline, scale, weight,
               length, truncated, missing, log_prob, lag, read, substr(text, 1, {_SHARE}) AS text,
               CASE WHEN length(text) > {_SHARE} THEN length(text) END AS cut_from,
               count(*) OVER (PARTITION BY step) AS kept,
               row_number() OVER (PARTITION BY step ORDER BY prompt_id, sample) AS place
        FROM rollouts r JOIN dbb_step s USING (run_id, step)
        WHERE run_id = :run AND {{of_steps}} AND prompt_id = coalesce(:prompt, prompt_id)) placed
    WHERE place <= :most ORDER BY prompt_id, sample"""
_GROUP = (
    "step",
    "prompt_id",
    "rollouts",
    "successes",
    "alpha",
    "beta",
    "mean",
    "variance",
    "before",
)
_GROUPS = f"""
    FROM (SELECT step, prompt_id, rollouts, successes, alpha, beta,
                 {MEAN} AS mean, {VARIANCE} AS variance,
                 prev_alpha / nullif(prev_alpha + prev_beta, 0) AS before
          FROM dbb_history
          WHERE run_id = :run AND {{of_steps}} AND prompt_id = coalesce(:prompt, prompt_id)) seen"""
_COUNTED = """
    SELECT step, form, generated, generated - trained AS filtered, skipped
    FROM dbb_step WHERE run_id = :run AND {of_steps}"""
_VISIT = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
_KEPT_STEPS = "SELECT DISTINCT step FROM dbb_rollout WHERE run_id = :run ORDER BY step DESC"
_LATEST = "SELECT max(step) AS step FROM dbb_rollout WHERE run_id = :run"


def runs(store: PosteriorStore) -> list[Any]:
    """Return a row of each run, newest first, which changes when anything of the run changes."""
    return store.query(_MARKS)


def is_there(store: PosteriorStore, uuid: str) -> bool:
    """Return whether the run has not been deleted."""
    return bool(store.query(_THERE, uuid=uuid))


def listed(store: PosteriorStore, run: RunRecord) -> tuple[list[Any], list[Any]]:
    """Return the last steps of a run, newest first, and the texts of some of its prompts."""
    recent = store.query(_LAST_STEPS, run=run.run_id)
    sample = store.query(_SAMPLE, run=run.run_id)
    return recent, [row.prompt for row in sample]


def events(store: PosteriorStore, run: RunRecord) -> list[list[Any]]:
    """Return time, kind, first and last step of each event of a run."""
    return [list(row) for row in store.query(_EVENTS, run=run.run_id)]


def series(store: PosteriorStore, run: RunRecord, width: int) -> tuple[list[Any], list[Any]]:
    """Return a row of sums for every ``width`` steps, and the metrics of each step.

    Raises:
        StoreError: a row holds a number that no run has written, or the run has no such step.
    """
    check_rows(store.database, run, "dbb_step")
    points = store.query(_POINTS, run=run.run_id, last=run.last_step, width=width)
    return points, store.query(_METRICS, run=run.run_id, last=run.last_step)


@dataclass(frozen=True)
class History:
    """All visits of a run's prompts."""

    visits: Floats  # (V, 4) step, prompt id, successes and mean afterwards, ordered by step
    prompt_id: Integers  # (P,) the prompts that have a posterior, ascending
    mean: Floats  # (P,) their means now
    unit: bool  # whether the scores lie in [0, 1]


def history(store: PosteriorStore, run: RunRecord) -> History:
    """Return the visits of all prompts of a run.

    Raises:
        StoreError: a value is not a number, or the run has no such step.
    """
    check_rows(store.database, run, "dbb_history", "dbb_posterior")
    with store.database.transaction() as connection:
        rows = table(connection, _OF_HISTORY, _VISITS, {"run": run.run_id})
        now = table(connection, _PROMPT, _NOW, {"run": run.run_id})
    visits = rows.view("<f8").reshape(-1, len(_OF_HISTORY))
    return History(visits, now["prompt_id"], now["mean"], has_unit_scores(store, run))


def has_unit_scores(store: PosteriorStore, run: RunRecord) -> bool:
    """Return whether all scores of a run lie in [0, 1], as far as the store tells.

    Only then a sum of 0 means that nothing was solved: of scores -1 and 1 it means that half was.

    Raises:
        StoreError: a score is not a number.
    """
    outside = "successes < 0 OR successes > rollouts"
    if run.estimator == "point":  # its means and variances are those of the groups themselves
        outside += f" OR {_TOO_FAR_APART}"
    if store.query(_OUTSIDE.format(condition=outside), run=run.run_id):
        return False
    [kept] = store.query(_SOME_SCORES, run=run.run_id)
    refuse_other_scores(store, run, kept.high)
    if kept.low is not None:
        return bool(kept.low >= 0 and kept.high <= 1)
    # Without kept rollouts: the other memories take only scores in [0, 1].
    memory = run.parameters.get("memory", run.estimator)
    return memory != "gaussian" or run.estimator == "point"


def prompt(
    store: PosteriorStore, run: RunRecord, prompt_id: int
) -> tuple[Floats, Columns, list[Any]] | None:
    """Return a prompt's mean now (1,), its visits by column, and how many rollouts are kept of each.

    None if the run has no posterior of it.

    Raises:
        StoreError: a row holds a number that no run has written, or the run has no such step.
    """
    values = {"run": run.run_id, "prompt": prompt_id}
    posterior = store.query(_MEAN, **values)
    if not posterior:
        return None
    rows = prompt_history(store, run, prompt_id)
    for row in rows:
        step = row["step"]
        if not isinstance(step, int) or not 1 <= step <= run.last_step:
            check_rows(store.database, run, "dbb_history")
    log = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _VISIT}
    log["prompt_id"] = np.full(len(rows), float(prompt_id))
    # By step, since the table is keyed by it: otherwise all kept rollouts of the run would be read.
    of_steps = f"prompt_id = :prompt AND {store.database.one_of('step')}"
    steps = store.database.ids(log["step"].astype(np.int64))
    kept = store.query(_KEPT.format(chosen=of_steps), ids=steps, **values)
    return np.array([posterior[0].mean], dtype=np.float64), log, kept


def prompts(
    store: PosteriorStore, run: RunRecord, prompt_ids: Integers
) -> tuple[Columns, list[Any]]:
    """Return the visits of some prompts by column, and how many rollouts are kept of each."""
    of_prompts = store.database.one_of("prompt_id")
    kinds = dict.fromkeys(("prompt_id", *_VISIT), "<f8")
    values = {"run": run.run_id, "ids": store.database.ids(prompt_ids)}
    log = columns(store, kinds, _ALL_VISITS.format(of_prompts=of_prompts), **values)
    return log, store.query(_KEPT.format(chosen=of_prompts), **values)


def kept_steps(store: PosteriorStore, run: RunRecord) -> list[int]:
    """Return the steps that have kept rollouts, newest first; StoreError for one that the run has not."""
    check_rows(store.database, run, "dbb_rollout")
    return [row.step for row in store.query(_KEPT_STEPS, run=run.run_id)]


def latest_step(store: PosteriorStore, run: RunRecord) -> int | None:
    """Return the newest step that has kept rollouts; StoreError for one that the run has not."""
    check_rows(store.database, run, "dbb_rollout")
    step: int | None = store.query(_LATEST, run=run.run_id)[0].step
    return step


@dataclass(frozen=True)
class Rollouts:
    """The kept rollouts of some steps."""

    rows: list[Any]  # of the rollouts
    counted: list[Any]  # counts of each step
    groups: Columns  # of the groups, by name


def rollouts(
    store: PosteriorStore, run: RunRecord, steps: list[int], prompt_id: int | None
) -> Rollouts:
    """Return the kept rollouts of some steps with their groups; None: of all prompts."""
    one_of = store.database.one_of("step")
    values = {"run": run.run_id, "ids": store.database.ids(np.array(steps))}
    query = _ROLLOUTS.format(of_steps=one_of)
    rows = store.query(query, prompt=prompt_id, most=MOST_ROLLOUTS, **values)
    counted = store.query(_COUNTED.format(of_steps=one_of), **values)
    kinds = dict.fromkeys(_GROUP, "<f8")
    groups = columns(store, kinds, _GROUPS.format(of_steps=one_of), prompt=prompt_id, **values)
    return Rollouts(rows, counted, groups)
