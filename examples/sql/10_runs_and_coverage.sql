-- What has each run covered? Prompts with a posterior, those only warm-started, visits, and the run it began from.
SELECT r.name, r.status, r.last_step,
       count(q.prompt_id) AS prompts,
       sum(CASE WHEN q.visits = 0 THEN 1 ELSE 0 END) AS only_warm_started,
       sum(q.visits) AS visits,
       r.parent_name
FROM runs r
LEFT JOIN posteriors q ON q.run_id = r.run_id
GROUP BY r.run_id, r.name, r.status, r.last_step, r.parent_name
ORDER BY r.run_id;
