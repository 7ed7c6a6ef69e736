-- What did an informative group (one with an advantage that is not 0) cost each run, in rollouts and in response
-- tokens? Rollouts that were filtered out, or in zero-variance groups without an advantage, are paid for too.
SELECT r.name, r.method,
       sum(s.generated) AS generated,
       sum(s.informative_groups) AS informative_groups,
       1.0 * sum(s.generated) / nullif(sum(s.informative_groups), 0) AS rollouts_per_group,
       1.0 * sum(s.generated_tokens) / nullif(sum(s.informative_groups), 0) AS tokens_per_group
FROM runs r
JOIN steps s ON s.run_id = r.run_id
WHERE s.generated IS NOT NULL
GROUP BY r.run_id, r.name, r.method
ORDER BY r.run_id;
