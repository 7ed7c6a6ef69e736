"""Cost of an estimator's step as ratios: ``dbb`` and ``auto`` to their bare arithmetic, all estimators to ``dbb``.

``auto`` costs 30 to 100 times ``dbb``. Its bound is not against ``dbb``, because each step fits four regressions of the
texts of at most 2,048 prompts, however few prompts the step has. Its bare arithmetic is the products in them.

Both sides of a ratio run alternately in this process on the same rewards; the medians are compared.

    python benchmarks/estimators.py            about a minute and 1 GiB on one core
    python benchmarks/estimators.py --check    exit code 1 if a ratio is above its bound
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

# In this folder, this file would hide the package of the same name
sys.path[0] = str(Path(__file__).parents[1])

from openrlhf_dbb.estimators import auto, available, build  # noqa: E402
from openrlhf_dbb.estimators.base import Floats, State  # noqa: E402
from openrlhf_dbb.estimators.text_prior import WIDTH  # noqa: E402

ROLLOUTS = 8
DISCOUNT = 0.5
MANY, STEP = 1_000_000, 4_096  # prompts
PASSES = 6  # before the measured step, so that auto has a history of the length it keeps
PRODUCTS = "products"
BOUNDS = {"dbb / numpy": 3.0, f"auto / {PRODUCTS}": 6.0}


def bare_dbb(state: State, rewards_P_G: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return DBB's new state and estimate in plain numpy, without checks; no rollout may be missing."""
    successes = rewards_P_G.sum(axis=1)
    alpha = DISCOUNT * state["alpha"] + successes
    beta = DISCOUNT * state["beta"] + (rewards_P_G.shape[1] - successes)
    total = alpha + beta
    mean = alpha / total
    return alpha, beta, mean, mean * (beta / total)


def medians(steps: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Return the median seconds of each step; the steps run alternately."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(-2, repetitions):  # two to warm up
        for name, step in steps.items():
            step()  # the step before this one has filled the caches with its own arrays
            start = time.perf_counter()
            step()
            if repetition >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def against_numpy(repetitions: int) -> dict[str, float]:
    """Return the seconds of ``dbb`` and of its bare arithmetic."""
    rng = np.random.default_rng(0)
    rewards_P_G = (rng.random((MANY, ROLLOUTS)) < rng.random((MANY, 1))).astype(float)
    dbb = build("dbb", discount=DISCOUNT)
    state = dbb.initial_state(MANY)
    steps = {
        "numpy": lambda: bare_dbb(state, rewards_P_G),
        "dbb": lambda: dbb.observe(state, rewards_P_G),
    }
    return medians(steps, repetitions)


def bare_products(features_P_D: Floats, weights_P: Floats) -> list[Floats]:
    """Return the curvatures of ``auto``'s regressions, (D, D) each, which take most of its step."""
    return [(features_P_D.T * weights_P) @ features_P_D for _ in auto.TEXT_DISCOUNTS_K]


def against_dbb(repetitions: int) -> dict[str, float]:
    """Return the seconds of every estimator, and of ``auto``'s products, on prompts that were visited before."""
    rng = np.random.default_rng(0)
    p = rng.random((STEP, 1))
    visits = [(rng.random((STEP, ROLLOUTS)) < p).astype(float) for _ in range(PASSES + 1)]
    steps: dict[str, Callable[[], object]] = {}
    for name in available():
        estimator = build(name)
        state = estimator.initial_state(STEP) | {"features": rng.normal(size=(STEP, WIDTH))}
        for rewards_P_G in visits[:-1]:
            state, _ = estimator.observe(state, rewards_P_G)
        steps[name] = lambda estimator=estimator, state=state: estimator.observe(state, visits[-1])
    texts_P_D = rng.normal(size=(auto._MOST_TEXTS, WIDTH))
    steps[PRODUCTS] = lambda: bare_products(texts_P_D, texts_P_D[:, 0])
    return medians(steps, repetitions)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=30, help="measured runs of each side")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a ratio is above its bound"
    )
    options = parser.parse_args()

    ratios = {}
    print(f"{'prompts':>10}  {'estimator':<17}{'median ms':>11}{'ratio':>8}")
    for prompts, times, base in (
        (MANY, against_numpy(options.repetitions), "numpy"),
        (STEP, against_dbb(10 * options.repetitions), "dbb"),
    ):
        for name, seconds in times.items():
            ratio = seconds / times[base]
            ratios[f"{name} / {base}"] = ratio
            print(f"{prompts:>10,}  {name:<17}{1e3 * seconds:>11.3f}{ratio:>8.2f}")
    ratios[f"auto / {PRODUCTS}"] = ratios["auto / dbb"] / ratios[f"{PRODUCTS} / dbb"]
    missed = [pair for pair, bound in BOUNDS.items() if ratios[pair] > bound]
    print(
        json.dumps(
            {
                "ratio": {pair: round(ratios[pair], 3) for pair in BOUNDS},
                "bound": BOUNDS,
                "missed": missed,
            }
        )
    )
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
