"""The numbers of the paper's analysis of the MSE (section 5.3, appendices), and a run's own beside them."""

from __future__ import annotations

from collections.abc import Callable

from estimators import RewardEstimator
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.error_curves import DISCOUNTS
from openrlhf_dbb.lab.probabilities import Probabilities

Error = Callable[[RewardEstimator, int], float]
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)

# Laplace's best smoothing is x = 2 m / (1 - 4 m) with m = E p (1 - p): x = 0.3 and 0.0108 give m = 0.093, and m / 8.
_IMPLIED_POINT = "not printed; 0.0116 follows from laplace's"


def beside(probabilities: Probabilities, rollouts: int) -> tuple[list[str], list[tuple[str, str, str, str]]]:
    """The table: header, and each of the paper's numbers with ours, computed as there and without probe noise."""
    as_paper, unbiased = _numbers(probabilities.mse, rollouts), _numbers(probabilities.mse_without_noise, rollouts)
    rows = [
        (name, ours, better, theirs) for (name, ours, theirs), (_, better, _) in zip(as_paper, unbiased, strict=True)
    ]
    return ["", "as the paper", "without probe noise", "paper"], rows


def _numbers(error: Error, rollouts: int) -> list[tuple[str, str, str]]:
    """(name, ours, the paper's)."""
    point = error(specs.parse("point"), rollouts)
    dbb, ema, laplace = (_curve(error, name, rollouts) for name in ("dbb", "ema", "laplace"))
    least = min(dbb.values())
    worse = [x for x, mse in dbb.items() if mse > point]
    sizes = [n for n in _GROUP_SIZES if error(specs.parse("dbb:discount=0.4"), n) <= error(specs.parse("point"), n)]
    return [
        ("dbb, least MSE", f"{least:.5f}", "0.0083"),
        ("    at discount", _best(dbb), "0.4"),
        ("    worse than point from discount", f"{worse[0]:g}" if worse else "never", "0.95"),
        ("    at 0.4 no worse than point up to N", str(sizes[-1]) if sizes else "never", "16"),
        ("ema, least MSE", f"{min(ema.values()):.5f}", "0.0086"),
        ("    above dbb's", f"{min(ema.values()) / least - 1:+.2%}", "+2.67%"),
        ("    at discount", _best(ema), "0.3"),
        ("laplace, least MSE", f"{min(laplace.values()):.5f}", "0.0108"),
        ("    above dbb's", f"{min(laplace.values()) / least - 1:+.2%}", "+30% by 0.0108 / 0.0083; printed is +21.71%"),
        ("    at smoothing", _best(laplace), "0.3"),
        ("empirical_bayes, MSE", f"{error(specs.parse('empirical_bayes'), rollouts):.5f}", "between dbb and point"),
        ("point, MSE", f"{point:.5f}", _IMPLIED_POINT),
    ]


def _curve(error: Error, name: str, rollouts: int) -> dict[float, float]:
    return {x: error(candidate, rollouts) for x, candidate in specs.swept(specs.parse(name), DISCOUNTS).items()}


def _best(curve: dict[float, float]) -> str:
    return f"{min(curve, key=curve.__getitem__):g}"
