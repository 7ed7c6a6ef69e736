"""Refusals of ``--rollouts.record`` and of ``--rollouts.of_run``, which trains on recorded rollouts."""

from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings

RECORDED: Rules[Settings] = Rules()

RECORD = "rollouts.record"
OF_RUN = "rollouts.of_run"
_STRATEGY = "rollout.strategy"


def _flag(settings: Settings) -> str | None:
    """Return the flag that is given; None if neither is."""
    if settings.values[OF_RUN]:
        return OF_RUN
    return RECORD if settings.values[RECORD] else None


@RECORDED.add
def recorded_again(settings: Settings) -> Refusal:
    """The record would be a copy."""
    if not settings.values[OF_RUN] or not settings.values[RECORD]:
        return None
    return f"{settings.shown(OF_RUN, RECORD)}: they are recorded already; leave one out"


@RECORDED.add
def openrlhf_alone(settings: Settings) -> Refusal:
    """OpenRLHF's own trainer neither records nor reads a record."""
    flag = _flag(settings)
    if flag is None or settings.estimator != NO_ESTIMATOR:
        return None
    return f"{settings.shown(flag, 'estimator')}: OpenRLHF alone cannot; use --estimator point"


@RECORDED.add
def scored_later(settings: Settings) -> Refusal:
    """A reward model scores a batch after it is recorded."""
    flag = _flag(settings)
    model = "reward.model_name_or_path"
    if flag is None or not settings.values[model]:
        return None
    advice = "a record holds the scores of a verifier; give --reward.remote_url"
    return f"{settings.shown(flag, model)}: {advice}"


@RECORDED.add
def images(settings: Settings) -> Refusal:
    """A record holds tokens alone."""
    flag = _flag(settings)
    pictures = "data.max_images_per_prompt"
    if flag is None or not settings.values[pictures]:
        return None
    return f"{settings.shown(flag, pictures)}: no images are recorded; leave one out"


@RECORDED.add
def generation(settings: Settings) -> Refusal:
    """Where nothing is generated, nothing can ask for a prompt or for more rollouts."""
    if not settings.values[OF_RUN]:
        return None
    asking = {
        _STRATEGY: settings.strategy.name != "plain",
        "probe.fraction": settings.values["probe.fraction"] > 0,
        "train.async_enable": settings.values["train.async_enable"],
    }
    for flag, asks in asking.items():
        if asks:
            advice = "give --rollout.strategy plain" if flag == _STRATEGY else "leave one out"
            both = settings.shown(OF_RUN, flag)
            return f"{both}: recorded batches are taken as they are, nothing is generated; {advice}"
    return None
