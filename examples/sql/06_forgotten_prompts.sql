-- Which prompts has the latest run forgotten: fall of the posterior mean from its peak to now? The page
-- calls a prompt forgotten from a fall of 0.3 on.
SELECT q.prompt_id, h.peak, q.mean, h.peak - q.mean AS fall, p.prompt
FROM (
    SELECT run_id, prompt_id, max(coalesce(alpha / nullif(alpha + beta, 0), mean)) AS peak
    FROM posterior_history
    GROUP BY run_id, prompt_id
) h
JOIN posteriors q ON q.run_id = h.run_id AND q.prompt_id = h.prompt_id
JOIN prompts p ON p.prompt_id = q.prompt_id
WHERE h.run_id = (SELECT max(run_id) FROM runs) AND h.peak > q.mean
ORDER BY h.peak - q.mean DESC, q.prompt_id
LIMIT 20;
