"""What a rollout strategy would have drawn in a recorded run, and how noisy the gradient would then have been.

A strategy meets the prompts of each recorded pass, with what an estimator expected of each before its visit, and the
groups that were recorded. Axes: V visits, P prompts of a pass, B of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from estimators.base import Floats
from openrlhf_dbb.core.strategies import Decision, Predictive, RolloutStrategy, RunFacts
from openrlhf_dbb.lab.visits import Integers, Visits

DRAWS = 20
"""Times that a strategy which draws at random goes through each pass."""
_BOOTSTRAP = 1000


@dataclass(frozen=True)
class Pass:
    """The visits of one pass over the prompts.

    Attributes:
        at: (P,) positions of the visits, in the order in which they were recorded.
        predictive: of each, before its rollouts were seen; prompt ids are places in ``at``.
        variance: (P,) S (N - S) / (N (N - 1)), unbiased for p (1 - p).
    """

    at: Integers
    predictive: Predictive
    variance: Floats

    def now(self) -> Predictive:
        """What a strategy that draws asks for."""
        return self.predictive


@dataclass(frozen=True)
class Allocation:
    """What became of a strategy's rollouts; sums by prompt, over all passes and draws.

    Attributes:
        generated, trained: (P,) rollouts.
        taught: (P,) sum over trained rollouts of p (1 - p).
        noise: (P,) the same, each times the square of its weight.
        none, all: (P,) rollouts of groups that were recorded without and with nothing but success.
    """

    generated: Floats
    trained: Floats
    taught: Floats
    noise: Floats
    none: Floats
    all: Floats


@dataclass(frozen=True)
class Ratio:
    """A ratio to the strategy plain at equal rollouts, with its 95 % interval (bootstrap over prompts)."""

    value: float
    low: float
    high: float


def passes(visits: Visits, predictive: tuple[Floats, Floats]) -> Iterator[Pass]:
    """The passes in which at least two batches of prompts were visited with two or more rollouts each.

    Args:
        predictive: (alpha, beta) of each visit, before its rollouts.
    """
    batch = batch_of(visits)
    for number in range(int(visits.earlier.max(initial=-1)) + 1):
        at = np.flatnonzero((visits.earlier == number) & (visits.rollouts > 1))
        if len(at) < 2 * batch:
            continue
        n, s = visits.rollouts[at], visits.successes[at]
        known = Predictive(np.arange(len(at)), predictive[0][at], predictive[1][at])
        yield Pass(at, known, s * (n - s) / (n * (n - 1)))


def batch_of(visits: Visits) -> int:
    """Groups of a step, the median."""
    return int(np.median(np.unique(visits.step, return_counts=True)[1]))


def allocate(strategy: RolloutStrategy, visits: Visits, recorded: list[Pass]) -> Allocation:
    """Let ``strategy`` go through the passes, in their order."""
    facts = RunFacts(groups=batch_of(visits), rollouts=visits.usual_rollouts, form="dr_grpo", loss="seq-mean")
    sums = np.zeros((6, visits.prompts))
    strategy = strategy.complete(facts)
    for draw in range(DRAWS if strategy.draws or strategy.needs_budget else 1):
        sampler = strategy.sampler(RunFacts(**{**vars(facts), "seed": draw}))
        for each in recorded:
            steps = math.ceil(len(each.at) / facts.groups)
            for step in range(steps):
                if strategy.draws:
                    drawn = [sampler.next_prompt(each.now) for _ in range(facts.groups)]
                    rows = [(row.prompt_id, row.rollouts, row.weight, True) for row in drawn]
                else:
                    batch = range(step * facts.groups, min((step + 1) * facts.groups, len(each.at)))
                    rows = []
                    for place in batch:
                        rollouts = sampler.rollouts(int(visits.prompt[each.at[place]]))
                        if rollouts:
                            group = visits.rewards_V_G[each.at[place]]
                            kept = sampler.judge(int(visits.prompt[each.at[place]]), group) is Decision.TRAIN
                            rows.append((place, rollouts, 1.0, kept))
                    sampler.end_round()
                    sampler.end_step()
                _count(sums, visits, each, rows)
            sampler.end_pass()
    return Allocation(*sums)


def _count(sums: Floats, visits: Visits, each: Pass, rows: list[tuple[int, int, float, bool]]) -> None:
    if not rows:
        return
    place, rollouts, weight, kept = (np.array(column) for column in zip(*rows, strict=True))
    at = each.at[place]
    taught = rollouts * kept * each.variance[place]
    solved = visits.successes[at] / visits.rollouts[at]
    columns = (
        rollouts,
        rollouts * kept,
        taught,
        weight**2 * taught,
        rollouts * (solved == 0),
        rollouts * (solved == 1),
    )
    for row, values in zip(sums, columns, strict=True):
        np.add.at(row, visits.prompt[at], values)


def compare(found: Allocation, plain: Allocation, *, noise: bool, seed: int = 0) -> Ratio:
    """Mean p (1 - p) of a rollout over that with plain; with ``noise`` that of the weighted gradient.

    With weights that keep the objective, the second is the variance of the gradient over that with plain at as many
    rollouts, or the rollouts for the same variance over plain's.
    """
    share = np.random.default_rng(seed).multinomial(
        len(plain.generated), np.full(len(plain.generated), 1 / len(plain.generated)), size=_BOOTSTRAP
    )
    weights_B_P = np.vstack([np.ones(len(plain.generated)), share])
    of = found.noise if noise else found.taught
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_B = (weights_B_P @ of / (weights_B_P @ found.generated)) / (
            weights_B_P @ plain.taught / (weights_B_P @ plain.generated)
        )
    low, high = np.nanpercentile(ratio_B[1:], [2.5, 97.5])
    return Ratio(float(ratio_B[0]), float(low), float(high))
