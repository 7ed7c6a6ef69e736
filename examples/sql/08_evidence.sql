-- On how many rollouts does a posterior of the latest run rest, after discounting (alpha + beta), by visits?
SELECT visits,
       count(*) AS prompts,
       avg(alpha + beta) AS mean_evidence,
       min(alpha + beta) AS least_evidence,
       max(alpha + beta) AS most_evidence
FROM posteriors
WHERE run_id = (SELECT max(run_id) FROM runs)
GROUP BY visits
ORDER BY visits;
