"""Refusals of ``--replay.samples`` that only OpenRLHF has; ``core/replay.py`` has the others."""

from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import Settings

REPLAY: Rules[Settings] = Rules()

_SAMPLES = "replay.samples"


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
