"""What must hold between the tables of a store, and the rows that violate it."""

from __future__ import annotations

import json

from sqlalchemy import text

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


def check(store):
    """Return the violations as (sentence, row); empty if all is well."""
    with store.database.transaction() as connection:
        wrong = [(what, tuple(row)) for what, sql in _CHECKS.items() for row in _rows(connection, sql)]
        for run in connection.execute(text("SELECT run_id, parameters, estimator FROM dbb_run")).all():
            wrong += [("alpha and beta are those of DBB", tuple(row)) for row in _dbb_violations(connection, run)]
    return wrong


def _dbb_violations(connection, run):
    parameters = json.loads(run.parameters)
    names = ("discount", "prior_alpha", "prior_beta")
    if run.estimator != "dbb" or not {*names} <= {*parameters}:
        return []
    numbers = {name: float(parameters[name]) for name in names}
    return _rows(connection, _DBB, run=run.run_id, tiniest=2.2250738585072014e-308, **numbers)


def _rows(connection, sql, **parameters):
    if connection.dialect.name == "sqlite":
        sql = sql.replace("IS SAME AS", "IS").replace("GREATER(", "max(")
    else:
        sql = sql.replace("IS SAME AS", "IS NOT DISTINCT FROM").replace("GREATER(", "greatest(")
    return connection.execute(text(sql), parameters).all()
