-- How many groups per step of the latest run have zero variance (rewards all 0 or all 1), so that plain GRPO learns
-- nothing from them, and what variance does the posterior still give them?
SELECT step,
       count(*) AS prompts,
       sum(CASE WHEN successes = 0 OR successes = rollouts THEN 1 ELSE 0 END) AS zero_variance,
       avg(CASE WHEN successes = 0 OR successes = rollouts
                THEN coalesce(alpha / nullif(alpha + beta, 0) * (beta / nullif(alpha + beta, 0)), variance)
           END) AS posterior_variance
FROM posterior_history
WHERE run_id = (SELECT max(run_id) FROM runs)
GROUP BY step
ORDER BY step;
