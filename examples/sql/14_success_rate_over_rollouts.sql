-- How does the success rate of the latest run rise with the rollouts generated so far, trained on or not? To
-- compare methods, take several runs: WHERE run_id IN (...).
SELECT run_id, generated_total,
       successes / nullif(rollouts, 0) AS success_rate
FROM steps
WHERE run_id = (SELECT max(run_id) FROM runs) AND generated IS NOT NULL
ORDER BY run_id, step;
