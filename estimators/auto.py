"""Self-tuning hierarchical DBB: the prior, its weight and the discount are learnt during training.

Axes: P prompts, V revisited prompts, L discounts, X = 2 L discounts of ages in visits and in time,
W prior weights, K discounts beside a text's mean, C forecasts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, State, counts, register
from openrlhf_dbb.estimators.empirical_bayes import WEIGHT, beta_weight, fit_beta, group_moments
from openrlhf_dbb.estimators.text_prior import WIDTH, learned, log_score, predicted

DISCOUNTS_L = np.array([0.02, 0.05, *np.arange(2, 21) / 20])
DISCOUNTS_X = np.tile(DISCOUNTS_L, 2)
TIMED_X = np.repeat([0.0, 1.0], DISCOUNTS_L.size)  # 1 where an age is in time, 0 where in visits
PRIOR_WEIGHTS_W = np.array([0.05, 0.25, 0.5, 1.0, 2.0])
# Beside a mean that the text predicts: what counts keep over a pass, and the mean's weight in
# rollouts.
TEXT_DISCOUNTS_K = np.array([0.005, 0.05, 0.3, 0.85])
TEXT_WEIGHTS = (2.0, 6.0)

# How fast the run's numbers forget, in passes over the prompts. The population of prompts changes
# within an epoch; the speed of its change is steadier.
_PRIOR_HALF_LIFE = 0.15
_EVIDENCE_HALF_LIFE = 0.7
# Nats of the forecast without the text: in a small pool one of eight others is often lucky.
_HEAD_START = 1.0
_MOST_EVIDENCE = 256  # prompts per step that judge the pairs; keeps large batches cheap
_MOST_TEXTS = 2048  # prompts, those seen last, that the regressions see; keeps a step cheap
_CHUNK = 64  # prompts at a time, so that arrays stay in the CPU cache
_LEAST_GAP = 0.25  # bounds of the number of groups that one counts for in the fit of the prior
_MOST_GAP = 4.0
_NO_PAIRS = 50.0  # pairs of visits that the prior's weight starts with where N = 1

_SHARED_SIZES = {
    "moments": 4,
    "pairs": 4,
    "evidence": PRIOR_WEIGHTS_W.size * DISCOUNTS_X.size,
    "prior": 2,
    "weight": 1,
    "discount": 1,
    "timed": 1,
    "prompts": 1,
    "clock": 2,
    "text_weights": len(TEXT_DISCOUNTS_K) * (WIDTH + 1),
    "forecasts": 1 + len(TEXT_WEIGHTS) * len(TEXT_DISCOUNTS_K),
}
"""The length of each of the run's vectors."""


VISIT_FIELDS = (
    "successes_1",
    "successes_2",
    "rollouts_1",
    "rollouts_2",
    "seen_1",
    "seen_2",
    "successes_old",
    "rollouts_old",
)
"""The fields of the state that hold the visits of each prompt so far."""


@dataclass(frozen=True)
class _Groups:
    """The counts of the prompts of one update, and which of them came back."""

    successes: Floats  # (P,) S
    rollouts: Floats  # (P,) N
    revisited: NDArray[np.int64]  # (V,) places of the prompts that were seen before
    revisits: float  # V as a share of the prompts seen
    now: float  # the update's number, from 1


@register
@dataclass(frozen=True)
class SelfTuningBetaBernoulli(BetaPosterior):
    """DBB whose prior, prior weight and discount follow the data, and whose forecasts read texts.

    With A and B the discounted successes and failures of a prompt's earlier visits k, of age u_k::

        A = sum_k discount^u_k S_k            alpha    = weight * a + A + S
        B = sum_k discount^u_k (N_k - S_k)    beta     = weight * b + B + N - S
        mean = alpha / (alpha + beta)         variance = mean * (1 - mean)

    and ``alpha = a + S``, ``beta = b + N - S`` on a first visit. ``variance`` is that of ONE
    reward, > 0.

    Ages are in visits (1, 2, ... ago) or in passes over the prompts. A pass has as many updates as
    it takes, at the mean number of groups per update so far, to observe as many groups as prompts
    have been seen.

    :meth:`predictive` forecasts the next visit by the above without S and N, or from the prompt's
    text::

        alpha = w m + A        beta = w (1 - m) + B
        w = 2 or 6             discount = 0.005, 0.05, 0.3 or 0.85 a pass

    with m predicted by a regression for each discount (:mod:`openrlhf_dbb.estimators.text_prior`).

    State:
        alpha, beta: of the posterior, in rollouts, > 0.
        successes_1, _2, rollouts_1, _2, seen_1, _2: S, N and update of the two latest visits,
            latest first; 0: none.
        successes_old, rollouts_old: of older visits, discounted up to seen_2 by the discounts of
            their time.
        moments (shared): sums behind the prior, as in ``empirical_bayes``.
        pairs (shared): number of pairs of successive visits, sums of S/N now, S/N then, and their
            product; faded.
        evidence (shared): (210,), a score for each pair, by weight, way to count, discount.
        prior (shared): a and b.
        weight, discount, timed (shared): the pair chosen; 1 if its ages are in time, 0 if in visits.
        prompts (shared): number of distinct prompts seen.
        clock (shared): numbers of updates and of groups so far.
        text_weights (shared): weights of the regressions, one after another.
        forecasts (shared): (9,), log scores of the forecasts, faded: without the text, then by w
            and discount.

    Source: our own. The paper names such a prior (appendix "Empirical-Bayes Prior") and discount as
    future work.
    """

    name = "auto"
    version = 4  # 1 forgot by visits; 2 read no texts; 3 told digits apart
    wide_clip = True
    reads_texts = True
    state_fields = ("alpha", "beta", *VISIT_FIELDS)
    shared_fields = tuple(_SHARED_SIZES)

    def initial_state(self, num_prompts: int) -> State:
        """Return no visits, alpha = beta = 1, and the prior a = b = 1 of weight 1; discount 0.5."""
        state = {name: np.zeros(size) for name, size in _SHARED_SIZES.items()}
        for name in VISIT_FIELDS:
            state[name] = np.zeros(num_prompts)
        state["alpha"] = np.ones(num_prompts)
        state["beta"] = np.ones(num_prompts)
        state["prior"] = np.ones(2)
        state["weight"] = np.ones(1)
        state["discount"] = np.full(1, 0.5)
        return state

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the state after the groups: prior, weight and discount fitted, then the counts."""
        successes, rollouts = counts(rewards_P_G)
        size = len(successes)
        after = state | {"clock": state["clock"] + [1, size]}
        if not size:
            return after  # a step without groups still makes the others older
        revisited = np.flatnonzero(state["rollouts_1"])
        after["prompts"] = state["prompts"] + size - len(revisited)
        revisits = float(len(revisited) / after["prompts"][0])
        groups = _Groups(
            successes,
            rollouts,
            revisited,
            revisits,
            after["clock"][0],
        )
        passes = size / max(state["prompts"][0], 1)
        scores_C_P = log_score(*_forecasts(after, groups.now), successes, rollouts)
        after["forecasts"] = _faded(state["forecasts"], passes, _EVIDENCE_HALF_LIFE)
        after["forecasts"] += scores_C_P.sum(axis=1)
        _fit_prior(after, groups)
        if len(revisited):
            self._choose_pair(after, groups)
        alpha, beta = _before(after, groups.now)
        after["alpha"] = alpha + successes
        after["beta"] = beta + (rollouts - successes)
        between = state["seen_1"] - state["seen_2"]
        kept_P_1 = _kept(after, 1, between, after["discount"], after["timed"])
        return after | _shifted(state, groups, kept_P_1[:, 0])

    def _choose_pair(self, state: State, groups: _Groups) -> None:
        """Judge each pair of a prior weight and a discount by the revisits, and take the best."""
        step = -(-len(groups.revisited) // _MOST_EVIDENCE)
        rows = groups.revisited[::step]  # spread evenly over the update
        evidence = _faded(state["evidence"], groups.revisits, _EVIDENCE_HALF_LIFE)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            past = self.state_at(state, chunk)
            evidence += self._judged(
                past,
                groups.now,
                groups.successes[chunk],
                groups.rollouts[chunk],
            )
        weight, discount = divmod(int(evidence.argmax()), DISCOUNTS_X.size)
        state["evidence"] = evidence
        state["weight"] = PRIOR_WEIGHTS_W[weight, None]
        state["discount"] = DISCOUNTS_X[discount, None]
        state["timed"] = TIMED_X[discount, None]

    def _judged(
        self,
        past: State,
        now: float,
        successes_V: Floats,
        rollouts_V: Floats,
    ) -> Floats:
        """Return scores of the pairs from V groups of prompts with this past, (W * X,).

        Higher is better.
        """
        scores_W_X = _negative_risk(past, 1, now, successes_V, rollouts_V)
        again = np.flatnonzero((rollouts_V == 1) & (past["rollouts_2"] > 0))
        if len(again):
            past = self.state_at(past, again)
            scores_W_X += _negative_risk(
                past,
                0,
                past["seen_1"],
                successes_V[again],
                rollouts_V[again],
            )
        return scores_W_X.ravel()

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        """Return the forecast with the best log score so far, (P,) each, in rollouts."""
        alpha_C_P, beta_C_P = _forecasts(state, state["clock"][0] + 1)
        scores_C = state["forecasts"][: len(alpha_C_P)].copy()
        scores_C[0] += _HEAD_START
        best = scores_C.argmax()
        return alpha_C_P[best], beta_C_P[best]

    def learn(self, state: State) -> State:
        """Return text weights fitted to the latest visits; none without features or visits."""
        if "features" not in state:
            return {}
        seen = np.flatnonzero(state["rollouts_1"])
        latest_first = np.argsort(-state["seen_1"][seen], kind="stable")
        read = seen[latest_first[:_MOST_TEXTS]]
        if not len(read):
            return {}
        past = self.state_at(state, read)
        successes_K_S, rollouts_K_S = _counts_beside_text(past, 0, state["clock"][0])
        weights_K_W = learned(
            _text_weights(state),
            past["features"],
            successes_K_S,
            rollouts_K_S,
        )
        return {"text_weights": weights_K_W.ravel()}


def _shifted(state: State, groups: _Groups, kept: Floats) -> State:
    """Return the visits of the state with one more.

    The new visit and the one before it are kept apart. The second latest so far joins the older
    ones, which then keep the share ``kept`` of their counts, (P,).
    """
    return {
        "successes_1": groups.successes,
        "successes_2": state["successes_1"],
        "rollouts_1": groups.rollouts,
        "rollouts_2": state["rollouts_1"],
        "seen_1": np.full(len(kept), groups.now),
        "seen_2": state["seen_1"],
        "successes_old": kept * state["successes_old"] + kept * state["successes_2"],
        "rollouts_old": kept * state["rollouts_old"] + kept * state["rollouts_2"],
    }


def _text_weights(state: State) -> Floats:
    """Return the weights of the regressions, (K, D + 1)."""
    return state["text_weights"].reshape(len(TEXT_DISCOUNTS_K), -1)


def _faded(sums: Floats, passes: float, half_life: float) -> Floats:
    """Return what sums are worth after some passes over the prompts."""
    return 0.5 ** (passes / half_life) * sums


def _fit_prior(state: State, groups: _Groups) -> None:
    """Add groups to the sums behind the prior, and fit the prior to them."""
    gap = np.clip(_passes(state, groups.now - state["seen_1"]), _LEAST_GAP, _MOST_GAP)
    added = group_moments(groups.successes, groups.rollouts, gap)
    state["moments"] = _faded(state["moments"], groups.revisits, _PRIOR_HALF_LIFE) + added
    rows = groups.revisited
    if len(rows):
        share = groups.successes[rows] / groups.rollouts[rows]
        before = state["successes_1"][rows] / state["rollouts_1"][rows]
        pairs_4_V = np.stack([np.ones_like(share), share, before, share * before])
        faded = _faded(state["pairs"], groups.revisits, _EVIDENCE_HALF_LIFE)
        state["pairs"] = faded + pairs_4_V @ gap[rows]
    state["prior"] = fit_beta(state["moments"], _weight_between(state["pairs"]))


def _weight_between(pairs: Floats) -> float:
    """Return a + b from the correlation of successive rewards, for N = 1."""
    number, sum_now, sum_before, sum_both = pairs
    if number == 0:
        return WEIGHT
    now = sum_now / number
    before = sum_before / number
    start = 1 / (WEIGHT + 1)
    correlation = start
    variances = now * (1 - now) * before * (1 - before)
    if variances > 0:
        correlation = (sum_both / number - now * before) / np.sqrt(variances)
    weighted = number * correlation + _NO_PAIRS * start
    return beta_weight(float(weighted / (number + _NO_PAIRS)))


def _passes(state: State, updates_P: Floats) -> Floats:
    """Return how many passes over the prompts some updates are, (P,)."""
    updates, groups = state["clock"]
    return updates_P * groups / np.maximum(updates * state["prompts"], 1)


def _kept(
    state: State,
    visits: int,
    updates_P: Floats,
    discounts_X: Floats,
    timed_X: Floats,
) -> Floats:
    """Return the weight that is left after some visits, or updates, (P, X)."""
    ages_P_X = np.where(timed_X, _passes(state, updates_P)[:, None], visits)
    return np.exp(ages_P_X * np.log(discounts_X))


def _past(
    state: State,
    visits: int,
    at: Floats | float,
    discounts_X: Floats,
    timed_X: Floats,
) -> tuple[Floats, Floats]:
    """Return discounted sums of the visits so far, S and N, (P, X) each.

    They are discounted to update ``at``, ``visits`` after the latest visit.
    """
    latest_P_X = _kept(state, visits, at - state["seen_1"], discounts_X, timed_X)
    older_P_X = _kept(state, visits + 1, at - state["seen_2"], discounts_X, timed_X)
    sums_P_X = []
    for count in ("successes", "rollouts"):
        latest_P = state[f"{count}_1"]
        older_P = state[f"{count}_2"] + state[f"{count}_old"]
        sums_P_X.append(latest_P_X * latest_P[:, None] + older_P_X * older_P[:, None])
    return sums_P_X[0], sums_P_X[1]


def _before(state: State, now: float) -> tuple[Floats, Floats]:
    """Return alpha and beta at update ``now`` before its group is seen, each (P,)."""
    successes_P_1, rollouts_P_1 = _past(state, 1, now, state["discount"], state["timed"])
    successes = successes_P_1[:, 0]
    rollouts = rollouts_P_1[:, 0]
    weight = np.where(state["rollouts_1"] > 0, state["weight"], 1.0)
    alpha, beta = state["prior"]
    return weight * alpha + successes, weight * beta + rollouts - successes


def _counts_beside_text(state: State, visits: int, at: float) -> tuple[Floats, Floats]:
    """Return S and N by each discount beside a text's mean, (K, P) each, 0 without a visit."""
    timed_K = np.ones(len(TEXT_DISCOUNTS_K))
    successes_P_K, rollouts_P_K = _past(state, visits, at, TEXT_DISCOUNTS_K, timed_K)
    return successes_P_K.T, rollouts_P_K.T


def _forecasts(state: State, at: float) -> tuple[Floats, Floats]:
    """Return alpha and beta of every forecast, (C, P) each, before the groups of update ``at``."""
    alpha, beta = _before(state, at)
    if "features" not in state:
        return alpha[None], beta[None]
    mean_K_P = predicted(_text_weights(state), state["features"])
    successes_K_P, rollouts_K_P = _counts_beside_text(state, 1, at)
    alphas = [alpha]
    betas = [beta]
    for weight in TEXT_WEIGHTS:
        alphas.extend(weight * mean_K_P + successes_K_P)
        betas.extend(weight * (1 - mean_K_P) + rollouts_K_P - successes_K_P)
    return np.stack(alphas), np.stack(betas)


def _negative_risk(
    past: State,
    visits: int,
    at_V: Floats | float,
    successes_V: Floats,
    rollouts_V: Floats,
) -> Floats:
    """Return minus the estimated squared error of each pair's means, (W, X).

    It is the sum over the V groups. The past is discounted to ``at_V``, ``visits`` after the last one.
    """
    past_successes_V_X, past_rollouts_V_X = _past(past, visits, at_V, DISCOUNTS_X, TIMED_X)
    weights_W_1 = PRIOR_WEIGHTS_W[:, None]
    alpha_V_W_X = weights_W_1 * past["prior"][0] + past_successes_V_X[:, None]
    total_V_W_X = weights_W_1 * past["prior"].sum() + past_rollouts_V_X[:, None]
    share_V = successes_V / rollouts_V
    share_V_1_1 = share_V[:, None, None]
    seen_V = np.where(rollouts_V > 1, rollouts_V, 0)  # a single rollout judges the mean before it
    noise_V = share_V * (1 - share_V) / np.maximum(rollouts_V - 1, 1)  # 0 for a single one
    inverse = 1 / (total_V_W_X + seen_V[:, None, None])
    # (alpha + successes) / (total + rollouts) - share
    error = (alpha_V_W_X - share_V_1_1 * total_V_W_X) * inverse
    # Sum of error^2 - (1 - 2 rollouts / total) noise; products and sums at once, as this is most
    # of a step's time.
    shrunk_W_X = np.tensordot(2 * rollouts_V * noise_V, inverse, axes=1)
    squares_W_X = np.einsum("vwx,vwx->wx", error, error)
    return noise_V.sum() - shrunk_W_X - squares_W_X
