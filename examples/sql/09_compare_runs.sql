-- Where do the two latest runs differ most? Posterior means of the prompts that both have.
SELECT b.prompt_id, a.mean AS earlier_mean, b.mean AS latest_mean, b.mean - a.mean AS difference, p.prompt
FROM posteriors a
JOIN posteriors b ON b.prompt_id = a.prompt_id
JOIN prompts p ON p.prompt_id = b.prompt_id
WHERE b.run_id = (SELECT max(run_id) FROM runs)
  AND a.run_id = (SELECT max(run_id) FROM runs WHERE run_id < (SELECT max(run_id) FROM runs))
ORDER BY abs(b.mean - a.mean) DESC, b.prompt_id
LIMIT 20;
