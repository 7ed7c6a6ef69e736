-- How does the latest run learn? Per step: prompts, success rate of its rollouts, mean of the posterior means
-- (without alpha and beta, of the estimates).
SELECT step,
       count(*) AS prompts,
       sum(successes) / sum(rollouts) AS success_rate,
       avg(coalesce(alpha / nullif(alpha + beta, 0), mean)) AS posterior_mean
FROM posterior_history
WHERE run_id = (SELECT max(run_id) FROM runs)
GROUP BY step
ORDER BY step;
