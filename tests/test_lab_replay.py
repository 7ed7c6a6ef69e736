"""lab replay: estimators as text; losses worked out by hand, unbiased in simulation; the ranking; a real store."""

import contextlib
import json
import re
import sqlite3

import numpy as np
import pytest

from openrlhf_dbb import Posteriors
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.core.scale import own_estimator
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.probe_error import squared_errors
from openrlhf_dbb.lab import replay
from openrlhf_dbb.lab.candidates import family, flags, label, parse, sweep
from openrlhf_dbb.lab.replay import (
    CRITERIA,
    Outcome,
    error_from_log,
    evaluate,
    rank,
    recommendation,
    rerun,
    thinned,
)
from openrlhf_dbb.storage.read import StepLog


def test_an_estimator_of_the_lab_is_written_as_text_and_as_flags():
    partial = parse("dbb:discount=0.4,prior_alpha=2,partial_credit=true")
    others = " prior_alpha=2 partial_credit=True"
    assert (label(partial), family(partial)) == ("dbb 0.4" + others, "dbb" + others)
    assert (
        flags(partial)
        == "--estimator dbb --dbb.discount 0.4 --dbb.prior_alpha 2.0 --dbb.partial_credit"
    )
    assert (
        label(parse("openrlhf_dbb.estimators.simple:LaplaceSmoothing:smoothing=0.3"))
        == "laplace 0.3"
    )
    with pytest.raises(
        UsageError, match=r"^estimator 'dbb:discount=half': Expected `float`, got `str`"
    ):
        parse("dbb:discount=half")


def test_candidates_of_a_sweep_are_there_once_and_within_the_range():
    candidates = sweep(["point", "ema", "dbb", "dbb:discount=0.3", "dbb:discount=0.3"], [0.0, 1.0])
    assert [label(candidate) for candidate in candidates] == ["point", "ema 0", "dbb 1", "dbb 0.3"]


def visits(step, prompt_id, successes, rollouts):
    """On-policy visits of a log that has no estimates."""
    none = np.zeros(len(step))
    nan = np.full(len(step), np.nan)
    return replay.visits(StepLog(step, prompt_id, rollouts, successes, nan, nan, none, nan, nan))


def simulated(prompts=1024, passes=4, rollouts=8, seed=0, walk=0.1):
    """Visits, a step for each pass over all prompts, and the success probabilities behind them, (V,).

    A probability is drawn from Beta(1, 1), then walks.
    """
    rng = np.random.default_rng(seed)
    p_T_P = np.cumsum(
        [rng.random(prompts), *rng.normal(0, walk, (passes - 1, prompts))], axis=0
    ).clip(0, 1)
    step = np.repeat(np.arange(1, passes + 1), prompts)
    prompt = np.tile(np.arange(prompts), passes)
    successes = 1.0 * rng.binomial(rollouts, p_T_P).ravel()
    return visits(step, prompt, successes, np.full(len(step), rollouts)), p_T_P.ravel()


def hand_made():
    """Prompts 7 and 9 in step 1, prompt 9 again in step 2: S/N = 1/2, 3/4, 4/4."""
    return visits(
        np.array([1, 1, 2]), np.array([7, 9, 9]), np.array([1.0, 3.0, 4.0]), np.array([2, 4, 4])
    )


def test_a_rerun_gives_the_means_and_group_weights_of_another_estimator():
    mean, weight = rerun(parse("dbb:discount=0.5"), hand_made())
    # Prompt 7: Beta(0.5 + 1, 0.5 + 1). Prompt 9: Beta(0.5 + 3, 0.5 + 1), then Beta(1.75 + 4, 0.75).
    np.testing.assert_allclose(mean, [0.5, 3.5 / 5, 5.75 / 6.5])
    np.testing.assert_allclose(weight, [2 / 3, 4 / 5, 4 / 6.5])
    # An estimator that reads first has nothing of the group.
    mean, weight = rerun(parse("spo"), hand_made())
    np.testing.assert_allclose(mean, [0.5, 0.5, 3.48 / 4.96])  # without a drift rho is 0.96
    assert weight.tolist() == [0, 0, 0]


def test_error_from_log_by_hand():
    error = error_from_log(hand_made(), np.array([0.4, 0.7, 0.9]), np.array([1.0, 0.5, 0.25]))
    # (0.1)^2 + 1 * 1 * 1 / (4 * 1);  (0.05)^2 - 0;  (0.1)^2 - 0.5 * 0, since S = N
    np.testing.assert_allclose(error, [0.01 + 0.25, 0.0025, 0.01])
    alone = visits(np.array([1]), np.array([1]), np.array([1.0]), np.array([1]))
    assert np.isnan(error_from_log(alone, np.array([0.5]), np.array([1.0]))).all()


def test_what_thinning_keeps_by_hand():
    # Of prompt 7 a rollout of either kind has |A| = 1. With p = 0.8 a success has 1/2, a failure 2, twice.
    kept, growth = thinned(np.array([0.5, 0.8, 0.8]), hand_made()).values()
    assert kept == pytest.approx((2 + 3 / 2 + 1 + 4 / 2) / 10)
    assert growth == pytest.approx((2 + 3 / 2 + 4 + 4 / 2) / (2 + 3 / 4 + 4 + 4 / 4))
    assert thinned(np.ones(3), visits(*np.ones((4, 3)))) == {
        "thin: kept": 0,
        "thin: A^2": None,
    }  # right, as expected


@pytest.mark.parametrize("name", ["point", "dbb:discount=0.4", "ema", "laplace"])
def test_error_from_log_is_unbiased(name):
    gaps = []
    for seed in range(40):
        simulated_visits, p = simulated(prompts=256, rollouts=2, seed=seed)
        mean, weight = rerun(parse(name), simulated_visits)
        gaps.append(np.mean(error_from_log(simulated_visits, mean, weight) - (mean - p) ** 2))
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / np.sqrt(len(gaps))


def test_the_noise_of_a_probe_is_taken_out_of_squared_errors():
    samples = np.array([4, 4, 5])
    successes = np.array([2.0, 3.0, 5.0])
    squares = np.array([1.5, 3.0, 5.0])
    # Scores 1 1 0.5 ... of mean 1/2: (1.5 - 4/4) / (4 * 3); 3/4: (3 - 9/4) / 12; all 1: no noise.
    errors = squared_errors(np.array([0.5, 0.4, 0.9]), samples, successes, squares)
    assert errors == pytest.approx([-0.5 / 12, 0.35**2 - 0.75 / 12, 0.1**2])
    assert np.isnan(squared_errors(*np.ones((4, 1)))).all()


def test_candidates_are_ranked_by_their_losses_by_hand():
    """Two prompts of two visits: a draw is (1, 1), (1, 2), (2, 1) or (2, 2)."""
    of_two = visits(
        np.array([1, 1, 2, 2]), np.array([0, 1, 0, 1]), np.zeros(4), np.ones(4, dtype=int)
    )
    losses = {
        "dbb:discount=0.3": [0.0, 4.0, 0.0, 4.0],
        "dbb:discount=0.6": [3.0] * 4,
        "point": [5.0] * 4,
    }
    unknown = dict.fromkeys(CRITERIA, np.full(4, np.nan))
    outcomes = [
        Outcome(parse(text), unknown | {"mse": np.array(loss)}) for text, loss in losses.items()
    ]
    ranking = rank(outcomes, of_two)
    np.testing.assert_allclose(ranking.mean_C, [2, 3, 5])
    assert ranking.best_of_each() == [0, 2]
    assert set(map(tuple, ranking.draws_B_C)) == {(0, 3, 5), (2, 3, 5), (4, 3, 5)}
    assert ranking.excess(1) == (1, -1, 3)


def ranked(simulated_visits, texts=("dbb",), discounts=(0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1)):
    candidates = sweep(texts, discounts)
    return rank(
        [evaluate(candidate, simulated_visits) for candidate in candidates], simulated_visits
    )


@pytest.mark.parametrize("walk", [0.0, 0.1, 0.4])
def test_best_discount_is_near_the_best_in_hindsight(walk):
    simulated_visits, p = simulated(prompts=4096, walk=walk)
    ranking = ranked(simulated_visits)
    true = [
        np.mean((rerun(each.estimator, simulated_visits)[0] - p) ** 2)
        for each in ranking.candidates
    ]
    assert true[0] < 1.02 * min(true)


def test_without_probes_no_estimator_is_recommended():
    for log, said in (
        ({"passes": 1}, "discounts cannot be compared"),
        ({"walk": 0}, "--probe.fraction"),
    ):
        simulated_visits, _ = simulated(prompts=512, **log)
        advice = "\n".join(recommendation(ranked(simulated_visits), simulated_visits))
        assert said in advice and "use next" not in advice and "--estimator" not in advice


def candidates(store, capsys, *arguments):
    """Recommendation and candidates, by label, as JSON has them."""
    assert main(["lab", "replay", "walk", "--store.url", store.url, "--json", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"run", "candidates", "recommendation"} and answer["run"] == "walk"
    return answer["recommendation"], {row["estimator"]: row for row in answer["candidates"]}


def test_lab_replay_prints_the_candidates_errors_and_what_to_use_next(open_new, fill, capsys):
    """16 prompts in 3 steps, N = 8, every fourth prompt probed."""
    store = open_new("sqlite")
    rng = np.random.default_rng(5)
    run = fill.run(store, "walk")
    ids = np.sort(fill.prompts(store, 16))
    p_T_P = simulated(prompts=16, passes=3, seed=5)[1].reshape(3, 16)
    successes_T_P = rng.binomial(8, p_T_P)
    probed_T_P = rng.binomial(100, p_T_P[:, ::4])
    for step, (successes, probed) in enumerate(zip(successes_T_P, probed_T_P, strict=True), 1):
        fill.step(
            run, step, ids, successes, rollouts=8, probes=fill.probes(ids[::4], [100] * 4, probed)
        )
    assert main(["lab", "replay", "walk", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    size = "48 visits of 16 prompts, 8 rollouts a visit, 12 visits with probes"
    assert out.startswith(f"run walk: {size}; trained with dbb 0.5\n")
    assert "criterion: mean squared error against the probes" in out
    advice, rows = candidates(store, capsys)
    assert (
        advice[-1].startswith("use next: --estimator ")
        and "not which one trains better" in advice[-2]
    )
    assert f"{len(rows)} candidates" in out
    share = successes_T_P[:, ::4] / 8
    p = probed_T_P / 100
    # p (1 - p) / 99 is the noise of a probe's 100 samples.
    assert rows["point"]["mse (probes)"] == pytest.approx(
        np.mean((share - p) ** 2 - p * (1 - p) / 99)
    )
    # Successes of a mixed group have |A| = sqrt((N - S) / S), its failures the inverse.
    right = successes_T_P[(successes_T_P > 0) & (successes_T_P < 8)]
    size = np.sqrt((8 - right) / right)
    kept = right * np.minimum(size, 1) + (8 - right) * np.minimum(1 / size, 1)
    assert rows["point"]["thin: kept"] == pytest.approx(kept.sum() / (48 * 8))


def test_the_texts_of_the_database_are_printed_escaped(open_new, fill, capsys):
    store = open_new("sqlite")
    fill.step(fill.run(store, "a"), 1, fill.prompts(store, 2), [1, 3])
    with contextlib.closing(sqlite3.connect(store.location)) as foreign, foreign:
        foreign.execute("UPDATE dbb_run SET name = name || char(27) || '[31m' || char(7)")
    assert main(["lab", "replay", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"run a\x1b[31m\x07: 2 visits" in out


def test_a_run_that_cannot_be_replayed_is_refused_in_one_line(store, fill, capsys):
    ids = fill.prompts(store, 2)
    fill.step(fill.run(store, "single"), 1, ids, [1, 0], rollouts=1)
    fill.step(fill.run(store, "partial"), 1, ids[:1], [1.5], usage=None)
    fill.run(store, "empty")
    single = "has no probes and no group of two rollouts, so no candidate can be judged; "
    partial = "1.5 successes of 4 rollouts"  # also without a name: the latest run has no step
    refused = {
        "single": single,
        "partial": partial,
        "empty": "has recorded no rollouts yet",
        "--json": partial,
    }
    for name, message in refused.items():
        assert main(["lab", "replay", "--store.url", store.url, name]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_class_of_the_working_folder_is_a_candidate_and_the_advice_names_it_so(
    store, fill, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    source = "from openrlhf_dbb import estimators\nclass Mine(estimators.get('point')):\n    name = 'mine'\n"
    (tmp_path / "my_mean.py").write_text(source)
    run = fill.run(store, "walk")
    ids = fill.prompts(store, 2)
    for step in (1, 2):
        fill.step(run, step, ids, [1, 3], probes=fill.probes(ids, [9, 9], [2, 7]))
    assert (
        candidates(store, capsys, "--estimators", "my_mean:Mine")[0][-1]
        == "use next: --estimator my_mean:Mine"
    )
    assert main(["lab", "replay", "--store.url", store.url, "--estimators", "no:Mine"]) == 2
    assert re.match(r"error: .*'no:Mine' .*ModuleNotFoundError: ", capsys.readouterr().err)


def test_scores_of_minus_1_and_1_are_not_replayed_though_their_sums_could_be_successes(
    tmp_path, capsys
):
    url = f"sqlite:///{tmp_path}/runs.db"
    texts = StepExtras(responses=Responses(["a", "b", "c", "d"]))
    with Posteriors.create(url, "signs", ["p"], ["1"], estimator="gaussian") as posteriors:
        posteriors.observe(1, ["p"] * 4, ["1"] * 4, [1, 1, -1, 1], extras=texts)
    assert main(["lab", "replay", "--store.url", url]) == 2
    assert "scores of run 'signs' go from -1 to 1; only rewards 0 and 1" in capsys.readouterr().err


def test_a_score_that_is_nearly_1_is_told_from_1(store, tmp_path, capsys, fill):
    url = f"sqlite:///{tmp_path}/runs.db"
    texts = StepExtras(responses=Responses(["a", "b"]))
    with Posteriors.create(url, "float", ["p"], ["1"], estimator="gaussian") as posteriors:
        posteriors.observe(1, ["p"] * 2, ["1"] * 2, [0, 0.9999999999999999], extras=texts)
    assert main(["lab", "replay", "--store.url", url]) == 2
    scores = "scores of run 'float' go from 0 to 0.9999999999999999; only rewards 0 and 1"
    assert f"{scores} can be replayed; choose another run" in capsys.readouterr().err
    ids = fill.prompts(store, 1)
    fill.step(fill.run(store, "sum"), 1, ids, [0.9999999999999999], usage=None)
    assert main(["lab", "replay", "--store.url", store.url, "sum"]) == 2
    assert ": 0.9999999999999999 successes of 4 rollouts; only" in capsys.readouterr().err


def test_the_replay_of_a_run_gives_what_it_stored_and_forecasts_read_the_prompts_texts(tmp_path):
    """Two passes. Prompts with ? succeed, those with ! fail: the last first visits are expected to do the same."""
    url = f"sqlite:///{tmp_path}/runs.db"
    prompts = [f"{number} {mark}" for number in range(40) for mark in "?!"]
    forecasts = []
    with Posteriors.create(url, "texts", prompts, ["1"] * 80, estimator="auto") as posteriors:
        for step in range(1, 9):
            expected = posteriors.predictive()
            drawn = (prompts * 2)[20 * step - 20 : 20 * step]
            mean = dict(
                zip(
                    expected.prompt_ids,
                    expected.alpha / (expected.alpha + expected.beta),
                    strict=True,
                )
            )
            seen = sorted((posteriors.prompt_ids[prompt, "1"], "?" in prompt) for prompt in drawn)
            forecasts += [mean[prompt_id] for prompt_id, _ in seen]
            posteriors.observe(step, drawn, ["1"] * 20, [float("?" in prompt) for prompt in drawn])
    right = np.array([right for _, right in seen])
    first = np.array(forecasts[60:80])
    assert np.all(first[right] > 0.75) and np.all(first[~right] < 0.25)
    # The replay knows no texts: only the forecasts read them.
    run, visits_seen = replay.read(url, "texts")
    mean, _ = rerun(own_estimator(run), visits_seen)
    np.testing.assert_allclose(mean, visits_seen.mean, rtol=1e-12)
