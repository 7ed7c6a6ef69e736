"""The settings of a run of TRL, and what does not fit a trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import NoneType
from typing import Any

from openrlhf_dbb.core.arrays import whole
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.plan import Part
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.errors import did_you_mean
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.integrations import shared


@dataclass(frozen=True)
class Settings(shared.Settings):
    """The settings of a run of TRL; docs/trl.md explains them."""

    resume: bool | str = False
    label_column: str | None = None
    verifier: str | None = None
    replay: Mapping[str, Any] | None = None
    max_rollouts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shared.check_text("label_column", self.label_column)
        shared.check_text("verifier", self.verifier)
        if not isinstance(self.resume, bool) and self.resume != "auto":
            raise ValueError(f"resume = {self.resume!r:.80}; give True, False or 'auto'")
        names = [field.name for field in fields(Replay)]
        if not isinstance(self.replay, (Mapping, NoneType)) or set(self.replay or ()) - set(names):
            raise ValueError(
                f"replay = {self.replay!r:.80}; give a dictionary of {', '.join(names)}"
            )
        _ = self.replays
        if self.max_rollouts is not None:
            whole("max_rollouts", self.max_rollouts)

    @cached_property
    def replays(self) -> Replay | None:
        """What is replayed; None: nothing."""
        replay = Replay(**(self.replay or {}))
        return replay if replay.samples else None

    @property
    def parts(self) -> Sequence[Part]:
        """The replay, if there is one."""
        return () if self.replays is None else (self.replays,)

    def with_real_memory(self) -> "Settings":
        """Return settings whose memory is of real rewards; these where that is chosen, or draws need another."""
        estimator, strategy = self.built
        chosen = dict(self.parameters or {})
        is_chosen = not isinstance(self.estimator, str) or "memory" in chosen
        if is_chosen or estimator.belief is estimator or strategy.draws:
            return self
        return replace(self, parameters=chosen | {"memory": "gaussian"})


def check_strategy(settings: Settings, args: Any) -> None:
    """Refuse a strategy that does not fit TRL's arguments."""
    _, strategy = settings.built
    judges = Capability.GENERATE_MORE in strategy.needs
    if judges and not args.shuffle_dataset:
        problem = f"strategy {strategy.name!r} shuffles the data"
        raise ValueError(f"{problem}; leave out shuffle_dataset=False")
    if settings.max_rollouts is None:
        return
    if not judges:
        problem = f"strategy {strategy.name!r} generates as many rollouts in each step"
        raise ValueError(f"{problem}; leave out max_rollouts, and give max_steps")
    step = args.generation_batch_size
    if settings.max_rollouts < step:
        less = f"max_rollouts = {settings.max_rollouts} is less than one step"
        raise ValueError(f"{less} of {step} rollouts; give more")


def check_column(name: str | None, dataset: Any) -> None:
    """Refuse a label_column that is none of the data set's."""
    columns = getattr(dataset, "column_names", None)
    if name is not None and columns is not None and name not in columns:
        raise ValueError(
            f"label_column={name!r} is none of {', '.join(columns)}{did_you_mean(name, columns)}"
        )


def verifier_of(
    name: str | None, estimator: RewardEstimator, names: list[str], weights: list[float]
) -> int | None:
    """Return the index of the reward function whose score the estimator sees.

    None stands for the weighted sum; for an estimator of 0 and 1, for the one function that scores
    a response, as :func:`openrlhf_dbb.integrations.trl_memory.by_task` finds it.

    Raises:
        ValueError: the name is unknown or not unique, its weight is not above 0, or without a name
            the functions differ in weight.
    """
    if name is not None:
        _check_verifier(name, names)
    if estimator.support == "real" and (name is None or estimator.belief is estimator):
        return None
    index = 0 if name is None else names.index(name)
    if not weights[index] > 0:
        raise ValueError(
            f"the weight of verifier {names[index]!r} is {weights[index]:g}; it must be above 0"
        )
    if name is not None or len(names) == 1:
        return index
    if len(set(weights)) > 1:
        raise ValueError(
            f"{estimator.name!r} needs one score of 0 or 1: give verifier, one of "
            f"{', '.join(names)}, or equal reward_weights where each is None outside its task"
        )
    return None


def _check_verifier(name: str, names: list[str]) -> None:
    """Refuse a name that is none of the reward functions', or of several."""
    if name not in names:
        raise ValueError(
            f"verifier {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}"
        )
    if names.count(name) > 1:
        raise ValueError(
            f"verifier {name!r} is the name of {names.count(name)} reward functions; give each its own: "
            'function.__name__ = "correct"'
        )
