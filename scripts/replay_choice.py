"""How good the discounts are that ``lab replay`` chooses, in simulations, where the truth is known.

Prints, by regime, how much the true error of the chosen discount exceeds that of the best one, in %, when chosen by
the log, by the next visit's likelihood, and by probes of a tenth of the prompts; how often the 95 % interval contained
the best discount; and by how much the log's estimate is too low for ``auto``, in units of noise / prompts.

    python scripts/replay_choice.py [--seeds 10] [--rollouts 8]        some minutes on one core

Axes: P prompts, T visits of each, V = P * T visits ordered by visit.
"""

from __future__ import annotations

import argparse

import numpy as np

from estimators.probe_error import squared_errors
from openrlhf_dbb.lab import criteria, specs
from openrlhf_dbb.lab.bootstrap import bootstrap
from openrlhf_dbb.lab.error_curves import DISCOUNTS
from openrlhf_dbb.lab.regimes import REGIMES, Regime
from openrlhf_dbb.lab.visits import rerun, visits

PROMPTS, VISITS, BATCH = 2048, 4, 128
PROBED, SAMPLES = 0.1, 128
CHOSEN_BY = ("log", "likelihood", "probes")


def simulate(regime: Regime, rollouts: int, seed: int) -> tuple[list[float], bool, float]:
    """Excess error in % by criterion; was the best discount in the log's interval; ``auto``'s optimism."""
    rng = np.random.default_rng([seed, 7])
    p_P_T = regime.paths(rng, PROMPTS, VISITS)
    order_T_P = np.stack([rng.permutation(PROMPTS) for _ in range(VISITS)])
    step_V = 1 + np.arange(PROMPTS * VISITS) // BATCH
    p_V = np.take_along_axis(p_P_T.T, order_T_P, axis=1).ravel()
    log = visits(step_V, order_T_P.ravel(), rng.binomial(rollouts, p_V).astype(float), np.full(len(p_V), rollouts))
    probed = np.flatnonzero((rng.random(PROMPTS) < PROBED)[order_T_P.ravel()])
    hits = rng.binomial(SAMPLES, p_V[probed]).astype(float)

    true, losses = [], {name: [] for name in CHOSEN_BY}
    for discount in DISCOUNTS:
        again = rerun(specs.parse(f"dbb:discount={discount}"), log)
        mean = again.estimate.mean
        true.append(np.mean((mean - p_V) ** 2))
        losses["log"].append(criteria.error_from_log(log, mean, again.group_weight))
        losses["likelihood"].append(-criteria.log_score(log, *again.predictive))
        samples = np.full(len(probed), float(SAMPLES))
        losses["probes"].append(squared_errors(mean[probed], samples, hits, hits))
    best = int(np.argmin(true))
    excess = []
    for name in CHOSEN_BY:
        chosen = int(np.argmin([np.nanmean(loss) for loss in losses[name]]))
        excess.append(100 * (true[chosen] / true[best] - 1))
    grid = list(DISCOUNTS)
    _, low, high = bootstrap(losses["log"], log.prompt).best_value(range(len(grid)), grid)

    auto = rerun(specs.parse("auto"), log)
    # Relative to a dbb on the same draws, which removes most of the chance from the difference.
    too_low = np.mean((auto.estimate.mean - p_V) ** 2) - true[best]
    too_low -= np.nanmean(criteria.error_from_log(log, auto.estimate.mean, auto.group_weight) - losses["log"][best])
    return excess, low <= grid[best] <= high, float(too_low / np.nanmean(criteria.noise(log)) * PROMPTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=8, help="N, 2 or more")
    options = parser.parse_args()
    names = "".join(f"{name:>12}" for name in CHOSEN_BY)
    print(f"{'regime':<16}{names}{'contained':>11}{'optimism of auto':>20}")
    means, held, optimism = [], 0, []
    for name, regime in REGIMES.items():
        excess, covered, low = zip(*(simulate(regime, options.rollouts, s) for s in range(options.seeds)), strict=True)
        means.append(np.mean(excess, axis=0))
        held += sum(covered)
        optimism.append(np.mean(low))
        error = np.std(low, ddof=1) / options.seeds**0.5
        shares = "".join(f"{value:>12.2f}" for value in means[-1])
        print(f"{name:<16}{shares}{sum(covered):>8}/{options.seeds}{optimism[-1]:>13.1f} +- {error:.1f}", flush=True)
    for label, values in (("mean", np.mean(means, axis=0)), ("maximum", np.max(means, axis=0))):
        print(f"{label:<16}" + "".join(f"{value:>12.2f}" for value in values))
    print(f"contained: {held} of {len(REGIMES) * options.seeds}; optimism {np.mean(optimism):.1f} on average")


if __name__ == "__main__":
    main()
