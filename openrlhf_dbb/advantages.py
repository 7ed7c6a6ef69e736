"""The hook: OpenRLHF's experience maker with advantages from the posteriors."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from openrlhf_dbb.posterior import Posteriors


class PosteriorExperienceMaker(RemoteExperienceMaker):
    """Replaces the group baseline; log-probs, KL, length penalties and returns stay OpenRLHF's.

    Attributes:
        posteriors: set by the trainer before the first step.
        step: global step of the batch being made, 1 for the first; set by the trainer.
    """

    posteriors: Posteriors
    step: int

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Score a whole rollout batch; see :meth:`openrlhf_dbb.posterior.Posteriors.observe`.

        OpenRLHF's reward clip is not applied: it would cut advantages (up to sqrt(alpha / beta)), not rewards.
        """
        for experience in experiences:
            experience.rewards = experience.rewards.to(torch.promote_types(experience.rewards.dtype, torch.float32))
        scores = torch.cat([_scores(experience) for experience in experiences])
        apply_length_penalties(experiences, self.args)
        rewards = torch.cat([experience.rewards for experience in experiences]).double()
        scored = self.posteriors.observe(
            self.step,
            [(p, str(a)) for e in experiences for p, a in zip(e.prompts, e.labels, strict=True)],
            rewards.masked_fill(scores.isnan(), torch.nan).numpy(),
            scores.numpy(),
            self.advantage_estimator,
        )
        sizes = [len(experience.rewards) for experience in experiences]
        columns = {
            "advantage": scored.advantages,
            "estimator/mean": scored.mean,
            "estimator/variance": scored.variance,
            "estimator/zero_variance": scored.zero_variance,
            "estimator/rescued": scored.rescued,
            "estimator/abs_advantage": abs(scored.advantages),
            "group_reward_std": scored.group_std,
        }
        parts = {name: torch.from_numpy(values).float().split(sizes) for name, values in columns.items()}
        for i, experience in enumerate(experiences):
            self._finish(experience, {name: values[i] for name, values in parts.items()})
        return experiences

    def _finish(self, experience: Experience, columns: dict[str, torch.Tensor]) -> None:
        """Spread the advantages over the response tokens (KL penalty included), as OpenRLHF does for GRPO."""
        reward: Any = compute_reward(
            columns.pop("advantage"), self.kl_ctl.value, experience.kl, action_mask=experience.action_mask
        )
        experience.returns = self.get_cumulative_returns(reward, experience.action_mask, 1.0)
        experience.advantages = experience.returns.clone()
        experience.kl = None
        experience.info |= columns | {"return": reward.sum(dim=-1)}


def _scores(experience: Experience) -> torch.Tensor:
    """The verifier's score of each rollout, shape (B,), NaN where missing; without one, the raw reward."""
    scores = experience.scores if experience.scores is not None else experience.rewards
    return scores.double().clone()
