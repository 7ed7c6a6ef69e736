"""Self-tuning hierarchical DBB: the prior, its weight and the discount are learnt during training.

Axes: P prompts, V revisited prompts, L discounts, X = 2 L discounts of ages in visits and in time, W prior weights, K
discounts beside a text's mean, C forecasts.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, State, counts, register
from openrlhf_dbb.estimators.empirical_bayes import WEIGHT, beta_weight, fit_beta, group_moments
from openrlhf_dbb.estimators.text_prior import WIDTH, learned, log_score, predicted

DISCOUNTS_L = np.array([0.02, 0.05, *np.arange(2, 21) / 20])
DISCOUNTS_X, TIMED_X = np.tile(DISCOUNTS_L, 2), np.repeat([0.0, 1.0], DISCOUNTS_L.size)
PRIOR_WEIGHTS_W = np.array([0.05, 0.25, 0.5, 1.0, 2.0])
# Beside a mean that the text predicts: what counts keep over a pass, and the weight of the mean in rollouts.
TEXT_DISCOUNTS_K = np.array([0.005, 0.05, 0.3, 0.85])
TEXT_WEIGHTS = (2.0, 6.0)

# How fast the run's numbers forget, in passes over the prompts. The population of prompts changes within an epoch; the
# speed of its change is steadier.
_PRIOR_HALF_LIFE, _EVIDENCE_HALF_LIFE = 0.15, 0.7
_HEAD_START = 1.0  # nats of the forecast without the text: in a small pool one of eight others is often lucky
_MOST_EVIDENCE = 256  # prompts per step that judge the pairs; keeps large batches cheap
_MOST_TEXTS = 2048  # prompts, those seen last, that the regressions see; keeps a step cheap
_CHUNK = 64  # prompts at a time, so that arrays stay in the CPU cache
_LEAST_GAP, _MOST_GAP = 0.25, 4.0  # bounds of the number of groups that one counts for in the fit of the prior
_NO_PAIRS = 50.0  # pairs of visits that the prior's weight starts with where N = 1

_COUNTED = ("successes", "rollouts")
_VISITS = (*(f"{kind}_{k}" for kind in (*_COUNTED, "seen") for k in (1, 2)), "successes_old", "rollouts_old")
_SHARED = {  # sizes of the run's vectors
    "moments": 4, "pairs": 4, "evidence": PRIOR_WEIGHTS_W.size * DISCOUNTS_X.size, "prior": 2, "weight": 1,
    "discount": 1, "timed": 1, "prompts": 1, "clock": 2, "text_weights": len(TEXT_DISCOUNTS_K) * (WIDTH + 1),
    "forecasts": 1 + len(TEXT_WEIGHTS) * len(TEXT_DISCOUNTS_K),
}  # fmt: skip


@register
@dataclass(frozen=True)
class SelfTuningBetaBernoulli(BetaPosterior):
    """DBB whose prior, prior weight and discount follow the data, and whose forecasts read the prompt's text.

    With A and B the discounted successes and failures of a prompt's earlier visits k, of age u_k::

        A = sum_k discount^u_k S_k          alpha = weight * a + A + S       mean     = alpha / (alpha + beta)
        B = sum_k discount^u_k (N_k - S_k)  beta  = weight * b + B + N - S   variance = mean * (1 - mean)

    and ``alpha = a + S``, ``beta = b + N - S`` on a first visit. ``variance`` is that of ONE reward, > 0.

    Ages are in visits (1, 2, ... ago) or in passes over the prompts. A pass has as many updates as it takes, at the
    mean number of groups per update so far, to observe as many groups as prompts have been seen.

    :meth:`predictive` forecasts the next visit by the above without S and N, or from the prompt's text::

        alpha = w m + A        beta = w (1 - m) + B        w = 2 or 6, discount = 0.005, 0.05, 0.3 or 0.85 a pass

    with m predicted by a regression for each discount (:mod:`openrlhf_dbb.estimators.text_prior`).

    State:
        alpha, beta: of the posterior, in rollouts, > 0.
        successes_1, _2, rollouts_1, _2, seen_1, _2: S, N and update of the two latest visits, latest first; 0: none.
        successes_old, rollouts_old: of older visits, discounted up to seen_2 by the discounts of their time.
        moments (shared): sums behind the prior, as in ``empirical_bayes``.
        pairs (shared): number of pairs of successive visits, sums of S/N now, S/N then, and their product; faded.
        evidence (shared): (210,), a score for each pair, by weight, way to count, discount.
        prior, weight, discount, timed (shared): a and b; the pair chosen; 1 if its ages are in time, 0 if in visits.
        prompts, clock (shared): number of distinct prompts seen; numbers of updates and of groups so far.
        text_weights (shared): weights of the regressions, one after another.
        forecasts (shared): (9,), log scores of the forecasts, faded: without the text, then by w and discount.

    Source: our own. The paper names such a prior (appendix "Empirical-Bayes Prior") and discount as future work.
    """

    name: ClassVar[str] = "auto"
    version: ClassVar[int] = 4  # 1 forgot by visits; 2 read no texts; 3 told digits apart
    wide_clip: ClassVar[bool] = True
    reads_texts: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta", *_VISITS)
    shared_fields: ClassVar[tuple[str, ...]] = tuple(_SHARED)

    def initial_state(self, num_prompts: int) -> State:
        visits = {name: np.zeros(num_prompts) for name in _VISITS}
        shared = {name: np.zeros(size) for name, size in _SHARED.items()}
        begun = {"prior": np.ones(2), "weight": np.ones(1), "discount": np.full(1, 0.5)}
        return {"alpha": np.ones(num_prompts), "beta": np.ones(num_prompts)} | visits | shared | begun

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        clock = state["clock"] + [1, len(successes)]
        if not len(successes):
            return state | {"clock": clock}  # a step without groups still makes the others older
        revisited = np.flatnonzero(state["rollouts_1"])
        prompts = state["prompts"] + len(successes) - len(revisited)
        state = state | {"prompts": prompts, "clock": clock}
        now = clock[0]
        passed = len(revisited) / prompts[0]
        faded = 0.5 ** (passed / _EVIDENCE_HALF_LIFE)
        scores_C = log_score(*_forecasts(state, now), successes, rollouts).sum(axis=1)
        observed = len(successes) / max(prompts[0] - len(successes) + len(revisited), 1)
        state["forecasts"] = 0.5 ** (observed / _EVIDENCE_HALF_LIFE) * state["forecasts"] + scores_C
        gap = np.clip(_passes(state, now - state["seen_1"]), _LEAST_GAP, _MOST_GAP)
        moments = 0.5 ** (passed / _PRIOR_HALF_LIFE) * state["moments"] + group_moments(successes, rollouts, gap)
        pairs = state["pairs"]
        if len(revisited):
            share = (successes / rollouts)[revisited]
            before = state["successes_1"][revisited] / state["rollouts_1"][revisited]
            pairs = faded * pairs + np.stack([np.ones_like(share), share, before, share * before]) @ gap[revisited]
        prior = fit_beta(moments, _weight_between(pairs))
        state = state | {"moments": moments, "pairs": pairs, "prior": prior}
        if len(revisited):
            rows = revisited[:: -(-len(revisited) // _MOST_EVIDENCE)]  # spread evenly over the step
            evidence = faded * state["evidence"]
            for chunk in np.split(rows, range(_CHUNK, len(rows), _CHUNK)):
                past = state | {name: state[name][chunk] for name in self.state_fields}
                evidence = evidence + self._judged(past, now, successes[chunk], rollouts[chunk])
            weight, fading = divmod(int(evidence.argmax()), DISCOUNTS_X.size)
            state |= {"evidence": evidence, "weight": PRIOR_WEIGHTS_W[weight, None]}
            state |= {"discount": DISCOUNTS_X[fading, None], "timed": TIMED_X[fading, None]}
        alpha, beta = _before(state, now)  # by the pair chosen just now
        # Of the visits with this one the two latest are kept apart, the others summed.
        faded = _kept(state, 1, state["seen_1"] - state["seen_2"], state["discount"], state["timed"])[:, 0]
        older = {f"{kind}_old": faded * state[f"{kind}_old"] + faded * state[f"{kind}_2"] for kind in _COUNTED}
        latest = {"successes_1": successes, "rollouts_1": rollouts, "seen_1": np.full(len(successes), now)}
        second = {f"{kind}_2": state[f"{kind}_1"] for kind in (*_COUNTED, "seen")}
        shared = {name: state[name] for name in self.shared_fields}
        return {"alpha": alpha + successes, "beta": beta + (rollouts - successes)} | older | latest | second | shared

    def _judged(self, past: State, now: float, successes_V: Floats, rollouts_V: Floats) -> Floats:
        """Return scores of the pairs from V groups of prompts with this past, (W * X,); higher is better."""
        scores_W_X = _negative_risk(past, 1, now, successes_V, rollouts_V)
        again = np.flatnonzero((rollouts_V == 1) & (past["rollouts_2"] > 0))
        if len(again):
            past = past | {name: past[name][again] for name in self.state_fields}
            scores_W_X = scores_W_X + _negative_risk(past, 0, past["seen_1"], successes_V[again], rollouts_V[again])
        return scores_W_X.ravel()

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        alpha_C_P, beta_C_P = _forecasts(state, state["clock"][0] + 1)
        scores_C = state["forecasts"][: len(alpha_C_P)].copy()
        scores_C[0] += _HEAD_START
        best = scores_C.argmax()
        return alpha_C_P[best], beta_C_P[best]

    def learn(self, state: State) -> State:
        if "features" not in state:
            return {}
        seen = np.flatnonzero(state["rollouts_1"])
        seen = seen[np.argsort(-state["seen_1"][seen], kind="stable")[:_MOST_TEXTS]]
        if not len(seen):
            return {}
        known = self.state_at(state, seen)
        counted_2_K_S = _of_text(known, 0, state["clock"][0])
        weights_K_W = state["text_weights"].reshape(len(TEXT_DISCOUNTS_K), -1)
        return {"text_weights": learned(weights_K_W, known["features"], *counted_2_K_S).ravel()}


def _weight_between(pairs: Floats) -> float:
    """Return a + b from the correlation of successive rewards, for N = 1."""
    number, now, before, both = pairs
    start = 1 / (WEIGHT + 1)
    if number == 0:
        return WEIGHT
    now, before = now / number, before / number
    deviations = np.sqrt(max(now * (1 - now) * before * (1 - before), 0.0))
    correlation = (both / number - now * before) / deviations if deviations > 0 else start
    return beta_weight(float((number * correlation + _NO_PAIRS * start) / (number + _NO_PAIRS)))


def _passes(state: State, updates_P: Floats) -> Floats:
    updates, groups = state["clock"]
    return np.asarray(updates_P * groups / np.maximum(updates * state["prompts"], 1))


def _kept(state: State, visits: int, updates_P: Floats, discounts_X: Floats, timed_X: Floats) -> Floats:
    """Return the weight that is left after some visits, or updates, (P, X)."""
    ages_P_X = np.where(timed_X, _passes(state, updates_P)[:, None], visits)
    return np.asarray(np.exp(ages_P_X * np.log(discounts_X)))


def _past(state: State, visits: int, at: Floats | float, discounts_X: Floats, timed_X: Floats) -> tuple[Floats, Floats]:
    latest, older = (_kept(state, visits + k - 1, at - state[f"seen_{k}"], discounts_X, timed_X) for k in (1, 2))
    successes, rollouts = (
        latest * state[f"{kind}_1"][:, None] + older * (state[f"{kind}_2"] + state[f"{kind}_old"])[:, None]
        for kind in _COUNTED
    )
    return successes, rollouts


def _before(state: State, now: float) -> tuple[Floats, Floats]:
    """Return alpha and beta at update ``now`` before its group is seen, each (P,)."""
    past = _past(state, 1, now, state["discount"], state["timed"])
    successes, rollouts = (values[:, 0] for values in past)
    weight = np.where(state["rollouts_1"] > 0, state["weight"], 1.0)
    alpha, beta = state["prior"]
    return weight * alpha + successes, weight * beta + rollouts - successes


def _of_text(state: State, visits: int, at: float) -> tuple[Floats, Floats]:
    """Return successes and rollouts by each discount beside a text's mean, (K, P), 0 without a visit."""
    successes_P_K, rollouts_P_K = _past(state, visits, at, TEXT_DISCOUNTS_K, np.ones(len(TEXT_DISCOUNTS_K)))
    return successes_P_K.T, rollouts_P_K.T


def _forecasts(state: State, at: float) -> tuple[Floats, Floats]:
    """Return alpha and beta of every forecast at update ``at`` before its groups are seen, (C, P)."""
    alpha, beta = _before(state, at)
    if "features" not in state:
        return alpha[None], beta[None]
    weights_K_W = state["text_weights"].reshape(len(TEXT_DISCOUNTS_K), -1)
    of_text = predicted(weights_K_W, state["features"]), *_of_text(state, 1, at)
    mean_C_P, successes_C_P, rollouts_C_P = (np.tile(each_K_P, (len(TEXT_WEIGHTS), 1)) for each_K_P in of_text)
    weight_C_1 = np.repeat(TEXT_WEIGHTS, len(TEXT_DISCOUNTS_K))[:, None]
    alpha_C_P = weight_C_1 * mean_C_P + successes_C_P
    beta_C_P = weight_C_1 * (1 - mean_C_P) + rollouts_C_P - successes_C_P
    return np.vstack([alpha, alpha_C_P]), np.vstack([beta, beta_C_P])


def _negative_risk(past: State, visits: int, at_V: Floats | float, successes_V: Floats, rollouts_V: Floats) -> Floats:
    """Return minus the estimated squared error of each pair's means, summed over the V groups: (W, X).

    The past is discounted to ``at_V``, ``visits`` after the last one.
    """
    past_successes_V_X, past_rollouts_V_X = _past(past, visits, at_V, DISCOUNTS_X, TIMED_X)
    alpha_V_W_X = PRIOR_WEIGHTS_W[:, None] * past["prior"][0] + past_successes_V_X[:, None]
    total_V_W_X = PRIOR_WEIGHTS_W[:, None] * past["prior"].sum() + past_rollouts_V_X[:, None]
    share_V = successes_V / rollouts_V
    seen_V = np.where(rollouts_V > 1, rollouts_V, 0)  # a single rollout judges the mean before it
    noise_V = share_V * (1 - share_V) / np.maximum(rollouts_V - 1, 1)  # 0 for a single one
    inverse = 1 / (total_V_W_X + seen_V[:, None, None])
    # (alpha + successes) / (total + rollouts) - share
    error = (alpha_V_W_X - share_V[:, None, None] * total_V_W_X) * inverse
    # Sum of error^2 - (1 - 2 rollouts / total) noise; products and sums at once, as this is most of a step's time.
    shrunk_W_X = np.tensordot(2 * rollouts_V * noise_V, inverse, axes=1)
    return np.asarray(noise_V.sum() - shrunk_W_X - np.einsum("vwx,vwx->wx", error, error))
