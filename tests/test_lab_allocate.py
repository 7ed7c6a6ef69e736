"""lab allocate: strategies on a recorded run whose success probabilities are known; the command on a real store."""

import csv
import json

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.core.strategies import STRATEGIES
from openrlhf_dbb.core.strategies.posterior import PosteriorSampling, inclusion
from openrlhf_dbb.lab.allocation import allocate, batch_of, compare, passes
from openrlhf_dbb.lab.visits import visits

BATCH, N = 50, 4
PLAIN = STRATEGIES.build("plain")


def run(p, rounds, seed=1):
    """Each prompt once a pass, 50 a step, with success probability p, which stays."""
    prompts, rng = len(p), np.random.default_rng(seed)
    step = np.arange(prompts * rounds) // BATCH + 1
    prompt = np.tile(np.arange(prompts), rounds)
    return visits(step, prompt, 1.0 * rng.binomial(N, np.tile(p, rounds)), np.full(len(step), N))


def known(p, seen, strength=1e6):
    """Forecasts that know p."""
    of_visit = np.clip(p, 1e-9, 1 - 1e-9)[seen.prompt] * strength
    return of_visit, strength - of_visit


def test_only_passes_of_two_batches_count():
    seen = run(np.full(200, 0.5), 2)
    assert batch_of(seen) == BATCH
    first, second = passes(seen, known(np.full(200, 0.5), seen))
    assert first.at.tolist() == list(range(200)) and second.at.tolist() == list(range(200, 400))
    # S (N - S) / (N (N - 1)) of 4: 0, 3/12, 4/12, 3/12, 0.
    assert set(first.variance.round(9)) <= {0, 0.25, round(1 / 3, 9)}
    short = run(np.full(BATCH, 0.5), 1)
    assert list(passes(short, known(np.full(BATCH, 0.5), short))) == []


@pytest.mark.parametrize(("power", "floor"), [(0.5, 0.25), (1.0, 0.25), (0.5, 1.0)])
def test_the_noise_of_known_probabilities_is_that_of_the_closed_form(power, floor):
    """Noise over plain's: mean of B / (P pi_i) p_i (1 - p_i), over the mean of p_i (1 - p_i)."""
    p = np.tile([0.0, 0.05, 0.5, 1.0], 1000)
    seen = run(p, 1)
    recorded = list(passes(seen, known(p, seen)))
    plain = allocate(PLAIN, seen, recorded)
    found = allocate(PosteriorSampling(power=power, floor=floor), seen, recorded)
    v = p * (1 - p)
    pi = inclusion(v**power, BATCH, floor)
    noise, taught = compare(found, plain, noise=True), compare(found, plain, noise=False)
    assert noise.value == pytest.approx((BATCH / (4000 * pi) * v).mean() / v.mean(), rel=0.03)
    assert taught.value == pytest.approx((pi * v).sum() / BATCH / v.mean(), rel=0.03)
    assert noise.low < noise.value < noise.high
    # Half of the prompts never vary: without the floor, half of the rollouts would do.
    if floor < 1:
        assert noise.value < 0.75
    else:
        assert (noise.value, taught.value) == (pytest.approx(1, rel=0.03), pytest.approx(1, rel=0.03))


def test_neyman_saves_as_much_with_even_draws():
    p = np.tile([0.0, 0.05, 0.5, 1.0], 500)
    seen = run(p, 1)
    recorded = list(passes(seen, known(p, seen)))
    plain = allocate(PLAIN, seen, recorded)
    found = allocate(PosteriorSampling(power=0, allocation="neyman"), seen, recorded)
    assert found.generated.sum() / 20 == plain.generated.sum()  # each of the 20 draws costs as much as the run
    # Of 16 rollouts 1 goes to each of those that never vary, 14 to the others as sqrt(0.0475) to sqrt(0.25): 4.25 and
    # 9.75. The sum of v / n is then 0.0368, with 4 each 0.0744.
    assert compare(found, plain, noise=True).value == pytest.approx(0.0368 / 0.0744, abs=0.03)


def test_plain_and_filters_meet_what_was_recorded():
    p = np.tile([0.0, 0.5, 1.0], 200)
    seen = run(p, 3)
    recorded = list(passes(seen, known(p, seen)))
    plain = allocate(PLAIN, seen, recorded)
    assert compare(plain, plain, noise=True).value == 1
    assert plain.generated.sum() == plain.trained.sum() == seen.rollouts.sum()
    dynamic = allocate(STRATEGIES.build("dynamic"), seen, recorded)
    mixed = (seen.successes > 0) & (seen.successes < N)
    assert (dynamic.generated.sum(), dynamic.trained.sum()) == (seen.rollouts.sum(), N * mixed.sum())
    assert compare(dynamic, plain, noise=False).value == 1  # what it drops could not teach
    greso = allocate(STRATEGIES.build("greso"), seen, recorded)
    assert greso.generated.sum() < 20 * plain.generated.sum()
    assert compare(greso, plain, noise=False).value > 1.1  # it skips prompts that agreed


@pytest.fixture
def written(open_new, fill):
    """Store with run "still": 40 prompts, 10 a step, three passes; and run "single" with one rollout a group."""
    store, rng = open_new("sqlite"), np.random.default_rng(3)
    run, ids, p = fill.run(store, "still"), fill.prompts(store, 40), rng.beta(0.5, 0.5, size=40)
    single = fill.run(store, "single")
    for step in range(12):
        some = slice(10 * (step % 4), 10 * (step % 4) + 10)
        fill.step(run, step + 1, ids[some], rng.binomial(8, p[some]), rollouts=8)
        fill.step(single, step + 1, ids[some], rng.binomial(1, p[some]), rollouts=1)
    return store


def test_command(written, tmp_path, capsys):
    argv = ["lab", "allocate", "still", "--store.url", written.url, "-o", str(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "run still: 120 visits in 3 passes, with the forecasts of dbb 0.5" in out
    assert "They are no accuracy: only a training is." in out
    rows = {row["strategy"]: row for row in csv.DictReader((tmp_path / "allocate.csv").read_text().splitlines())}
    assert {"plain", "dynamic", "greso", "posterior", "posterior, neyman"} <= set(rows)
    assert rows["plain"]["rollouts ratio"] == "1.0" and rows["dynamic"]["rollouts ratio"] == ""
    assert rows["posterior, power 1, no weights"]["rollouts ratio"] == ""  # another objective
    for name in ("allocate.png", "allocate.svg"):
        assert (tmp_path / name).stat().st_size > 0
    assert main([*argv, "--estimator", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["estimator"], found["passes"]) == ("still", "auto", 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["single"],
            "run 'single' has groups of one rollout, which do not show how much a prompt's rewards vary; name",
        ),
        (["still", "--estimator", "point"], "--estimator point forecasts no visit; use dbb or auto"),
        (["still", "--floor", "0"], r"--posterior.floor 0 is not in (0, 1]"),
        (["other"], "there is no run 'other'"),
    ],
)
def test_errors_are_one_line(written, tmp_path, capsys, argv, message):
    assert main(["lab", "allocate", *argv, "--store.url", written.url, "-o", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
