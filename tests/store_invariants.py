"""Everything that must hold between the tables of a store, and where it does not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from storage import schema
from storage.engine import chunks
from storage.evaluations import EvaluationRows
from storage.groups import SETTLED
from storage.prompts import prompt_hash
from storage.records import StateLayout
from storage.store import PosteriorStore
from storage.usage import COUNTS, GROUPS, TOTALS, bounds_sql

SHOWN = 20
"""At most so many violations of a kind are listed."""

_TINIEST = 2.2250738585072014e-308  # the dbb estimator's floor of alpha and beta


@dataclass(frozen=True)
class Violation:
    """Something wrong in a store.

    Attributes:
        run: name of the run; its id if there is no such run; "" if it is not about a run.
        what: the invariant that does not hold.
        where: the step, prompt or checkpoint.
    """

    run: str
    what: str
    where: str


_KEPT = """kept AS (
    SELECT r.run_id, r.last_step, r.parent_uuid,
           1 AS first
    FROM dbb_run r)"""

_CHAIN = """chain AS (
    SELECT h.*, lag(step) OVER earlier AS last_seen, lag(alpha) OVER earlier AS last_alpha,
           lag(beta) OVER earlier AS last_beta, lag(state) OVER earlier AS last_state
    FROM dbb_history h WINDOW earlier AS (PARTITION BY run_id, prompt_id ORDER BY step))"""

_NEWEST = """newest AS (
    SELECT run_id, prompt_id, max(step) AS step, count(*) AS visits FROM dbb_history GROUP BY run_id, prompt_id)"""

_USED = f"""used AS (
    SELECT run_id, step, {", ".join(f"sum({name}) AS {name}" for name in COUNTS)},
           {", ".join(f"sum(CASE WHEN {count} > 0 THEN 1 ELSE 0 END) AS {name}" for name, (count, _) in GROUPS.items())}
    FROM dbb_usage GROUP BY run_id, step)"""

# Those totals of a step that are wrong, as text.
_WRONG_TOTALS = " || ".join(
    f"""CASE WHEN s.{name} IS SAME AS coalesce(u.{name}, 0) THEN ''
             ELSE ' {name} ' || coalesce(CAST(s.{name} AS TEXT), 'NULL') || ' for ' || coalesce(u.{name}, 0) END"""
    for name in TOTALS
)

# What must hold; where it does not, as a format of the row's columns; SQL for the rows (run_id, ...) that violate it.
# "IS SAME AS" stands for each database's comparison in which NULL equals NULL.
_CHECKS = [
    (
        "status is running or finished",
        "status {}",
        "SELECT run_id, status FROM dbb_run WHERE status NOT IN ('running', 'finished')",
    ),
    (
        "every step up to the last one is recorded once",
        "last step {}; {} steps recorded, {} to {}",
        """SELECT r.run_id, r.last_step, count(s.step), min(s.step), max(s.step)
           FROM dbb_run r LEFT JOIN dbb_step s ON s.run_id = r.run_id GROUP BY r.run_id, r.last_step
           HAVING count(s.step) <> r.last_step OR min(s.step) <> 1 OR max(s.step) <> r.last_step""",
    ),
    (
        "a step's prompts, rollouts and successes are those of its history",
        "step {}: {} prompts, {} rollouts, {} successes; {}, {}, {} in the history",
        f"""WITH {_KEPT}
        SELECT s.run_id, s.step, s.prompts, s.rollouts, s.successes, h.prompts, h.rollouts, h.successes
        FROM dbb_step s JOIN kept k ON k.run_id = s.run_id AND s.step >= k.first
        LEFT JOIN (SELECT run_id, step, count(*) AS prompts, sum(rollouts) AS rollouts, sum(successes) AS successes
                   FROM dbb_history GROUP BY run_id, step) h ON h.run_id = s.run_id AND h.step = s.step
        WHERE s.prompts <> coalesce(h.prompts, 0) OR s.rollouts <> coalesce(h.rollouts, 0)
           OR abs(s.successes - coalesce(h.successes, 0)) > 1e-9 * (1 + abs(s.successes))""",
    ),
    (
        "a row of the history belongs to a recorded step",
        "step {}, prompt {}",
        """SELECT h.run_id, h.step, h.prompt_id FROM dbb_history h WHERE NOT EXISTS
           (SELECT 1 FROM dbb_step s WHERE s.run_id = h.run_id AND s.step = h.step)""",
    ),
    (
        "prev_step is the prompt's step before",
        "step {}, prompt {}: prev_step {}, the step before is {}",
        f"""WITH {_KEPT}, {_CHAIN}
        SELECT c.run_id, c.step, c.prompt_id, c.prev_step, c.last_seen FROM chain c JOIN kept k ON k.run_id = c.run_id
        WHERE c.last_seen <> c.prev_step
           OR (c.last_seen IS NULL AND c.prev_step NOT IN (-1, 0) AND c.prev_step NOT BETWEEN 1 AND k.first - 1)""",
    ),
    (
        "the state before a visit is the state after the visit before",
        "step {}, prompt {}: ({}, {}) before, ({}, {}) after step {}",
        f"""WITH {_CHAIN}
        SELECT run_id, step, prompt_id, prev_alpha, prev_beta, last_alpha, last_beta, last_seen FROM chain
        WHERE last_seen = prev_step AND NOT (prev_alpha IS SAME AS last_alpha
              AND prev_beta IS SAME AS last_beta AND prev_state IS SAME AS last_state)""",
    ),
    (
        "a prompt of the history has the posterior of its newest visit",
        "prompt {}: newest visit at step {}, posterior of step {}",
        f"""WITH {_NEWEST}
        SELECT n.run_id, n.prompt_id, n.step, q.step FROM newest n
        LEFT JOIN dbb_posterior q ON q.run_id = n.run_id AND q.prompt_id = n.prompt_id
        WHERE NOT (q.step IS SAME AS n.step)""",
    ),
    (
        "a posterior is the state after its newest visit",
        "prompt {}: ({}, {}), after step {} ({}, {})",
        """SELECT q.run_id, q.prompt_id, q.alpha, q.beta, q.step, h.alpha, h.beta FROM dbb_posterior q
           JOIN dbb_history h ON h.run_id = q.run_id AND h.step = q.step AND h.prompt_id = q.prompt_id
           WHERE NOT (q.alpha IS SAME AS h.alpha AND q.beta IS SAME AS h.beta AND q.state IS SAME AS h.state)""",
    ),
    (
        "a posterior comes from a visit in the history or from the warm start",
        "prompt {}: step {}, {} visits",
        f"""WITH {_KEPT}
        SELECT q.run_id, q.prompt_id, q.step, q.visits FROM dbb_posterior q JOIN kept k ON k.run_id = q.run_id
        WHERE (q.step = 0 AND (q.visits <> 0 OR k.parent_uuid IS NULL)) OR q.step < 0 OR q.step > k.last_step
           OR (q.step >= k.first AND NOT EXISTS (SELECT 1 FROM dbb_history h
               WHERE h.run_id = q.run_id AND h.step = q.step AND h.prompt_id = q.prompt_id))""",
    ),
    (
        "visits count the prompt's rows of the history",
        "prompt {}: {} visits, {} rows",
        f"""WITH {_KEPT}, {_NEWEST}
        SELECT q.run_id, q.prompt_id, q.visits, n.visits FROM dbb_posterior q
        JOIN kept k ON k.run_id = q.run_id JOIN newest n ON n.run_id = q.run_id AND n.prompt_id = q.prompt_id
        WHERE q.visits < n.visits OR (k.first = 1 AND q.visits > n.visits)""",
    ),
    (
        "estimates are finite, variances not negative, rollouts at least 1",
        "step {}, prompt {}: mean {}, variance {}, {} rollouts of sum {}",
        """SELECT run_id, step, prompt_id, mean, variance, rollouts, successes FROM dbb_history
           WHERE NOT (abs(mean) <= 1.7976931348623157e308 AND variance BETWEEN 0 AND 1.7976931348623157e308
                 AND abs(successes) <= 1.7976931348623157e308 AND rollouts >= 1)""",
    ),
    (
        "a probe belongs to a recorded step and has at least one sample",
        "step {}, prompt {}: {} samples, sum {}, of squares {}",
        """SELECT p.run_id, p.step, p.prompt_id, p.samples, p.successes, p.squares FROM dbb_probe p
           WHERE p.samples < 1 OR p.squares * p.samples < p.successes * p.successes * (1 - 1e-9)
              OR NOT EXISTS (SELECT 1 FROM dbb_step s WHERE s.run_id = p.run_id AND s.step = p.step)""",
    ),
    (
        "a step's totals are the sums of its usage",
        "step {}:{}",
        f"""WITH {_KEPT}, {_USED}, wrong AS (
            SELECT s.run_id, s.step, {_WRONG_TOTALS} AS totals
            FROM dbb_step s JOIN kept k ON k.run_id = s.run_id AND s.step >= k.first
            LEFT JOIN used u ON u.run_id = s.run_id AND u.step = s.step WHERE s.generated IS NOT NULL)
        SELECT run_id, step, totals FROM wrong WHERE totals <> ''""",
    ),
    (
        "a row of the usage belongs to a recorded step with totals",
        "step {}, prompt {}",
        """SELECT u.run_id, u.step, u.prompt_id FROM dbb_usage u WHERE NOT EXISTS
           (SELECT 1 FROM dbb_step s WHERE s.run_id = u.run_id AND s.step = u.step AND s.generated IS NOT NULL)""",
    ),
    (
        "no count of the usage is negative or above the count it is a part of",
        "step {}, prompt {}:" + ",".join(f" {name} {{}}" for name in COUNTS),
        f"SELECT run_id, step, prompt_id, {', '.join(COUNTS)} FROM dbb_usage WHERE NOT ({bounds_sql()})",
    ),
    (
        "where a step has usage, it has generated the rollouts of every prompt",
        "step {}, prompt {}: {} rollouts, {} generated",
        """SELECT h.run_id, h.step, h.prompt_id, h.rollouts, coalesce(u.generated, 0) FROM dbb_history h
           JOIN dbb_step s ON s.run_id = h.run_id AND s.step = h.step AND s.generated IS NOT NULL
           LEFT JOIN dbb_usage u ON u.run_id = h.run_id AND u.step = h.step AND u.prompt_id = h.prompt_id
           WHERE coalesce(u.generated, 0) < h.rollouts""",
    ),
    (
        "a kept rollout belongs to a recorded step, and has a reward exactly if it has a score",
        "step {}, prompt {}, sample {}: reward {}, score {}",
        """SELECT k.run_id, k.step, k.prompt_id, k.sample, k.reward, k.score FROM dbb_rollout k
           WHERE (k.reward IS NULL AND k.score IS NOT NULL) OR (k.reward IS NOT NULL AND k.score IS NULL)
              OR NOT EXISTS (SELECT 1 FROM dbb_step s WHERE s.run_id = k.run_id AND s.step = k.step)""",
    ),
    (
        "a policy version is from 0 to step - 1",
        "step {}, prompt {}: {}",
        """SELECT run_id, step, prompt_id, policy_version FROM dbb_history
           WHERE NOT policy_version BETWEEN 0 AND step - 1 UNION ALL
           SELECT run_id, step, prompt_id, policy_version FROM dbb_rollout
           WHERE NOT policy_version BETWEEN 0 AND step - 1""",
    ),
    (
        "a probability of inclusion is above 0 and at most 1",
        "step {}, prompt {}: {}",
        "SELECT run_id, step, prompt_id, inclusion FROM dbb_history WHERE NOT (inclusion > 0 AND inclusion <= 1)",
    ),
    (
        "a group is settled by a recorded step later than its policy, or by none; of a finished run none is open",
        "group {}: {}, step {}, policy version {}",
        f"""SELECT g.run_id, g.ordinal, g.fate, g.step, g.policy_version FROM dbb_group g
            LEFT JOIN dbb_run r ON r.run_id = g.run_id
            LEFT JOIN dbb_step s ON s.run_id = g.run_id AND s.step = g.step
            WHERE CASE WHEN g.fate IN {SETTLED} THEN s.step IS NULL OR g.policy_version > g.step - 1
                       WHEN g.fate = 'open' THEN g.step IS NOT NULL OR r.status = 'finished'
                       ELSE g.fate <> 'abandoned' OR g.step IS NOT NULL END
               OR g.policy_version < 0 OR g.ordinal < 1 OR g.pass < 0 OR g.rollouts < 1""",
    ),
    (
        "where a step has groups, it has trained on those trained, and filtered those filtered",
        "step {}, prompt {}: {} rollouts trained, {} filtered, {} stale; in the usage {} trained, {} filtered",
        f"""WITH {_KEPT}, asynchronous AS (
            SELECT DISTINCT g.run_id, g.step FROM dbb_group g JOIN kept k ON k.run_id = g.run_id AND g.step >= k.first
            JOIN dbb_step s ON s.run_id = g.run_id AND s.step = g.step AND s.generated IS NOT NULL),
        counted AS (
            SELECT run_id, step, prompt_id, 0 AS used_trained, 0 AS used_filtered,
                   {", ".join(f"CASE WHEN fate = '{fate}' THEN rollouts ELSE 0 END AS {fate}" for fate in SETTLED)}
            FROM asynchronous JOIN dbb_group USING (run_id, step)
            UNION ALL SELECT run_id, step, prompt_id, trained, generated - trained, 0, 0, 0
            FROM asynchronous JOIN dbb_usage USING (run_id, step)),
        summed AS (
            SELECT run_id, step, prompt_id, sum(trained) AS trained, sum(filtered) AS filtered, sum(stale) AS stale,
                   sum(used_trained) AS used_trained, sum(used_filtered) AS used_filtered
            FROM counted GROUP BY run_id, step, prompt_id)
        SELECT * FROM summed
        WHERE trained <> used_trained OR used_filtered NOT BETWEEN filtered AND filtered + stale""",
    ),
    (
        "a checkpoint is of a recorded step",
        "checkpoint {} of step {}, last step {}",
        """SELECT c.run_id, c.tag, c.step, r.last_step FROM dbb_checkpoint c JOIN dbb_run r ON r.run_id = c.run_id
           WHERE c.step NOT BETWEEN 0 AND r.last_step""",
    ),
    (
        "an evaluation has no step, or a recorded step of its run",
        "evaluation {} ({}) of step {}, last step {}",
        """SELECT e.run_id, e.evaluation_id, e.name, e.step, r.last_step
           FROM dbb_evaluation e LEFT JOIN dbb_run r ON r.run_id = e.run_id
           WHERE e.step < 0 OR e.step > coalesce(r.last_step, -1)""",
    ),
    (
        "an evaluation has results",
        "evaluation {} ({})",
        """SELECT e.run_id, e.evaluation_id, e.name FROM dbb_evaluation e WHERE NOT EXISTS
           (SELECT 1 FROM dbb_evaluation_result r WHERE r.evaluation_id = e.evaluation_id)""",
    ),
    (
        "a run, step and name have one evaluation",
        "evaluations {} to {} ({}) of step {}",
        """SELECT run_id, min(evaluation_id), max(evaluation_id), name, step FROM dbb_evaluation
           GROUP BY run_id, step, name HAVING count(*) > 1""",
    ),
    (
        "every evaluation run of a benchmark has the same prompts",
        "evaluation {}, {}: {} results, for {} runs of {} prompts",
        """SELECT e.run_id, r.evaluation_id, r.benchmark, r.results, r.repeats, r.prompts
           FROM (SELECT evaluation_id, benchmark, count(*) AS results, max(repeat) + 1 AS repeats,
                        max(place) + 1 AS prompts, min(same) AS same
                 FROM (SELECT r.*, CASE WHEN f.prompt_id = r.prompt_id THEN 1 ELSE 0 END AS same
                       FROM dbb_evaluation_result r LEFT JOIN dbb_evaluation_result f
                       ON f.evaluation_id = r.evaluation_id AND f.benchmark = r.benchmark
                          AND f.repeat = 0 AND f.place = r.place) s
                 GROUP BY evaluation_id, benchmark) r
           LEFT JOIN dbb_evaluation e ON e.evaluation_id = r.evaluation_id
           WHERE r.results <> r.repeats * r.prompts OR r.same = 0""",
    ),
    (
        "the counts and scores of a result are consistent",
        "evaluation {}, {}, evaluation run {}, place {}: {} samples, {} verified of sum {}, best {}",
        f"""SELECT e.run_id, r.evaluation_id, benchmark, repeat, place, samples, verified, successes, best
            FROM dbb_evaluation_result r LEFT JOIN dbb_evaluation e ON e.evaluation_id = r.evaluation_id
            WHERE NOT ({EvaluationRows.bounds_sql()})""",
    ),
]

_OWNED = (
    "dbb_posterior", "dbb_history", "dbb_probe", "dbb_usage", "dbb_rollout", "dbb_group", "dbb_step", "dbb_checkpoint",
    "dbb_event", "dbb_evaluation",
)  # fmt: skip
_OF_PROMPTS = ("dbb_posterior", "dbb_history", "dbb_probe", "dbb_usage", "dbb_rollout", "dbb_group")

# The update of DBB, to the last bit; the first visit of a prompt starts from the prior.
_DBB = """
    SELECT run_id, step, prompt_id, prev_alpha, prev_beta, rollouts, successes, alpha, beta FROM dbb_history
    WHERE run_id = :run AND NOT (
        alpha = GREATER(:discount * coalesce(prev_alpha, :prior_alpha) + successes, :tiniest)
        AND beta = GREATER(:discount * coalesce(prev_beta, :prior_beta) + (rollouts - successes), :tiniest))"""

_PACKED = """
    SELECT run_id, prompt_id, coalesce(length(state), 0) FROM {table}
    WHERE run_id = :run AND coalesce(length(state), 0) <> :bytes LIMIT :limit"""


def check(store: PosteriorStore) -> list[Violation]:
    """Every violation of what must hold in a store, in one snapshot of it; at most ``SHOWN`` of a kind.

    Reads every table once or a few times and writes nothing; runs may be trained meanwhile. Pruned history is not
    reported as missing.

    Returns:
        Empty if all is well.
    """
    with store.database.transaction() as connection:
        found = [*_by_sql(connection), *_orphans(connection), *_prompts(connection), *_shared(connection)]
        runs = connection.execute(schema.run.select().order_by(schema.run.c.run_id)).all()
        for run in runs:
            found += [*_state_sizes(connection, run), *_dbb_updates(connection, run)]
        names = {run.run_id: run.name for run in runs}
    return [
        Violation("" if run_id is None else names.get(run_id, f"run_id {run_id}"), what, where)
        for run_id, what, where in found
    ]


_Found = Iterator[tuple[int | None, str, str]]


def _rows(connection: Connection, sql: str, **parameters: Any) -> Any:
    if connection.dialect.name == "sqlite":
        sql = sql.replace("IS SAME AS", "IS").replace("GREATER(", "max(")
    else:
        sql = sql.replace("IS SAME AS", "IS NOT DISTINCT FROM").replace("GREATER(", "greatest(")
    if ":limit" not in sql:
        sql += " LIMIT :limit"
    return connection.execute(text(sql), {"limit": SHOWN, **parameters})


def _by_sql(connection: Connection) -> _Found:
    for what, where, sql in _CHECKS:
        for run_id, *values in _rows(connection, sql):
            yield run_id, what, where.format(*values)


def _orphans(connection: Connection) -> _Found:
    for table in _OWNED:
        sql = f"""SELECT run_id, count(*) FROM {table}
                  WHERE run_id IS NOT NULL AND run_id NOT IN (SELECT run_id FROM dbb_run) GROUP BY run_id"""
        for run_id, count in _rows(connection, sql):
            yield run_id, "a row belongs to a run", f"{count} rows of {table}"
    for table in _OF_PROMPTS:
        sql = f"""SELECT t.run_id, t.prompt_id, count(*) FROM {table} t
                  LEFT JOIN dbb_prompt p ON p.prompt_id = t.prompt_id
                  WHERE p.prompt_id IS NULL GROUP BY t.run_id, t.prompt_id"""
        for run_id, prompt_id, count in _rows(connection, sql):
            yield run_id, "a row belongs to a prompt", f"prompt {prompt_id}, {count} rows of {table}"
    for parent, key in (("dbb_evaluation", "evaluation_id"), ("dbb_prompt", "prompt_id")):
        sql = f"""SELECT r.evaluation_id, r.{key}, count(*) FROM dbb_evaluation_result r
                  LEFT JOIN {parent} p ON p.{key} = r.{key}
                  WHERE p.{key} IS NULL GROUP BY r.evaluation_id, r.{key}"""
        for evaluation_id, missing, count in _rows(connection, sql):
            where = f"evaluation {evaluation_id}: no {key} {missing}, {count} rows of dbb_evaluation_result"
            yield None, "a result belongs to an evaluation and to a prompt", where


def _prompts(connection: Connection) -> _Found:
    shown = 0
    for rows in chunks(connection, "SELECT prompt_id, hash, prompt, label FROM dbb_prompt ORDER BY prompt_id", {}):
        for prompt_id, digest, prompt, label in rows:
            # U+FFFD stands for what could not be stored: the hash is of the original text.
            if "\ufffd" in prompt + label or bytes(digest) == prompt_hash(prompt, label):
                continue
            yield None, "a prompt's hash is that of its text and label", f"prompt {prompt_id}"
            shown += 1
            if shown == SHOWN:
                return


def _shared(connection: Connection) -> _Found:
    sql = """SELECT run_id, 0, shared_start FROM dbb_run WHERE shared_start IS NOT NULL
             UNION ALL SELECT run_id, step, shared FROM dbb_step WHERE shared IS NOT NULL"""
    shown = 0
    for rows in chunks(connection, sql, {}):
        for run_id, step, stored in rows:
            if shown < SHOWN and not _is_shared_state(stored):
                yield run_id, "run-wide state is JSON of named vectors of finite numbers", f"step {step}"
                shown += 1


def _is_shared_state(stored: str) -> bool:
    try:
        vectors = json.loads(stored).values()
        return all(math.isfinite(value) for vector in vectors for value in vector)
    except (ValueError, TypeError, AttributeError):
        return False


def _state_sizes(connection: Connection, run: Any) -> _Found:
    size = 8 * len(StateLayout(tuple(json.loads(run.state_fields))).packed)
    for table in ("dbb_posterior", "dbb_history"):
        for run_id, prompt_id, found in _rows(connection, _PACKED.format(table=table), run=run.run_id, bytes=size):
            where = f"{table}, prompt {prompt_id}: {found} bytes, not {size}"
            yield run_id, "packed state has 8 bytes per field", where


def _dbb_updates(connection: Connection, run: Any) -> _Found:
    parameters = json.loads(run.parameters)
    names = ("discount", "prior_alpha", "prior_beta")
    if run.estimator != "dbb" or parameters.get("forgetting", "visits") != "visits" or not {*names} <= {*parameters}:
        return
    numbers = {name: float(parameters[name]) for name in names}
    for row in _rows(connection, _DBB, run=run.run_id, tiniest=_TINIEST, **numbers):
        run_id, step, prompt_id, *values = row
        where = "step {}, prompt {}: ({}, {}), {} rollouts with {} successes, gave ({}, {})"
        yield (
            run_id,
            "alpha = discount * alpha + successes, beta = discount * beta + failures",
            where.format(step, prompt_id, *values),
        )
