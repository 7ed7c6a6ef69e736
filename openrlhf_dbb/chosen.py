"""What the arguments of OpenRLHF choose, where more than one part has to know it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.core.probing import Probing
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.core.strategies import STRATEGIES, RolloutStrategy, RunFacts
from openrlhf_dbb.estimators.registry import parameter_fields

COMMAND_LINE = "command line"


@dataclass
class Values:
    """The values of all flags while the layers are put on one another, and where each comes from.

    An owner of flags has functions that take them, set the values that follow from others, and say why.
    """

    values: dict[str, Any]  # by flag
    origin: dict[str, str]  # of each value that is not OpenRLHF's default

    def put(self, layer: Mapping[str, Any], origin: str) -> None:
        """Replace values of some flags."""
        self.values.update(layer)
        for flag in layer:
            self.origin[flag] = origin

    def is_given(self, flag: str) -> bool:
        """Return whether the command line names a flag."""
        return self.origin.get(flag) == COMMAND_LINE


def strategy(args: SimpleNamespace) -> RolloutStrategy:
    """Return the rollout strategy; ValueError if a parameter is outside its range."""
    cls = STRATEGIES.get(args.rollout.strategy)
    parameters = {}
    for field in parameter_fields(cls):
        parameters[field.name] = getattr(getattr(args, cls.name), field.name)
    return STRATEGIES.build(args.rollout.strategy, **parameters)


def replay(args: SimpleNamespace) -> Replay:
    """Return what is replayed; ValueError if a parameter is outside its range."""
    return Replay(
        **{field.name: getattr(args.replay, field.name) for field in parameter_fields(Replay)}
    )


def probing(args: SimpleNamespace) -> Probing:
    """Return what is probed; ValueError if a parameter is outside its range."""
    return Probing(args.probe.fraction, args.probe.samples)


def facts(args: SimpleNamespace) -> RunFacts:
    """Return the facts about a run that a strategy may need."""
    score_range = None
    if args.algo.dynamic_filtering_enable:
        low, high = args.algo.dynamic_filtering_range
        score_range = (low, high)
    return RunFacts(
        groups=args.rollout.batch_size,
        rollouts=args.rollout.n_samples_per_prompt,
        seed=args.train.seed,
        score_range=score_range,
    )


def rollouts_of_a_step(args: SimpleNamespace) -> int:
    """Return how many rollouts a step trains on."""
    return int(args.rollout.batch_size * args.rollout.n_samples_per_prompt)


def needs_log_probs(args: SimpleNamespace) -> bool:
    """Return whether the loss takes the log-probs of the generation."""
    corrects = args.algo.advantage.is_correction_level != "off"
    return bool(args.train.vllm_log_probs or corrects)
