"""OpenRLHF's vLLM actor: a group is one request, and rewards are checked."""

import asyncio
import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.platform.actor_start import reason_of_failure
from openrlhf_dbb.platform.machine import use_rays_interface
from openrlhf_dbb.platform.vllm_requests import Finished, Request, answers, sampling_params
from openrlhf_dbb.platform.weights import Parameter
from openrlhf_dbb.rewards import reward_server
from openrlhf_dbb.rewards.reward_file import RewardError, checked, scored
from openrlhf_dbb.secrets import without_passwords

with cpu.without_unused("engine"):
    import torch
    import vllm
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

_Prompt = tuple[str, Any, Any]  # text, label, images
_Group = list[dict[str, Any]]  # the rollouts of a prompt in upstream's form


class PlatformRolloutActor(upstream.plain_class(RolloutRayActor)):  # type: ignore[misc]
    """OpenRLHF's vLLM actor; without CUDA with another engine."""

    async def __init__(self, *args: Any, threads: int = 0, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        if threads:
            torch.set_num_threads(threads)
        use_rays_interface()
        if cpu.active():
            from openrlhf_dbb.platform.cpu_engine import InProcessEngine

            used = {"__version__": vllm.__version__, "AsyncEngineArgs": vllm.AsyncEngineArgs}
            engine = SimpleNamespace(from_engine_args=InProcessEngine)
            upstream.replace(vllm_engine, "vllm", SimpleNamespace(**used, AsyncLLMEngine=engine))
        with reason_of_failure():
            await super().__init__(*args, **kwargs)


class StrictRolloutActor(PlatformRolloutActor):
    """The vLLM actor of a run with posteriors. A broken reward stops the run, and a missing reward is not 0."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, *args: Any, gives_up_weights: bool = False, **kwargs: Any
    ) -> None:
        worker = "openrlhf_dbb.platform.vllm_worker.WeightWorker"
        # The policy's log-probs are of the distribution that was sampled from, so vLLM's must be of it.
        engine = {"logprobs_mode": "processed_logprobs", **kwargs, "worker_extension_cls": worker}
        await super().__init__(*args, **engine)
        self._tokenizer: Any = None
        self._gives_up_weights = gives_up_weights

    async def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory back; main memory gets a copy of the weights unless they are sent anew.

        Upstream calls this without a level right after the engine's start, too.
        """
        await super().sleep(level=2 if self._gives_up_weights else level)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Keep the tokenizer of the run for all of its prompts."""
        # OpenRLHF sends the tokenizer with every prompt. Unpickling it takes longer than the prompt.
        self._tokenizer = tokenizer

    async def receive_weights(self, bucket: list[Parameter], handles: Any = None) -> None:
        """Let vLLM's workers receive a bucket of weights: by broadcast, or from CUDA handles."""
        await self.llm.collective_rpc("receive_weights", args=(bucket, handles))

    async def sample(self, requests: Sequence[Request], sampling: dict[str, Any]) -> list[Finished]:
        """Return plain responses, as the command ``evaluate`` samples them: no reward function, no agent."""
        pending = []
        for request in requests:
            pending.append(self.generate(request.prompt, sampling_params(sampling, request)))
        outputs = await asyncio.gather(*pending)
        numbers = [request.number for request in requests]
        return list(map(answers, numbers, outputs))

    async def generate_groups(
        self, prompts: Sequence[_Prompt], sampling: dict[str, Any], samples: int, max_length: int
    ) -> list[_Group]:
        """Return N responses (``samples``) to each prompt; raise RewardError if the reward function fails on one.

        ``sampling`` has values of ``vllm.SamplingParams``, so that the caller need not import vllm. Prompt and response
        have at most ``max_length`` tokens together.
        """
        # An agent is a subclass with its own loop; only upstream's own class asks the engine once and then scores.
        group = (
            self._group if type(self.executor) is SingleTurnAgentExecutor else self._group_of_agents
        )
        return await asyncio.gather(
            *(group(prompt, sampling, samples, max_length) for prompt in prompts)
        )

    async def _group(
        self, row: _Prompt, sampling: dict[str, Any], samples: int, max_length: int
    ) -> _Group:
        """Do what upstream's ``SingleTurnAgentExecutor.execute`` does, with one request instead of N."""
        prompt, label, images = row
        train_inputs = None
        pictures = []
        if images and hasattr(self._tokenizer, "image_processor"):  # a vision-language model
            from openrlhf.utils.vlm_utils import process_prompt_with_images

            tokens, train_inputs, pictures = process_prompt_with_images(
                self._tokenizer, prompt, images
            )
        else:
            tokens = list(self._tokenizer(text=prompt, add_special_tokens=False)["input_ids"])
        new_tokens = sampling["max_tokens"] or max(1, max_length - len(tokens))
        room = max_length - new_tokens
        shown = prompt
        if len(tokens) > room:
            if pictures:
                raise ValueError(
                    f"a prompt with images has {len(tokens)} tokens, above {room}; raise --data.max_len"
                )
            tokens = tokens[-room:]
            shown = self._tokenizer.decode(tokens)
        # Only the reward needs the text. It is decoded once, and not token by token.
        form = {"n": samples, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        params = SamplingParams(**sampling | {"max_tokens": new_tokens}, **form)
        answer = await self.generate(tokens, params, {"image": pictures} if pictures else None)
        pending = []
        for response in answer.outputs:
            text = self._text(shown, tokens, response.token_ids)
            pending.append(self._reward(text, prompt, label))
        rewards = await asyncio.gather(*pending)
        of_prompt = {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": train_inputs,
        }
        group = []
        for response, reward in zip(answer.outputs, rewards, strict=True):
            group.append({**of_prompt, **_rollout(tokens, response), **reward})
        return group

    def _text(self, prompt: str, prompt_tokens: list[int], response_tokens: Sequence[int]) -> str:
        """Return prompt and response as text, with the prompt as it is where decoding would change it."""
        text = str(
            self._tokenizer.decode([*prompt_tokens, *response_tokens], skip_special_tokens=False)
        )
        if text.startswith(prompt):
            return text
        return prompt + str(
            self._tokenizer.decode(list(response_tokens), skip_special_tokens=False)
        )

    async def _reward(self, query: str, prompt: str, label: Any) -> dict[str, Any]:
        executor = self.executor
        if not executor.reward_endpoints:
            return {"reward": None, "scores": None, "extra_logs": {}, "read": None}
        call = functools.partial(
            scored, executor.reward_func, executor.reward_endpoints[0], query, prompt, label
        )
        try:  # upstream's executor would log an error and go on without a reward
            if getattr(executor.reward_func, "quick", False):
                reward, score, logs, read = call()  # a thread switch would take longer
            elif executor.reward_func:
                reward, score, logs, read = await asyncio.to_thread(call)
            else:
                url = next(executor._reward_endpoint_cycle)
                answer = await reward_server.ask(url, query, prompt, label)
                reward, score, logs, read = checked(answer, reward_server.name_of(url))
        except RewardError as error:
            raise RewardError(without_passwords(f"{error}; on prompt {prompt[:80]!r}")) from None
        # The reward is averaged for the log and so has to be finite. The score says that it is missing.
        score = math.nan if score is None else score
        return {"reward": reward or 0.0, "scores": score, "extra_logs": logs, "read": read}

    async def _group_of_agents(
        self, row: _Prompt, sampling: dict[str, Any], samples: int, max_length: int
    ) -> _Group:
        """Return the rollouts of N agents; their turns differ, so each asks the engine by itself."""
        prompt, label, images = row
        execute = functools.partial(
            self.executor.execute, prompt=prompt, label=label, images=images,
            max_length=max_length, hf_tokenizer=self._tokenizer, llm_engine=self,
        )  # fmt: skip
        agents = [execute(sampling_params=SamplingParams(**sampling)) for _ in range(samples)]
        return await asyncio.gather(*agents)


def _rollout(prompt: list[int], response: Any) -> dict[str, Any]:
    generated = list(response.token_ids)
    log_probs = None
    if response.logprobs is not None:
        log_probs = [0.0] * len(prompt)
        for token, choices in zip(generated, response.logprobs, strict=True):
            log_probs.append(choices[token].logprob)
    return {
        "observation_tokens": prompt + generated,
        "action_ranges": [(len(prompt), len(prompt) + len(generated))],
        "rollout_log_probs": log_probs,
        "truncated": response.finish_reason == "length",
    }
