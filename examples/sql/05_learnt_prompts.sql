-- Which prompts has the latest run learnt: rise of the posterior mean from the first visit to the last?
WITH visits AS (
    SELECT prompt_id, step, coalesce(alpha / nullif(alpha + beta, 0), mean) AS mean,
           min(step) OVER (PARTITION BY prompt_id) AS first_step,
           max(step) OVER (PARTITION BY prompt_id) AS last_step
    FROM posterior_history
    WHERE run_id = (SELECT max(run_id) FROM runs)
)
SELECT a.prompt_id, a.mean AS first_mean, b.mean AS last_mean, b.mean - a.mean AS rise, p.prompt
FROM visits a
JOIN visits b ON b.prompt_id = a.prompt_id AND b.step = b.last_step
JOIN prompts p ON p.prompt_id = a.prompt_id
WHERE a.step = a.first_step AND b.mean > a.mean
ORDER BY b.mean - a.mean DESC, a.prompt_id
LIMIT 20;
