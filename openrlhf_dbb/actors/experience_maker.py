"""The hook: OpenRLHF's experience maker with advantages from the posteriors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from openrlhf_dbb import chosen
from openrlhf_dbb.actors.generation import RolloutBatch, one_update, rollouts_of, scores
from openrlhf_dbb.actors.progress import LOG_PROBS, Progress
from openrlhf_dbb.core import ALL
from openrlhf_dbb.core.advantages import thinned, whitening
from openrlhf_dbb.core.arrays import Floats
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.replay import ExtraRow, ReplayMemory, TokenRollout
from openrlhf_dbb.core.step import Probes, Responses, Scored
from openrlhf_dbb.estimators import FORMS


class PosteriorExperienceMaker(RemoteExperienceMaker):
    """Replaces the group baseline. Log-probs, KL, length penalties and returns stay OpenRLHF's."""

    def __init__(self, *args: Any, posteriors: Posteriors, progress: Progress) -> None:
        super().__init__(*args)
        self._progress = progress
        self.posteriors = posteriors
        replay = chosen.replay(self.args)
        self.replays = replay.memory(self.advantage_estimator) if replay.samples else None

    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return the experiences of :meth:`make`.

        OpenRLHF calls this method, but takes no metrics from it. So :meth:`make` did the work before.
        """
        return rollout_samples

    @torch.no_grad()
    def make(
        self, batch: RolloutBatch, step: int, probes: Probes | None
    ) -> tuple[list[Experience], dict[str, float]]:
        """Return the step's rollouts with log-probs and advantages, and what is logged of them.

        Where one optimizer update takes all rollouts, the training pass computes the log-probs
        itself. With ``--train.vllm_log_probs`` the engine's are taken instead.
        """
        # Copies, since OpenRLHF writes into its experiences.
        rollouts = [replace(rollout) for rollout in rollouts_of(batch.trained)]
        samples = self.split_rollout_samples(rollouts)
        self._progress.enter(LOG_PROBS)
        takes_vllms = self.args.train.vllm_log_probs
        needs_pass = not takes_vllms and not one_update(self.args)
        if samples[0].rewards is None or needs_pass:
            samples = self.make_experience(samples)
        else:
            for sample in samples:
                if takes_vllms:
                    sample.action_log_probs = sample.rollout_log_probs
                sample.kl = torch.zeros(sample.action_mask.shape)
                sample.info["kl"] = torch.zeros(len(sample.kl))
                sample.info["logprobs_diff"] = torch.zeros(len(sample.kl))
        return samples, self.add_advantages(samples, batch, step, probes)

    def add_advantages(
        self,
        experiences: list[Experience],
        batch: RolloutBatch,
        step: int,
        probes: Probes | None = None,
    ) -> dict[str, float]:
        """Observe all rollouts of a step, give the trained ones their advantages, in place, and return what is logged.

        The stored and logged advantages are those of the form, before they are thinned, spread and whitened.
        """
        # In the order of the experiences, since a dynamic batch sorts the rollouts by length.
        places = [place for experience in experiences for place in experience.index]
        groups_R = batch.groups_of_each(places)
        filtered = [
            replace(rollout, rewards=rollout.rewards.clone())
            for rollout in rollouts_of(batch.filtered)
        ]
        generated = [*experiences, *filtered]
        rewards_R, scores_R = self._rewards(generated)
        extras = replace(
            batch.extras(groups_R),
            tokens=torch.cat([experience.response_length for experience in generated])
            .long()
            .numpy(),
            probes=probes,
            responses=self._responses(generated),
        )
        prompts, labels = zip(*[group.prompt.key for group, _ in groups_R], strict=True)
        form = self.advantage_estimator
        scored = self.posteriors.observe(
            step, prompts, labels, rewards_R, scores=scores_R, form=form, extras=extras
        )
        scored = thinned(scored, self.args.train.thin, self.args.train.seed, step)
        self._spread(experiences, scored)
        verified_R = ~np.isnan(rewards_R[: len(places)])
        if FORMS.get(form).whitened:
            whiten(experiences, verified_R, divide=not self.args.algo.advantage.no_std_norm)
        if self.replays is None:
            return scored.metrics
        prompt_ids = [group.prompt_id for group, _ in groups_R[: len(places)]]
        return scored.metrics | self._replay(self.replays, experiences, prompt_ids, verified_R)

    def _replay(
        self,
        replays: ReplayMemory,
        experiences: list[Experience],
        prompt_ids: list[int],
        verified_R: NDArray[np.bool_],
    ) -> dict[str, float]:
        """Send rows of earlier steps to the policy, remember this step's rollouts, and return what is logged."""
        rows = replays.extra_rows(prompt_ids)
        replays.remember(token_rollouts(experiences, prompt_ids, verified_R))
        logged = replays.metrics(len(rows))
        if not rows:
            return logged
        self._send([extra_experience(row, like=experiences[0]) for row in rows])
        return logged | means(experiences)

    def _rewards(self, experiences: list[Experience]) -> tuple[Floats, Floats]:
        """Return rewards after length penalties and scores before them, (R,) each; NaN where missing."""
        for experience in experiences:  # integers would cut the penalties
            experience.rewards = experience.rewards.to(
                torch.promote_types(experience.rewards.dtype, torch.float32)
            )
        # A copy: without a score it is the reward, which a penalty changes
        scores_R = np.array(scores(experiences))
        apply_length_penalties(experiences, self.args)
        rewards_R = torch.cat([experience.rewards for experience in experiences]).double().numpy()
        return np.where(np.isnan(scores_R), np.nan, rewards_R), scores_R

    def _spread(self, experiences: list[Experience], scored: Scored) -> None:
        """Spread the advantages over the response tokens (KL penalty included), as OpenRLHF does for GRPO."""
        sizes = [len(experience.rewards) for experience in experiences]
        advantages = _split(scored.advantages, sizes)
        group_stds = _split(scored.group_std, sizes)
        for experience, advantage, group_std in zip(
            experiences, advantages, group_stds, strict=True
        ):
            if self.args.rollout.n_samples_per_prompt > 1:  # as upstream
                experience.info["group_reward_std"] = group_std
            mask = experience.action_mask
            # OpenRLHF's reward clip is left out: it would cut advantages (up to sqrt(alpha / beta)), not rewards.
            reward: Any = compute_reward(
                advantage, self.kl_ctl.value, experience.kl, action_mask=mask
            )
            experience.returns = self.get_cumulative_returns(reward, mask, 1.0)
            experience.advantages = experience.returns.clone()
            experience.kl = None
            experience.info["return"] = reward.sum(dim=-1)

    def _send(self, extra_rows: list[Experience]) -> None:
        """Give each of the policy's ranks its share of the extra rows."""
        group = self.actor_model_group
        ranks = len(group._actor_handlers) // group.duplicate_actors
        shares = [extra_rows[rank::ranks] for rank in range(ranks)]
        ray.get(group.async_run_method_batch(method_name="append_extra_rows", experience=shares))

    def _responses(self, experiences: list[Experience]) -> Responses | None:
        """Return what the model wrote, decoded on demand, without the token that ended it."""
        keep = self.args.rollouts.keep
        if keep == 0:
            return None
        rows = [
            (experience, row)
            for experience in experiences
            for row in range(len(experience.sequences))
        ]

        def decode(place: int) -> str:
            experience, row = rows[place]
            tokens = experience.sequences[row, 1:][experience.action_mask[row].bool()].tolist()
            ended = bool(tokens) and tokens[-1] == self.tokenizer.eos_token_id
            return str(self.tokenizer.decode(tokens[:-1] if ended else tokens))

        return Responses(
            texts=decode,
            truncated=torch.cat([experience.truncated for experience in experiences]).numpy(),
            log_probs=torch.cat([_log_prob_sums(experience) for experience in experiences]).numpy(),
            keep=None if keep == ALL else keep,
        )


def _split(values_R: Floats, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Return the first values of a column in parts of these sizes."""
    return torch.from_numpy(values_R[: sum(sizes)]).float().split(sizes)


def whiten(
    experiences: Sequence[Experience], verified_R: NDArray[np.bool_], *, divide: bool
) -> None:
    """Subtract the batch's mean from the advantages, and divide by its deviation, in place.

    Mean and deviation are over the response tokens of all verified rollouts together. A rollout that is not verified is
    not shifted: it keeps 0, or its KL penalty on the others' scale.
    """
    sizes = [len(experience.rewards) for experience in experiences]
    verified = torch.from_numpy(verified_R).split(sizes)
    pairs = list(zip(experiences, verified, strict=True))
    parts = []
    for experience, rows in pairs:
        is_counted = experience.action_mask.bool() & rows[:, None]
        parts.append(experience.advantages[is_counted].double())
    values = torch.cat(parts)
    if not len(values):
        return
    mean, scale = whitening(values.numpy(), np.ones(len(values)))
    if not divide:
        scale = 1.0
    for experience, rows in pairs:
        advantages = experience.advantages.double()
        experience.advantages = ((advantages - mean * rows[:, None]) * scale).to(
            experience.advantages.dtype
        )


def means(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return over these rows the means that OpenRLHF logs over all rows that it trains on."""

    def mean(columns: Iterable[torch.Tensor]) -> float:
        return torch.cat(list(columns)).float().mean().item()

    logged = {}
    for name in experiences[0].info:
        logged[name] = mean(experience.info[name] for experience in experiences)
    for name in ("response_length", "total_length", "truncated"):
        logged[name] = mean(getattr(experience, name) for experience in experiences)
    return logged


def token_rollouts(
    experiences: Sequence[Experience], prompt_ids: Sequence[int], verified_R: NDArray[np.bool_]
) -> Iterator[TokenRollout]:
    """Yield the verified rollouts of a step, without their padding."""
    facts_R = zip(prompt_ids, verified_R.tolist(), strict=True)
    for experience in experiences:
        lengths = experience.attention_mask.sum(dim=1).tolist()
        for row, length in enumerate(lengths):
            prompt_id, verified = next(facts_R)
            if verified:
                actions = experience.action_mask[row, : length - 1].bool()
                log_probs = experience.action_log_probs[row, : length - 1]
                yield TokenRollout(
                    prompt_id,
                    tokens=experience.sequences[row, :length].numpy(),
                    actions=actions.numpy(),
                    log_probs=log_probs[actions].float().numpy(),
                    reward=experience.rewards[row].item(),
                )


def extra_experience(row: ExtraRow, *, like: Experience) -> Experience:
    """Return an extra row as OpenRLHF's buffer holds a rollout: without a batch dimension.

    OpenRLHF batches rows by the fields and info keys of the first one. So the row gets those of
    ``like``. What is only logged is 0: the logged means are of the step's own rollouts.
    """
    rollout = row.rollout
    tokens = torch.tensor(rollout.tokens)
    actions = torch.tensor(rollout.actions)
    log_probs = torch.zeros(len(actions))
    log_probs[actions] = torch.tensor(rollout.log_probs)
    advantages = torch.full_like(log_probs, row.advantage)
    nothing = torch.tensor(0)
    columns = {
        "sequences": tokens,
        "attention_mask": torch.ones_like(tokens),
        "action_mask": actions,
        "action_log_probs": log_probs,
        "rollout_log_probs": torch.full_like(log_probs, torch.nan),  # the engines have moved on
        "advantages": advantages,
        "returns": advantages.clone(),
        "rewards": torch.tensor(rollout.reward),
        "scores": torch.tensor(rollout.reward),
        "response_length": nothing,
        "truncated": nothing,
        "total_length": nothing,
    }
    fields: dict[str, torch.Tensor] = {}
    for name, values in columns.items():
        other = getattr(like, name)
        if other is not None:
            fields[name] = values.to(other.dtype)
    info = {name: torch.zeros_like(values[0]) for name, values in like.info.items()}
    return Experience(**fields, info=info)


def _log_prob_sums(experience: Experience) -> torch.Tensor:
    """Return each response's log-prob (B,): the engine's, else the trainer's; NaN without any."""
    log_probs = experience.rollout_log_probs
    if log_probs is None:
        log_probs = experience.action_log_probs
    if log_probs is None:
        return torch.full((len(experience.sequences),), torch.nan)
    return (log_probs.double() * experience.action_mask).sum(dim=-1)
