-- What did a mixed group (some rollouts right, some wrong) cost each run, in rollouts and in response tokens? Rollouts
-- that were filtered out, or in zero-variance groups, are paid for too. Exact where all groups have the same size.
SELECT r.name, r.method,
       sum(s.generated) AS generated,
       sum(1.0 * s.groups * (s.generated - s.zero_variance) / s.generated) AS mixed_groups,
       sum(s.generated) / nullif(sum(1.0 * s.groups * (s.generated - s.zero_variance) / s.generated), 0)
           AS rollouts_per_mixed_group,
       sum(s.generated_tokens) / nullif(sum(1.0 * s.groups * (s.generated - s.zero_variance) / s.generated), 0)
           AS tokens_per_mixed_group
FROM runs r
JOIN steps s ON s.run_id = r.run_id
WHERE s.generated > 0
GROUP BY r.run_id, r.name, r.method
ORDER BY r.run_id;
