"""The rollouts of one step, from the draw of their prompts on. What is learnt later is a new value beside them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.core.checks import Floats, Key
from openrlhf_dbb.core.strategies import Drawn


class Prompt(NamedTuple):
    text: str
    label: Any
    image: Any = None

    @property
    def key(self) -> Key:
        """Text and label. The store keeps one posterior for all rows that share both."""
        return self.text, str(self.label)


@dataclass(frozen=True, eq=False)  # tensors do not compare
class Group:
    """A prompt that was drawn, and its rollouts."""

    prompt: Prompt
    prompt_id: int
    drawn: Drawn | None = None  # how the strategy chose the prompt; None if it does not choose
    version: int | None = None  # training steps that the engines' policy had seen; None: the policy of the step
    rollouts: tuple[Experience, ...] = ()  # the engines' answers; none before they have answered
    read: tuple[str | None, ...] = ()  # what the verifier read in each rollout; empty: it does not tell


class Snapshot(NamedTuple):
    """The generation right after a batch, for a checkpoint to continue from."""

    state: dict[str, Any]
    place: dict[str, Any]  # in the data, as a data loader tells it
    ends_pass: bool  # a resume begins with the next pass over the data
    metrics: dict[str, float]  # the strategy's, to be logged after the step
    generated: int  # training rollouts so far, without those that a resume would ask for again


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The rollouts of one step. The actor trains on some groups, the estimator observes all."""

    trained: tuple[Group, ...] = ()
    filtered: tuple[Group, ...] = ()  # observed, and not trained on
    skipped: int = 0  # prompts that were drawn, and nothing was generated for them
    compared: bool = False  # the log-probs of vLLM with the policy's; in the first batch of a start
    snapshot: Snapshot | None = None  # None of an empty batch

    def __len__(self) -> int:
        """Return the number of rollouts to train on. OpenRLHF's loop asks for it."""
        return len(rollouts_of(self.trained))

    def groups_of_each(self, places: Iterable[int]) -> list[tuple[Group, str | None]]:
        """Return the group of each rollout (R,), and what the verifier read in it.

        First of the rollouts to train on, at these places, then of the filtered ones.
        """
        trained, filtered = (
            [(group, read) for group in groups for read in group.read or [None] * len(group.rollouts)]
            for groups in (self.trained, self.filtered)
        )
        return [trained[place] for place in places] + filtered


def rollouts_of(groups: Iterable[Group]) -> list[Experience]:
    return [rollout for group in groups for rollout in group.rollouts]


def scores(rollouts: Sequence[Experience]) -> Floats | None:
    """Return each rollout's score (R,), else its reward; NaN where missing. None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in rollouts]
    if not values:
        return np.array([])
    return None if any(value is None for value in values) else torch.cat([each.double() for each in values]).numpy()


def one_update(args: SimpleNamespace) -> bool:
    """Return whether a step is one optimizer update, and nothing else needs old log-probs."""
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    one = args.train.batch_size == rollouts and args.train.max_epochs == 1
    needed = args.algo.kl.init_coef > 0 or args.critic.model_name_or_path
    return bool(one and not needed and args.algo.advantage.is_correction_level == "off")
