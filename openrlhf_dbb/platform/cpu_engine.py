"""Runs vLLM's engine in its caller's process and on one thread, with the interface of ``vllm.AsyncLLMEngine``.

vLLM's own asynchronous engine always starts a process, which competes with its parent for the cores at each step. This
engine samples from torch's global random stream.
"""

import asyncio
import copy
import sys
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu

with cpu.without_unused("engine"):
    # vLLM would import these when it makes an engine.
    import vllm._aiter_ops
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.renderers.hf
    import vllm.v1.worker.cpu_worker
    from vllm import EngineArgs, RequestOutput, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor


class InProcessEngine:
    """The methods of ``vllm.AsyncLLMEngine`` that OpenRLHF's actor and ours call, on vLLM's synchronous engine.

    One thread makes all calls of vLLM, in the order in which they were requested. Between two generation steps the
    thread handles all waiting requests, so that requests that arrive together share their steps.
    """

    def __init__(self, arguments: EngineArgs) -> None:
        """Make vLLM's engine on a thread of its own, and wait for it."""

        def make() -> LLMEngine:
            # One thread reads all prompts. vLLM would copy the tokenizer for others, in a second.
            upstream.replace(
                vllm.renderers.hf, "maybe_make_thread_pool", lambda tokenizer, *_: tokenizer
            )
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            executor = Executor.get_class(config)
            return LLMEngine(
                config, executor, log_stats=not arguments.disable_log_stats, multiprocess_mode=False
            )

        # A step releases Python's lock at each operation on tensors. If another thread is busy, such as a reward
        # function's, the step waits this long to get the lock back. With Python's default, 5 ms, a step takes twice
        # as long.
        sys.setswitchinterval(1e-3)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._engine = self._thread.submit(make).result()
        self.output_processor = self._engine.output_processor
        # Only the thread uses the attributes below.
        self._answers: dict[str, Future[RequestOutput]] = {}
        self._stepping = self._paused = False
        self._failure: Exception | None = None

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield once: the finished request with all of its responses. ``output_kind`` is ignored.

        A request is aborted if its generator is cancelled or closed. An error of vLLM at this request, or at any
        earlier generation step, is raised: after a failed step the engine's state is unknown.
        """
        params = copy.copy(sampling_params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        answer: Future[RequestOutput] = Future()
        self._thread.submit(self._add, request_id, prompt, params, answer)
        try:
            yield await asyncio.wrap_future(answer)
        finally:
            answer.cancel()  # if the caller has gone before the answer, the next step aborts the request

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        **rest: Any,
    ) -> list[Any]:
        """Call a method of vLLM's worker, or a function of the worker, between two generation steps."""
        return list(await self._call(self._engine.collective_rpc, method, timeout, args, **rest))

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached keys and values of prompts; return False if requests still need them."""
        return bool(await self._call(self._engine.reset_prefix_cache))

    async def is_sleeping(self) -> bool:
        """Ask vLLM's engine whether it sleeps, between two generation steps."""
        return bool(await self._call(self._engine.is_sleeping))

    async def pause_generation(self, *, mode: str) -> None:
        """Make no generation step until :meth:`resume_generation`; mode "keep" keeps the requests."""
        assert mode == "keep", mode
        await self._call(self._pause)

    async def resume_generation(self) -> None:
        """Make generation steps again, after :meth:`pause_generation`."""
        await self._call(self._resume)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(function, *args, **kwargs))

    # The thread itself runs the methods below.

    def _add(
        self, request_id: str, prompt: Any, params: SamplingParams, answer: Future[RequestOutput]
    ) -> None:
        self._answers[request_id] = answer
        try:
            if self._failure is not None:
                raise self._failure
            self._engine.add_request(request_id, prompt, params)
        except BaseException as error:  # nobody waits for this call, only for the answer
            self._answer(request_id, error)
        self._go_on()

    def _pause(self) -> None:
        self._paused = True
        self._engine.engine_core.engine_core.pause_scheduler("keep")

    def _resume(self) -> None:
        self._paused = False
        self._engine.engine_core.engine_core.resume_scheduler()
        self._go_on()

    def _go_on(self) -> None:
        if not self._stepping and not self._paused and self._failure is None and self._answers:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        self._stepping = False
        if self._paused:  # paused after the step was submitted; resuming submits another one
            return
        try:
            gone = [
                request_id for request_id, answer in self._answers.items() if answer.cancelled()
            ]
            self._engine.abort_request(gone)
            for request_id in gone:
                del self._answers[request_id]
            for output in self._engine.step():
                if output.finished:
                    self._answer(output.request_id, output)
        except BaseException as error:  # nobody waits for this call, only for the answers
            self._failure = RuntimeError(f"vLLM's engine has failed: {error!r}")
            self._failure.__cause__ = error
            for request_id in list(self._answers):
                self._answer(request_id, self._failure)
        self._go_on()

    def _answer(self, request_id: str, result: RequestOutput | BaseException) -> None:
        answer = self._answers.pop(request_id)
        if answer.set_running_or_notify_cancel():
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
