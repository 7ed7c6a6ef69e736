-- How far are the estimates of the latest run from the true success probabilities? Mean squared error per step
-- against its probes, minus the noise of the probes (rewards 0 and 1); values slightly below 0 are due to chance.
SELECT h.step,
       count(*) AS prompts,
       avg((h.mean - p.mean) * (h.mean - p.mean) - p.mean * (1 - p.mean) / (p.samples - 1)) AS squared_error
FROM probes p
JOIN posterior_history h ON h.run_id = p.run_id AND h.step = p.step AND h.prompt_id = p.prompt_id
WHERE p.run_id = (SELECT max(run_id) FROM runs) AND p.samples > 1
GROUP BY h.step
ORDER BY h.step;
