"""The hook: OpenRLHF's experience maker with advantages from the posteriors."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from openrlhf_dbb.posterior import Posteriors
from openrlhf_dbb.probes import Probes


class PosteriorExperienceMaker(RemoteExperienceMaker):
    """Replaces the group baseline; log-probs, KL, length penalties and returns stay OpenRLHF's.

    Attributes:
        posteriors: set by the trainer before the first step.
        step: global step of the batch being made, 1 for the first; set by the trainer.
        probed: what the probes of this batch found; set by the trainer, None without probes.
        metrics: of the last batch, to be logged; those of the estimator are means over its rollouts.
    """

    posteriors: Posteriors
    step: int
    probed: Probes | None = None
    metrics: dict[str, float]

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
            self.probed,
        )
        # Not through ``info``: every key there costs a reduction over all ranks in every micro-batch.
        self.metrics = scored.metrics | {
            "estimator/mean": float(scored.mean.mean()),
            "estimator/variance": float(scored.variance.mean()),
            "estimator/zero_variance": float(scored.zero_variance.mean()),
            "estimator/rescued": float(scored.rescued.mean()),
            "estimator/abs_advantage": float(abs(scored.advantages).mean()),
            "estimator/missing": float(scores.isnan().double().mean()),
        }
        sizes = [len(experience.rewards) for experience in experiences]
        advantages = torch.from_numpy(scored.advantages).float().split(sizes)
        group_stds = torch.from_numpy(scored.group_std).float().split(sizes)
        for experience, advantage, group_std in zip(experiences, advantages, group_stds, strict=True):
            experience.info.pop("missing", None)
            experience.info["group_reward_std"] = group_std
            self._finish(experience, advantage)
        return experiences

    def _finish(self, experience: Experience, advantage: torch.Tensor) -> None:
        """Spread the advantages over the response tokens (KL penalty included), as OpenRLHF does for GRPO."""
        reward: Any = compute_reward(advantage, self.kl_ctl.value, experience.kl, action_mask=experience.action_mask)
        experience.returns = self.get_cumulative_returns(reward, experience.action_mask, 1.0)
        experience.advantages = experience.returns.clone()
        experience.kl = None
        experience.info["return"] = reward.sum(dim=-1)


def _scores(experience: Experience) -> torch.Tensor:
    """The verifier's score of each rollout, shape (B,), NaN where missing; without one, the raw reward."""
    scores = experience.scores if experience.scores is not None else experience.rewards
    return scores.double().clone()
