-- How many steps was the policy behind that generated the groups of the latest run, and how many rollouts were not
-- trained on? Step by step; asynchronous training generates ahead, so that groups may come late.
SELECT h.step, s.trained, s.filtered, avg(h.lag) AS mean_lag, max(h.lag) AS longest_lag
FROM posterior_history h JOIN steps s ON s.run_id = h.run_id AND s.step = h.step
WHERE h.run_id = (SELECT max(run_id) FROM runs)
GROUP BY h.step, s.trained, s.filtered
ORDER BY h.step;
