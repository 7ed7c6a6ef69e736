"""The rollouts of one step. The actor trains on some groups, the estimator observes all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.core.step import Probes
from openrlhf_dbb.core.strategies import Drawn

# Keys of an experience's ``info``. OpenRLHF carries ``info`` along and needs no change for further keys.
VERSION = "policy_version"
"""Training steps that the policy had seen when the engines were asked; in async training."""
INCLUSION, WEIGHT = "inclusion", "weight"
"""See :class:`openrlhf_dbb.core.strategies.Drawn`; where the strategy chooses the prompts."""

Prompt = tuple[str, Any, Any]
"""Text, label, image."""


@dataclass
class Group:
    """A group of rollouts, from the draw of its prompt on."""

    prompt: Prompt
    drawn: Drawn | None = None  # how the strategy chose the prompt; None if it does not choose
    version: int = 0  # of the policy when the engines were asked; only of use in async training
    rollouts: list[Experience] = field(default_factory=list)  # the engines' answers
    kept: bool = False  # to be trained on


@dataclass
class RolloutBatch:
    """The rollouts of one step; goes through OpenRLHF's loop in place of a list of rollouts."""

    trained: list[Experience] = field(default_factory=list)  # to train on, group by group
    filtered: list[Experience] = field(default_factory=list)  # observed, and not trained on
    skipped: int = 0  # prompts that were drawn, and nothing was generated for them
    compared: bool = False  # the log-probs of vLLM with the policy's; in the first batch
    step: int = 0  # global step, 1 for the first; set by the trainer
    probes: Probes | None = None  # further rollouts of some prompts, for their scores alone
    metrics: dict[str, float] = field(default_factory=dict)  # to be logged; filled in by the experience maker

    def __len__(self) -> int:
        """Return the number of rollouts to train on. OpenRLHF's loop asks for it."""
        return len(self.trained)

    @property
    def all(self) -> list[Experience]:
        """Everything generated, the rollouts to train on first."""
        return [*self.trained, *self.filtered]

    def set_aside(self, groups: Sequence[Group]) -> None:
        """Take groups that are observed, and not trained on."""
        self.filtered += [rollout for group in groups for rollout in group.rollouts]


def one_update(args: SimpleNamespace) -> bool:
    """Return whether a step is one optimizer update, and nothing else needs old log-probs."""
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    one = args.train.batch_size == rollouts and args.train.max_epochs == 1
    needed = args.algo.kl.init_coef > 0 or args.critic.model_name_or_path or args.replay.samples
    return bool(one and not needed and args.algo.advantage.is_correction_level == "off")


def scores(rollouts: Sequence[Experience]) -> NDArray[np.float64] | None:
    """Return each rollout's score, else its reward; None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in rollouts]
    if any(value is None for value in values):
        return None
    return np.array([value.item() for value in values], dtype=np.float64)
