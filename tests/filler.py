"""Fills a store with runs whose states are easy to work out by hand, and reads it back whole."""

import numpy as np
from sqlalchemy import text
from store_invariants import check

from openrlhf_dbb.storage import EvaluationRows, ProbeRows, RolloutRows, StepRows, Usage

DISCOUNT = 0.5


def run(store, name="run", fields=("alpha", "beta"), dataset="sums", **values):
    """A new run; any argument of ``create_run`` may be given."""
    arguments = {
        "estimator": "dbb" if fields == ("alpha", "beta") else "other",
        "estimator_version": 1,
        "parameters": {"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0},
        "state_fields": fields,
        "model": "tiny",
        "dataset": dataset,
        "dataset_digest": "d1",
        "reward": "exact",
        "config": {"seed": 7},
    }
    return store.create_run(name, **(arguments | values))


def prompts(store, count):
    """Ids of the prompts "prompt 0", "prompt 1", ..., labelled "0", "1", ..."""
    return store.register_prompts([f"prompt {i}" for i in range(count)], [str(i) for i in range(count)])


def rows(run, ids, successes, rollouts=4, **more):
    """DBB with discount 0.5 and prior Beta(1, 1), from what the run has stored; with :func:`usage` unless given."""
    ids, successes = np.asarray(ids), np.asarray(successes, dtype=float)
    before = run.load(ids)
    prior = np.where(np.isnan(before.state), 1.0, before.state)
    state = DISCOUNT * prior + np.stack([successes, rollouts - successes], axis=1)
    mean = state[:, 0] / state.sum(axis=1)
    return StepRows(
        prompt_ids=ids,
        rollouts=np.full(len(ids), rollouts),
        successes=successes,
        mean=mean,
        variance=mean * (1 - mean),
        state=state,
        previous_state=before.state,
        previous_step=before.step,
        **({"usage": usage(ids, successes, rollouts)} | more),
    )


def usage(ids, successes, rollouts=4, **counts):
    """All rollouts of 10 tokens trained on and informative, zero-variance groups rescued, and each prompt
    skipped once; or as given in ``counts``."""
    successes, generated = np.asarray(successes).astype(int), rollouts * len(ids)
    zero_variance = rollouts * int(np.isin(successes, (0, rollouts)).sum())
    columns = {
        "generated": generated,
        "generated_tokens": 10 * generated,
        "trained": generated,
        "trained_tokens": 10 * generated,
        "zero_variance": zero_variance,
        "informative": generated,
        "rescued": zero_variance,
        "skipped": len(ids),
        "groups": len(ids),
        "informative_groups": len(ids),
    }
    return Usage(**(columns | counts))


def probes(ids, samples, successes, squares=None):
    """Probes of these prompts; ``squares`` as of scores 0 and 1 unless given."""
    successes = np.array(successes, dtype=float)
    squares = successes if squares is None else np.array(squares)
    return ProbeRows(np.array(ids), np.array(samples), successes, squares)


def rollouts(ids, successes, samples=2):
    """The first rollouts of each prompt, the right ones before the wrong ones, of 10 tokens."""
    sample = np.tile(np.arange(samples), len(ids))
    reward = (sample < np.repeat(successes, samples)).astype(float)
    return RolloutRows(
        prompt_ids=np.repeat(ids, samples),
        sample=sample,
        reward=reward,
        score=reward,
        advantage=reward - 0.5,
        baseline=np.full(len(sample), 0.5),
        scale=np.ones(len(sample)),
        weight=np.ones(len(sample)),
        length=np.full(len(sample), 10),
        truncated=np.zeros(len(sample)),
        log_prob=np.full(len(sample), -1.5),
        text=[f"answer {i}" for i in sample],
    )


def step(run, step, ids, successes, rollouts=4, **more):
    """Record one step; the rows recorded."""
    recorded = rows(run, ids, successes, rollouts, **more)
    run.record_step(step, recorded)
    return recorded


def evaluation(ids, successes, benchmark="sums", samples=4):
    """Results of (P,) prompts with these (R, P) successes among 4 responses of 10 tokens, none of them missing or
    truncated; the majority is right where more than half are."""
    successes = np.atleast_2d(np.asarray(successes, dtype=float))
    whole = np.full(successes.shape, samples)
    return EvaluationRows(
        benchmark=benchmark,
        prompt_ids=np.asarray(ids),
        samples=whole,
        verified=whole,
        successes=successes,
        best=(successes > 0).astype(float),
        majority=(2 * successes > samples).astype(float),
        tokens=10 * whole,
        truncated=0 * whole,
    )


def successes(step, count):
    """Any number of successes among four, another at each step."""
    return (np.arange(count) + step) % 5


def train(run, ids, steps):
    """Record these steps, each of all prompts."""
    for each in steps:
        step(run, each, ids, successes(each, len(ids)))


def check_trained(store, run, ids, steps):
    """The posteriors are those of steps 1 to ``steps`` undisturbed, and no row is missing or there twice."""
    state = np.ones((len(ids), 2))
    for each in range(1, steps + 1):
        right = successes(each, len(ids))
        state = DISCOUNT * state + np.stack([right, 4 - right], axis=1)
    table = run.load(ids)
    np.testing.assert_array_equal(table.state, state)
    assert table.visits.tolist() == [steps] * len(ids)
    counts = "SELECT count(*), count(DISTINCT step) FROM posterior_history WHERE run_id = :run"
    assert store.query(counts, run=run.record.run_id) == [(steps * len(ids), steps)]
    generated = "SELECT count(*), min(generated), max(generated) FROM steps WHERE run_id = :run"
    assert store.query(generated, run=run.record.run_id) == [(steps, 4 * len(ids), 4 * len(ids))]
    assert run.record.last_step == steps
    assert check(store) == []


def dump(store):
    """All rows of the tables that hold a run's progress, to compare before and after."""
    tables = {
        "dbb_posterior": "run_id, prompt_id",
        "dbb_history": "run_id, step, prompt_id",
        "dbb_probe": "run_id, step, prompt_id",
        "dbb_rollout": "run_id, step, prompt_id, sample",
        "dbb_step": "run_id, step",
        "dbb_checkpoint": "run_id, step, tag",
        "dbb_event": "event_id",
        "dbb_evaluation": "evaluation_id",
        "dbb_evaluation_result": "evaluation_id, benchmark, repeat, place",
    }
    with store.database.transaction() as connection:
        rows = {
            table: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY {order}"))]
            for table, order in tables.items()
        }
        runs = connection.execute(
            text("SELECT run_id, status, last_step, parent_uuid, shared_start FROM dbb_run ORDER BY run_id")
        )
        return rows | {"dbb_run": [tuple(row) for row in runs]}
