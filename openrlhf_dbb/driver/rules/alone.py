"""Refusals of OpenRLHF alone, ``--estimator none``: it knows none of our flags."""

from openrlhf_dbb import upstream
from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import Settings
from openrlhf_dbb.methods import CONSTANT_LENGTH

ALONE: Rules[Settings] = Rules()

_FORM = "algo.advantage.estimator"
_OURS = (
    "train.max_rollouts",
    "eval.benchmarks",
    "probe.fraction",
    "warm_start",
    "data.pass_rate_key",
    "data.group_key",
    "replay.samples",
    "train.thin",
    "train.vllm_log_probs",
    "data.chat_template_kwargs",
)


def _is_ours(settings: Settings, flag: str) -> str:
    both = settings.shown(flag, "estimator")
    return f"{both}: OpenRLHF alone has no such thing; use --estimator point, its group mean"


@ALONE.add
def flag_of_ours(settings: Settings) -> Refusal:
    """OpenRLHF alone reads none of these flags."""
    for flag in _OURS:
        if settings.values[flag]:
            return _is_ours(settings, flag)
    return None


@ALONE.add
def strategy_of_ours(settings: Settings) -> Refusal:
    """OpenRLHF has dynamic filtering of its own, which its switch asks for."""
    own = "dynamic" if settings.args.algo.dynamic_filtering_enable else "plain"
    if settings.args.rollout.strategy == own:
        return None
    return _is_ours(settings, "rollout.strategy")


@ALONE.add
def loss_of_ours(settings: Settings) -> Refusal:
    """Sums over a constant length are ours."""
    if settings.args.actor.loss_agg_mode != CONSTANT_LENGTH:
        return None
    return _is_ours(settings, "actor.loss_agg_mode")


@ALONE.add
def form_of_ours(settings: Settings) -> Refusal:
    """OpenRLHF computes its own advantages alone."""
    if settings.values[_FORM] in upstream.choices(_FORM):
        return None
    return _is_ours(settings, _FORM)


@ALONE.add
def lag_of_ours(settings: Settings) -> Refusal:
    """0, too, is a lag that OpenRLHF would not keep."""
    if settings.args.train.max_lag is None:
        return None
    return _is_ours(settings, "train.max_lag")


@ALONE.add
def top_p_of_ours(settings: Settings) -> Refusal:
    """OpenRLHF evaluates by the top-p of the rollouts."""
    if settings.args.eval.top_p == settings.args.rollout.top_p:
        return None
    return _is_ours(settings, "eval.top_p")
