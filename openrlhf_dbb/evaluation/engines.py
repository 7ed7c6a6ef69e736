import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, ray_start

CALL_S = 0.5  # an engine reports this often


class Request(NamedTuple):
    """A prompt (token ids) to be answered N times; the answer has the same number."""

    number: int
    prompt: list[int]
    max_tokens: int


class Finished(NamedTuple):
    """The N responses to a request: texts without special tokens, lengths, and whether ``max_tokens`` cut them."""

    number: int
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]


def sampling_params(sampling: dict[str, Any], request: Request) -> Any:
    """Return the ``vllm.SamplingParams`` of a request; ``sampling``: n, temperature (0 is greedy) and top_p."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**sampling, max_tokens=request.max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)


def answers(number: int, output: Any) -> Finished:
    samples = [(each.text, len(each.token_ids), each.finish_reason == "length") for each in output.outputs]
    responses, tokens, truncated = map(list, zip(*samples, strict=True))
    return Finished(number, responses, tokens, truncated)


class EngineActor:
    """One vLLM engine, which generates during calls of :meth:`work`."""

    def __init__(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
        import vllm

        self._sampling = sampling
        self._engine = vllm.LLM(**arguments).llm_engine

    def work(self, requests: Sequence[Request]) -> tuple[list[Finished], int, int]:
        """Add requests, generate for a while; return what is finished, how many sequences are not, and the capacity."""
        for request in requests:
            parameters = sampling_params(self._sampling, request)
            self._engine.add_request(str(request.number), {"prompt_token_ids": request.prompt}, parameters)
        end, finished = time.monotonic() + CALL_S, []
        while self._engine.has_unfinished_requests() and time.monotonic() < end:
            finished += [answers(int(output.request_id), output) for output in self._engine.step() if output.finished]
        capacity = self._engine.vllm_config.scheduler_config.max_num_seqs
        return finished, self._engine.get_num_unfinished_requests(), capacity


class Engines:
    """Engines that share requests, one for each seed. Ray must be running."""

    def __init__(self, arguments: dict[str, Any], seeds: Sequence[int], sampling: dict[str, Any]) -> None:
        import ray

        self._n = sampling["n"]
        if cpu.active():
            weights = sum(file.stat().st_size for file in Path(arguments["model"]).glob("*.safetensors"))
            is_small = 0 < weights < 80_000_000  # bytes: 20 million parameters in float32
            threads = 1 if is_small else max(len(os.sched_getaffinity(0)) // len(seeds), 1)
            variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
            options: dict[str, Any] = {"runtime_env": {"env_vars": variables}}
            # As in training.
            dtype = "bfloat16" if cpu.has_bf16() and not is_small else "float32"
            arguments = cpu.engine_arguments(arguments | {"enforce_eager": True, "dtype": dtype})
            del arguments["worker_extension_cls"]  # no new weights are sent during an evaluation
        else:
            gpus = arguments["tensor_parallel_size"]
            options = {"num_gpus": gpus}
            # Inside an actor, vLLM might otherwise start its ranks as further actors.
            arguments = arguments | {"distributed_executor_backend": "mp" if gpus > 1 else "uni"}
        actor = ray.remote(num_cpus=1, **options)(EngineActor)
        self._actors = [actor.remote(arguments | {"seed": seed}, sampling) for seed in seeds]

    def generate(self, requests: Sequence[Request]) -> Iterator[list[Finished]]:
        """Yield answers as they finish, in any order."""
        import ray

        waiting = deque(requests)
        calls = {actor.work.remote([]): actor for actor in self._actors}
        while calls:
            (call,), _ = ray.wait(list(calls))
            actor = calls.pop(call)
            finished, unfinished, capacity = ray.get(call)
            # Twice its capacity, so that the engine is full until its next call.
            room = math.ceil((2 * capacity - unfinished) / self._n)
            # At most an equal share, so that all engines end together.
            count = max(0, min(room, math.ceil(len(waiting) / len(self._actors))))
            given = [waiting.popleft() for _ in range(count)]
            if given or unfinished:
                calls[actor.work.remote(given)] = actor
            yield finished


@contextmanager
def ray_started(engines: int | None, tensor_parallel_size: int, verbose: bool) -> Iterator[int]:
    """Run Ray in the block; yield the number of engines, by default what the GPUs allow."""
    ray_start.prepare()
    import ray

    count = engines or 1
    ray_start.start({"num_cpus": count, "num_gpus": 0}, {}, verbose=verbose)
    try:
        if not cpu.active():
            places = ray_start.places(tensor_parallel_size)
            count = engines or max(1, places)
            if places < count:  # Ray would wait forever
                raise UsageError(
                    f"Ray has GPUs, each with a CPU, for {places} engines with --tensor_parallel_size "
                    f"{tensor_parallel_size}, not for {count}; lower --engines or --tensor_parallel_size"
                )
        yield count
    finally:
        ray.shutdown()
