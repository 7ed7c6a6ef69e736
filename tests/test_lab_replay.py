"""lab replay: criteria worked out by hand, unbiased in simulation; the recommendation; the command on a real store."""

import csv
import json
import types

import numpy as np
import pytest

from estimators import Estimate
from estimators.dbb import DiscountedBetaBernoulli
from openrlhf_dbb import Posteriors, StepExtras
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import criteria, recorded, specs
from openrlhf_dbb.lab.bootstrap import bootstrap
from openrlhf_dbb.lab.outcomes import evaluate, judge
from openrlhf_dbb.lab.replay_command import introduction, recommendation
from openrlhf_dbb.lab.visits import rerun, visits
from storage import ProbeRows, StepRows, open_store
from storage.log import read_log
from study import regimes


def simulated(regime="paper-walk", prompts=1024, passes=4, rollouts=8, seed=0):
    """Visits, a step per pass over all prompts, and the success probabilities behind them, (V,)."""
    rng = np.random.default_rng(seed)
    p_P_T = regimes.get(regime).paths(rng, prompts, passes)
    successes = rng.binomial(rollouts, p_P_T).T.ravel()
    step, prompt = np.repeat(np.arange(1, passes + 1), prompts), np.tile(np.arange(prompts), passes)
    return visits(step, prompt, 1.0 * successes, np.full(len(step), rollouts)), p_P_T.T.ravel()


def hand_made():
    """Prompts 7 and 9 in step 1, prompt 9 again in step 2: S/N = 1/2, 3/4, 4/4."""
    return visits(np.array([1, 1, 2]), np.array([7, 9, 9]), np.array([1.0, 3.0, 4.0]), np.array([2, 4, 4]))


def test_visits():
    seen = hand_made()
    assert seen.prompts == 2
    assert seen.prompt.tolist() == [0, 1, 1]
    assert seen.earlier.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(seen.rewards_V_G, [[1, 0, np.nan, np.nan], [1, 1, 1, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("successes", [0.5, -1.0, 3.0])
def test_scores_other_than_0_and_1_are_refused(successes):
    with pytest.raises(UsageError, match=r"step 1, prompt 7: .* of 2 rollouts; only rewards 0 and 1"):
        visits(np.array([1]), np.array([7]), np.array([successes]), np.array([2]))


def test_rerun():
    again = rerun(specs.parse("dbb:discount=0.5"), hand_made())
    # Prompt 7: Beta(0.5 + 1, 0.5 + 1). Prompt 9: Beta(0.5 + 3, 0.5 + 1), then Beta(1.75 + 4, 0.75).
    np.testing.assert_allclose(again.estimate.mean, [0.5, 3.5 / 5, 5.75 / 6.5])
    np.testing.assert_allclose(again.group_weight, [2 / 3, 4 / 5, 4 / 6.5])
    np.testing.assert_allclose(again.predictive, [[0.5, 0.5, 1.75], [0.5, 0.5, 0.75]])


class Before(DiscountedBetaBernoulli):
    reads = "before"


def test_an_estimator_that_reads_first_has_nothing_of_the_group():
    again = rerun(Before(discount=0.5), hand_made())
    np.testing.assert_allclose(again.estimate.mean, [0.5, 0.5, 3.5 / 5])
    assert again.group_weight.tolist() == [0, 0, 0]


def test_visits_together_are_steps_one_by_one():
    """dbb has no run-wide state, dbb by updates has: with a pass a step both forget alike."""
    seen, _ = simulated(prompts=50)
    together = rerun(specs.parse("dbb:discount=0.3"), seen)
    by_step = rerun(specs.parse("dbb:discount=0.3,forgetting=updates"), seen)
    np.testing.assert_allclose(together.estimate.mean, by_step.estimate.mean, rtol=1e-12)


def test_error_from_log_by_hand():
    error = criteria.error_from_log(hand_made(), np.array([0.4, 0.7, 0.9]), np.array([1.0, 0.5, 0.25]))
    # (0.1)^2 + 1 * 1 * 1 / (4 * 1);  (0.05)^2 - 0;  (0.1)^2 - 0.5 * 0, since S = N
    np.testing.assert_allclose(error, [0.01 + 0.25, 0.0025, 0.01])


def test_error_from_log_needs_two_rollouts():
    seen = visits(np.array([1]), np.array([1]), np.array([1.0]), np.array([1]))
    assert np.isnan(criteria.error_from_log(seen, np.array([0.5]), np.array([1.0]))).all()


@pytest.mark.parametrize("name", ["point", "dbb:discount=0.4", "dbb:discount=1", "ema", "laplace"])
@pytest.mark.parametrize("rollouts", [2, 8])
def test_error_from_log_is_unbiased(name, rollouts):
    gaps = []
    for seed in range(40):
        seen, p = simulated(prompts=256, rollouts=rollouts, seed=seed)
        again = rerun(specs.parse(name), seen)
        error = criteria.error_from_log(seen, again.estimate.mean, again.group_weight)
        gaps.append(np.mean(error - (again.estimate.mean - p) ** 2))
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / np.sqrt(len(gaps))


def test_beta_binomial():
    # Beta(1, 1): all numbers of successes alike. Beta(2, 1), N = 2: 1/6, 2/6, 3/6.
    masses = np.exp(criteria.beta_binomial(np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([3.0, 2.0])))
    np.testing.assert_allclose(masses, [[1 / 4] * 4, [1 / 6, 2 / 6, 3 / 6, 0]])
    certain = criteria.beta_binomial(np.array([1e-300]), np.array([5.0]), np.array([8.0]))
    assert certain[0, 0] == 0 and np.isfinite(certain).all()


def test_log_score_by_hand():
    seen = hand_made()
    score = criteria.log_score(seen, np.ones(3), np.ones(3))
    np.testing.assert_allclose(score, [np.nan, np.nan, np.log(1 / 5)])


def test_advantages_by_hand():
    # Means 0.5 and variance 0.25: advantages +-1. Variance 0: none. Mean 0.8, variance 0.16: +0.5 four times.
    estimate = Estimate(np.array([0.5, 0.75, 0.8]), np.array([0.25, 0.0, 0.16]))
    found = criteria.advantages(hand_made(), estimate)
    assert found.zero_groups == pytest.approx(1 / 3)
    assert found.zeros == pytest.approx(4 / 10)
    assert found.size == pytest.approx((2 * 1 + 4 * 0.5) / 10)
    assert found.histogram.sum() == pytest.approx(6 / 10)


def test_bootstrap_by_hand():
    """Two prompts of two visits: a draw is (1, 1), (1, 2), (2, 1) or (2, 2)."""
    prompt = np.array([0, 0, 1, 1])
    draws = bootstrap([np.array([0.0, 0.0, 4.0, 4.0]), np.array([3.0, 3.0, 3.0, np.nan])[[0, 1, 2, 2]]], prompt)
    np.testing.assert_allclose(draws.mean_C, [2, 3])
    assert draws.best == 0
    assert set(map(tuple, draws.mean_B_C)) == {(0, 3), (2, 3), (4, 3)}
    wins = draws.wins(["a", "b"])
    assert wins["a"] + wins["b"] == 1 and abs(wins["b"] - 1 / 4) < 4 * np.sqrt(3 / 16 / 1000)
    excess, low, high = draws.excess(0)
    assert (excess[1], low[1], high[1]) == (1, -1, 3)


def dbb_ranking(seen, criterion="mse"):
    candidates = recorded.sweep(["dbb"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1])
    return judge([evaluate(candidate, seen, None) for candidate in candidates], seen, criterion)


@pytest.mark.parametrize("regime", ["very-fast", "paper-walk", "stationary-flat"])
def test_best_discount_is_near_the_best_in_hindsight(regime):
    seen, p = simulated(regime, prompts=4096)
    ranking = dbb_ranking(seen)
    true = [np.mean((rerun(o.estimator, seen).estimate.mean - p) ** 2) for o in ranking.candidates]
    assert true[ranking.bootstrap.best] < 1.02 * min(true)
    _, low, high = ranking.bootstrap.best_value(range(len(true)), [o.value for o in ranking.candidates])
    assert low <= ranking.candidates[int(np.argmin(true))].value <= high


def test_recommendation():
    seen, _ = simulated("stationary-flat", prompts=512)
    lines = recommendation(dbb_ranking(seen), seen)
    assert lines[-1] == "use next: --estimator dbb --dbb.discount 1"
    assert any(line.startswith("best discount of dbb: 1 (95 %: ") for line in lines)


def test_what_is_fitted_to_the_groups_must_win_by_more():
    """auto leads dbb 0.1 by far, dbb 0.5 by less than its fit to 64 prompts may explain."""
    seen, _ = simulated("stationary-flat", prompts=64)
    text = {}
    for discount in (0.02, 0.8):
        candidates = recorded.sweep(["auto", "dbb"], [discount])
        ranking = judge([evaluate(candidate, seen, None) for candidate in candidates], seen, "mse")
        text[discount] = "\n".join(recommendation(ranking, seen))
        assert "auto is fitted to these very groups, so its mse may be too low by" in text[discount]
    assert "cannot tell" in text[0.8] and "cannot tell" not in text[0.02]


def test_one_visit_a_prompt_says_nothing_about_discounts():
    seen, _ = simulated(passes=1, prompts=64)
    text = " ".join(recommendation(dbb_ranking(seen), seen))
    assert "every prompt was visited once: discounts cannot be compared" in text
    assert "--estimator" not in text


def test_few_prompts_cannot_tell():
    seen, _ = simulated(prompts=6, passes=2, seed=1)
    text = "\n".join(recommendation(dbb_ranking(seen), seen))
    assert "only 6 prompts: the intervals below say little" in text
    assert "this log does not determine it" in text


def test_sweep():
    labels = [
        specs.label(e) for e in recorded.sweep(["point", "ema", "dbb:discount=0.3"], [0.5, 1.0], [(1, 1), (2, 1)])
    ]
    assert labels == ["point", "ema 0.5", "dbb 0.3", "dbb 0.3 prior_alpha=2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("point", "--estimator point"),
        ("dbb", "--estimator dbb --dbb.discount 0.5"),
        (
            "dbb:discount=0.4,prior_alpha=2,partial_credit=true",
            "--estimator dbb --dbb.discount 0.4 --dbb.prior_alpha 2.0 --dbb.partial_credit",
        ),
    ],
)
def test_flags(text, expected):
    assert recorded.flags(specs.parse(text)) == expected


@pytest.fixture
def written(open_new, fill):
    """Store with run "walk": 64 prompts in 3 passes of 4 steps, N = 8, every fourth prompt probed; and their S_T_P."""
    store, rng = open_new("sqlite"), np.random.default_rng(5)
    run, ids = fill.run(store, "walk"), fill.prompts(store, 64)
    p_P_T = regimes.get("paper-walk").paths(rng, 64, 3)
    successes_T_P = rng.binomial(8, p_P_T.T)
    step = 0
    for t in range(3):
        for rows in np.split(rng.permutation(64), 4):
            step += 1
            probed = rows[rows % 4 == 0]
            found = rng.binomial(100, p_P_T[probed, t]).astype(float)
            step_rows = fill.rows(run, ids[rows], successes_T_P[t, rows], rollouts=8)
            step_rows.probes = ProbeRows(ids[probed], np.full(len(probed), 100), found, found)
            run.record_step(step, step_rows)
    return store, successes_T_P


def test_command(written, tmp_path, capsys):
    store, successes_T_P = written
    assert main(["lab", "replay", "walk", "--store.url", store.url, "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "run walk: 192 visits of 64 prompts, 8 rollouts a visit" in out
    assert "probes: 48 visits, 100 samples each" in out
    assert "criterion: mean squared error against the probes" in out
    for name in ("replay.csv", "replay_advantages.csv", "replay_probes.png", "replay_advantages.svg"):
        assert (tmp_path / name).stat().st_size > 0
    rows = {row["estimator"]: row for row in csv.DictReader((tmp_path / "replay.csv").read_text().splitlines())}
    assert float(rows["dbb 0.5"]["zero-advantage groups"]) == 0
    zero_variance = np.mean((successes_T_P == 0) | (successes_T_P == 8))
    assert float(rows["point"]["zero-advantage groups"]) == pytest.approx(zero_variance)
    # The first four steps are the first visits; p (1 - p) / 99 is the noise of a probe's 100 samples.
    probed = store.query(
        "SELECT h.successes, p.successes FROM dbb_probe p JOIN dbb_history h USING (run_id, step, prompt_id) "
        "WHERE step <= 4"
    )
    share, p = np.array([tuple(row) for row in probed]).T / [[8], [100]]
    assert len(p) == 16
    wanted = np.mean((share - p) ** 2 - p * (1 - p) / 99)
    assert float(rows["point"]["mse probes first visits"]) == pytest.approx(wanted)


def test_a_run_of_single_rollouts_is_judged_by_its_forecasts(store, fill, tmp_path, capsys):
    run, ids = fill.run(store), fill.prompts(store, 2)
    for step, successes in enumerate(([1, 0], [1, 0], [1, 1]), start=1):
        fill.step(run, step, ids, successes, rollouts=1)
    argv = ["lab", "replay", "--store.url", store.url, "-o", str(tmp_path), "--estimators", "dbb", "--discounts", "0.5"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "6 visits of 2 prompts, 1 rollouts a visit\n" in out
    assert "criterion: minus log-likelihood of the next visit's successes" in out


def test_visits_of_one_rollout_have_no_variance_to_tell_of():
    of_one = visits(np.array([1, 2]), np.array([7, 7]), np.array([1.0, 0.0]), np.array([1, 1]))
    run = recorded.RecordedRun(types.SimpleNamespace(name="old", estimator="dbb", parent=None), of_one, None)
    assert introduction(run, None)[0] == "run old: 2 visits of 1 prompts, 1 rollouts a visit"


def test_the_latest_run_as_json(written, tmp_path, capsys):
    argv = ["lab", "replay", "--store.url", written[0].url, "-o", str(tmp_path), "--json", "--criterion", "mse"]
    assert main([*argv, "--estimators", "point", "dbb", "--discounts", "0.2", "0.4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"run", "candidates", "recommendation", "files"}
    assert found["run"] == "walk" and found["recommendation"][-1].startswith("use next: --estimator dbb ")
    rows = list(csv.DictReader((tmp_path / "replay.csv").read_text().splitlines()))
    assert [row["estimator"] for row in found["candidates"]] == ["point", "dbb 0.2", "dbb 0.4"]
    assert [row["mse log"] for row in found["candidates"]] == [float(row["mse log"]) for row in rows]
    assert str(tmp_path / "replay.csv") in found["files"]


def test_replay_of_the_run_itself_gives_what_it_stored(written):
    store, _ = written
    run = recorded.read(types.SimpleNamespace(run="walk", store_url=store.url))
    stored = store.query("SELECT mean FROM posterior_history ORDER BY step, prompt_id")
    again = rerun(recorded.own_estimator(run.record), run.visits)
    np.testing.assert_allclose(again.estimate.mean, [row[0] for row in stored], rtol=1e-12)


@pytest.fixture
def late(open_new):
    """Run "late" of dbb by updates, an epoch an update: as recorded groups (step, prompt, S of 4), and their lags.

    The fraction is a group of which two policies wrote half each; the last group of "a" is older than the one before.
    """
    store = open_new("sqlite")
    parameters = {"discount": 0.5, "forgetting": "updates", "updates_per_epoch": 1.0}
    steps = [
        {"a": (4, [0] * 4), "b": (1, [0] * 4)},
        {"b": (2, [0, 0, 1, 1])},
        {"a": (0, [2] * 4)},
        {"a": (2, [1] * 4), "b": (3, [3] * 4)},
    ]
    with Posteriors.create(store, "late", ["a", "b"], ["", ""], estimator="dbb", parameters=parameters) as posteriors:
        for step, groups in enumerate(steps, start=1):
            prompts = [prompt for prompt in groups for _ in range(4)]
            rewards = [float(sample < successes) for successes, _ in groups.values() for sample in range(4)]
            versions = [version for _, of_group in groups.values() for version in of_group]
            posteriors.observe(step, prompts, [""] * len(prompts), rewards, extras=StepExtras(policy_versions=versions))
        ids = [posteriors.prompt_ids["a", ""], posteriors.prompt_ids["b", ""]]
    return store, recorded.read(types.SimpleNamespace(run="late", store_url=store.url)), ids


def test_replay_of_an_asynchronous_run_gives_what_it_stored(late):
    store, run, (a, b) = late
    rows = store.query("SELECT step, prompt_id, lag, mean, alpha, beta FROM posterior_history ORDER BY step, prompt_id")
    assert {(row.step, row.prompt_id): row.lag for row in rows} == {
        (1, a): 0, (1, b): 0, (2, b): 0.5, (3, a): 0, (4, a): 2, (4, b): 0,
    }  # fmt: skip
    again = rerun(recorded.own_estimator(run.record), run.visits)
    np.testing.assert_allclose(again.estimate.mean, [row.mean for row in rows], rtol=1e-12)
    np.testing.assert_allclose(again.group_weight, [4 / (row.alpha + row.beta) for row in rows], rtol=1e-12)
    # Groups of "a": 4 of update 1, 0 of update 3, then 2 of update 2. The prior is 3 updates old, the first group 2.
    (last,) = (at for at, row in enumerate(rows) if (row.step, row.prompt_id) == (4, a))
    assert again.estimate.mean[last] == pytest.approx((1 / 8 + 4 / 4 + 2 / 2) / (2 / 8 + 4 / 4 + 4 + 4 / 2))


def test_replay_says_how_late_the_groups_were(late):
    _, run, _ = late
    assert "lag: 0.417 training steps on average, 2 at most" in introduction(run, None)  # 2.5 in 6 groups
    on_policy, _ = simulated(prompts=8)
    assert not any("lag" in line for line in introduction(recorded.RecordedRun(run.record, on_policy, None), None))


@pytest.mark.parametrize("criterion", ["mse", "likelihood"])
def test_command_by_other_criteria(written, tmp_path, capsys, criterion):
    argv = ["lab", "replay", "walk", "--store.url", written[0].url, "-o", str(tmp_path), "--criterion", criterion]
    assert main([*argv, "--estimators", "dbb", "--discounts", "0.2", "0.4", "--priors", "1,1", "0.5,0.5"]) == 0
    labels = ["dbb 0.2", "dbb 0.2 prior_alpha=0.5 prior_beta=0.5", "dbb 0.4", "dbb 0.4 prior_alpha=0.5 prior_beta=0.5"]
    rows = list(csv.DictReader((tmp_path / "replay.csv").read_text().splitlines()))
    assert [row["estimator"] for row in rows] == labels
    best = min(rows, key=lambda row: float(row["excess over best"]))
    assert f"use next: {best['parameters']}\n" in capsys.readouterr().out


def test_warm_start_is_said():
    seen, _ = simulated(prompts=8)
    record = types.SimpleNamespace(name="new", estimator="dbb", parent={"name": "old"})
    text = "\n".join(introduction(recorded.RecordedRun(record, seen, None), specs.parse("dbb")))
    assert "warm-started from old: candidates are replayed from their own priors instead" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nobody"], "there is no run 'nobody'"),
        (["empty"], "run 'empty' has recorded no rollouts yet"),
        (["partial"], "step 1, prompt 1: 1.5 successes of 4 rollouts; only rewards 0 and 1"),
        (["walk", "--estimators", "dbbb"], "unknown estimator 'dbbb'"),
        (["walk", "--priors", "0,1"], "--priors: dbb.prior_alpha = 0.0 is not"),
        (["walk", "--discounts", "2", "--estimators", "dbb"], "--discounts 2.0: no estimator allows these"),
        (["walk", "--estimators", "laplace", "--criterion", "likelihood"], "--criterion likelihood: "),
    ],
)
def test_errors_are_one_line(written, fill, tmp_path, capsys, argv, message):
    store, _ = written
    fill.run(store, "empty")
    partial = fill.run(store, "partial", estimator="point", parameters={}, fields=())
    one, no_state = np.ones(1), np.empty((1, 0))
    rows = StepRows(np.array([1]), np.array([4]), 1.5 * one, one, one, no_state, no_state, np.array([-1]))
    partial.record_step(1, rows)
    assert main(["lab", "replay", "--store.url", store.url, "-o", str(tmp_path), *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_hidden_states_cannot_be_replayed_and_the_other_candidates_can(tmp_path, capsys):
    url, prompts = f"sqlite:///{tmp_path}/runs.db", ["1 =", "2 ="]
    parameters = {"updates_per_epoch": 1.0, "features": "hidden"}
    with Posteriors.create(
        url, "hidden", prompts, ["", ""], estimator="predicted_prior", parameters=parameters
    ) as posteriors:
        posteriors.set_features(np.ones((2, 64)))
        for step in (1, 2):
            posteriors.observe(step, prompts * 2, [""] * 4, [1.0, 0.0, 1.0, 1.0])
    command = ["lab", "replay", "hidden", "--store.url", url, "-o", str(tmp_path)]
    assert main(command) == 0
    assert "trained with predicted_prior 0.85 features=hidden" in capsys.readouterr().out
    assert main(["lab", "calibration", *command[2:]]) == 0
    assert main([*command, "--estimators", "predicted_prior:features=hidden,discount=0.85"]) == 2
    assert capsys.readouterr().err == (
        "error: predicted_prior 0.85 features=hidden: no store keeps the policy's hidden states, which it reads; use "
        "predicted_prior:features=text\n"
    )


def test_a_replay_reads_the_prompts_texts(tmp_path):
    """The run itself and its replay give the same estimates, first visits and later ones."""
    url = f"sqlite:///{tmp_path}/runs.db"
    prompts, rng = [f"{number} + 1 =" for number in range(12)], np.random.default_rng(0)
    own = {"estimator": "predicted_prior", "parameters": {"updates_per_epoch": 3.0}}
    with Posteriors.create(url, "texts", prompts, ["1"] * 12, **own) as posteriors:
        for step in range(1, 7):
            drawn = sorted(rng.choice(12, 4, replace=False))
            texts = [prompts[prompt] for prompt in drawn for _ in range(2)]
            posteriors.observe(step, texts, ["1"] * 8, rng.integers(0, 2, 8).astype(float))
    with open_store(url) as store:
        log = read_log(store, store.find_run("texts"))
    run = recorded.read(types.SimpleNamespace(store_url=url, run="texts"))
    again = rerun(recorded.own_estimator(run.record), run.visits)
    np.testing.assert_allclose(again.estimate.mean, log.mean, rtol=1e-9)
    other = rerun(specs.parse("predicted_prior:features=none,updates_per_epoch=3"), run.visits)
    assert np.abs(other.estimate.mean - log.mean).max() > 0.001
