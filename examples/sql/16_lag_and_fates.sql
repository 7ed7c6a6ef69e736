-- What became of the groups that the latest run asked for ahead of its training, step by step, and how many steps
-- was the policy behind that generated those it trained on?
SELECT step,
       sum(CASE WHEN fate = 'trained' THEN 1 ELSE 0 END) AS trained,
       sum(CASE WHEN fate = 'filtered' THEN 1 ELSE 0 END) AS filtered,
       sum(CASE WHEN fate = 'stale' THEN 1 ELSE 0 END) AS stale,
       avg(CASE WHEN fate = 'trained' THEN lag END) AS mean_lag,
       max(CASE WHEN fate = 'trained' THEN lag END) AS longest_lag
FROM groups
WHERE run_id = (SELECT max(run_id) FROM runs) AND step IS NOT NULL
GROUP BY step
ORDER BY step;
