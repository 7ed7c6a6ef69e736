BEGIN TRANSACTION;
CREATE TABLE dbb_checkpoint (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	tag TEXT NOT NULL,
	created_at TEXT NOT NULL,
	PRIMARY KEY (run_id, step, tag),
	FOREIGN KEY(run_id) REFERENCES dbb_run (run_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_checkpoint" VALUES(2,1,'global_step1','2026-11-23T01:04:26.099Z');
CREATE TABLE dbb_evaluation (
	evaluation_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	run_id BIGINT,
	step BIGINT,
	name TEXT NOT NULL,
	model TEXT NOT NULL,
	config TEXT NOT NULL,
	generated_total BIGINT,
	created_at TEXT NOT NULL,
	FOREIGN KEY(run_id) REFERENCES dbb_run (run_id)
);
INSERT INTO "dbb_evaluation" VALUES(1,2,2,'training','tiny','{}',NULL,'2026-11-23T01:04:26.104Z');
CREATE TABLE dbb_evaluation_result (
	evaluation_id BIGINT NOT NULL,
	benchmark TEXT NOT NULL,
	repeat BIGINT NOT NULL,
	place BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	samples BIGINT NOT NULL,
	verified BIGINT NOT NULL,
	successes DOUBLE NOT NULL,
	best DOUBLE,
	majority DOUBLE,
	tokens BIGINT NOT NULL,
	truncated BIGINT NOT NULL,
	PRIMARY KEY (evaluation_id, benchmark, repeat, place)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_evaluation_result" VALUES(1,'sums',0,0,2,4,4,4.0,1.0,1.0,40,0);
INSERT INTO "dbb_evaluation_result" VALUES(1,'sums',0,1,1,4,4,1.0,1.0,0.0,40,0);
INSERT INTO "dbb_evaluation_result" VALUES(1,'sums',0,2,3,4,4,0.0,0.0,0.0,40,0);
CREATE TABLE dbb_event (
	event_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	run_id BIGINT NOT NULL,
	created_at TEXT NOT NULL,
	kind TEXT NOT NULL,
	from_step BIGINT NOT NULL,
	to_step BIGINT NOT NULL,
	detail TEXT NOT NULL,
	FOREIGN KEY(run_id) REFERENCES dbb_run (run_id)
);
INSERT INTO "dbb_event" VALUES(1,1,'2026-11-23T01:04:26.079Z','finish',1,1,'{"unused_rollouts": 3, "unused_tokens": 30}');
INSERT INTO "dbb_event" VALUES(2,2,'2026-11-23T01:04:26.092Z','warm_start',0,0,'{"name": "first", "uuid": "628f2d2bc94644dda5830e890afbedab", "step": 1, "weight": 0.5, "database": "first.db", "matched": 2, "unmatched": 1}');
INSERT INTO "dbb_event" VALUES(3,2,'2026-11-23T07:49:06.104Z','claim',2,2,'{"from": {"host": "", "pid": 0}, "to": {"host": "node", "pid": 1234}}');
CREATE TABLE dbb_group (
	run_id BIGINT NOT NULL, 
	ordinal BIGINT NOT NULL, 
	pass BIGINT NOT NULL, 
	prompt_id BIGINT NOT NULL, 
	rollouts BIGINT NOT NULL, 
	policy_version DOUBLE NOT NULL, 
	fate TEXT NOT NULL, 
	step BIGINT, 
	PRIMARY KEY (run_id, ordinal), 
	FOREIGN KEY(run_id) REFERENCES dbb_run (run_id)
)
 WITHOUT ROWID

;
INSERT INTO "dbb_group" VALUES(2,1,0,2,4,1.0,'open',NULL);
CREATE TABLE dbb_history (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	rollouts BIGINT NOT NULL,
	successes DOUBLE NOT NULL,
	alpha DOUBLE,
	beta DOUBLE,
	state BLOB,
	mean DOUBLE NOT NULL,
	variance DOUBLE NOT NULL,
	prev_alpha DOUBLE,
	prev_beta DOUBLE,
	prev_state BLOB,
	prev_step BIGINT NOT NULL, policy_version DOUBLE,
	PRIMARY KEY (run_id, step, prompt_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_history" VALUES(1,1,1,4,1.0,1.5,3.5,NULL,0.3,0.21,NULL,NULL,NULL,-1,NULL);
INSERT INTO "dbb_history" VALUES(1,1,2,4,4.0,4.5,0.5,NULL,0.9,8.99999999999999827915e-02,NULL,NULL,NULL,-1,NULL);
INSERT INTO "dbb_history" VALUES(2,1,1,4,4.0,4.375,0.875,NULL,8.3333333333333337034e-01,1.38888888888888867301e-01,0.75,1.75,NULL,0,NULL);
INSERT INTO "dbb_history" VALUES(2,1,2,4,0.0,1.125,4.125,NULL,2.14285714285714273819e-01,1.6836734693877550284e-01,2.25,0.25,NULL,0,NULL);
INSERT INTO "dbb_history" VALUES(2,2,1,4,4.0,6.1875,0.4375,NULL,9.33962264150943410889e-01,6.16767532929868161906e-02,4.375,0.875,NULL,1,NULL);
INSERT INTO "dbb_history" VALUES(2,2,2,4,4.0,4.5625,2.0625,NULL,6.88679245283018826029e-01,2.1440014239943042118e-01,1.125,4.125,NULL,1,NULL);
INSERT INTO "dbb_history" VALUES(2,2,3,4,1.0,1.5,3.5,NULL,0.3,0.21,NULL,NULL,NULL,-1,NULL);
INSERT INTO "dbb_history" VALUES(3,1,2,4,1.0,1.0,2.0,X'00000000000008400000000000001040',1.0,1.0,NULL,NULL,NULL,-1,NULL);
CREATE TABLE dbb_posterior (
	run_id BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	alpha DOUBLE,
	beta DOUBLE,
	state BLOB,
	visits BIGINT NOT NULL,
	step BIGINT NOT NULL,
	PRIMARY KEY (run_id, prompt_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_posterior" VALUES(1,1,1.5,3.5,NULL,1,1);
INSERT INTO "dbb_posterior" VALUES(1,2,4.5,0.5,NULL,1,1);
INSERT INTO "dbb_posterior" VALUES(2,1,6.1875,0.4375,NULL,2,2);
INSERT INTO "dbb_posterior" VALUES(2,2,4.5625,2.0625,NULL,2,2);
INSERT INTO "dbb_posterior" VALUES(2,3,1.5,3.5,NULL,1,2);
INSERT INTO "dbb_posterior" VALUES(3,2,1.0,2.0,X'00000000000008400000000000001040',1,1);
CREATE TABLE dbb_probe (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	samples BIGINT NOT NULL,
	successes DOUBLE NOT NULL,
	squares DOUBLE NOT NULL,
	PRIMARY KEY (run_id, step, prompt_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_probe" VALUES(2,1,2,8,3.0,3.0);
CREATE TABLE dbb_prompt (
	prompt_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	hash BLOB NOT NULL,
	prompt TEXT NOT NULL,
	label TEXT NOT NULL,
	UNIQUE (hash)
);
INSERT INTO "dbb_prompt" VALUES(1,X'B2F00983A6B28DF60802616225CD43EE','2 + 2 = ?','4');
INSERT INTO "dbb_prompt" VALUES(2,X'CF41DD1039E7E2BFE8DA859A83110C47','1 + 1 = ?','2');
INSERT INTO "dbb_prompt" VALUES(3,X'F0A813DA27B2915CC4372EC3DF1744DD','NUL �, <b>HTML</b> and ünicode','');
CREATE TABLE dbb_rollout (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	sample BIGINT NOT NULL,
	reward DOUBLE,
	score DOUBLE,
	advantage DOUBLE NOT NULL,
	length BIGINT NOT NULL,
	truncated BIGINT,
	log_prob DOUBLE,
	text TEXT NOT NULL, policy_version DOUBLE,
	PRIMARY KEY (run_id, step, prompt_id, sample)
);
INSERT INTO "dbb_rollout" VALUES(2,1,1,0,1.0,1.0,0.5,10,0,-1.5,'answer 0',NULL);
INSERT INTO "dbb_rollout" VALUES(2,1,2,0,0.0,0.0,-0.5,10,0,-1.5,'answer 0',NULL);
INSERT INTO "dbb_rollout" VALUES(2,2,1,3,0.5,1.0,-0.25,7,1,-3.5,'NUL �, </script>, two
lines and ''quotes''',NULL);
INSERT INTO "dbb_rollout" VALUES(2,2,3,0,NULL,NULL,0.0,0,NULL,NULL,'',NULL);
CREATE TABLE dbb_run (
	run_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	uuid TEXT NOT NULL,
	name TEXT NOT NULL,
	status TEXT NOT NULL,
	last_step BIGINT NOT NULL,
	estimator TEXT NOT NULL,
	estimator_version INTEGER NOT NULL,
	parameters TEXT NOT NULL,
	state_fields TEXT NOT NULL,
	model TEXT NOT NULL,
	dataset TEXT NOT NULL,
	dataset_digest TEXT NOT NULL,
	reward TEXT NOT NULL,
	config TEXT NOT NULL,
	method TEXT,
	created_at TEXT NOT NULL,
	heartbeat_at TEXT NOT NULL,
	writer_token TEXT NOT NULL,
	owner_host TEXT NOT NULL,
	owner_pid BIGINT NOT NULL,
	owner_started TEXT,
	parent_name TEXT,
	parent_uuid TEXT,
	parent_step BIGINT,
	parent_weight DOUBLE,
	parent_database TEXT,
	shared_start TEXT,
	UNIQUE (uuid),
	UNIQUE (name)
);
INSERT INTO "dbb_run" VALUES(1,'628f2d2bc94644dda5830e890afbedab','first','finished',1,'dbb',1,'{"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0}','["alpha", "beta"]','tiny','sums','d1','exact','{"seed": 7}',NULL,'2026-11-23T01:04:26.067Z','2026-11-23T01:04:26.078Z','64db1e6ec474ecf053a62fe4d16d6097','host',1,'1@boot',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "dbb_run" VALUES(2,'94af11ce83884667ab13e8ad4973aca0','second','running',2,'dbb',1,'{"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0}','["alpha", "beta"]','tiny','sums','d1','exact','{"seed": 7}','dapo','2026-11-23T01:04:26.080Z','2026-11-23T07:49:06.126Z','6090c8d46a09b7cd172d98faef2f80ea','',0,NULL,'first','628f2d2bc94644dda5830e890afbedab',1,0.5,'first.db','{"clock": [1.0, 0.1]}');
INSERT INTO "dbb_run" VALUES(3,'bc9a0a1c7dc1437cbf3e48a3126f65ed','packed','running',1,'other',1,'{"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0}','["alpha", "beta", "level", "speed"]','tiny','sums','d1','exact','{"seed": 7}',NULL,'2026-11-23T01:04:26.107Z','2026-11-23T01:04:26.111Z','b4870265b8c1b7967f972adc9682555f','',0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE dbb_step (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	prompts BIGINT NOT NULL,
	rollouts BIGINT NOT NULL,
	successes DOUBLE NOT NULL,
	digest BLOB NOT NULL,
	created_at TEXT NOT NULL,
	shared TEXT,
	generated BIGINT,
	generated_tokens BIGINT,
	trained BIGINT,
	trained_tokens BIGINT,
	zero_variance BIGINT,
	informative BIGINT,
	rescued BIGINT,
	replayed BIGINT,
	replayed_tokens BIGINT,
	skipped BIGINT,
	groups BIGINT,
	informative_groups BIGINT,
	metrics TEXT,
	PRIMARY KEY (run_id, step),
	FOREIGN KEY(run_id) REFERENCES dbb_run (run_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_step" VALUES(1,1,2,8,5.0,X'7AF1A5C77C58603DB0FAACADE2716139','2026-11-23T01:04:26.076Z','{"clock": [1.0, 0.1]}',8,80,8,80,4,8,4,5,50,2,2,2,NULL);
INSERT INTO "dbb_step" VALUES(2,1,2,8,4.0,X'EF2C996C3885AE1B6F0CC1637D50789D','2026-11-23T01:04:26.097Z',NULL,8,80,8,80,8,8,8,4,40,2,2,2,'{"kl": 0.25, "loss": null}');
INSERT INTO "dbb_step" VALUES(2,2,3,12,9.0,X'0DFD57C916FD25E921CEF7B71EE46D4F','2026-11-23T01:04:26.102Z',NULL,12,120,12,120,8,12,8,9,90,3,3,3,NULL);
INSERT INTO "dbb_step" VALUES(3,1,1,4,1.0,X'BF044C9A3DF653FD105CE3861C062930','2026-11-23T01:04:26.110Z',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE dbb_usage (
	run_id BIGINT NOT NULL,
	step BIGINT NOT NULL,
	prompt_id BIGINT NOT NULL,
	generated BIGINT NOT NULL,
	generated_tokens BIGINT NOT NULL,
	trained BIGINT NOT NULL,
	trained_tokens BIGINT NOT NULL,
	zero_variance BIGINT NOT NULL,
	informative BIGINT NOT NULL,
	rescued BIGINT NOT NULL,
	replayed BIGINT NOT NULL,
	replayed_tokens BIGINT NOT NULL,
	skipped BIGINT NOT NULL,
	PRIMARY KEY (run_id, step, prompt_id)
)
 WITHOUT ROWID
;
INSERT INTO "dbb_usage" VALUES(1,1,1,4,40,4,40,0,4,0,1,10,1);
INSERT INTO "dbb_usage" VALUES(1,1,2,4,40,4,40,4,4,4,4,40,1);
INSERT INTO "dbb_usage" VALUES(2,1,1,4,40,4,40,4,4,4,4,40,1);
INSERT INTO "dbb_usage" VALUES(2,1,2,4,40,4,40,4,4,4,0,0,1);
INSERT INTO "dbb_usage" VALUES(2,2,1,4,40,4,40,4,4,4,4,40,1);
INSERT INTO "dbb_usage" VALUES(2,2,2,4,40,4,40,4,4,4,4,40,1);
INSERT INTO "dbb_usage" VALUES(2,2,3,4,40,4,40,0,4,0,1,10,1);
CREATE TABLE dbb_version (
	version INTEGER NOT NULL,
	library_version TEXT NOT NULL,
	PRIMARY KEY (version)
);
INSERT INTO "dbb_version" VALUES(3,'0.1.0');
CREATE VIEW runs AS
        SELECT run_id, name, uuid, status, last_step, estimator, estimator_version, parameters, model,
               dataset, reward, method, created_at, heartbeat_at, parent_name, parent_uuid, parent_step, parent_weight
        FROM dbb_run;
CREATE VIEW prompts AS SELECT prompt_id, prompt, label FROM dbb_prompt;
CREATE VIEW probes AS
        SELECT run_id, step, prompt_id, samples, successes, successes / samples AS mean
        FROM dbb_probe;
CREATE VIEW usage AS
        SELECT run_id, step, prompt_id, generated, generated_tokens, trained, trained_tokens, zero_variance, informative, rescued, replayed, replayed_tokens, skipped, generated - trained AS filtered
        FROM dbb_usage;
CREATE VIEW steps AS
        SELECT run_id, step, prompts, rollouts, successes, shared, created_at,
               generated, generated_tokens, trained, trained_tokens, zero_variance, informative, rescued, replayed, replayed_tokens, skipped, groups, informative_groups, generated - trained AS filtered,
               CAST(sum(generated) OVER (PARTITION BY run_id ORDER BY step) AS BIGINT) AS generated_total, metrics
        FROM dbb_step;
CREATE VIEW evaluation_results AS
        SELECT r.evaluation_id, e.run_id, e.step, e.name, r.benchmark, r.repeat, r.place, r.prompt_id,
               r.samples, r.verified, r.successes, r.best, r.majority, r.tokens, r.truncated
        FROM dbb_evaluation_result r JOIN dbb_evaluation e ON e.evaluation_id = r.evaluation_id;
CREATE VIEW evaluations AS
        SELECT evaluation_id, run_id, step, name, model, benchmark, count(*) AS repeats, max(prompts) AS prompts,
               max(samples) AS samples, avg(accuracy) AS accuracy, avg(best) AS best, avg(majority) AS majority,
               avg(length) AS length, avg(truncated) AS truncated, avg(missing) AS missing, generated_total, created_at
        FROM (SELECT e.evaluation_id, e.run_id, e.step, e.name, e.model, r.benchmark, r.repeat,
                     count(*) AS prompts, max(r.samples) AS samples,
                     avg(r.successes / nullif(r.verified, 0)) AS accuracy,
                     avg(r.best) AS best, avg(r.majority) AS majority,
                     CAST(sum(r.tokens) AS DOUBLE PRECISION) / sum(r.samples) AS length,
                     CAST(sum(r.truncated) AS DOUBLE PRECISION) / sum(r.samples) AS truncated,
                     CAST(sum(r.samples - r.verified) AS DOUBLE PRECISION) / sum(r.samples) AS missing,
                     e.generated_total, e.created_at
              FROM dbb_evaluation e JOIN dbb_evaluation_result r ON r.evaluation_id = e.evaluation_id
              GROUP BY e.evaluation_id, e.run_id, e.step, e.name, e.model, e.generated_total, e.created_at,
                       r.benchmark, r.repeat) of_repeat
        GROUP BY evaluation_id, run_id, step, name, model, generated_total, created_at, benchmark;
CREATE VIEW posteriors AS
        SELECT q.run_id, q.prompt_id, q.alpha, q.beta,
               coalesce(h.mean, q.alpha / nullif(q.alpha + q.beta, 0)) AS mean,
               coalesce((q.alpha / nullif(q.alpha + q.beta, 0)) * (q.beta / nullif(q.alpha + q.beta, 0)),
                        h.variance) AS variance,
               q.visits, q.step
        FROM dbb_posterior q
        LEFT JOIN dbb_history h ON h.run_id = q.run_id AND h.step = q.step AND h.prompt_id = q.prompt_id;
CREATE VIEW groups AS 
        SELECT run_id, ordinal, pass, prompt_id, rollouts, policy_version, fate, step,
               step - 1 - policy_version AS lag
        FROM dbb_group;
CREATE VIEW posterior_history AS 
        SELECT run_id, step, prompt_id, rollouts, successes, alpha, beta, mean, variance,
               coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION)) AS policy_version, step - 1 - coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION)) AS lag
        FROM dbb_history;
CREATE VIEW rollouts AS 
        SELECT run_id, step, prompt_id, sample, reward, score, advantage, length, truncated,
               CASE WHEN score IS NULL THEN 1 ELSE 0 END AS missing, log_prob, text,
               coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION)) AS policy_version, step - 1 - coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION)) AS lag
        FROM dbb_rollout;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('dbb_prompt',3);
INSERT INTO "sqlite_sequence" VALUES('dbb_run',3);
INSERT INTO "sqlite_sequence" VALUES('dbb_event',3);
INSERT INTO "sqlite_sequence" VALUES('dbb_evaluation',1);
COMMIT;
