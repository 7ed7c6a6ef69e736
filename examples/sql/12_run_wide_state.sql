-- How did the state that all prompts of the latest run share evolve, next to the success rate? It is JSON; for the
-- first number of a vector x: json_extract(shared, '$.x[0]') on SQLite, shared::json -> 'x' ->> 0 on PostgreSQL.
SELECT step,
       successes / nullif(rollouts, 0) AS success_rate,
       shared
FROM steps
WHERE run_id = (SELECT max(run_id) FROM runs) AND shared IS NOT NULL
ORDER BY step;
