"""Refusals of ``--replay.samples``, which trains on rollouts of earlier steps (RePO)."""

from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import Settings
from openrlhf_dbb.estimators import FORMS

REPLAY: Rules[Settings] = Rules()

_SAMPLES = "replay.samples"
_FORM = "algo.advantage.estimator"


@REPLAY.add
def cache_without_replay(settings: Settings) -> Refusal:
    """A cache that nothing is replayed from does nothing."""
    if settings.values[_SAMPLES]:
        return None
    for flag in ("replay.cache", "replay.max_age"):
        if settings.given(flag):
            both = settings.shown(flag, _SAMPLES)
            return f"{both}: nothing is replayed; give --replay.samples, or leave it out"
    return None


@REPLAY.add
def dynamic_batches(settings: Settings) -> Refusal:
    """Replayed rows join the micro-batches that replay makes."""
    if not settings.values[_SAMPLES] or not settings.args.train.dynamic_batch_enable:
        return None
    both = settings.shown(_SAMPLES, "train.dynamic_batch_enable")
    return f"{both}: replay makes the micro-batches itself; leave one out"


@REPLAY.add
def correction(settings: Settings) -> Refusal:
    """The correction compares vLLM's log-probs, which the cache does not hold."""
    level = "algo.advantage.is_correction_level"
    if not settings.values[_SAMPLES] or settings.values[level] == "off":
        return None
    return f"{settings.shown(_SAMPLES, level)}: no log-probs of vLLM are kept; leave one out"


@REPLAY.add
def kl_loss(settings: Settings) -> Refusal:
    """The KL loss takes the reference model's log-probs, which the cache does not hold."""
    if not settings.values[_SAMPLES] or not settings.args.algo.kl.use_loss:
        return None
    both = settings.shown(_SAMPLES, "algo.kl.use_loss")
    return f"{both}: no log-probs of the reference model are kept; leave one out"


@REPLAY.add
def images(settings: Settings) -> Refusal:
    """The cache holds tokens alone."""
    if not settings.values[_SAMPLES] or not settings.values["data.max_images_per_prompt"]:
        return None
    both = settings.shown(_SAMPLES, "data.max_images_per_prompt")
    return f"{both}: no images are kept; leave one out"


@REPLAY.add
def whitened_form(settings: Settings) -> Refusal:
    """Whitening is over the tokens of a step."""
    form = FORMS.available().get(settings.values[_FORM])
    if not settings.values[_SAMPLES] or form is None or not form.whitened:
        return None
    return f"{settings.shown(_SAMPLES, _FORM)}: replayed rows are not whitened; leave one out"
