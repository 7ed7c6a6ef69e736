"""OpenRLHF's generation, made strict: broken rewards stop the run, missing ones are no 0, batches are whole."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, batch_vllm_engine_call
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_dbb import cpu, upstream

_failure: ContextVar[list[Exception]] = ContextVar("failure")


class RewardError(RuntimeError):
    """The reward function raised, or returned something that is not a reward."""


class StrictExecutor(SingleTurnAgentExecutor):
    """Upstream's executor logs an exception of the reward function and goes on without a reward.

    This one raises :class:`RewardError` with the traceback. A reward of ``None`` marks a rollout that
    could not be verified (a time-out): it is passed on as missing, with ``extra_logs["missing"] = 1``.
    """

    async def execute(self, prompt: str, label: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        failures: list[Exception] = []
        _failure.set(failures)
        output = await super().execute(prompt, label, *args, **kwargs)
        if failures:
            detail = "".join(traceback.format_exception(failures[0]))
            raise RewardError(f"the reward function failed on prompt {prompt[:80]!r}:\n{detail}")
        if self.reward_endpoints:
            output.update(_checked(output, prompt))
        return output

    async def _fetch_rewards_via_func(self, *args: Any) -> list[dict[str, Any]]:
        return _own_values(await self._noting_failure(super()._fetch_rewards_via_func(*args)))

    async def _fetch_rewards_via_http(self, *args: Any) -> list[dict[str, Any]]:
        return _own_values(await self._noting_failure(super()._fetch_rewards_via_http(*args)))

    async def _noting_failure(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # raised again: upstream swallows it, execute() must not
            _failure.get().append(error)
            raise


_MISSING = "missing"


def _own_values(results: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Keep "not verifiable" apart from upstream's "no reward was asked for": both are None there."""
    owned = []
    for result in results:
        if not result or "rewards" not in result:
            raise _no_reward(result)
        reward = _single(result["rewards"])
        score = _single(result.get("scores", reward))
        owned.append(
            {
                "rewards": _MISSING if reward is None else reward,
                "scores": reward if score is None else score,
                "extra_logs": result.get("extra_logs") or {},
            }
        )
    return owned


def _no_reward(result: Any) -> RewardError:
    error = RewardError(f'the reward function returned {result!r}; a dict with "rewards" (and "scores") is needed')
    _failure.get().append(error)  # upstream swallows it, execute() must not
    return error


def _checked(output: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Reward, score and the missing flag of one rollout, as finite floats.

    Raises:
        RewardError: a value is not a finite number.
    """
    missing = output["reward"] == _MISSING
    extra = {**output["extra_logs"], "missing": float(missing)}
    if missing:
        # The reward only has to be finite (it is averaged for the log); the score carries the meaning.
        return {"reward": 0.0, "scores": math.nan, "extra_logs": extra}
    for name in ("reward", "scores"):
        value = output[name]
        if isinstance(value, str) or value is None or not math.isfinite(value):
            raise RewardError(
                f"the reward function returned {name} = {value!r} for prompt {prompt[:80]!r}; "
                "finite numbers are allowed, and None for a rollout that could not be verified"
            )
    return {"reward": float(output["reward"]), "scores": float(output["scores"]), "extra_logs": extra}


def _single(value: Any) -> Any:
    """The one number in a scalar, a list or a tensor of one; None stays None."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, torch.Tensor):
        value = value.item()
    return value


class PlatformRolloutActor(upstream.plain_class(RolloutRayActor)):  # type: ignore[misc]
    """OpenRLHF's vLLM actor, with engine arguments for CPU where there is no CUDA."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        if cpu.active():
            kwargs = cpu.engine_arguments(kwargs)
        await super().__init__(*args, **kwargs)


class StrictRolloutActor(PlatformRolloutActor):
    """The same with :class:`StrictExecutor`."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        await super().__init__(*args, **kwargs)
        if not kwargs.get("agent_func_path"):
            self.executor = StrictExecutor(kwargs.get("remote_rm_url"))


class WholeBatchGenerator(SamplesGenerator):
    """Emits whole rollout batches only.

    OpenRLHF trains the short batch at the end of an episode, whose rows may not fill an optimizer step:
    such rows vanish, or shift every later step. Here they are held and completed in the next episode.

    Attributes:
        held: rollouts waiting for their batch; part of the checkpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dataloader_iter: Any = None
        self._sample_buffer: list[Experience] = []

    @property
    def held(self) -> list[Experience]:
        return self._sample_buffer

    @held.setter
    def held(self, rollouts: list[Experience]) -> None:
        self._sample_buffer = rollouts

    @property
    def at_end_of_episode(self) -> bool:
        """True if the next call starts a new pass over the data."""
        return self._dataloader_iter is None

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """One whole rollout batch, or none at the end of an episode; see upstream for the return values."""
        group, batch = self.args.rollout.n_samples_per_prompt, self.args.rollout.batch_size
        if self._dataloader_iter is None:
            self._dataloader_iter = iter(self.prompts_dataloader)
        self.args.rollout.vllm_generate_batch_size = batch - len(self._sample_buffer) // group
        samples, pass_rate, consumed, exhausted = super().generate_samples(**generate_kwargs)
        if len(samples) < batch * group:
            self._sample_buffer, samples = samples, []
        return samples, pass_rate, consumed, exhausted

    def score_more(self, rollouts: Sequence[Experience], samples: int, **generate_kwargs: Any) -> list[list[float]]:
        """Scores of more responses to the prompts of some rollouts, under the present weights.

        Args:
            rollouts: one of each prompt.
            samples: responses to each prompt.
            generate_kwargs: as for :meth:`generate_samples`.

        Returns:
            ``samples`` scores for each of ``rollouts``, NaN where missing.

        Raises:
            RewardError: as in training, and for a response without any score.
        """
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        try:
            refs = self._dispatch_prompts_to_vllm(
                [rollout.prompts[0] for rollout in rollouts],
                [rollout.labels[0] for rollout in rollouts],
                images=[rollout.images[0] if rollout.images else None for rollout in rollouts],
                **generate_kwargs | {"n_samples_per_prompt": samples},
            )
            return [[_score(response) for response in ray.get(ref)] for ref in refs]
        finally:
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.vllm_engines, "sleep")

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        if experience.scores is not None:  # logged as a mean, which a missing score (NaN) would spoil
            experience.info["score"] = experience.scores.nan_to_num()
        return experience


def _score(response: dict[str, Any]) -> float:
    """The verifier's score, or else the reward, as in training."""
    score = response.get("scores")
    score = _single(response.get("reward") if score is None else score)
    if score is None:
        raise RewardError(f"no score came with a probe of prompt {response['prompt'][:80]!r}; mend the agent")
    return float(score)
