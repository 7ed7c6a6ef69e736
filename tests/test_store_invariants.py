"""The check of a store: silent on sound ones, and each kind of damage found where it is."""

import numpy as np
import pytest
from sqlalchemy import text
from store_invariants import SHOWN, check

from storage import ProbeRows


@pytest.fixture
def sound(store, fill):
    """Run "old" of 2 steps, run "new" warm-started from it with 3, a checkpoint, a probe, run-wide state, an evaluation
    of step 2 (id 1), and one without a run (id 2)."""
    ids = np.sort(fill.prompts(store, 3))  # 1, 2, 3
    old = fill.run(store, "old")
    fill.step(old, 1, ids, [4, 1, 0])
    fill.step(old, 2, ids[:2], [4, 1])
    old.finish()
    new = fill.run(store, "new")
    new.warm_start(store, old.record, ids)
    fill.step(new, 1, ids[:2], [1, 2])
    new.record_checkpoint(1, "one")
    probes = ProbeRows(ids[:1], np.array([8]), np.array([2.0]), np.array([2.0]))
    fill.step(new, 2, ids, [3, 3, 3], probes=probes, shared={"clock": np.array([0.1])})
    fill.step(new, 3, [], [])
    rows = [fill.evaluation(ids, [[4, 1, 0], [3, 0, 0]])]
    new.record_evaluation(2, "training", rows, model="tiny", config={})
    store.record_evaluation("alone", rows, model="tiny", config={})
    return store


def _damage(store, statement):
    with store.database.transaction(write=True) as connection:
        if store.database.is_sqlite:
            connection.execute(text("PRAGMA defer_foreign_keys = ON"))
        connection.execute(text(statement))


def test_a_sound_store_has_no_violation(sound, fill):
    assert check(sound) == []
    run = sound.claim_run(2)
    run.roll_back(1)
    assert check(sound) == []
    packed = fill.run(sound, "packed", fields=("level", "alpha", "beta"))
    assert check(sound) == []
    packed.discard()
    assert check(sound) == []


def test_an_empty_store_has_no_violation(store):
    assert check(store) == []


NEW = "WHERE run_id = 2"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (f"UPDATE dbb_run SET status = 'odd' {NEW}", {"new: status is running or finished: status odd"}),
        (
            f"UPDATE dbb_run SET last_step = 4 {NEW}",
            {"new: every step up to the last one is recorded once: last step 4; 3 steps recorded, 1 to 3"},
        ),
        (
            f"DELETE FROM dbb_step {NEW} AND step = 3",
            {"new: every step up to the last one is recorded once: last step 3; 2 steps recorded, 1 to 2"},
        ),
        (
            f"UPDATE dbb_history SET inclusion = 0 {NEW} AND step = 1 AND prompt_id = 2",
            {"new: a probability of inclusion is above 0 and at most 1: step 1, prompt 2: 0.0"},
        ),
        (
            f"UPDATE dbb_step SET rollouts = 9 {NEW} AND step = 1",
            {
                "new: a step's prompts, rollouts and successes are those of its history: step 1: 2 prompts, "
                "9 rollouts, 3.0 successes; 2, 8, 3.0 in the history"
            },
        ),
        (
            f"UPDATE dbb_history SET prev_step = 0 {NEW} AND step = 2 AND prompt_id = 1",
            {"new: prev_step is the prompt's step before: step 2, prompt 1: prev_step 0, the step before is 1"},
        ),
        (
            f"UPDATE dbb_history SET prev_beta = 7 {NEW} AND step = 2 AND prompt_id = 3",  # 0.5 * 7 + 1 is not 3.25
            {
                "new: alpha = discount * alpha + successes, beta = discount * beta + failures: "
                "step 2, prompt 3: (0.5, 7.0), 4 rollouts with 3.0 successes, gave (3.25, 3.25)"
            },
        ),
        (
            f"UPDATE dbb_posterior SET alpha = alpha + 1e-15 {NEW} AND prompt_id = 1",
            {"new: a posterior is the state after its newest visit: prompt 1: (5.0625"},
        ),
        (
            f"DELETE FROM dbb_posterior {NEW} AND prompt_id = 2",
            {"new: a prompt of the history has the posterior of its newest visit: prompt 2: newest visit at step 2, "},
        ),
        (
            f"UPDATE dbb_posterior SET visits = 3 {NEW} AND prompt_id = 2",
            {"new: visits count the prompt's rows of the history: prompt 2: 3 visits, 2 rows"},
        ),
        (
            "INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, visits, step) VALUES (1, 99, 1, 1, 0, 0)",
            {
                "old: a posterior comes from a visit in the history or from the warm start: prompt 99: step 0, ",
                "old: a row belongs to a prompt: prompt 99, 1 rows of dbb_posterior",
            },
        ),
        (
            f"UPDATE dbb_history SET variance = -1 {NEW} AND step = 1 AND prompt_id = 1",
            {"new: estimates are finite, variances not negative, rollouts at least 1: step 1, prompt 1: mean "},
        ),
        (
            f"UPDATE dbb_probe SET squares = 0.1 {NEW}",
            {"new: a probe belongs to a recorded step and has at least one sample: step 2, prompt 1: 8 samples"},
        ),
        (
            f"UPDATE dbb_checkpoint SET step = 4 {NEW}",
            {"new: a checkpoint is of a recorded step: checkpoint one of step 4, last step 3"},
        ),
        (
            "INSERT INTO dbb_probe VALUES (7, 1, 1, 8, 2, 2)",
            {
                "run_id 7: a row belongs to a run: 1 rows of dbb_probe",
                "run_id 7: a probe belongs to a recorded step and has at least one sample: step 1, prompt 1: 8 samples",
            },
        ),
        (
            f"UPDATE dbb_step SET skipped = 7, groups = NULL {NEW} AND step = 2",
            {"new: a step's totals are the sums of its usage: step 2: skipped 7 for 3 groups NULL for 3"},
        ),
        (
            f"UPDATE dbb_step SET generated = 1 {NEW} AND step = 3",
            {"new: a step's totals are the sums of its usage: step 3: generated 1 for 0"},
        ),
        (
            f"UPDATE dbb_step SET generated = NULL {NEW} AND step = 1",
            {
                f"new: a row of the usage belongs to a recorded step with totals: step 1, prompt {prompt}"
                for prompt in (1, 2)
            },
        ),
        (
            f"UPDATE dbb_usage SET rescued = 1 {NEW} AND step = 2 AND prompt_id = 3",  # 3 of 4: not of zero variance
            {
                "new: a step's totals are the sums of its usage: step 2: rescued 0 for 1",
                "new: no count of the usage is negative or above the count it is a part of: step 2, prompt 3: "
                "generated 4, generated_tokens 40, trained 4, trained_tokens 40, zero_variance 0, informative 4, ",
            },
        ),
        (
            f"UPDATE dbb_usage SET replayed = 0 {NEW} AND step = 1 AND prompt_id = 1",
            {
                "new: a step's totals are the sums of its usage: step 1: replayed 3 for 2",
                "new: no count of the usage is negative or above the count it is a part of: step 1, prompt 1: ",
            },
        ),
        (
            f"DELETE FROM dbb_usage {NEW} AND step = 2 AND prompt_id = 3",
            {
                "new: a step's totals are the sums of its usage: step 2: generated 12 for 8 generated_tokens ",
                "new: where a step has usage, it has generated the rollouts of every prompt: step 2, prompt 3: ",
            },
        ),
        (
            "INSERT INTO dbb_usage VALUES (7, 1, 99, 4, 40, 0, 0, 0, 0, 0, 0, 0, 0)",
            {
                "run_id 7: a row belongs to a run: 1 rows of dbb_usage",
                "run_id 7: a row belongs to a prompt: prompt 99, 1 rows of dbb_usage",
                "run_id 7: a row of the usage belongs to a recorded step with totals: step 1, prompt 99",
            },
        ),
        (
            "UPDATE dbb_evaluation SET step = 4 WHERE evaluation_id = 1",
            {
                "new: an evaluation has no step, or a recorded step of its run: evaluation 1 (training) of step 4, "
                "last step 3"
            },
        ),
        (
            "UPDATE dbb_evaluation SET step = 0 WHERE evaluation_id = 2",
            {": an evaluation has no step, or a recorded step of its run: evaluation 2 (alone) of step 0, last"},
        ),
        (
            "DELETE FROM dbb_evaluation_result WHERE evaluation_id = 2",
            {": an evaluation has results: evaluation 2 (alone)"},
        ),
        (
            "DELETE FROM dbb_evaluation WHERE evaluation_id = 1",
            {": a result belongs to an evaluation and to a prompt: evaluation 1: no evaluation_id 1, 6 rows of"},
        ),
        (
            f"""INSERT INTO dbb_evaluation (evaluation_id, run_id, step, name, model, config, created_at)
                SELECT 3, run_id, step, name, model, config, created_at FROM dbb_evaluation {NEW}""",
            {
                "new: a run, step and name have one evaluation: evaluations 1 to 3 (training) of step 2",
                "new: an evaluation has results: evaluation 3 (training)",
            },
        ),
        (
            "DELETE FROM dbb_evaluation_result WHERE evaluation_id = 1 AND repeat = 0 AND place = 1",
            {
                "new: every evaluation run of a benchmark has the same prompts: evaluation 1, sums: 5 results, "
                "for 2 runs of 3 prompts"
            },
        ),
        (
            "UPDATE dbb_evaluation_result SET prompt_id = 3 WHERE evaluation_id = 1 AND repeat = 1 AND place = 1",
            {"new: every evaluation run of a benchmark has the same prompts: evaluation 1, sums: 6 results, "},
        ),
        (
            "UPDATE dbb_evaluation_result SET prompt_id = 99 WHERE evaluation_id = 1 AND place = 1",
            {": a result belongs to an evaluation and to a prompt: evaluation 1: no prompt_id 99, 2 rows of "},
        ),
        (
            "UPDATE dbb_evaluation_result SET verified = 5 WHERE evaluation_id = 1 AND repeat = 1 AND place = 0",
            {
                "new: the counts and scores of a result are consistent: evaluation 1, sums, evaluation run 1, place 0: "
                "4 samples, 5 verified of sum 3.0, best 1.0"
            },
        ),
        (
            "UPDATE dbb_evaluation_result SET best = NULL WHERE evaluation_id = 2 AND repeat = 0 AND place = 0",
            {": the counts and scores of a result are consistent: evaluation 2, sums, evaluation run 0, place 0: 4 "},
        ),
        (
            "UPDATE dbb_prompt SET prompt = 'prompt 9' WHERE prompt_id = 2",
            {": a prompt's hash is that of its text and label: prompt 2"},
        ),
        (
            f"UPDATE dbb_step SET shared = '{{\"clock\": [0.1' {NEW} AND step = 2",
            {"new: run-wide state is JSON of named vectors of finite numbers: step 2"},
        ),
        (
            f"UPDATE dbb_run SET shared_start = '{{\"clock\": [NaN]}}' {NEW}",
            {"new: run-wide state is JSON of named vectors of finite numbers: step 0"},
        ),
        (
            f'UPDATE dbb_run SET state_fields = \'["alpha", "beta", "level"]\' {NEW}',
            {
                f"new: packed state has 8 bytes per field: {table}, prompt {prompt}: 0 bytes, not 8"
                for table in ("dbb_posterior", "dbb_history")
                for prompt in (1, 2, 3)
            },
        ),
    ],
)
def test_damage_is_found_where_it_is(sound, statement, expected):
    _damage(sound, statement)
    found = {f"{violation.run}: {violation.what}: {violation.where}" for violation in check(sound)}
    assert len(found) == len(expected)
    for line in expected:
        assert any(shown.startswith(line) for shown in found), found


def test_a_changed_past_breaks_the_chain_at_the_next_visit(sound):
    _damage(sound, f"UPDATE dbb_history SET alpha = 9 {NEW} AND step = 1 AND prompt_id = 2")
    found = [(violation.what, violation.where) for violation in check(sound)]
    # warm start: (0.5 * 1.5 + 1, 0.5 * 3.5 + 3) = (1.75, 4.75); step 1 with 2 of 4: (2.875, 4.375)
    assert found == [
        (
            "the state before a visit is the state after the visit before",
            "step 2, prompt 2: (2.875, 4.375) before, (9.0, 4.375) after step 1",
        ),
        (
            "alpha = discount * alpha + successes, beta = discount * beta + failures",
            "step 1, prompt 2: (1.75, 4.75), 4 rollouts with 2.0 successes, gave (9.0, 4.375)",
        ),
    ]


def test_a_list_of_one_kind_ends(store, fill):
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, SHOWN + 5), np.ones(SHOWN + 5))
    _damage(store, "UPDATE dbb_posterior SET visits = 2")
    assert len(check(store)) == SHOWN
