-- How well does a posterior foretell the next visit of its prompt in the latest run? Mean squared error per step
-- of the mean after the visit before, against the success rate now.
WITH visits AS (
    SELECT step, successes / rollouts AS success_rate,
           lag(mean) OVER (PARTITION BY prompt_id ORDER BY step) AS foretold
    FROM posterior_history
    WHERE run_id = (SELECT max(run_id) FROM runs)
)
SELECT step,
       count(*) AS prompts,
       avg((foretold - success_rate) * (foretold - success_rate)) AS squared_error
FROM visits
WHERE foretold IS NOT NULL
GROUP BY step
ORDER BY step;
