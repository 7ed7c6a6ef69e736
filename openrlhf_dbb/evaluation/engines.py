"""vLLM engines in Ray actors that never run out of prompts, from the first benchmark to the last run.

Every engine holds more sequences than it can run at a time. While it works, its next call is already queued with
requests that replace what it finished before, so it waits neither for the driver nor between benchmarks.

Axes: N samples of a prompt.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine

CALL_S = 1.0  # an engine reports at least this often
LEAST_CALL_S = 0.02  # and at most this often while it has work
POLL_S = 0.2
CALLS = 2  # one running, one queued


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled.

    Attributes:
        n: samples of each prompt.
        temperature: 0 is greedy.
        top_p: in (0, 1].
    """

    n: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Request:
    """A prompt to be answered N times.

    Attributes:
        number: identifies the answer.
        prompt: its token ids.
        max_tokens: limit on the response length.
    """

    number: int
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Finished:
    """The N responses to a request.

    Attributes:
        responses: N texts without special tokens.
        tokens: N lengths, end of sequence included.
        truncated: N times whether it was cut at ``max_tokens``.
    """

    number: int
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]


class EngineActor:
    """One vLLM engine, which makes steps only during calls of :meth:`work`."""

    def __init__(self, arguments: dict[str, Any], sampling: SamplingSettings) -> None:
        import vllm

        self._sampling = sampling
        self._llm = vllm.LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._capacity = int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def capacity(self) -> int:
        """Sequences that it can run at a time."""
        return self._capacity

    def work(self, requests: Sequence[Request], more: bool) -> tuple[list[Finished], int]:
        """Add requests, then make steps and report what has finished.

        Args:
            more: whether the driver has more requests; the call then returns before the engine runs out of work.

        Returns:
            Finished requests, and the number of unfinished sequences.
        """
        for request in requests:
            self._add(request)
        began, finished = time.monotonic(), []
        while self._engine.has_unfinished_requests():
            finished += [answers(int(output.request_id), output) for output in self._engine.step() if output.finished]
            spent = time.monotonic() - began
            if spent > CALL_S or (more and spent > LEAST_CALL_S and self._unfinished() <= self._capacity):
                break
        return finished, self._unfinished()

    def _unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    def _add(self, request: Request) -> None:
        parameters = sampling_params(self._sampling, request)
        self._engine.add_request(str(request.number), {"prompt_token_ids": request.prompt}, parameters)


def sampling_params(sampling: SamplingSettings, request: Request) -> Any:
    """``vllm.SamplingParams`` of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=request.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def answers(number: int, output: Any) -> Finished:
    """What vLLM answered to the request of this number."""
    samples = output.outputs
    return Finished(
        number=number,
        responses=[sample.text for sample in samples],
        tokens=[len(sample.token_ids) for sample in samples],
        truncated=[sample.finish_reason == "length" for sample in samples],
    )


@dataclass
class _Lane:
    """What the driver knows about one engine: unfinished sequences, and those in calls it has not answered yet."""

    actor: Any
    capacity: int
    unfinished: int = 0
    sent: deque[int] = field(default_factory=deque)

    @property
    def room(self) -> int:
        """How many sequences it should be given now."""
        return 4 * self.capacity - self.unfinished - sum(self.sent)

    @property
    def busy(self) -> bool:
        return self.unfinished > 0 or any(self.sent)


class Engines:
    """Engines that share requests; Ray must be running, see :func:`ray_started`.

    Args:
        arguments: of ``vllm.LLM``, except the seed.
        seeds: one for each engine.
        sampling: of all requests.

    Raises:
        ray.exceptions.RayError: an engine could not start; the text says why.
    """

    def __init__(self, arguments: dict[str, Any], seeds: Sequence[int], sampling: SamplingSettings) -> None:
        import ray

        self._n = sampling.n
        gpus = 0 if cpu.active() else arguments["tensor_parallel_size"]
        actor = ray.remote(num_cpus=1, num_gpus=gpus)(EngineActor)
        actors = [actor.remote(engine_arguments(arguments) | {"seed": seed}, sampling) for seed in seeds]
        capacities = ray.get([each.capacity.remote() for each in actors])
        self._lanes = [_Lane(each, capacity) for each, capacity in zip(actors, capacities, strict=True)]

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Finished]]:
        """Yield answers as they finish, in any order; now and then an empty list while there are none.

        Raises:
            ray.exceptions.RayError: an engine failed or died.
        """
        import ray

        waiting = deque(requests)
        calls: dict[Any, _Lane] = {}
        rooms = [math.ceil(lane.room / self._n) for lane in self._lanes]
        for lane, share in zip(self._lanes, deal(waiting, rooms), strict=True):
            for part in (share, []) if share else ():
                calls[self._call(lane, part, bool(waiting))] = lane
        while calls:
            ready, _ = ray.wait(list(calls), timeout=POLL_S)
            finished = []
            for call in ready:
                lane = calls.pop(call)
                done, lane.unfinished = ray.get(call)
                lane.sent.popleft()
                finished += done
                while len(lane.sent) < CALLS and (lane.busy or waiting):
                    calls[self._call(lane, self._share(lane, waiting), bool(waiting))] = lane
            yield finished

    def _share(self, lane: _Lane, waiting: deque[Request]) -> list[Request]:
        """Requests for the room of an engine, at most its share of what is left, so that all engines end together."""
        count = min(math.ceil(lane.room / self._n), math.ceil(len(waiting) / len(self._lanes)))
        return [waiting.popleft() for _ in range(max(0, count))]

    def _call(self, lane: _Lane, requests: list[Request], more: bool) -> Any:
        lane.sent.append(len(requests) * self._n)
        return lane.actor.work.remote(requests, more)


def deal(waiting: deque[Request], rooms: Sequence[int]) -> list[list[Request]]:
    """Deal out the first requests one by one in turn, so that even a few requests keep all engines busy.

    Example:
        >>> requests = [Request(number, [1], max_tokens=1) for number in range(5)]
        >>> [[request.number for request in share] for share in deal(deque(requests), rooms=[4, 1, 4])]
        [[0, 3], [1], [2, 4]]
    """
    shares: list[list[Request]] = [[] for _ in rooms]
    for place in range(max(rooms)):
        for share, room in zip(shares, rooms, strict=True):
            if waiting and place < room:
                share.append(waiting.popleft())
    return shares


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` with those that this machine needs."""
    if not cpu.active():
        # Inside an actor, vLLM might otherwise start its ranks as further actors.
        return arguments | {"distributed_executor_backend": "mp" if arguments["tensor_parallel_size"] > 1 else "uni"}
    # In 32 bits, as in training: most CPUs emulate bfloat16.
    arguments = cpu.engine_arguments(arguments | {"enforce_eager": True, "dtype": "float32"})
    del arguments["worker_extension_cls"]  # no new weights are sent during an evaluation
    return arguments


@contextmanager
def ray_started(engines: int | None, tensor_parallel_size: int, verbose: bool) -> Iterator[int]:
    """Ray for the duration of the block; yields the number of engines it has room for.

    Args:
        engines: how many are wanted; None for as many as the GPUs allow, or one without CUDA.
        tensor_parallel_size: GPUs per engine.
        verbose: show the actors' output.

    Raises:
        UsageError: the engines need more GPUs than there are.
    """
    import ray

    environment = {"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true")}
    options: dict[str, Any] = {} if machine.ray_cluster() else {"include_dashboard": False}
    environment |= (cpu if cpu.active() else cuda).worker_environment()
    if cpu.active():
        options |= {"num_cpus": engines or 1, "num_gpus": 0} if options else {}
    ray.init(runtime_env={"env_vars": environment}, log_to_driver=verbose, logging_level="warning", **options)
    try:
        yield (engines or 1) if cpu.active() else _fitting(engines, tensor_parallel_size)
    finally:
        ray.shutdown()


def _fitting(engines: int | None, tensor_parallel_size: int) -> int:
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    needed = (engines or 1) * tensor_parallel_size
    if gpus < needed:
        raise UsageError(
            f"{engines or 1} engines with --tensor_parallel_size {tensor_parallel_size} need {needed} GPUs, "
            f"Ray has {gpus}; lower --engines or --tensor_parallel_size"
        )
    return engines or gpus // tensor_parallel_size
