"""Pass rates that were measured before a training: what its posteriors begin with; metrics by source and difficulty."""

import math

import numpy as np
import pytest

from openrlhf_dbb import Posteriors
from openrlhf_dbb.storage import open_store

DATA = ["1+1=", "2+2=", "3+3="], ["2", "4", "6"]
KNOWN = [[5.0, 8.0], [math.nan, math.nan], [2.4, 8.0]]
MEANS = {  # expected before the next visit, after S of N
    "dbb": lambda s, n: (0.25 + 0.5 * s) / (0.5 + 0.5 * n),  # the prior is discounted twice, the rate once
    "spo": lambda s, n: (0.96 * 0.5 + s) / (0.96 + n),
}


def forecast(posteriors):
    """Alpha and beta before the next visit, (2, P), in the order of the data."""
    expected = posteriors.predictive()
    places = np.searchsorted(expected.prompt_ids, list(posteriors.prompt_ids.values()))
    by_text = dict(zip(posteriors.prompt_ids, np.array([expected.alpha, expected.beta]).T[places], strict=True))
    return np.array([by_text[key] for key in zip(*DATA, strict=True)]).T


def states(url):
    with open_store(url) as store:
        return store.query("SELECT prompt_id, alpha, beta, visits, step, state FROM dbb_posterior ORDER BY prompt_id")


@pytest.mark.parametrize("estimator", ["dbb", "spo"])
def test_known_pass_rates_are_a_visit_before_the_first_step(url, estimator):
    with Posteriors.create(url, "demo", *DATA, estimator=estimator, pass_rates=KNOWN) as posteriors:
        alpha, beta = began = forecast(posteriors)
        mean = MEANS[estimator]
        assert alpha / (alpha + beta) == pytest.approx([mean(5, 8), 0.5, mean(2.4, 8)])
        assert posteriors.run.record.parent is None
    before = states(url)
    assert [row[3:5] for row in before] == [(0, 0), (0, 0)]
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        np.testing.assert_array_equal(forecast(posteriors), began)
        posteriors.observe(1, ["1+1="] * 2, ["2"] * 2, [1, 0])
        posteriors.roll_back(0)
        np.testing.assert_array_equal(forecast(posteriors), began)
    assert states(url) == before


@pytest.mark.parametrize("estimator", ["auto", "gaussian"])
def test_known_pass_rates_do_not_move_time(new_url, estimator):
    """A pass is as long as without them; then the counts have faded by a pass as those of a first step have."""
    with Posteriors.create(new_url("sqlite"), "demo", *DATA, estimator=estimator, pass_rates=KNOWN) as posteriors:
        belief, state = posteriors.estimator, posteriors._state
        assert all((state[field] == 0).all() for field in ("clock",) if field in state)
        scored = posteriors.observe(1, *DATA, [1, 1, 0])
        assert np.isfinite(scored.mean).all()
        assert scored.mean[0] > scored.mean[2]
        assert "clock" not in belief.shared_fields or posteriors._state["clock"].tolist() == [1, 3]


@pytest.mark.parametrize("rates", [[[1, 2]], [[3, 2], [1, 2], [1, 2]], [[0, 0.5]] * 3, [[math.nan] * 2] * 3])
def test_pass_rates_that_are_none_are_refused(new_url, rates):
    with pytest.raises(ValueError, match="pass_rates "):
        Posteriors.create(new_url("sqlite"), "demo", *DATA, pass_rates=rates)


def test_metrics_by_source_and_of_the_hardest(new_url):
    data = [f"{number} =" for number in range(10)], ["1"] * 10
    rates = [[at, 9.0] for at in range(10)]  # the harder the lower the number
    url = new_url("sqlite")
    Posteriors.create(url, "demo", *data, pass_rates=rates).close()
    with Posteriors.resume(url, "demo", *data, sources=["low"] * 5 + ["high"] * 5) as posteriors:
        texts = [data[0][at] for at in (0, 0, 3, 3, 9, 9)]
        metrics = posteriors.observe(1, texts, ["1"] * 6, [1, 0, 0, 0, 1, 1]).metrics
    by_source = {name: value for name, value in metrics.items() if name.startswith(("source/", "hardest/"))}
    assert by_source == {
        "source/low/groups": 2, "source/low/right": 0.25, "source/low/mixed": 0.5, "source/high/groups": 1,
        "source/high/right": 1, "source/high/mixed": 0, "hardest/10": 0.5, "hardest/25": 0.5, "hardest/50": 0.25,
    }  # fmt: skip
    with Posteriors.create(new_url("sqlite"), "even", *data) as unknown:  # all alike: none is among the hardest half
        metrics = unknown.observe(1, texts, ["1"] * 6, [1, 0, 0, 0, 1, 1]).metrics
    assert not [name for name in metrics if name.startswith(("source/", "hardest/"))]
