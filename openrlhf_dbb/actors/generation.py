"""Rollout batches: prompts are drawn, vLLM generates, the rollout strategy judges, until a batch is full.

Axes: N rollouts of a group.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from openrlhf_dbb.actors.vllm_actor import RewardError, single_value
from openrlhf_dbb.core.rollouts import Key
from openrlhf_dbb.core.strategies import Decision, Sampler


class BudgetSpent(Exception):
    """``--train.max_rollouts`` does not allow another batch: the training is over."""


@dataclass
class RolloutBatch:
    """What was generated for one step.

    Attributes:
        trained: rollouts to train on, group by group.
        filtered: rollouts that are not trained on: scores, rewards and lengths only.
        skipped: how often each prompt was drawn and nothing was generated for it.
    """

    trained: list[Experience] = field(default_factory=list)
    filtered: list[Experience] = field(default_factory=list)
    skipped: Counter[Key] = field(default_factory=Counter)

    def __len__(self) -> int:
        """Rollouts to train on; OpenRLHF's loop asks."""
        return len(self.trained)

    @property
    def all(self) -> list[Experience]:
        """Everything generated, the rollouts to train on first."""
        return [*self.trained, *self.filtered]


class RolloutGenerator(SamplesGenerator):
    """Fills whole rollout batches, as its strategy decides.

    OpenRLHF trains on the short batch at the end of an episode. Its rows may not fill an optimizer step: they are then
    lost, or shift every later step. Here its groups wait until the next episode completes the batch, under the same
    policy. Nothing is left over between steps.

    Attributes:
        sampler: the strategy at work.
        prompt_ids: each prompt's id, as the strategy knows it.
        generated: training rollouts generated so far.
        watch: called with the number of groups kept so far.
    """

    def __init__(
        self,
        *args: Any,
        sampler: Sampler,
        prompt_ids: Mapping[Key, int],
        max_rollouts: int | None = None,
        watch: Callable[[int], None] = lambda kept: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sampler = sampler
        self.prompt_ids = prompt_ids
        self.generated = 0
        self.watch = watch
        self._max_rollouts = max_rollouts
        self._dataloader_iter: Any = None
        # Of the batch that is being filled: groups kept so far, and all else.
        self._kept: list[list[Experience]] = []
        self._batch = RolloutBatch()

    @property
    def at_end_of_episode(self) -> bool:
        """True if the next call starts a new pass over the data."""
        return self._dataloader_iter is None

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[RolloutBatch, float | None, int, bool]:
        """One whole rollout batch, or an empty one if the pass over the data ends first.

        Returns:
            The batch; the share of groups kept, in percent (as OpenRLHF logs it); prompts generated for; whether the
            pass is over.

        Raises:
            BudgetSpent: the budget does not allow the batch to be filled.
            openrlhf_dbb.core.strategies.SamplingError: the strategy gives up.
        """
        if self._dataloader_iter is None:
            self._dataloader_iter = iter(self.prompts_dataloader)
        batch, consumed = self.args.rollout.batch_size, 0
        with self._engines_awake():
            while len(self._kept) < batch:
                if self._dataloader_iter is None:
                    return RolloutBatch(), None, consumed, True
                missing = batch - len(self._kept)
                if self._groups_left() < missing:
                    raise BudgetSpent
                asked = self.sampler.round_size(missing)
                drawn = self._draw(int(min(asked, self._groups_left())))
                consumed += self._round(drawn, **generate_kwargs) if drawn else 0
                self.sampler.end_round()
        self.sampler.end_step()
        full, self._batch = self._batch, RolloutBatch()
        kept, self._kept = self._kept, []
        full.trained = [rollout for group in kept[:batch] for rollout in group]
        full.filtered += [_scores_only(rollout) for group in kept[batch:] for rollout in group]
        return full, 100 * len(full) / len(full.all), consumed, self.at_end_of_episode

    def unused(self) -> tuple[int, int]:
        """Rollouts of a last batch that was not filled, and their tokens: no step has used them."""
        left = [*self._batch.filtered, *(rollout for group in self._kept for rollout in group)]
        return len(left), sum(int(rollout.response_length.item()) for rollout in left)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold; taken between steps."""
        return {"generated": self.generated, "sampling": self.sampler.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.generated = state["generated"]
        self.sampler.load(state["sampling"])

    def score_more(self, rollouts: Sequence[Experience], samples: int, **generate_kwargs: Any) -> list[list[float]]:
        """Scores of further responses to the prompts of some rollouts, under the current weights.

        Args:
            rollouts: one of each prompt.
            samples: responses to each prompt; not counted as training rollouts.
            generate_kwargs: as for :meth:`generate_samples`.

        Returns:
            ``samples`` scores for each of ``rollouts``, NaN where missing.

        Raises:
            RewardError: as in training, and for a response without any score.
        """
        with self._engines_awake():
            refs = self._dispatch_prompts_to_vllm(
                [rollout.prompts[0] for rollout in rollouts],
                [rollout.labels[0] for rollout in rollouts],
                images=[rollout.images[0] if rollout.images else None for rollout in rollouts],
                **generate_kwargs | {"n_samples_per_prompt": samples},
            )
            return [[_score(response) for response in ray.get(ref)] for ref in refs]

    @torch.no_grad()
    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Samples of all evaluation prompts, side by side for each prompt, in the order of the data.

        Not counted as training rollouts. OpenRLHF waits for each rollout batch of prompts before it sends the next,
        and returns prompts in the order in which they finish.

        Raises:
            RewardError: as in training.
        """
        data = self.eval_dataloader.dataset
        with self._engines_awake():
            refs = self._dispatch_prompts_to_vllm(data.prompts, data.labels, images=data.images, **generate_kwargs)
            answers = [answer for ref in refs for answer in ray.get(ref)]
        return [self._process_response_into_experience(answer, **generate_kwargs) for answer in answers]

    @contextlib.contextmanager
    def _engines_awake(self) -> Iterator[None]:
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        try:
            yield
        finally:
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.vllm_engines, "sleep")

    def _groups_left(self) -> float:
        """Groups the budget still allows."""
        if self._max_rollouts is None:
            return float("inf")
        return (self._max_rollouts - self.generated) // self.args.rollout.n_samples_per_prompt

    def _draw(self, count: int) -> list[tuple[str, Any, Any]]:
        """The next ``count`` prompts that are not skipped: text, label, image; fewer at the end of the pass."""
        drawn: list[tuple[str, Any, Any]] = []
        while len(drawn) < count:
            try:
                _, texts, labels, images = next(self._dataloader_iter)
            except StopIteration:
                # Now, not at the next draw: a finished data loader must not end up in a checkpoint.
                self._dataloader_iter = None
                self.sampler.end_pass()
                break
            for text, label, image in zip(texts, labels, images, strict=True):  # one, in OpenRLHF's data loader
                key = (text, str(label))
                if self._rollouts(self.prompt_ids[key]):
                    drawn.append((text, label, image))
                else:
                    self._batch.skipped[key] += 1
        return drawn

    def _round(self, drawn: list[tuple[str, Any, Any]], **generate_kwargs: Any) -> int:
        """Generate for prompts and for the replacements of rejected ones; the number of both.

        Kept groups are in the order in which they were sent: which ones finish first depends on their lengths.
        """
        pending: dict[Any, int] = {}
        kept: dict[int, list[Experience]] = {}
        sent = self._send(drawn, pending, 0, **generate_kwargs)
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=10.0)
            for ref in ready:
                place = pending.pop(ref)
                group = [self._process_response_into_experience(answer, **generate_kwargs) for answer in ray.get(ref)]
                decision = self._judge(group)
                if decision is Decision.TRAIN:
                    kept[place] = group
                    self.watch(len(self._kept) + len(kept))
                    continue
                self._batch.filtered += map(_scores_only, group)
                replaced = decision is Decision.REPLACE
                if replaced and self._dataloader_iter is not None and self._groups_left() >= 1:
                    sent += self._send(self._draw(1), pending, sent, **generate_kwargs)
        self._kept += [kept[place] for place in sorted(kept)]
        return sent

    def _send(
        self, drawn: list[tuple[str, Any, Any]], pending: dict[Any, int], first: int, **generate_kwargs: Any
    ) -> int:
        """Send prompts to the engines and note their places in ``pending``. From here on they count as generated."""
        if not drawn:
            return 0
        texts, labels, images = (list(column) for column in zip(*drawn, strict=True))
        refs = self._dispatch_prompts_to_vllm(texts, labels, images=images, **generate_kwargs)
        pending.update(zip(refs, range(first, first + len(refs)), strict=True))
        self.generated += len(refs) * self.args.rollout.n_samples_per_prompt
        return len(refs)

    def _rollouts(self, prompt_id: int) -> int:
        rollouts, whole = self.sampler.rollouts(prompt_id), self.args.rollout.n_samples_per_prompt
        if rollouts not in (0, whole):
            raise ValueError(f"the rollout strategy asks for {rollouts} rollouts of a prompt; only 0 or {whole} work")
        return rollouts

    def _judge(self, group: list[Experience]) -> Decision:
        scores_N = _scores(group)
        prompt_id = self.prompt_ids[group[0].prompts[0], str(group[0].labels[0])]
        return Decision.TRAIN if scores_N is None else self.sampler.judge(prompt_id, scores_N)

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        if experience.scores is not None:  # logged as a mean, which a missing score would turn into NaN
            experience.info["score"] = experience.scores.nan_to_num()
        return experience


def _scores(group: list[Experience]) -> NDArray[np.float64] | None:
    """The verifier's scores, or else the rewards; None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in group]
    if any(value is None for value in values):
        return None
    return np.array([value.item() for value in values], dtype=np.float64)


def _scores_only(rollout: Experience) -> Experience:
    """What the estimator and the counts need of a rollout that is not trained on."""
    return Experience(
        rewards=rollout.rewards,
        scores=rollout.scores,
        response_length=rollout.response_length,
        truncated=rollout.truncated,
        prompts=rollout.prompts,
        labels=rollout.labels,
        images=rollout.images,
    )


def _score(response: dict[str, Any]) -> float:
    """The verifier's score, or else the reward, as in training."""
    score = response.get("scores")
    score = single_value(response.get("reward") if score is None else score)
    if score is None:
        raise RewardError(f"no score came with a probe of prompt {response['prompt'][:80]!r}; fix the agent")
    return float(score)
