"""Reading for people: progress of a run, run-wide state, prompts, rollouts, events, a prompt's
history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import or_, select, text

from storage import schema, shared
from storage.engine import chunks
from storage.errors import StoreError
from storage.records import RunRecord
from storage.retry import retried
from storage.store import PosteriorStore
from storage.usage import TOTALS

Rows = list[dict[str, Any]]

_LARGEST_ID = 2**63 - 1

# The sum of big integers is a decimal on PostgreSQL.
_SUMS = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in TOTALS)

# The event of the end adds rollouts that were left over to the totals.
_NOTED = ("probes", "samples", "unused_rollouts", "unused_tokens")


def progress(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Totals of a run.

    Returns:
        steps; visits (prompts trained on, summed over steps), rollouts, successes (sum of rewards),
        last_step_at; prompts (with a posterior), visited (of these, trained on in this run), mean (of
        their posterior means, None if there are none); checkpoint (step of the last one, or None);
        probes (probed groups, summed over steps), samples (of the probes; not counted in rollouts); all of
        ``storage.usage.TOTALS`` and filtered (generated, not trained on), each None if usage was not counted;
        unused_rollouts, unused_tokens (as given to ``Run.finish``).
    """
    query = f"""
        SELECT s.*, q.prompts, q.visited, q.mean, c.checkpoint, p.probes, p.samples
        FROM (SELECT count(*) AS steps, CAST(coalesce(sum(prompts), 0) AS BIGINT) AS visits,
                     CAST(coalesce(sum(rollouts), 0) AS BIGINT) AS rollouts, coalesce(sum(successes), 0) AS successes,
                     max(created_at) AS last_step_at, CAST(sum(generated - trained) AS BIGINT) AS filtered, {_SUMS}
              FROM dbb_step WHERE run_id = :run) s
        CROSS JOIN (SELECT count(*) AS prompts, avg(mean) AS mean,
                           coalesce(sum(CASE WHEN visits > 0 THEN 1 ELSE 0 END), 0) AS visited
                    FROM posteriors WHERE run_id = :run) q
        CROSS JOIN (SELECT max(step) AS checkpoint FROM dbb_checkpoint WHERE run_id = :run) c
        CROSS JOIN (SELECT count(*) AS probes, CAST(coalesce(sum(samples), 0) AS BIGINT) AS samples
                    FROM dbb_probe WHERE run_id = :run) p"""
    noted = "SELECT detail FROM dbb_event WHERE run_id = :run AND kind = 'finish'"
    totals = _rows(store, query, {"run": run.run_id})[0] | {"unused_rollouts": 0, "unused_tokens": 0}
    for event in _rows(store, noted, {"run": run.run_id}):
        detail = json.loads(event["detail"])
        totals |= {name: totals[name] + detail.get(name, 0) for name in _NOTED}
    return totals


@retried
def shared_state(store: PosteriorStore, run: RunRecord) -> shared.SharedState | None:
    """The estimator's run-wide vectors by name, as ``Run.load_shared``, whoever owns the run."""
    with store.database.transaction() as connection:
        return shared.from_text(shared.newest(connection, run.run_id))


@dataclass(frozen=True)
class Means:
    """Current posterior means, ordered by prompt_id.

    Attributes, each (P,):
        prompt_id: int64.
        mean: float64, estimated mean of one reward; NaN if the run has not estimated it.
        visits: int64, steps of this run that trained on the prompt; 0: warm start only.
        step: int64, the last of them.
    """

    prompt_id: NDArray[np.int64]
    mean: NDArray[np.float64]
    visits: NDArray[np.int64]
    step: NDArray[np.int64]


def current_means(store: PosteriorStore, run: RunRecord) -> Means:
    """The posterior mean of every prompt of a run that has a posterior."""
    query = "SELECT prompt_id, mean, visits, step FROM posteriors WHERE run_id = :run ORDER BY prompt_id"
    parts = [np.empty((0, 4))]
    with store.database.transaction() as connection:
        parts += [np.array(rows, dtype=np.float64) for rows in chunks(connection, query, {"run": run.run_id})]
    prompt_id, mean, visits, step = np.concatenate(parts).T
    return Means(prompt_id.astype(np.int64), mean, visits.astype(np.int64), step.astype(np.int64))


def events(store: PosteriorStore, run: RunRecord) -> Rows:
    """Events of a run: claims, take-overs, roll backs, warm starts, its end.

    Returns:
        created_at, kind, from_step, to_step of each, oldest first.
    """
    query = "SELECT created_at, kind, from_step, to_step FROM dbb_event WHERE run_id = :run ORDER BY event_id"
    return _rows(store, query, {"run": run.run_id})


def prompt_texts(
    store: PosteriorStore, prompt_ids: NDArray[np.int64], *, length: int
) -> Iterator[tuple[int, str, str, int]]:
    """Texts of prompts, longer ones cut by the database.

    Yields:
        prompt_id, prompt and label (at most ``length`` characters each), and the prompt's full length;
        lowest id first.
    """
    query = f"""SELECT prompt_id, substr(prompt, 1, :length), substr(label, 1, :length), length(prompt)
                FROM dbb_prompt WHERE {store.database.one_of("prompt_id")} ORDER BY prompt_id"""
    with store.database.transaction() as connection:
        for rows in chunks(connection, query, {"ids": store.database.ids(prompt_ids), "length": length}):
            yield from ((prompt_id, prompt, label, size) for prompt_id, prompt, label, size in rows)


def extremes(store: PosteriorStore, run: RunRecord, *, hardest: bool, limit: int = 10) -> Rows:
    """Prompts with the lowest (``hardest``) or highest posterior mean.

    Returns:
        prompt_id, prompt, mean, variance, visits, step of each, most extreme first.
    """
    order = "ASC" if hardest else "DESC"
    query = f"""
        SELECT q.prompt_id, p.prompt, q.mean, q.variance, q.visits, q.step
        FROM (SELECT prompt_id, mean, variance, visits, step FROM posteriors
              WHERE run_id = :run AND mean IS NOT NULL ORDER BY mean {order}, prompt_id LIMIT :limit) q
        JOIN dbb_prompt p ON p.prompt_id = q.prompt_id ORDER BY q.mean {order}, q.prompt_id"""
    return _rows(store, query, {"run": run.run_id, "limit": limit})


def find_prompts(store: PosteriorStore, run: RunRecord, ref: str, *, limit: int = 10) -> Rows:
    """Prompts of a run with this id, or with this text in their prompt (case-insensitive).

    Returns:
        prompt_id, prompt, label of each: first the one with this id, then those with the text, lowest id first.

    Raises:
        StoreError: no such prompt.
    """
    prompt, posterior = schema.prompt.c, schema.posterior.c
    number = int(ref) if ref.isascii() and ref.isdigit() else 0
    named = prompt.prompt_id == (number if number <= _LARGEST_ID else 0)
    query = (
        select(prompt.prompt_id, prompt.prompt, prompt.label)
        .join(schema.posterior, posterior.prompt_id == prompt.prompt_id)
        .where(posterior.run_id == run.run_id, or_(named, prompt.prompt.icontains(ref, autoescape=True)))
        .order_by(named.desc(), prompt.prompt_id)
        .limit(limit)
    )
    with store.database.transaction() as connection:
        found = [dict(row) for row in connection.execute(query).mappings()]
    if not found:
        raise StoreError(
            f"run {run.name!r} has no posterior of a prompt with id or text {ref!r}; "
            "give a prompt_id, or part of the prompt's text"
        )
    return found


def prompt_history(store: PosteriorStore, run: RunRecord, prompt_id: int) -> Rows:
    """Every visit of one prompt.

    Returns:
        step, rollouts, successes, alpha, beta, mean, variance, lag (steps that their policy was behind) of each, oldest
        first.
    """
    # Walks back from step to step: an index of the history by prompt would slow every step down. SQLite keeps the
    # order of a cross join; of a plain one it may read all steps of the run first.
    query = """
        WITH RECURSIVE visit(step) AS (
            SELECT step FROM dbb_posterior WHERE run_id = :run AND prompt_id = :prompt
            UNION ALL
            SELECT h.prev_step FROM visit v
            JOIN dbb_history h ON h.run_id = :run AND h.step = v.step AND h.prompt_id = :prompt
            WHERE h.prev_step > 0)
        SELECT h.step, h.rollouts, h.successes, h.alpha, h.beta, h.mean, h.variance,
               coalesce(h.step - 1 - h.policy_version, 0.0) AS lag
        FROM visit v CROSS JOIN dbb_history h
        WHERE h.run_id = :run AND h.step = v.step AND h.prompt_id = :prompt ORDER BY h.step"""
    return _rows(store, query, {"run": run.run_id, "prompt": prompt_id})


def rollouts(store: PosteriorStore, run: RunRecord, step: int, prompt_id: int | None = None) -> Rows:
    """The kept rollouts of a step, or of one prompt in it; empty if none are kept.

    Returns:
        prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, text, lag of each, ordered by
        prompt_id, then sample.
    """
    of_prompt = "" if prompt_id is None else "AND prompt_id = :prompt"
    query = f"""SELECT prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, text, lag
                FROM rollouts WHERE run_id = :run AND step = :step {of_prompt} ORDER BY prompt_id, sample"""
    return _rows(store, query, {"run": run.run_id, "step": step, "prompt": prompt_id})


@retried
def _rows(store: PosteriorStore, query: str, parameters: dict[str, Any]) -> Rows:
    with store.database.transaction() as connection:
        return [dict(row) for row in connection.execute(text(query), parameters).mappings()]
