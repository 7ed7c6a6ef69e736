"""OpenRLHF's vLLM actor, made strict: broken rewards stop the run, missing ones do not become 0."""

from __future__ import annotations

import asyncio
import itertools
import math
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.actors import policy_updates
from openrlhf_dbb.actors.rewards import RewardError, single_value
from openrlhf_dbb.evaluation.engines import Finished, Request, SamplingSettings, answers, sampling_params
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.platform.network import use_rays_interface
from openrlhf_dbb.platform.weight_buckets import Parameter

with cpu.lean_imports():
    import vllm
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

_failure: ContextVar[list[Exception]] = ContextVar("failure")


class StrictExecutor(SingleTurnAgentExecutor):
    """Raises :class:`RewardError` when the reward function fails; upstream's logs it and goes on without a reward.

    A reward of ``None`` marks a rollout that could not be verified (a time-out): it is passed on as missing, with
    ``extra_logs["missing"] = 1``.
    """

    async def execute(self, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        failures: list[Exception] = []
        _failure.set(failures)
        output = await super().execute(prompt, *args, **kwargs)
        if failures:
            detail = "".join(traceback.format_exception(failures[0]))
            raise RewardError(f"the reward function failed on prompt {prompt[:80]!r}:\n{detail}")
        if self.reward_endpoints:
            output.update(_checked(output, prompt))
        return output

    async def _fetch_rewards_via_func(self, *args: Any) -> list[dict[str, Any]]:
        return _own_values(await self._noting_failure(self._call_reward_func(*args)))

    async def _call_reward_func(self, *args: Any) -> Any:
        """Upstream's, in a thread; without one if the function declares itself quicker than a thread switch."""
        if getattr(self.reward_func, "quick", False):
            return [self.reward_func(*args)]
        return await super()._fetch_rewards_via_func(*args)

    async def _fetch_rewards_via_http(self, *args: Any) -> list[dict[str, Any]]:
        return _own_values(await self._noting_failure(super()._fetch_rewards_via_http(*args)))

    async def _noting_failure(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # raised again; upstream swallows it, execute() must not
            _failure.get().append(error)
            raise


_MISSING = "missing"


def _own_values(results: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Tell "could not be verified" from upstream's "no reward was asked for": upstream uses None for both."""
    owned = []
    for result in results:
        if not result or "rewards" not in result:
            raise _no_reward(result)
        reward = single_value(result["rewards"])
        score = single_value(result.get("scores", reward))
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
        # The reward is averaged for the log and so has to be finite; the score says that it is missing.
        return {"reward": 0.0, "scores": math.nan, "extra_logs": extra}
    for name in ("reward", "scores"):
        value = output[name]
        if isinstance(value, str) or value is None or not math.isfinite(value):
            raise RewardError(
                f"the reward function returned {name} = {value!r} for prompt {prompt[:80]!r}; "
                "finite numbers are allowed, and None for a rollout that could not be verified"
            )
    return {"reward": float(output["reward"]), "scores": float(output["scores"]), "extra_logs": extra}


class PlatformRolloutActor(upstream.plain_class(RolloutRayActor)):  # type: ignore[misc]
    """OpenRLHF's vLLM actor; without CUDA, with another engine and with engine arguments that suit it."""

    async def __init__(self, *args: Any, param_dtype: str = "bf16", **kwargs: Any) -> None:  # type: ignore[misc]
        """Ray awaits this.

        Args:
            param_dtype: of the policy, as in ``--ds.param_dtype``; without CUDA, "fp32" gives a float32 engine.
        """
        use_rays_interface()
        if cpu.active():
            with cpu.lean_imports():
                from openrlhf_dbb.platform.cpu_engine import InProcessEngine

            used = {"__version__": vllm.__version__, "AsyncEngineArgs": vllm.AsyncEngineArgs}
            upstream.replace(vllm_engine, "vllm", SimpleNamespace(**used, AsyncLLMEngine=InProcessEngine))
            kwargs = cpu.engine_arguments(kwargs)
            if param_dtype == "fp32":
                kwargs["dtype"] = "float32"
        await super().__init__(*args, **kwargs)


class _TokenizedOnce:
    """A tokenizer that caches its last call: upstream tokenizes a prompt once for each of its rollouts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._last: tuple[Any, Any] | None = None

    def __call__(self, **asked: Any) -> Any:
        if self._last is None or self._last[0] != asked:
            self._last = asked, self._tokenizer(**asked)
        return self._last[1]

    def decode(self, ids: list[int], **options: Any) -> str:
        """The text of a prompt and a response, with the prompt as it is where decoding would change it."""
        text: str = self._tokenizer.decode(ids, **options)
        if self._last is None or text.startswith(self._last[0]["text"]):
            return text
        asked, tokenized = self._last
        prompt = tokenized["input_ids"][0].tolist()
        if ids[: len(prompt)] != prompt:  # it was truncated
            return text
        return str(asked["text"] + self._tokenizer.decode(ids[len(prompt) :], **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _OneRequest:
    """The engine as the rollouts of a group see it: their requests become one request for all of them.

    Attributes:
        looked_at: what upstream reads of the sampling parameters, and copies for each rollout: a copy of vLLM's own
            takes longer than all else that is done for a rollout.
    """

    def __init__(self, engine: Any, rollouts: int, sampling: dict[str, Any]) -> None:
        self._engine, self._rollouts, self._sampling = engine, rollouts, sampling
        self._answer: asyncio.Future[Any] | None = None
        self._given = itertools.count()
        self.looked_at = SimpleNamespace(max_tokens=sampling["max_tokens"], logprobs=sampling["logprobs"])

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """One of the group's responses, in the form upstream expects for a single request."""
        if self._answer is None:
            given = self._sampling | {"max_tokens": sampling_params.max_tokens}  # which may follow from the prompt
            # No text: it is decoded once, for the reward, and not token by token.
            form = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
            whole = SamplingParams(**given, n=self._rollouts, **form)
            asked = self._engine.answer(prompt_token_ids, whole, multi_modal_data)
            self._answer = asyncio.ensure_future(asked)
        answer = await self._answer
        response = answer.outputs[next(self._given)]
        policy_updates.note_turn(response)
        return SimpleNamespace(outputs=[response])


class StrictRolloutActor(PlatformRolloutActor):
    """The platform's actor with :class:`StrictExecutor`."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        worker = "openrlhf_dbb.platform.vllm_worker.BucketWorker"  # without CUDA, the platform's instead
        # Log-probs, if asked for, are those of the distribution that was sampled from, as the policy's are.
        engine = {"logprobs_mode": "processed_logprobs", **kwargs, "worker_extension_cls": worker}
        await super().__init__(*args, **engine)
        if not kwargs.get("agent_func_path"):
            self.executor = StrictExecutor(kwargs.get("remote_rm_url"))
        self._updates = policy_updates.PolicyUpdates()

    async def receive_weights(self, bucket: list[Parameter]) -> None:
        """Have vLLM's workers receive these parameters, see :meth:`openrlhf_dbb.platform.weight_buckets.Receiver`."""
        await self.llm.collective_rpc("receive_weights", args=(bucket,))

    def note_update(self) -> None:
        """The weights are those of the next policy: in async training, after each update."""
        self._updates.note(list(self.llm.output_processor.request_states.values()))

    async def answer(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Upstream's ``generate``; each response says in ``policy_updates`` how many updates its tokens had seen."""
        began = self._updates.count
        found = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        self._updates.write_down(found, began)
        return found

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """As upstream's, for a turn of an agent."""
        found = await self.answer(prompt_token_ids, sampling_params, multi_modal_data)
        policy_updates.note_turn(found.outputs[0])
        return found

    async def sample(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Finished]:
        """Responses alone, as the command ``evaluate`` samples them: without a reward, and not of an agent."""
        outputs = (self.answer(each.prompt, sampling_params(sampling, each)) for each in requests)
        found = await asyncio.gather(*outputs)
        return [answers(each.number, output) for each, output in zip(requests, found, strict=True)]

    async def generate_groups(
        self, prompts: Sequence[tuple[str, Any, Any]], sampling: dict[str, Any], num_samples: Sequence[int], **rest: Any
    ) -> list[list[dict[str, Any]]]:
        """A group of responses to each of several prompts.

        Args:
            prompts: text, label and images of each.
            sampling: values of ``vllm.SamplingParams``, so that who asks need not import vllm.
            num_samples: N of each prompt's group.
            rest: ``max_length`` and ``hf_tokenizer``, as for upstream's ``generate_responses``.

        Returns:
            For each prompt its responses, as upstream's, with ``policy_updates``: the weight updates that the engine
            had seen, mean over the response's tokens.

        Raises:
            RewardError: the reward function failed on one of them.
        """
        groups = zip(prompts, num_samples, strict=True)
        return await asyncio.gather(*(self._group(*prompt, sampling, count, **rest) for prompt, count in groups))

    async def _group(
        self, prompt: str, label: Any, images: Any, sampling: dict[str, Any], num_samples: int, **rest: Any
    ) -> list[dict[str, Any]]:
        """Upstream's ``generate_responses`` with one request to vLLM for the group, not one for each rollout."""
        asked = {"prompt": prompt, "label": label, "images": images, **rest}
        if isinstance(self.executor, StrictExecutor):
            engine = _OneRequest(self, num_samples, sampling)
            asked |= {"llm_engine": engine, "sampling_params": engine.looked_at}
            asked["hf_tokenizer"] = _TokenizedOnce(rest["hf_tokenizer"])
        else:  # an agent: its turns differ between rollouts
            asked |= {"llm_engine": self, "sampling_params": SamplingParams(**sampling)}
        return await asyncio.gather(*(self._rollout(asked) for _ in range(num_samples)))

    async def _rollout(self, asked: dict[str, Any]) -> dict[str, Any]:
        policy_updates.begin_rollout()  # in a task of its own
        response: dict[str, Any] = await self.executor.execute(**asked)
        return {**response, "policy_updates": policy_updates.mean_updates(self._updates.count)}
