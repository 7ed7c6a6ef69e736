"""The policy loss on our advantages: clipped, corrected for stale rollouts, per sequence; against its formula in numpy.

Axes: B rows, T places, of which a mask says which are tokens of the response, in several spans.
"""

import numpy as np
import pytest
import torch

import estimators
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import PolicyLoss  # noqa: E402

from openrlhf_dbb.actors.policy_actor import ConstantLengthLoss  # noqa: E402

LOW, HIGH = 0.2, 0.28
LENGTH = 7
# One turn; two turns with the environment's words between them; one token; three turns.
MASK_B_T = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1]] * 4, dtype=float)
RANDOM = np.random.default_rng(3)
# By the engine that generated, some updates ago; by the trainer before the update; by the policy that is trained.
ROLLOUT_B_T = -RANDOM.exponential(0.7, MASK_B_T.shape) - 0.05
OLD_B_T = np.minimum(ROLLOUT_B_T + RANDOM.normal(0, 0.4, MASK_B_T.shape), -0.01)
NEW_B_T = np.minimum(OLD_B_T + RANDOM.normal(0, 0.3, MASK_B_T.shape), -0.01)

CORRECTIONS = [
    *(("token", mode, "ratio", threshold) for mode in ("mask", "clip") for threshold in ((0.8, 1.25), (0.0, 1.1))),
    *(("seq", "mask", "ratio", threshold) for threshold in ((0.9, 1.15), (0.0, 1.05))),
    *((level, "mask", gating, (0.0, 0.1)) for level in ("token", "seq") for gating in ("binary_kl", "tv")),
]


def advantages(form, estimator):
    """Two groups of eight, each rollout's advantage at all its places, (B, T)."""
    built, rewards_P_G = estimators.build(estimator), np.array([[1.0] * 3 + [0.0] * 5, [1.0] * 8])
    _, estimate = built.observe(built.initial_state(2), rewards_P_G, leave_one_out=form == "rloo")
    found = estimators.FORMS.build(form).advantages(rewards_P_G, estimate)
    return np.repeat(found.reshape(-1, 1), MASK_B_T.shape[1], axis=1)


def mean(values_B_T):
    """Over the tokens of each response, (B, 1)."""
    return ((values_B_T * MASK_B_T).sum(axis=1) / MASK_B_T.sum(axis=1))[:, None]


def clipped(ratio, advantages_B_T, dual_clip=None):
    """Of each token: -min(r A, clip(r) A), and where A < 0 not more than -c A."""
    gain = np.minimum(ratio * advantages_B_T, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantages_B_T)
    if dual_clip is not None:
        gain = np.where(advantages_B_T < 0, np.maximum(gain, dual_clip * advantages_B_T), gain)
    return -gain


def correction(level, mode, gating, threshold):
    """The factor on each token's loss, (B, T), and which tokens (or responses) are outside the threshold."""
    low, high = threshold
    log_ratio, p, q = OLD_B_T - ROLLOUT_B_T, np.exp(ROLLOUT_B_T), np.exp(OLD_B_T)
    if gating == "ratio":  # of a response the geometric mean
        statistic = np.exp(log_ratio if level == "token" else mean(log_ratio))
    else:
        divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) if gating == "binary_kl" else abs(p - q)
        statistic = divergence if level == "token" else mean(divergence)
    outside = (statistic < low) | (statistic > high)
    if mode == "clip":
        return np.clip(statistic, low, high), outside
    return np.where(outside, 0.0, np.exp(log_ratio)), outside


def summed(loss_B_T, aggregation):
    tokens = (loss_B_T * MASK_B_T).sum()
    if aggregation == "token-mean":
        return tokens / MASK_B_T.sum()
    return mean(loss_B_T).mean() if aggregation == "seq-mean-token-mean" else tokens / (len(MASK_B_T) * LENGTH)


def loss_of(aggregation, advantages_B_T, **options):
    """OpenRLHF's loss and what it logs, with the whole batch in one micro-batch."""
    loss_fn = PolicyLoss(LOW, HIGH, token_level_loss=aggregation == "token-mean", **options)
    if aggregation == "seq-mean-token-sum-norm":
        loss_fn = ConstantLengthLoss(loss_fn, LENGTH)
    new, old, rollout, given, mask = (
        torch.from_numpy(values) for values in (NEW_B_T, OLD_B_T, ROLLOUT_B_T, advantages_B_T, MASK_B_T)
    )
    found = loss_fn(
        new, old, given, action_mask=mask, rollout_log_probs=rollout, batch_num_tokens=MASK_B_T.sum(),
        global_batch_size=float(len(MASK_B_T)),
    )  # fmt: skip
    return [None if value is None else value.item() for value in found]


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


@pytest.mark.parametrize(("level", "mode", "gating", "threshold"), CORRECTIONS)
@every_aggregation
def test_a_corrected_loss_is_that_of_its_formula(level, mode, gating, threshold, aggregation):
    given = advantages("rloo", "dbb")
    options = {f"is_correction_{name}": value for name, value in zip(
        ("level", "mode", "gating", "threshold"), (level, mode, gating, threshold), strict=True
    )}  # fmt: skip
    factor, outside = correction(level, mode, gating, threshold)
    tokens = outside if level == "token" else np.broadcast_to(outside, MASK_B_T.shape)
    assert 0 < (tokens * MASK_B_T).sum() < MASK_B_T.sum()  # the threshold tells some from others
    expected = summed(factor * clipped(np.exp(NEW_B_T - OLD_B_T), given), aggregation)
    loss, _, policy_kl, engine_kl, filtered = loss_of(aggregation, given, **options)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert policy_kl == pytest.approx(((OLD_B_T - NEW_B_T) * MASK_B_T).sum() / MASK_B_T.sum(), rel=1e-6)
    assert engine_kl == pytest.approx(((ROLLOUT_B_T - OLD_B_T) * MASK_B_T).sum() / MASK_B_T.sum(), rel=1e-6)
    share = (outside * MASK_B_T).sum() / MASK_B_T.sum() if level == "token" else outside.mean()
    assert filtered == pytest.approx(share, rel=1e-6)


@every_aggregation
def test_a_correction_of_fresh_rollouts_changes_nothing(aggregation, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROLLOUT_B_T", OLD_B_T)
    given = advantages("dr_grpo", "dbb")
    plain = loss_of(aggregation, given)[0]
    for level, mode, gating, threshold in CORRECTIONS:
        options = {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating}
        corrected, *_, filtered = loss_of(aggregation, given, **options, is_correction_threshold=threshold)
        assert (corrected, filtered) == (pytest.approx(plain, rel=1e-12), 0)


@pytest.mark.parametrize("form", estimators.FORMS.available())
@pytest.mark.parametrize("dual_clip", [None, 1.1])
@every_aggregation
def test_the_clipped_loss_of_each_form(form, dual_clip, aggregation):
    given = advantages(form, "dbb")
    loss_B_T = clipped(np.exp(NEW_B_T - OLD_B_T), given, dual_clip)
    loss, clip_share, *_ = loss_of(aggregation, given, dual_clip=dual_clip)
    assert loss == pytest.approx(summed(loss_B_T, aggregation), rel=1e-6)
    assert 0 < clip_share < 1
    if dual_clip is not None:  # it binds
        assert loss < loss_of(aggregation, given)[0]


@pytest.mark.parametrize("form", estimators.FORMS.available())
@pytest.mark.parametrize("corrected", [False, True])
def test_gspo_has_one_ratio_a_response(form, corrected):
    """The geometric mean over the tokens of all its turns; with a correction, against the engine's log-probs."""
    given = advantages(form, "dbb")
    ratio = np.exp(mean(NEW_B_T - (ROLLOUT_B_T if corrected else OLD_B_T)))
    expected = mean(clipped(ratio, given)).mean()
    for aggregation in AGGREGATIONS[:2]:  # it is a mean over responses whatever was asked for
        loss, *_ = loss_of(aggregation, given, policy_loss_type="gspo", is_correction_level=("off", "seq")[corrected])
        assert loss == pytest.approx(expected, rel=1e-6)
