"""Self-tuning hierarchical DBB: the prior, its weight and the discount are learnt during training.

Axes: P prompts, V revisited prompts, K visits remembered (latest first), L discounts, W prior weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State, bernoulli, counts
from estimators.empirical_bayes import fit_beta, group_moments
from estimators.registry import register

DISCOUNTS_L = np.array([0.02, 0.05, *np.arange(2, 21) / 20])
PRIOR_WEIGHTS_W = np.array([0.05, 0.25, 0.5, 1.0, 2.0])

# How fast the run's numbers forget, in passes over the prompts. The population changes within an epoch; how fast it
# changes is steadier.
_PRIOR_HALF_LIFE, _EVIDENCE_HALF_LIFE = 0.15, 0.7
_MOST_EVIDENCE = 512  # prompts per step that judge the pairs; keeps large batches cheap
_CHUNK = 128  # prompts at a time, so that arrays stay in the CPU cache
_REMEMBERED = 2  # visits kept apart; older ones are summed at the discount of their time

_RECENT = tuple(f"{what}_{k}" for what in ("successes", "rollouts") for k in range(1, _REMEMBERED + 1))


@register
@dataclass(frozen=True)
class SelfTuningBetaBernoulli(RewardEstimator):
    """DBB whose prior, prior weight and discount follow the data; nothing to tune.

    All prompts share a Beta(a, b) prior, fitted to their recent groups as in ``empirical_bayes``. With A
    and B the discounted successes and failures of a prompt's earlier visits k = 1, 2, ... ago::

        A = sum_k discount^k S_k        alpha = weight * a + A + S       mean     = alpha / (alpha + beta)
        B = sum_k discount^k (N_k - S_k) beta  = weight * b + B + N - S  variance = mean * (1 - mean)

    and ``alpha = a + S``, ``beta = b + N - S`` on a first visit. ``variance`` is that of ONE reward, > 0.

    ``(weight, discount)`` is the pair, from a 5 x 21 grid, whose means had the least squared error so far. The
    success probabilities are unknown, but the squared error can be estimated without bias: with the current
    group's share ``g = N / (alpha + beta)`` in the mean, ::

        (mean - S/N)^2 - (1 - 2 g) S (N - S) / (N^2 (N - 1))

    has the expectation of ``(mean - p)^2``, since ``E[(mean - p)(S/N - p)] = g p (1 - p) / N``. (The noise of a
    single rollout cannot be estimated; with N = 1 a pair is judged by how well the history alone predicted it.)
    With ``criterion="likelihood"`` it is the pair that predicted the groups best, one visit ahead::

        log BetaBinomial(S | N, weight * a + A, weight * b + B)

    In both, the weight of a group halves in 0.7 passes over the prompts seen so far (in 0.15 for the fit of the
    prior); nothing is forgotten until prompts come back. Weight and discount are chosen together because one
    discount cannot serve both the prior and the history.

    Args:
        criterion: "risk" (least squared error) or "likelihood" (best prediction one visit ahead).

    State:
        alpha, beta: of the posterior, in rollouts, > 0.
        successes_1, _2, rollouts_1, _2: S and N of the two latest visits, latest first; 0: no such visit.
        successes_old, rollouts_old: of older ones, discounted as of their time.
        moments (shared): sums behind the prior, as in ``empirical_bayes``.
        evidence (shared): (105,), a score for each pair, by weight, then discount; the highest is chosen.
        prior (shared): a and b.
        weight, discount (shared): the pair chosen.
        prompts (shared): number of distinct prompts seen.

    Raises:
        ValueError: an unknown criterion.

    Example:
        >>> auto = SelfTuningBetaBernoulli()
        >>> state = auto.initial_state(3)
        >>> for _ in range(2):
        ...     state, estimate = auto.observe(state, [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
        >>> state["discount"], state["weight"]  # the groups repeat exactly: full trust in the history
        (array([1.]), array([2.]))
        >>> estimate.mean.round(3)
        array([0.991, 0.007, 0.335])

    Source: our own. The paper names a hierarchical prior with a discount (appendix "Empirical-Bayes Prior") and
    a discount that adapts (conclusion) as future work.
    """

    criterion: str = field(default="risk", metadata={"help": "how the discount is chosen: by risk or likelihood"})

    name: ClassVar[str] = "auto"
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta", *_RECENT, "successes_old", "rollouts_old")
    shared_fields: ClassVar[tuple[str, ...]] = ("moments", "evidence", "prior", "weight", "discount", "prompts")
    never_collapses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.criterion not in ("risk", "likelihood"):
            raise ValueError(f"auto.criterion = {self.criterion!r} is neither 'risk' nor 'likelihood'")

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "binary"

    def initial_state(self, num_prompts: int) -> State:
        return {
            "alpha": np.ones(num_prompts),
            "beta": np.ones(num_prompts),
            **{name: np.zeros(num_prompts) for name in (*_RECENT, "successes_old", "rollouts_old")},
            "moments": np.zeros(4),
            "evidence": np.zeros(PRIOR_WEIGHTS_W.size * DISCOUNTS_L.size),
            "prior": np.ones(2),
            "weight": np.ones(1),
            "discount": np.full(1, 0.5),
            "prompts": np.zeros(1),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        revisited = np.flatnonzero(state["rollouts_1"])
        prompts = state["prompts"] + len(successes) - len(revisited)
        passes = len(revisited) / prompts[0]
        moments = 0.5 ** (passes / _PRIOR_HALF_LIFE) * state["moments"] + group_moments(successes, rollouts)
        prior = fit_beta(moments)
        shared = {"moments": moments, "prior": prior, "prompts": prompts}
        shared |= {name: state[name] for name in ("evidence", "weight", "discount")}
        if len(revisited):
            rows = revisited[:: -(-len(revisited) // _MOST_EVIDENCE)]
            evidence = 0.5 ** (passes / _EVIDENCE_HALF_LIFE) * state["evidence"]
            for chunk in np.split(rows, range(_CHUNK, len(rows), _CHUNK)):
                past = {name: state[name][chunk] for name in self.state_fields}
                evidence = evidence + self._judged(past, prior, successes[chunk], rollouts[chunk])
            best = int(evidence.argmax())
            shared |= {
                "evidence": evidence,
                "weight": PRIOR_WEIGHTS_W[best // DISCOUNTS_L.size, None],
                "discount": DISCOUNTS_L[best % DISCOUNTS_L.size, None],
            }
        alpha, beta = self.predictive(state | shared)
        return {
            "alpha": alpha + successes,
            "beta": beta + (rollouts - successes),
            **_shifted(state, "successes", successes),
            **_shifted(state, "rollouts", rollouts),
            **shared,
        }

    def _judged(self, past: State, prior: Floats, successes_V: Floats, rollouts_V: Floats) -> Floats:
        """Scores of the pairs from V groups of prompts with this past, (W * L,); higher is better."""
        past_successes_V_L, past_rollouts_V_L = _past(past, DISCOUNTS_L)
        alpha = PRIOR_WEIGHTS_W[:, None] * prior[0] + past_successes_V_L[:, None]
        total = PRIOR_WEIGHTS_W[:, None] * prior.sum() + past_rollouts_V_L[:, None]
        judge = _log_likelihood if self.criterion == "likelihood" else _negative_risk
        return judge(alpha, total, successes_V, rollouts_V).ravel()

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        return bernoulli(state["alpha"], state["beta"])

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        past_successes, past_rollouts = _past(state, state["discount"])
        weight = np.where(state["rollouts_1"] > 0, state["weight"], 1.0)
        alpha, beta = state["prior"]
        return weight * alpha + past_successes[:, 0], weight * beta + (past_rollouts - past_successes)[:, 0]

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return counts(rewards_P_G)[1] / (state["alpha"] + state["beta"])


def _past(state: State, discounts_L: Floats) -> tuple[Floats, Floats]:
    """Discounted successes and rollouts of all earlier visits, each (P, L)."""
    ages_K = np.arange(1, _REMEMBERED + 1)
    weights_K_L = np.vstack([discounts_L ** ages_K[:, None], discounts_L**_REMEMBERED])
    successes, rollouts = (
        np.column_stack([*(state[f"{what}_{k}"] for k in ages_K), state[f"{what}_old"]]) @ weights_K_L
        for what in ("successes", "rollouts")
    )
    return successes, rollouts


def _shifted(state: State, what: str, newest: Floats) -> State:
    """The remembered visits with ``newest`` in front; the oldest is added to the discounted sum."""
    new = {f"{what}_{k + 1}": state[f"{what}_{k}"] for k in range(1, _REMEMBERED)}
    old = state["discount"] * (state[f"{what}_{_REMEMBERED}"] + state[f"{what}_old"])
    return {f"{what}_1": newest, **new, f"{what}_old": old}


def _negative_risk(alpha: Floats, total: Floats, successes_V: Floats, rollouts_V: Floats) -> Floats:
    """Minus the estimated squared error of each pair's means, summed over the V groups: (W, L).

    Args:
        alpha, total: (V, W, L), alpha and alpha + beta before the groups are seen.
    """
    rollouts = rollouts_V[:, None, None]
    share = successes_V[:, None, None] / rollouts
    several = rollouts > 1
    noise = several * share * (1 - share) / np.maximum(rollouts - 1, 1)
    total = total + several * rollouts
    error = ((alpha + several * rollouts * share) / total - share) ** 2 - (1 - 2 * rollouts / total) * noise
    return np.asarray(-error.sum(axis=0))


def _log_likelihood(alpha: Floats, total: Floats, successes_V: Floats, rollouts_V: Floats) -> Floats:
    """Beta-binomial log-likelihood of each pair, summed over the V groups: (W, L); arguments as above."""
    return np.asarray(
        _log_rising(alpha, successes_V)
        + _log_rising(total - alpha, rollouts_V - successes_V)
        - _log_rising(total, rollouts_V)
    )


def _log_rising(x_V_W_L: Floats, times_V: Floats) -> Floats:
    """``log Gamma(x + times) - log Gamma(x)``, summed over V, for whole ``times``: products, then one logarithm."""
    order = np.argsort(-times_V, kind="stable")
    x, longest_first = x_V_W_L[order], -times_V[order]
    result, product = np.zeros(x.shape[1:]), np.ones_like(x)
    for j in range(int(times_V.max())):
        reached = np.searchsorted(longest_first, -j)
        product[:reached] *= x[:reached] + j
        if j % 32 == 31:  # long before the product could overflow
            result += np.log(product).sum(axis=0)
            product[:] = 1
    return np.asarray(result + np.log(product).sum(axis=0))
