SELECT pg_catalog.set_config('search_path', '', false);
COMMENT ON SCHEMA "public" IS 'standard public schema';
CREATE TABLE "public"."dbb_checkpoint" (
    "run_id" bigint NOT NULL,
    "step" bigint NOT NULL,
    "tag" "text" NOT NULL,
    "created_at" "text" NOT NULL
);
COMMENT ON TABLE "public"."dbb_checkpoint" IS 'Model checkpoints that the stored posteriors are known to cover';
COMMENT ON COLUMN "public"."dbb_checkpoint"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_checkpoint"."step" IS 'step the model was saved at';
COMMENT ON COLUMN "public"."dbb_checkpoint"."tag" IS 'name of the model checkpoint';
COMMENT ON COLUMN "public"."dbb_checkpoint"."created_at" IS 'UTC, ISO 8601';
CREATE TABLE "public"."dbb_event" (
    "event_id" bigint NOT NULL,
    "run_id" bigint NOT NULL,
    "created_at" "text" NOT NULL,
    "kind" "text" NOT NULL,
    "from_step" bigint NOT NULL,
    "to_step" bigint NOT NULL,
    "detail" "text" NOT NULL
);
COMMENT ON TABLE "public"."dbb_event" IS 'What happened to a run other than steps and checkpoints';
COMMENT ON COLUMN "public"."dbb_event"."event_id" IS 'number of the event in this database';
COMMENT ON COLUMN "public"."dbb_event"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_event"."created_at" IS 'UTC, ISO 8601';
COMMENT ON COLUMN "public"."dbb_event"."kind" IS 'claim, take_over, roll_back, warm_start, prune or finish';
COMMENT ON COLUMN "public"."dbb_event"."from_step" IS 'last step before the event';
COMMENT ON COLUMN "public"."dbb_event"."to_step" IS 'last step after the event';
COMMENT ON COLUMN "public"."dbb_event"."detail" IS 'JSON';
CREATE SEQUENCE "public"."dbb_event_event_id_seq"
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE "public"."dbb_event_event_id_seq" OWNED BY "public"."dbb_event"."event_id";
CREATE TABLE "public"."dbb_history" (
    "run_id" bigint NOT NULL,
    "step" bigint NOT NULL,
    "prompt_id" bigint NOT NULL,
    "rollouts" bigint NOT NULL,
    "successes" double precision NOT NULL,
    "alpha" double precision,
    "beta" double precision,
    "state" "bytea",
    "mean" double precision NOT NULL,
    "variance" double precision NOT NULL,
    "prev_alpha" double precision,
    "prev_beta" double precision,
    "prev_state" "bytea",
    "prev_step" bigint NOT NULL
);
COMMENT ON TABLE "public"."dbb_history" IS 'Every posterior of every step, with the one before it, so that steps can be undone';
COMMENT ON COLUMN "public"."dbb_history"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_history"."step" IS 'training step, from 1';
COMMENT ON COLUMN "public"."dbb_history"."prompt_id" IS 'the prompt';
COMMENT ON COLUMN "public"."dbb_history"."rollouts" IS 'rewards seen in this step';
COMMENT ON COLUMN "public"."dbb_history"."successes" IS 'their sum';
COMMENT ON COLUMN "public"."dbb_history"."alpha" IS 'posterior after the step, as in dbb_posterior';
COMMENT ON COLUMN "public"."dbb_history"."beta" IS 'posterior after the step';
COMMENT ON COLUMN "public"."dbb_history"."state" IS 'posterior after the step';
COMMENT ON COLUMN "public"."dbb_history"."mean" IS 'estimated mean of one reward, used in this step';
COMMENT ON COLUMN "public"."dbb_history"."variance" IS 'estimated variance of one reward, used in this step';
COMMENT ON COLUMN "public"."dbb_history"."prev_alpha" IS 'posterior before the step; NULL if there was none';
COMMENT ON COLUMN "public"."dbb_history"."prev_beta" IS 'posterior before the step';
COMMENT ON COLUMN "public"."dbb_history"."prev_state" IS 'posterior before the step';
COMMENT ON COLUMN "public"."dbb_history"."prev_step" IS 'step of that posterior; 0: warm start; -1: none';
CREATE TABLE "public"."dbb_posterior" (
    "run_id" bigint NOT NULL,
    "prompt_id" bigint NOT NULL,
    "alpha" double precision,
    "beta" double precision,
    "state" "bytea",
    "visits" bigint NOT NULL,
    "step" bigint NOT NULL
)
WITH ("fillfactor"='80', "autovacuum_vacuum_scale_factor"='0.02');
COMMENT ON TABLE "public"."dbb_posterior" IS 'Current posterior of each prompt that a run has seen or was warm-started with';
COMMENT ON COLUMN "public"."dbb_posterior"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_posterior"."prompt_id" IS 'the prompt';
COMMENT ON COLUMN "public"."dbb_posterior"."alpha" IS 'discounted successes, rollouts; NULL if the estimator has none';
COMMENT ON COLUMN "public"."dbb_posterior"."beta" IS 'discounted failures, rollouts; NULL if the estimator has none';
COMMENT ON COLUMN "public"."dbb_posterior"."state" IS 'other state fields, little-endian float64; NULL if none';
COMMENT ON COLUMN "public"."dbb_posterior"."visits" IS 'steps of this run that trained on the prompt';
COMMENT ON COLUMN "public"."dbb_posterior"."step" IS 'the last of them; 0: warm start only';
CREATE TABLE "public"."dbb_probe" (
    "run_id" bigint NOT NULL,
    "step" bigint NOT NULL,
    "prompt_id" bigint NOT NULL,
    "samples" bigint NOT NULL,
    "successes" double precision NOT NULL,
    "squares" double precision NOT NULL
);
COMMENT ON TABLE "public"."dbb_probe" IS 'Extra rollouts that measure the policy; never trained on, never seen by the estimator';
COMMENT ON COLUMN "public"."dbb_probe"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_probe"."step" IS 'training step whose policy is probed';
COMMENT ON COLUMN "public"."dbb_probe"."prompt_id" IS 'the prompt';
COMMENT ON COLUMN "public"."dbb_probe"."samples" IS 'extra rollouts';
COMMENT ON COLUMN "public"."dbb_probe"."successes" IS 'sum of their scores';
COMMENT ON COLUMN "public"."dbb_probe"."squares" IS 'sum of their squared scores';
CREATE TABLE "public"."dbb_prompt" (
    "prompt_id" bigint NOT NULL,
    "hash" "bytea" NOT NULL,
    "prompt" "text" NOT NULL,
    "label" "text" NOT NULL
);
COMMENT ON TABLE "public"."dbb_prompt" IS 'Prompts of all runs; the same text with another label is another prompt';
COMMENT ON COLUMN "public"."dbb_prompt"."prompt_id" IS 'number of the prompt in this database';
COMMENT ON COLUMN "public"."dbb_prompt"."hash" IS '16 bytes, BLAKE2b of prompt and label';
COMMENT ON COLUMN "public"."dbb_prompt"."prompt" IS 'what the model saw; U+0000 is kept as U+FFFD';
COMMENT ON COLUMN "public"."dbb_prompt"."label" IS 'reference answer; U+0000 is kept as U+FFFD';
CREATE SEQUENCE "public"."dbb_prompt_prompt_id_seq"
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE "public"."dbb_prompt_prompt_id_seq" OWNED BY "public"."dbb_prompt"."prompt_id";
CREATE TABLE "public"."dbb_run" (
    "run_id" bigint NOT NULL,
    "uuid" "text" NOT NULL,
    "name" "text" NOT NULL,
    "status" "text" NOT NULL,
    "last_step" bigint NOT NULL,
    "estimator" "text" NOT NULL,
    "estimator_version" integer NOT NULL,
    "parameters" "text" NOT NULL,
    "state_fields" "text" NOT NULL,
    "model" "text" NOT NULL,
    "dataset" "text" NOT NULL,
    "dataset_digest" "text" NOT NULL,
    "reward" "text" NOT NULL,
    "config" "text" NOT NULL,
    "created_at" "text" NOT NULL,
    "heartbeat_at" "text" NOT NULL,
    "writer_token" "text" NOT NULL,
    "owner_host" "text" NOT NULL,
    "owner_pid" bigint NOT NULL,
    "owner_started" "text",
    "parent_name" "text",
    "parent_uuid" "text",
    "parent_step" bigint,
    "parent_weight" double precision,
    "parent_database" "text",
    "shared_start" "text"
);
COMMENT ON TABLE "public"."dbb_run" IS 'Training runs';
COMMENT ON COLUMN "public"."dbb_run"."run_id" IS 'number of the run in this database';
COMMENT ON COLUMN "public"."dbb_run"."uuid" IS '32 hex digits, unique in all databases';
COMMENT ON COLUMN "public"."dbb_run"."name" IS 'name given by the user';
COMMENT ON COLUMN "public"."dbb_run"."status" IS 'running or finished';
COMMENT ON COLUMN "public"."dbb_run"."last_step" IS 'last recorded training step, 0 before the first';
COMMENT ON COLUMN "public"."dbb_run"."estimator" IS 'name of the reward estimator';
COMMENT ON COLUMN "public"."dbb_run"."estimator_version" IS 'version of the meaning of its state';
COMMENT ON COLUMN "public"."dbb_run"."parameters" IS 'parameters of the estimator, JSON';
COMMENT ON COLUMN "public"."dbb_run"."state_fields" IS 'names of the state''s numbers, JSON list';
COMMENT ON COLUMN "public"."dbb_run"."model" IS 'model that is trained';
COMMENT ON COLUMN "public"."dbb_run"."dataset" IS 'data set of the prompts';
COMMENT ON COLUMN "public"."dbb_run"."dataset_digest" IS 'digest of its prompts and labels';
COMMENT ON COLUMN "public"."dbb_run"."reward" IS 'reward function';
COMMENT ON COLUMN "public"."dbb_run"."config" IS 'training configuration, JSON';
COMMENT ON COLUMN "public"."dbb_run"."created_at" IS 'start of the run, UTC, ISO 8601';
COMMENT ON COLUMN "public"."dbb_run"."heartbeat_at" IS 'last write of the owner, UTC, ISO 8601';
COMMENT ON COLUMN "public"."dbb_run"."writer_token" IS 'secret of the process that may write';
COMMENT ON COLUMN "public"."dbb_run"."owner_host" IS 'host of that process';
COMMENT ON COLUMN "public"."dbb_run"."owner_pid" IS 'its process id';
COMMENT ON COLUMN "public"."dbb_run"."owner_started" IS 'its start, ticks since boot and boot id; NULL if unknown';
COMMENT ON COLUMN "public"."dbb_run"."parent_name" IS 'run this one was warm-started from; NULL if none';
COMMENT ON COLUMN "public"."dbb_run"."parent_uuid" IS 'uuid of that run';
COMMENT ON COLUMN "public"."dbb_run"."parent_step" IS 'its last step at that time';
COMMENT ON COLUMN "public"."dbb_run"."parent_weight" IS 'factor in (0, 1] on its alpha and beta';
COMMENT ON COLUMN "public"."dbb_run"."parent_database" IS 'where it is stored';
COMMENT ON COLUMN "public"."dbb_run"."shared_start" IS 'run-wide state from the warm start, JSON; NULL if none';
CREATE SEQUENCE "public"."dbb_run_run_id_seq"
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE "public"."dbb_run_run_id_seq" OWNED BY "public"."dbb_run"."run_id";
CREATE TABLE "public"."dbb_schema" (
    "version" integer NOT NULL,
    "library_version" "text" NOT NULL
);
COMMENT ON COLUMN "public"."dbb_schema"."version" IS 'version of these tables';
COMMENT ON COLUMN "public"."dbb_schema"."library_version" IS 'openrlhf-dbb release that made them';
CREATE TABLE "public"."dbb_step" (
    "run_id" bigint NOT NULL,
    "step" bigint NOT NULL,
    "prompts" bigint NOT NULL,
    "rollouts" bigint NOT NULL,
    "successes" double precision NOT NULL,
    "digest" "bytea" NOT NULL,
    "created_at" "text" NOT NULL,
    "shared" "text"
);
COMMENT ON TABLE "public"."dbb_step" IS 'Ledger of steps: a step is here if and only if all of it was written';
COMMENT ON COLUMN "public"."dbb_step"."run_id" IS 'the run';
COMMENT ON COLUMN "public"."dbb_step"."step" IS 'training step, from 1';
COMMENT ON COLUMN "public"."dbb_step"."prompts" IS 'rows of dbb_history in this step';
COMMENT ON COLUMN "public"."dbb_step"."rollouts" IS 'rewards seen in this step';
COMMENT ON COLUMN "public"."dbb_step"."successes" IS 'their sum';
COMMENT ON COLUMN "public"."dbb_step"."digest" IS '16 bytes, tells a repeat from other content';
COMMENT ON COLUMN "public"."dbb_step"."created_at" IS 'UTC, ISO 8601';
COMMENT ON COLUMN "public"."dbb_step"."shared" IS 'run-wide state after the step, vectors by name, JSON; NULL: none, or as it was';
CREATE VIEW "public"."posterior_history" AS
 SELECT "run_id",
    "step",
    "prompt_id",
    "rollouts",
    "successes",
    "alpha",
    "beta",
    "mean",
    "variance"
   FROM "public"."dbb_history";
CREATE VIEW "public"."posteriors" AS
 SELECT "q"."run_id",
    "q"."prompt_id",
    "q"."alpha",
    "q"."beta",
    COALESCE("h"."mean", ("q"."alpha" / NULLIF(("q"."alpha" + "q"."beta"), (0)::double precision))) AS "mean",
    COALESCE((("q"."alpha" / NULLIF(("q"."alpha" + "q"."beta"), (0)::double precision)) * ("q"."beta" / NULLIF(("q"."alpha" + "q"."beta"), (0)::double precision))), "h"."variance") AS "variance",
    "q"."visits",
    "q"."step"
   FROM ("public"."dbb_posterior" "q"
     LEFT JOIN "public"."dbb_history" "h" ON ((("h"."run_id" = "q"."run_id") AND ("h"."step" = "q"."step") AND ("h"."prompt_id" = "q"."prompt_id"))));
CREATE VIEW "public"."probes" AS
 SELECT "run_id",
    "step",
    "prompt_id",
    "samples",
    "successes",
    ("successes" / ("samples")::double precision) AS "mean"
   FROM "public"."dbb_probe";
CREATE VIEW "public"."prompts" AS
 SELECT "prompt_id",
    "prompt",
    "label"
   FROM "public"."dbb_prompt";
CREATE VIEW "public"."runs" AS
 SELECT "run_id",
    "name",
    "uuid",
    "status",
    "last_step",
    "estimator",
    "estimator_version",
    "parameters",
    "model",
    "dataset",
    "reward",
    "created_at",
    "heartbeat_at",
    "parent_name",
    "parent_uuid",
    "parent_step",
    "parent_weight"
   FROM "public"."dbb_run";
CREATE VIEW "public"."steps" AS
 SELECT "run_id",
    "step",
    "prompts",
    "rollouts",
    "successes",
    "shared",
    "created_at"
   FROM "public"."dbb_step";
ALTER TABLE ONLY "public"."dbb_event" ALTER COLUMN "event_id" SET DEFAULT "nextval"('"public"."dbb_event_event_id_seq"'::"regclass");
ALTER TABLE ONLY "public"."dbb_prompt" ALTER COLUMN "prompt_id" SET DEFAULT "nextval"('"public"."dbb_prompt_prompt_id_seq"'::"regclass");
ALTER TABLE ONLY "public"."dbb_run" ALTER COLUMN "run_id" SET DEFAULT "nextval"('"public"."dbb_run_run_id_seq"'::"regclass");
INSERT INTO "public"."dbb_checkpoint" VALUES (1, 2, 'global_step2', '2026-11-20T16:48:09.140Z');
INSERT INTO "public"."dbb_checkpoint" VALUES (2, 1, 'global_step1', '2026-11-20T16:48:09.231Z');
INSERT INTO "public"."dbb_event" VALUES (1, 1, '2026-11-20T16:48:09.145Z', 'finish', 2, 2, '{}');
INSERT INTO "public"."dbb_event" VALUES (2, 2, '2026-11-20T16:48:09.161Z', 'warm_start', 0, 0, '{"name": "first", "uuid": "8f15683b9e9d42de81dc33a6db329856", "step": 2, "weight": 0.5, "database": "elsewhere", "matched": 3, "unmatched": 1}');
INSERT INTO "public"."dbb_event" VALUES (3, 2, '2026-11-20T16:48:09.244Z', 'roll_back', 2, 1, '{"history_rows": 2, "steps": 1, "checkpoints": 0, "probes": 0}');
INSERT INTO "public"."dbb_history" VALUES (1, 1, 2, 4, 1, 1.5, 3.5, NULL, 0.3, 0.21, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (1, 1, 3, 4, 4, 4.5, 0.5, NULL, 0.9, 0.08999999999999998, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (1, 2, 2, 4, 0, 0.75, 5.75, NULL, 0.11538461538461539, 0.10207100591715977, 1.5, 3.5, NULL, 1);
INSERT INTO "public"."dbb_history" VALUES (1, 2, 3, 4, 3, 5.25, 1.25, NULL, 0.8076923076923077, 0.15532544378698224, 4.5, 0.5, NULL, 1);
INSERT INTO "public"."dbb_history" VALUES (1, 2, 4, 4, 2, 2.5, 2.5, NULL, 0.5, 0.25, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (2, 1, 2, 4, 1, 1.1875, 4.4375, NULL, 0.2111111111111111, 0.1665432098765432, 0.375, 2.875, NULL, 0);
INSERT INTO "public"."dbb_history" VALUES (2, 1, 4, 4, 1, 1.625, 3.625, NULL, 0.30952380952380953, 0.213718820861678, 1.25, 1.25, NULL, 0);
INSERT INTO "public"."dbb_history" VALUES (2, 2, 1, 4, 1, 1.5, 3.5, NULL, 0.3, 0.21, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (2, 2, 2, 4, 4, 4.59375, 2.21875, NULL, 0.6743119266055045, 0.2196153522430772, 1.1875, 4.4375, NULL, 1);
INSERT INTO "public"."dbb_history" VALUES (2, 2, 3, 4, 0, 1.3125, 4.3125, NULL, 0.23333333333333334, 0.17888888888888888, 2.625, 0.625, NULL, 0);
INSERT INTO "public"."dbb_history" VALUES (2, 2, 4, 4, 4, 4.8125, 1.8125, NULL, 0.7264150943396226, 0.1987362050551798, 1.625, 3.625, NULL, 1);
INSERT INTO "public"."dbb_history" VALUES (3, 1, 2, 4, 0, 0.5, 4.5, '\x000000000000e83f000000000000e83f', 0.1, 0.09000000000000001, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (3, 1, 3, 4, 4, 4.5, 0.5, '\x000000000000e83f000000000000e83f', 0.9, 0.08999999999999998, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_history" VALUES (3, 2, 2, 4, 1, 1.25, 5.25, '\x000000000000e43f000000000000e43f', 0.19230769230769232, 0.15532544378698226, 0.5, 4.5, '\x000000000000e83f000000000000e83f', 1);
INSERT INTO "public"."dbb_history" VALUES (3, 2, 4, 4, 2, 2.5, 2.5, '\x000000000000e83f000000000000e83f', 0.5, 0.25, NULL, NULL, NULL, -1);
INSERT INTO "public"."dbb_posterior" VALUES (1, 2, 0.75, 5.75, NULL, 2, 2);
INSERT INTO "public"."dbb_posterior" VALUES (1, 3, 5.25, 1.25, NULL, 2, 2);
INSERT INTO "public"."dbb_posterior" VALUES (1, 4, 2.5, 2.5, NULL, 1, 2);
INSERT INTO "public"."dbb_posterior" VALUES (2, 1, 1.5, 3.5, NULL, 1, 2);
INSERT INTO "public"."dbb_posterior" VALUES (2, 2, 4.59375, 2.21875, NULL, 2, 2);
INSERT INTO "public"."dbb_posterior" VALUES (2, 3, 1.3125, 4.3125, NULL, 1, 2);
INSERT INTO "public"."dbb_posterior" VALUES (2, 4, 4.8125, 1.8125, NULL, 2, 2);
INSERT INTO "public"."dbb_posterior" VALUES (3, 3, 4.5, 0.5, '\x000000000000e83f000000000000e83f', 1, 1);
INSERT INTO "public"."dbb_posterior" VALUES (3, 2, 1.25, 5.25, '\x000000000000e43f000000000000e43f', 2, 2);
INSERT INTO "public"."dbb_posterior" VALUES (3, 4, 2.5, 2.5, '\x000000000000e83f000000000000e83f', 1, 2);
INSERT INTO "public"."dbb_probe" VALUES (2, 2, 3, 8, 3, 3);
INSERT INTO "public"."dbb_prompt" VALUES (1, '\x6f8e143ce2e4ffbad17eb888cbc51d59', 'never seen', 'x');
INSERT INTO "public"."dbb_prompt" VALUES (2, '\xb2f00983a6b28df60802616225cd43ee', '2 + 2 = ?', '4');
INSERT INTO "public"."dbb_prompt" VALUES (3, '\xcf41dd1039e7e2bfe8da859a83110c47', '1 + 1 = ?', '2');
INSERT INTO "public"."dbb_prompt" VALUES (4, '\xf0a813da27b2915cc4372ec3df1744dd', 'NUL �, <b>HTML</b> and ünicode', '');
INSERT INTO "public"."dbb_run" VALUES (3, '1f47d12716504b5d8934521783466b43', 'packed', 'running', 2, 'other', 1, '{"discount": 0.5}', '["level", "alpha", "speed", "beta"]', 'tiny', 'sums', 'd1', 'exact', '{"seed": 7}', '2026-11-20T16:48:09.253Z', '2026-11-20T16:48:09.266Z', 'b3f7ce8591bd19b9f9d5ec7844d0cb5c', '', 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO "public"."dbb_run" VALUES (1, '8f15683b9e9d42de81dc33a6db329856', 'first', 'finished', 2, 'dbb', 1, '{"discount": 0.5}', '["alpha", "beta"]', 'tiny', 'sums', 'd1', 'exact', '{"seed": 7}', '2026-11-20T16:48:09.111Z', '2026-11-20T16:48:09.143Z', 'a246d4cc7deafa3f50fc053713239564', 'training-host', 24507, '1430589@e7209bf7-12b7-4e08-9332-e80806db788a', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO "public"."dbb_run" VALUES (2, '90d8d609e2d4417c9e33352079d42322', 'second', 'running', 2, 'dbb', 1, '{"discount": 0.5}', '["alpha", "beta"]', 'tiny', 'sums', 'd1', 'exact', '{"seed": 7}', '2026-11-20T16:48:09.147Z', '2026-11-20T16:48:09.251Z', '4f54d4b083e71eee2736c3119f6cb1ad', '', 0, NULL, 'first', '8f15683b9e9d42de81dc33a6db329856', 2, 0.5, 'elsewhere', '{"clock": [2.0, 0.1]}');
INSERT INTO "public"."dbb_schema" VALUES (2, '0.1.0');
INSERT INTO "public"."dbb_step" VALUES (1, 1, 2, 8, 5, '\x4394b2d9da7d6664d2d24c901e5ad356', '2026-11-20T16:48:09.124Z', '{"clock": [1.0, 0.1]}');
INSERT INTO "public"."dbb_step" VALUES (1, 2, 3, 12, 5, '\xb1456cf2a52112e6624f80791cacb7fb', '2026-11-20T16:48:09.133Z', '{"clock": [2.0, 0.1]}');
INSERT INTO "public"."dbb_step" VALUES (2, 1, 2, 8, 2, '\x2440ce75f56aa81ed382b753c1bfa093', '2026-11-20T16:48:09.169Z', NULL);
INSERT INTO "public"."dbb_step" VALUES (2, 2, 4, 16, 9, '\x305bb88977f1af6e45f48d0bc06e4e1b', '2026-11-20T16:48:09.247Z', NULL);
INSERT INTO "public"."dbb_step" VALUES (3, 1, 2, 8, 4, '\x4b50416c67963bd58e97a1ae98e691a3', '2026-11-20T16:48:09.258Z', NULL);
INSERT INTO "public"."dbb_step" VALUES (3, 2, 2, 8, 3, '\xbe05a75ef32cbabbff1791d2093fa2ca', '2026-11-20T16:48:09.264Z', NULL);
SELECT pg_catalog.setval('"public"."dbb_event_event_id_seq"', 3, true);
SELECT pg_catalog.setval('"public"."dbb_prompt_prompt_id_seq"', 4, true);
SELECT pg_catalog.setval('"public"."dbb_run_run_id_seq"', 3, true);
ALTER TABLE ONLY "public"."dbb_checkpoint"
    ADD CONSTRAINT "dbb_checkpoint_pkey" PRIMARY KEY ("run_id", "step", "tag");
ALTER TABLE ONLY "public"."dbb_event"
    ADD CONSTRAINT "dbb_event_pkey" PRIMARY KEY ("event_id");
ALTER TABLE ONLY "public"."dbb_history"
    ADD CONSTRAINT "dbb_history_pkey" PRIMARY KEY ("run_id", "step", "prompt_id");
ALTER TABLE ONLY "public"."dbb_posterior"
    ADD CONSTRAINT "dbb_posterior_pkey" PRIMARY KEY ("run_id", "prompt_id");
ALTER TABLE ONLY "public"."dbb_probe"
    ADD CONSTRAINT "dbb_probe_pkey" PRIMARY KEY ("run_id", "step", "prompt_id");
ALTER TABLE ONLY "public"."dbb_prompt"
    ADD CONSTRAINT "dbb_prompt_hash_key" UNIQUE ("hash");
ALTER TABLE ONLY "public"."dbb_prompt"
    ADD CONSTRAINT "dbb_prompt_pkey" PRIMARY KEY ("prompt_id");
ALTER TABLE ONLY "public"."dbb_run"
    ADD CONSTRAINT "dbb_run_name_key" UNIQUE ("name");
ALTER TABLE ONLY "public"."dbb_run"
    ADD CONSTRAINT "dbb_run_pkey" PRIMARY KEY ("run_id");
ALTER TABLE ONLY "public"."dbb_run"
    ADD CONSTRAINT "dbb_run_uuid_key" UNIQUE ("uuid");
ALTER TABLE ONLY "public"."dbb_schema"
    ADD CONSTRAINT "dbb_schema_pkey" PRIMARY KEY ("version");
ALTER TABLE ONLY "public"."dbb_step"
    ADD CONSTRAINT "dbb_step_pkey" PRIMARY KEY ("run_id", "step");
ALTER TABLE ONLY "public"."dbb_checkpoint"
    ADD CONSTRAINT "dbb_checkpoint_run_id_fkey" FOREIGN KEY ("run_id") REFERENCES "public"."dbb_run"("run_id");
ALTER TABLE ONLY "public"."dbb_event"
    ADD CONSTRAINT "dbb_event_run_id_fkey" FOREIGN KEY ("run_id") REFERENCES "public"."dbb_run"("run_id");
ALTER TABLE ONLY "public"."dbb_step"
    ADD CONSTRAINT "dbb_step_run_id_fkey" FOREIGN KEY ("run_id") REFERENCES "public"."dbb_run"("run_id");
