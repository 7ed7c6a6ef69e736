-- On which prompts of the latest run do rewards vary most (posterior mean nearest to one half)?
SELECT q.prompt_id, q.variance, q.mean, q.visits, p.prompt
FROM posteriors q
JOIN prompts p ON p.prompt_id = q.prompt_id
WHERE q.run_id = (SELECT max(run_id) FROM runs)
ORDER BY q.variance DESC, q.prompt_id
LIMIT 20;
