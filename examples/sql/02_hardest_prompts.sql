-- Which prompts does the latest run find hardest? For the easiest, order by mean DESC.
SELECT q.prompt_id, q.mean, q.visits, p.prompt
FROM posteriors q
JOIN prompts p ON p.prompt_id = q.prompt_id
WHERE q.run_id = (SELECT max(run_id) FROM runs)
ORDER BY q.mean, q.prompt_id
LIMIT 20;
