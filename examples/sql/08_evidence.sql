-- How many rollouts is a posterior of the latest run based on, after discounting (alpha + beta), by visits?
SELECT visits,
       count(*) AS prompts,
       avg(alpha + beta) AS mean_evidence,
       min(alpha + beta) AS least_evidence,
       max(alpha + beta) AS most_evidence
FROM posteriors
WHERE run_id = (SELECT max(run_id) FROM runs)
GROUP BY visits
ORDER BY visits;
