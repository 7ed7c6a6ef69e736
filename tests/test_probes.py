"""Probes: which prompts, how their error is measured, and that they are stored apart from what is trained on."""

import numpy as np
import pytest

import estimators
import storage
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Probes, StepExtras, probe_metrics, probe_rows, probed_prompts

MANY = [(f"{i}+1=", str(i + 1)) for i in range(10_000)]
NAN = np.nan


def test_the_chosen_prompts_are_about_the_fraction_asked_for():
    # binomial: standard deviation sqrt(0.1 * 0.9 / 10000) = 0.003
    assert abs(len(probed_prompts(MANY, 0.1, seed=42)) / 10_000 - 0.1) < 4 * 0.003
    assert probed_prompts(MANY, 0.0, seed=42) == set()
    assert probed_prompts(MANY, 1.0, seed=42) == set(MANY)


def test_the_choice_depends_on_prompt_label_and_seed_alone():
    chosen = probed_prompts(MANY, 0.1, seed=42)
    assert probed_prompts(reversed(MANY[:100]), 0.1, seed=42) == chosen & set(MANY[:100])
    assert chosen < probed_prompts(MANY, 0.2, seed=42)
    others = [probed_prompts(MANY, 0.1, seed=43), probed_prompts([(text, "?") for text, _ in MANY], 0.1, seed=42)]
    for other in others:
        overlap = {text for text, _ in chosen} & {text for text, _ in other}
        assert len(overlap) < 0.02 * 10_000  # 100 expected of independent tenths


def test_metrics_by_hand():
    scores_Q_M = np.array([[1.0, 0, 0, 0], [0.2, 0.6, NAN, NAN], [1, NAN, NAN, NAN]])
    # (0.5 - 0.25)^2 - 0.25 * 0.75 / 3 and (0.5 - 0.4)^2 - 0.08 / 2; a single score is not measured.
    rows = probe_rows(np.arange(3), scores_Q_M)
    logged = probe_metrics(np.array([0.5, 0.5, 0.5]), np.array([0.25, 0.4, 1]), rows)
    assert logged == pytest.approx({"probe/groups": 3, "probe/mse": -0.03 / 2, "probe/mse_point": -0.1025 / 2})


def test_a_probe_with_a_single_score_is_counted_but_not_measured():
    single, none = probe_rows(np.array([1]), np.array([[1.0, NAN]])), probe_rows(np.arange(0), np.empty((0, 4)))
    assert probe_metrics(np.array([0.5]), np.array([0.5]), single) == {"probe/groups": 1.0}
    assert probe_metrics(np.empty(0), np.empty(0), none) == {"probe/groups": 0.0}


PROMPTS = [(f"{i}+1=", str(i + 1)) for i in range(3)]


@pytest.fixture
def posteriors(open_new):
    """Function: posteriors of three prompts in a new run."""

    def make(name, **parameters):
        estimator = estimators.build(name, **parameters)
        store = open_new("sqlite")
        run = store.create_run(
            "run", estimator=name, estimator_version=estimator.version, parameters=parameters,
            state_fields=estimator.state_fields, model="m", dataset="d", dataset_digest="x", reward="r", config={},
        )  # fmt: skip
        texts, labels = zip(*PROMPTS, strict=True)
        return Posteriors(estimator, store, run, texts, labels), store

    return make


def observe(ours, step, rewards_P_G, probed=None):
    """One step with a group of every prompt."""
    rewards_P_G = np.asarray(rewards_P_G, dtype=float)
    texts, labels = zip(*(prompt for prompt in PROMPTS for _ in range(rewards_P_G.shape[1])), strict=True)
    scored = ours.observe(step, texts, labels, rewards_P_G.reshape(-1), extras=StepExtras(probes=probed))
    ours.settle()
    return scored


GROUPS = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
PROBED = Probes([PROMPTS[1], PROMPTS[0]], np.array([[1.0, 0, 0, 0], [1, 1, 0, NAN]]))


def test_probes_are_stored_with_the_step_and_measure_both_estimates(posteriors):
    ours, store = posteriors("dbb", discount=0.5)
    scored = observe(ours, 1, GROUPS, PROBED)
    stored = store.query("SELECT prompt, p.step, p.samples, p.successes FROM probes p JOIN prompts USING (prompt_id)")
    assert sorted(map(tuple, stored)) == [("0+1=", 1, 3, 2.0), ("1+1=", 1, 4, 1.0)]
    # dbb: 4.5 / 5 and 1.5 / 5; noise 2/9 / 2 and 3/16 / 3; the groups' own means are 1 and 1/4
    assert scored.metrics["probe/groups"] == 2
    dbb = [(0.9 - 2 / 3) ** 2 - 1 / 9, (0.3 - 0.25) ** 2 - 1 / 16]
    assert scored.metrics["probe/mse"] == pytest.approx(np.mean(dbb))
    point = [(1 - 2 / 3) ** 2 - 1 / 9, -1 / 16]
    assert scored.metrics["probe/mse_point"] == pytest.approx(np.mean(point))


def test_probes_change_nothing_that_is_trained_or_estimated(posteriors):
    (with_probes, first), (without, second) = posteriors("auto"), posteriors("auto")
    for step in (1, 2):
        scored = observe(with_probes, step, GROUPS, PROBED), observe(without, step, GROUPS)
        assert scored[0].advantages.tolist() == scored[1].advantages.tolist()
    history = "SELECT * FROM dbb_history ORDER BY step, prompt_id"
    assert first.query(history) == second.query(history)
    assert first.query("SELECT shared, rollouts FROM steps") == second.query("SELECT shared, rollouts FROM steps")
    assert second.query("SELECT * FROM probes") == []


def test_a_probe_without_a_score_or_without_an_estimate_is_left_out(posteriors):
    ours, store = posteriors("dbb")
    groups = [[1, 0], [NAN, NAN], [0, 0]]
    scored = observe(ours, 1, groups, Probes(PROMPTS, np.array([[1.0, 0], [1, 0], [NAN, NAN]])))
    assert [row[0] for row in store.query("SELECT prompt FROM probes JOIN prompts USING (prompt_id)")] == ["0+1="]
    assert scored.metrics["probe/groups"] == 1


def test_real_scores_are_stored_with_their_squares(posteriors):
    ours, store = posteriors("dbb", partial_credit=True)
    observe(ours, 1, GROUPS, Probes([PROMPTS[2]], np.array([[0.5, 0.25]])))
    assert [tuple(row) for row in store.query("SELECT samples, successes, squares FROM dbb_probe")] == [
        (2, 0.75, 0.3125)
    ]


UPDATES = {"forgetting": "updates", "updates_per_epoch": 2.0}
SHARING = [("auto", {}), ("empirical_bayes", {}), ("dbb", UPDATES)]
STEPS = [GROUPS, [[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]], [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]]


@pytest.mark.parametrize(("name", "parameters"), SHARING, ids=[name for name, _ in SHARING])
def test_run_wide_state_survives_a_reload_and_goes_back_with_the_run(posteriors, name, parameters):
    through, first = posteriors(name, **parameters)
    stopping, second = posteriors(name, **parameters)
    expected = [observe(through, step, groups).advantages.tolist() for step, groups in enumerate(STEPS, 1)]
    observe(stopping, 1, STEPS[0])
    for groups in (STEPS[2], STEPS[0]):  # two steps that the checkpoint does not have
        observe(stopping, stopping.step + 1, groups)
    stopping.roll_back(1)
    for step in (2, 3):
        assert observe(stopping, step, STEPS[step - 1]).advantages.tolist() == expected[step - 1]
    rows = "SELECT step, prompt_id, mean, variance, alpha, beta, state FROM dbb_history ORDER BY step, prompt_id"
    assert first.query(rows) == second.query(rows)
    assert first.query("SELECT step, shared FROM steps") == second.query("SELECT step, shared FROM steps")


def test_a_run_wide_number_is_logged(posteriors):
    ours, _ = posteriors("dbb", **UPDATES)
    assert [observe(ours, step, GROUPS).metrics["estimator/updates"] for step in (1, 2)] == [1, 2]


def test_forgetting_by_updates_counts_the_steps_between_two_visits(posteriors):
    ours, store = posteriors("dbb", discount=0.25, **UPDATES)
    for step, prompt in ((1, 0), (2, 1), (3, 1), (4, 0)):
        ours.observe(step, [PROMPTS[prompt][0]] * 4, [PROMPTS[prompt][1]] * 4, np.ones(4))
    ours.settle()
    last = store.query("SELECT alpha FROM posterior_history WHERE step = 4")[0][0]
    # first visit 0.25 * 1 + 4; three updates later at two an epoch: 0.25 ** 1.5 = 0.125
    assert last == pytest.approx(0.125 * 4.25 + 4)


def test_probes_of_a_step_that_cannot_be_stored_are_not_stored_either(posteriors):
    ours, store = posteriors("dbb")
    store.claim_run(ours.run.record.run_id, take_over=True)
    with pytest.raises(storage.StoreError, match="was taken over by"):
        observe(ours, 1, GROUPS, PROBED)
    assert store.query("SELECT * FROM dbb_probe") == []
