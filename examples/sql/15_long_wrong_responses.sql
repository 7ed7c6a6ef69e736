-- What does the latest run write when it is wrong? The longest wrong responses of its last 100 steps; more than these
-- are kept with --rollouts.keep.
SELECT k.step, k.prompt_id, k.score, k.advantage, k.length, k.truncated, p.prompt, p.label, k.text
FROM rollouts k
JOIN prompts p ON p.prompt_id = k.prompt_id
WHERE k.run_id = (SELECT max(run_id) FROM runs) AND k.missing = 0 AND k.score <= 0
  AND k.step > (SELECT max(last_step) - 100 FROM runs WHERE run_id = (SELECT max(run_id) FROM runs))
ORDER BY k.length DESC, k.step DESC, k.prompt_id, k.sample
LIMIT 20;
