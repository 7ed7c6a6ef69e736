-- How well does a posterior predict the next visit of its prompt in the latest run? Mean squared error per step
-- of the posterior mean after the previous visit, against the success rate now.
WITH visits AS (
    SELECT step, successes / rollouts AS success_rate,
           lag(mean) OVER (PARTITION BY prompt_id ORDER BY step) AS predicted
    FROM posterior_history
    WHERE run_id = (SELECT max(run_id) FROM runs)
)
SELECT step,
       count(*) AS prompts,
       avg((predicted - success_rate) * (predicted - success_rate)) AS squared_error
FROM visits
WHERE predicted IS NOT NULL
GROUP BY step
ORDER BY step;
