"""The views, the same on both databases; build on them, as tables may change with the schema version."""

from storage.usage import TOTALS

_VERSION = "coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION))"

VIEWS = {
    "runs": """
        SELECT run_id, name, uuid, status, last_step, estimator, estimator_version, parameters, model,
               dataset, reward, method, created_at, heartbeat_at, parent_name, parent_uuid, parent_step, parent_weight
        FROM dbb_run""",
    "prompts": "SELECT prompt_id, prompt, label FROM dbb_prompt",
    "posterior_history": f"""
        SELECT run_id, step, prompt_id, rollouts, successes, alpha, beta, mean, variance,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag, inclusion
        FROM dbb_history""",
    "probes": """
        SELECT run_id, step, prompt_id, samples, successes, successes / samples AS mean
        FROM dbb_probe""",
    "rollouts": f"""
        SELECT run_id, step, prompt_id, sample, reward, score, advantage, length, truncated,
               CASE WHEN score IS NULL THEN 1 ELSE 0 END AS missing, log_prob, text,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag
        FROM dbb_rollout""",
    # The sum of big integers is a decimal on PostgreSQL.
    "steps": f"""
        SELECT run_id, step, prompts, rollouts, successes, shared, created_at,
               {", ".join(TOTALS)}, generated - trained AS filtered,
               CAST(sum(generated) OVER (PARTITION BY run_id ORDER BY step) AS BIGINT) AS generated_total, metrics
        FROM dbb_step""",
    "evaluation_results": """
        SELECT r.evaluation_id, e.run_id, e.step, e.name, r.benchmark, r.repeat, r.place, r.prompt_id,
               r.samples, r.verified, r.successes, r.best, r.majority, r.tokens, r.truncated
        FROM dbb_evaluation_result r JOIN dbb_evaluation e ON e.evaluation_id = r.evaluation_id""",
    # Means over the prompts of each evaluation run, then over evaluation runs. A prompt without a verified response
    # counts in none of the means; shares and lengths are of all responses.
    "evaluations": """
        SELECT evaluation_id, run_id, step, name, model, benchmark, count(*) AS repeats, max(prompts) AS prompts,
               max(samples) AS samples, avg(accuracy) AS accuracy, avg(best) AS best, avg(majority) AS majority,
               avg(length) AS length, avg(truncated) AS truncated, avg(missing) AS missing, generated_total, created_at
        FROM (SELECT e.evaluation_id, e.run_id, e.step, e.name, e.model, r.benchmark, r.repeat,
                     count(*) AS prompts, max(r.samples) AS samples,
                     avg(r.successes / nullif(r.verified, 0)) AS accuracy,
                     avg(r.best) AS best, avg(r.majority) AS majority,
                     CAST(sum(r.tokens) AS DOUBLE PRECISION) / sum(r.samples) AS length,
                     CAST(sum(r.truncated) AS DOUBLE PRECISION) / sum(r.samples) AS truncated,
                     CAST(sum(r.samples - r.verified) AS DOUBLE PRECISION) / sum(r.samples) AS missing,
                     e.generated_total, e.created_at
              FROM dbb_evaluation e JOIN dbb_evaluation_result r ON r.evaluation_id = e.evaluation_id
              GROUP BY e.evaluation_id, e.run_id, e.step, e.name, e.model, e.generated_total, e.created_at,
                       r.benchmark, r.repeat) of_repeat
        GROUP BY evaluation_id, run_id, step, name, model, generated_total, created_at, benchmark""",
    # The product of two ratios, not alpha * beta / (alpha + beta)^2, which may overflow, or underflow to 0.
    "posteriors": """
        SELECT q.run_id, q.prompt_id, q.alpha, q.beta,
               coalesce(h.mean, q.alpha / nullif(q.alpha + q.beta, 0)) AS mean,
               coalesce((q.alpha / nullif(q.alpha + q.beta, 0)) * (q.beta / nullif(q.alpha + q.beta, 0)),
                        h.variance) AS variance,
               q.visits, q.step
        FROM dbb_posterior q
        LEFT JOIN dbb_history h ON h.run_id = q.run_id AND h.step = q.step AND h.prompt_id = q.prompt_id""",
}
