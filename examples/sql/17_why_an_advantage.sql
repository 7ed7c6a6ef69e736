-- Why does a rollout of the latest run have its advantage: weight * (reward - baseline) / scale, and what is it made of?
SELECT r.step, r.prompt_id, r.sample, s.form, r.reward, h.mean, h.variance, r.baseline, r.scale, r.weight, r.advantage,
       coalesce(r.weight * (r.reward - r.baseline) / nullif(r.scale, 0), 0) AS recomputed
FROM rollouts r
JOIN posterior_history h ON h.run_id = r.run_id AND h.step = r.step AND h.prompt_id = r.prompt_id
JOIN steps s ON s.run_id = r.run_id AND s.step = r.step
WHERE r.run_id = (SELECT max(run_id) FROM runs)
ORDER BY r.step, r.prompt_id, r.sample;
