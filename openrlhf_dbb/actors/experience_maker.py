"""The hook: OpenRLHF's experience maker with advantages from the posteriors."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from openrlhf_dbb.actors.generation import Aside
from openrlhf_dbb.actors.replay import Chosen, Replays
from openrlhf_dbb.core.posteriors import Posteriors, Scored
from openrlhf_dbb.core.probes import Key, Probes
from openrlhf_dbb.core.usage import Rollouts


class PosteriorExperienceMaker(RemoteExperienceMaker):
    """Replaces the group baseline; log-probs, KL, length penalties and returns stay OpenRLHF's.

    Attributes:
        posteriors: set by the trainer before the first step.
        replays: adds earlier rollouts of the same prompts to a step; None without replay.
        step: global step of the batch being made, 1 for the first; set by the trainer.
        aside: what was generated or skipped beside this batch; set by the trainer.
        probed: what the probes of this batch found; set by the trainer, None without probes.
        metrics: of the last batch, to be logged; those of the estimator are means over the rollouts trained on.
    """

    posteriors: Posteriors
    replays: Replays | None = None
    step: int
    aside: Aside
    probed: Probes | None = None
    metrics: dict[str, float]

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Score a whole rollout batch; see :meth:`openrlhf_dbb.core.posteriors.Posteriors.observe`.

        OpenRLHF's reward clip is not applied: it would cut advantages (up to sqrt(alpha / beta)), not rewards.
        """
        prompts = _prompts(experiences)
        replayed: Chosen = self.replays.choose(prompts) if self.replays is not None else {}
        rollouts = self._rollouts([*experiences, *self.aside.observed], len(prompts), replayed)
        scored = self.posteriors.observe(self.step, rollouts, self.advantage_estimator, self.probed)
        trained = len(prompts)
        self.metrics = scored.metrics | _means(scored, rollouts, trained)
        advantages, rewards = scored.advantages[:trained], rollouts.rewards[:trained]
        if self.replays is not None:
            advantages, replay_advantages = self.replays.normalise(prompts, rewards, advantages, replayed)
        sizes = [len(experience.rewards) for experience in experiences]
        group_stds = torch.from_numpy(scored.group_std[:trained]).float().split(sizes)
        parts = torch.from_numpy(advantages).float().split(sizes)
        for experience, advantage, group_std in zip(experiences, parts, group_stds, strict=True):
            experience.info.pop("missing", None)
            experience.info["group_reward_std"] = group_std
            self._finish(experience, advantage)
        if self.replays is not None:
            rows = self.replays.rows(replayed, replay_advantages, experiences[0])
            self._send(rows)
            self.replays.remember(experiences)
            self.metrics |= self.replays.metrics(len(rows), experiences)
        return experiences

    def _rollouts(self, experiences: list[Experience], trained: int, replayed: Chosen) -> Rollouts:
        """All rollouts of the step, the ``trained`` first; their rewards get OpenRLHF's length penalties."""
        for experience in experiences:
            experience.rewards = experience.rewards.to(torch.promote_types(experience.rewards.dtype, torch.float32))
        scores = torch.cat([_scores(experience) for experience in experiences])
        apply_length_penalties(experiences, self.args)
        rewards = torch.cat([experience.rewards for experience in experiences]).double()
        return Rollouts(
            prompts=_prompts(experiences),
            rewards=rewards.masked_fill(scores.isnan(), torch.nan).numpy(),
            scores=scores.numpy(),
            tokens=torch.cat([experience.response_length for experience in experiences]).long().numpy(),
            trained=np.arange(len(scores)) < trained,
            replayed={key: (len(old), sum(len(r.log_probs) for r in old)) for key, old in replayed.items()},
            skipped=self.aside.skipped,
        )

    def _finish(self, experience: Experience, advantage: torch.Tensor) -> None:
        """Spread the advantages over the response tokens (KL penalty included), as OpenRLHF does for GRPO."""
        reward: Any = compute_reward(advantage, self.kl_ctl.value, experience.kl, action_mask=experience.action_mask)
        experience.returns = self.get_cumulative_returns(reward, experience.action_mask, 1.0)
        experience.advantages = experience.returns.clone()
        experience.kl = None
        experience.info["return"] = reward.sum(dim=-1)

    def _send(self, rows: list[Experience]) -> None:
        """Hand replayed rows to the actor's ranks, beside the batch that OpenRLHF gives them."""
        if not rows:
            return
        group = self.actor_model_group
        ranks = len(group._actor_handlers) // group.duplicate_actors
        shares = [rows[rank::ranks] for rank in range(ranks)]
        ray.get(group.async_run_method_batch(method_name="append_replays", experience=shares))


def _prompts(experiences: list[Experience]) -> list[Key]:
    return [(p, str(a)) for e in experiences for p, a in zip(e.prompts, e.labels, strict=True)]


def _means(scored: Scored, rollouts: Rollouts, trained: int) -> dict[str, float]:
    """Means over the rollouts that are trained on.

    Not through ``info``: every key there costs a reduction over all ranks in every micro-batch.
    """

    def mean(values: NDArray[Any]) -> float:
        return float(values[:trained].mean())

    return {
        "estimator/mean": mean(scored.mean),
        "estimator/variance": mean(scored.variance),
        "estimator/zero_variance": mean(scored.zero_variance),
        "estimator/rescued": mean(scored.rescued),
        "estimator/abs_advantage": mean(abs(scored.advantages)),
        "estimator/missing": mean(np.isnan(rollouts.scores)),
        "rollout/filtered": float((~rollouts.trained).mean()),
        "rollout/skipped": float(sum(rollouts.skipped.values())),
    }


def _scores(experience: Experience) -> torch.Tensor:
    """The verifier's score of each rollout, shape (B,), NaN where missing; without one, the raw reward."""
    scores = experience.scores if experience.scores is not None else experience.rewards
    return scores.double().clone()
