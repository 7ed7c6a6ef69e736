"""Fills a store with runs whose states are easy to work out by hand, reads it, and checks what must hold in it."""

import json

import numpy as np
from sqlalchemy import text

from openrlhf_dbb.storage import EvaluationRows, ProbeRows, RolloutRows, StepRows, Usage, schema

DISCOUNT = 0.5

_CHAIN = """SELECT h.*, lag(step) OVER earlier AS last_seen, lag(alpha) OVER earlier AS last_alpha,
           lag(beta) OVER earlier AS last_beta
    FROM dbb_history h WINDOW earlier AS (PARTITION BY run_id, prompt_id ORDER BY step)"""

# Each query returns the rows that violate the sentence. "IS SAME AS" stands for the comparison of the database in which
# NULL equals NULL.
_CHECKS = {
    "every step up to the last one is recorded once": """
        SELECT r.run_id, r.last_step, count(s.step) FROM dbb_run r LEFT JOIN dbb_step s ON s.run_id = r.run_id
        GROUP BY r.run_id, r.last_step
        HAVING count(s.step) <> r.last_step OR min(s.step) <> 1 OR max(s.step) <> r.last_step""",
    "the totals of a step are those of its history": """
        SELECT s.run_id, s.step, s.prompts, s.rollouts, s.successes, h.prompts, h.rollouts, h.successes
        FROM dbb_step s
        LEFT JOIN (SELECT run_id, step, count(*) AS prompts, sum(rollouts) AS rollouts, sum(successes) AS successes
                   FROM dbb_history GROUP BY run_id, step) h ON h.run_id = s.run_id AND h.step = s.step
        WHERE s.prompts <> coalesce(h.prompts, 0) OR s.rollouts <> coalesce(h.rollouts, 0)
           OR abs(s.successes - coalesce(h.successes, 0)) > 1e-9 * (1 + abs(s.successes))""",
    "the rows of a step belong to a recorded step": " UNION ALL ".join(
        f"""SELECT t.run_id, t.step, t.prompt_id FROM {table} t WHERE NOT EXISTS
            (SELECT 1 FROM dbb_step s WHERE s.run_id = t.run_id AND s.step = t.step)"""
        for table in ("dbb_history", "dbb_probe", "dbb_rollout")
    ),
    "prev_step is the last step of the prompt before": f"""
        SELECT run_id, step, prompt_id, prev_step, last_seen FROM ({_CHAIN}) c
        WHERE last_seen <> prev_step OR (last_seen IS NULL AND prev_step NOT IN (-1, 0))""",
    "the state before a visit is the state after the visit before": f"""
        SELECT run_id, step, prompt_id, prev_alpha, prev_beta, last_alpha, last_beta FROM ({_CHAIN}) c
        WHERE last_seen = prev_step AND NOT (prev_alpha IS SAME AS last_alpha
              AND prev_beta IS SAME AS last_beta AND prev_state IS NULL)""",
    "a posterior is the state after the newest visit of its prompt": """
        SELECT n.run_id, n.prompt_id, n.step, q.step, n.visits, q.visits
        FROM (SELECT run_id, prompt_id, max(step) AS step, count(*) AS visits
              FROM dbb_history GROUP BY run_id, prompt_id) n
        JOIN dbb_history h ON h.run_id = n.run_id AND h.step = n.step AND h.prompt_id = n.prompt_id
        LEFT JOIN dbb_posterior q ON q.run_id = n.run_id AND q.prompt_id = n.prompt_id
        WHERE NOT (q.step IS SAME AS n.step AND q.visits IS SAME AS n.visits AND q.alpha IS SAME AS h.alpha
                   AND q.beta IS SAME AS h.beta AND q.state IS SAME AS h.state)""",
    "a posterior without a visit is of a warm start": """
        SELECT q.run_id, q.prompt_id, q.step, q.visits FROM dbb_posterior q
        WHERE NOT EXISTS (SELECT 1 FROM dbb_history h WHERE h.run_id = q.run_id AND h.prompt_id = q.prompt_id)
          AND (q.step <> 0 OR q.visits <> 0)""",
    "a policy version is from 0 to step - 1": " UNION ALL ".join(
        f"SELECT run_id, step, policy_version FROM {table} WHERE NOT policy_version BETWEEN 0 AND step - 1"
        for table in ("dbb_history", "dbb_rollout")
    ),
    "a checkpoint and an evaluation are of a recorded step": " UNION ALL ".join(
        f"""SELECT t.run_id, t.step, r.last_step FROM {table} t JOIN dbb_run r ON r.run_id = t.run_id
            WHERE t.step NOT BETWEEN 0 AND r.last_step"""
        for table in ("dbb_checkpoint", "dbb_evaluation")
    ),
    "a run, step and name have one evaluation": """
        SELECT run_id, step, name, count(*) FROM dbb_evaluation GROUP BY run_id, step, name HAVING count(*) > 1""",
    "an evaluation has results of the same prompts in every repeat": """
        SELECT e.evaluation_id, e.name, r.benchmark, count(*) FROM dbb_evaluation e
        LEFT JOIN dbb_evaluation_result r ON r.evaluation_id = e.evaluation_id
        GROUP BY e.evaluation_id, e.name, r.benchmark
        HAVING r.benchmark IS NULL OR count(*) <> (max(r.repeat) + 1) * (max(r.place) + 1)""",
}

# The update of DBB, to the last bit. The first visit of a prompt starts from the prior.
_DBB = """
    SELECT run_id, step, prompt_id, alpha, beta FROM dbb_history WHERE run_id = :run AND NOT (
        alpha = GREATER(:discount * coalesce(prev_alpha, :prior_alpha) + successes, :tiniest)
        AND beta = GREATER(:discount * coalesce(prev_beta, :prior_beta) + (rollouts - successes), :tiniest))"""
_DBB_PARAMETERS = ("discount", "prior_alpha", "prior_beta")


def run(store, name="run", fields=("alpha", "beta"), dataset="sums", **values):
    """A new run; any argument of ``create_run`` may be given."""
    defaults = {
        "estimator": "dbb" if fields == ("alpha", "beta") else "other",
        "estimator_version": 1,
        "parameters": {"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0},
        "state_fields": fields,
        "model": "tiny",
        "dataset": dataset,
        "dataset_digest": "d1",
        "reward": "exact",
        "config": {"seed": 7},
    }
    return store.create_run(name, **(defaults | values))


def prompts(store, count):
    """Ids of the prompts "prompt 0", "prompt 1", ..., labelled "0", "1", ..."""
    return store.register_prompts(
        [f"prompt {i}" for i in range(count)], [str(i) for i in range(count)]
    )


def rows(run, ids, successes, rollouts=4, **more):
    """DBB with discount 0.5 and prior Beta(1, 1), from what the run has stored; with :func:`usage` unless given."""
    ids = np.asarray(ids)
    successes = np.asarray(successes, dtype=float)
    if "usage" not in more:
        more["usage"] = usage(ids, successes, rollouts)
    before = run.load(ids)
    prior = np.where(np.isnan(before.state), 1.0, before.state)
    state = DISCOUNT * prior + np.stack([successes, rollouts - successes], axis=1)
    mean = state[:, 0] / state.sum(axis=1)
    return StepRows(
        prompt_ids=ids,
        rollouts=np.full(len(ids), rollouts),
        successes=successes,
        mean=mean,
        variance=mean * (1 - mean),
        state=state,
        previous_state=before.state,
        previous_step=before.step,
        **more,
    )


def usage(ids, successes, rollouts=4, **counts):
    """All rollouts of 10 tokens trained on and informative, zero-variance groups rescued, and each prompt
    skipped once; or as given in ``counts``."""
    successes = np.asarray(successes).astype(int)
    generated = rollouts * len(ids)
    zero_variance = rollouts * int(np.isin(successes, (0, rollouts)).sum())
    defaults = {
        "generated": generated,
        "generated_tokens": 10 * generated,
        "trained": generated,
        "informative": generated,
        "zero_variance": zero_variance,
        "rescued": zero_variance,
        "skipped": len(ids),
        "groups": len(ids),
    }
    return Usage(**(defaults | counts))


def probes(ids, samples, successes, squares=None):
    """Probes of these prompts; ``squares`` as of scores 0 and 1 unless given."""
    successes = np.array(successes, dtype=float)
    squares = successes if squares is None else np.array(squares)
    return ProbeRows(np.array(ids), np.array(samples), successes, squares)


def rollouts(ids, successes, samples=2):
    """The first rollouts of each prompt, the right ones before the wrong ones, of 10 tokens."""
    sample = np.tile(np.arange(samples), len(ids))
    reward = (sample < np.repeat(successes, samples)).astype(float)
    return RolloutRows(
        prompt_ids=np.repeat(ids, samples),
        sample=sample,
        reward=reward,
        score=reward,
        advantage=reward - 0.5,
        baseline=np.full(len(sample), 0.5),
        scale=np.ones(len(sample)),
        weight=np.ones(len(sample)),
        length=np.full(len(sample), 10),
        truncated=np.zeros(len(sample)),
        log_prob=np.full(len(sample), -1.5),
        text=[f"answer {i}" for i in sample],
    )


def step(run, step, ids, successes, rollouts=4, **more):
    """Record one step; the rows recorded."""
    recorded = rows(run, ids, successes, rollouts, **more)
    run.record_step(step, recorded)
    return recorded


def evaluation(ids, successes, benchmark="sums", samples=4):
    """Results of (P,) prompts with these (R, P) successes among 4 responses of 10 tokens, none of them missing or
    truncated; the majority is right where more than half are."""
    successes = np.atleast_2d(np.asarray(successes, dtype=float))
    whole = np.full(successes.shape, samples)
    return EvaluationRows(
        benchmark=benchmark,
        prompt_ids=np.asarray(ids),
        samples=whole,
        verified=whole,
        successes=successes,
        best=(successes > 0).astype(float),
        majority=(2 * successes > samples).astype(float),
        tokens=10 * whole,
        truncated=0 * whole,
    )


def successes(step, count):
    """Any number of successes among four, another at each step."""
    return (np.arange(count) + step) % 5


def train(run, ids, steps):
    """Record these steps, each of all prompts."""
    for number in steps:
        step(run, number, ids, successes(number, len(ids)))


def check_trained(store, run, ids, steps):
    """The posteriors are those of steps 1 to ``steps`` undisturbed, and no row is missing or there twice."""
    state = np.ones((len(ids), 2))
    for number in range(1, steps + 1):
        right = successes(number, len(ids))
        state = DISCOUNT * state + np.stack([right, 4 - right], axis=1)
    np.testing.assert_array_equal(run.load(ids).state, state)
    counts = "SELECT count(*), count(DISTINCT step) FROM posterior_history WHERE run_id = :run"
    assert store.query(counts, run=run.record.run_id) == [(steps * len(ids), steps)]
    generated = "SELECT count(*), min(generated), max(generated) FROM steps WHERE run_id = :run"
    assert store.query(generated, run=run.record.run_id) == [(steps, 4 * len(ids), 4 * len(ids))]
    assert run.record.last_step == steps
    assert check(store) == []


def dump(store):
    """All rows of all tables, to compare before and after; of the runs only their progress."""
    progress = text(
        "SELECT run_id, status, last_step, parent_uuid, shared_start FROM dbb_run ORDER BY run_id"
    )
    contents = {}
    with store.database.transaction() as connection:
        for table in schema.metadata.sorted_tables:
            select = table.select().order_by(*table.primary_key)
            if table is schema.run:
                select = progress
            contents[table.name] = [tuple(row) for row in connection.execute(select)]
    return contents


def check(store):
    """Return each broken rule between the tables with its row, as (sentence, row); empty if all is well."""
    broken = []
    with store.database.transaction() as connection:
        for rule, sql in _CHECKS.items():
            for row in _rows(connection, sql):
                broken.append((rule, tuple(row)))
        dbb = text("SELECT run_id, parameters FROM dbb_run WHERE estimator = 'dbb'")
        for run_id, stored in connection.execute(dbb).all():
            parameters = json.loads(stored)
            if parameters.keys() >= set(_DBB_PARAMETERS):
                numbers = {name: float(parameters[name]) for name in _DBB_PARAMETERS}
                for row in _rows(
                    connection, _DBB, run=run_id, tiniest=2.2250738585072014e-308, **numbers
                ):
                    broken.append(("alpha and beta are those of DBB", tuple(row)))
    return broken


def _rows(connection, sql, **parameters):
    if connection.dialect.name == "sqlite":
        sql = sql.replace("IS SAME AS", "IS").replace("GREATER(", "max(")
    else:
        sql = sql.replace("IS SAME AS", "IS NOT DISTINCT FROM").replace("GREATER(", "greatest(")
    return connection.execute(text(sql), parameters).all()
