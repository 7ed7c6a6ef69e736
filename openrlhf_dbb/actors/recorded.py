"""Rollouts of OpenRLHF as a record holds them, and batches of a record in the place of generated ones.

Axes: T tokens of a rollout; A of them generated.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb import chosen
from openrlhf_dbb.actors.generation import (
    BudgetSpent,
    Generated,
    RolloutBatch,
    RolloutGenerator,
    Snapshot,
    rollouts_of,
)
from openrlhf_dbb.core.recorded import Record, RecordedBatch, RecordedRollout, changed
from openrlhf_dbb.errors import RunError

# OpenRLHF makes these of a rollout's other parts.
_DERIVED = ("reward", "score", "response_clip_ratio")


def as_recorded(batch: RolloutBatch) -> RecordedBatch:
    """Return a batch as a record holds it, before OpenRLHF writes into its rollouts."""
    return changed(batch, _without_tensors)


def _without_tensors(group: Any) -> Any:
    rollouts = tuple(map(_rollout_without_tensors, group.rollouts))
    return replace(group, prompt=group.prompt.key, rollouts=rollouts)


def _rollout_without_tensors(rollout: Experience) -> RecordedRollout:
    actions = rollout.action_mask[0].bool()
    log_probs = np.full(int(actions.sum()), np.nan, dtype=np.float32)
    if rollout.rollout_log_probs is not None:
        log_probs = rollout.rollout_log_probs[0][actions].float().numpy()
    logs = {}
    for name, value in rollout.info.items():
        if name not in _DERIVED:
            logs[name] = value[0].item()
    return RecordedRollout(
        tokens=rollout.sequences[0].numpy(),
        actions=actions.numpy(),
        log_probs=log_probs,
        reward=rollout.rewards[0].item(),
        truncated=bool(rollout.truncated[0]),
        logs=logs,
    )


def as_response(rollout: RecordedRollout) -> dict[str, Any]:
    """Return a rollout in the form in which OpenRLHF's engines return it, without prompt and score."""
    is_generated = np.concatenate(([False], rollout.actions))
    # A span of generated tokens begins and ends where two neighbours differ.
    bounded = np.concatenate(([False], is_generated, [False]))
    edges = np.flatnonzero(bounded[1:] != bounded[:-1])
    log_probs = None
    if not np.isnan(rollout.log_probs).any():
        of_all = np.zeros(len(rollout.tokens), dtype=np.float32)
        of_all[is_generated] = rollout.log_probs
        log_probs = of_all.tolist()
    return {
        "observation_tokens": rollout.tokens.tolist(),
        "action_ranges": edges.reshape(-1, 2).tolist(),
        "rollout_log_probs": log_probs,
        "reward": rollout.reward,
        "truncated": rollout.truncated,
        "extra_logs": rollout.logs,
    }


class RecordedGenerator(RolloutGenerator):
    """Gives the batches of a record, in the order in which they were trained on. It asks no engine."""

    def __init__(self, *args: Any, record: Record, last_step: int, **options: Any) -> None:
        """``last_step``: after which the training is over; at most ``record.steps``."""
        super().__init__(*args, **options)
        self._record = record
        self._last_step = last_step
        self._step = 0
        self._given = 0  # rollouts to train on, and filtered ones

    def generate_samples(self, **generate_kwargs: Any) -> Generated:
        """Return the next recorded batch, as :meth:`RolloutGenerator.generate_samples`.

        Raises:
            BudgetSpent: the record, or the planned number of steps, is at its end.
            RunError: the step's file is damaged, or lacks log-probs that the loss takes.
        """
        if self._step == self._last_step:
            if self._step == self._record.steps:
                end = f"step {self._step}, the last recorded one"
                self.filler.sampler.note = f"the training ends with {end}"
            raise BudgetSpent
        self._step += 1
        self._options = generate_kwargs
        try:
            batch: Any = self._record.batch(
                self._step, with_log_probs=chosen.needs_log_probs(self.args)
            )
        except ValueError as error:
            raise RunError(str(error)) from error
        batch = changed(batch, self._group)
        self._given += len(rollouts_of(batch.trained + batch.filtered))
        rollouts = RolloutBatch(batch.trained, batch.filtered, batch.skipped, self.snapshot())
        groups = len(batch.trained) + len(batch.filtered)
        return rollouts, 100 * len(batch.trained) / groups, groups, False

    def _group(self, group: Any) -> Any:
        """Return a recorded group with this run's prompt and OpenRLHF's rollouts."""
        prompt_id = self._prompt_ids[group.prompt]
        prompt = self._prompts.by_id[prompt_id]
        of_prompt = {"prompt": prompt.text, "label": prompt.label}
        rollouts = []
        for rollout, score in zip(group.rollouts, group.scores.tolist(), strict=True):
            response = {**as_response(rollout), **of_prompt, "scores": score}
            rollouts.append(self._rollout(response))
        drawn = group.drawn and group.drawn._replace(prompt_id=prompt_id)
        return replace(
            group, prompt=prompt, prompt_id=prompt_id, drawn=drawn, rollouts=tuple(rollouts)
        )

    def snapshot(self) -> Snapshot:
        """Return the place in the record."""
        state = {"recorded": self._step, "generated": self._given}
        return Snapshot(state, {}, False, {}, self._given)

    def load(self, state: dict[str, Any], place: dict[str, Any]) -> None:
        """Continue from a :meth:`snapshot`."""
        self._step = int(state["recorded"])
        self._given = int(state["generated"])
