"""vLLM's engines, each in an actor of Ray, that share the prompts of an evaluation."""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.platform import cpu, ray_start
from openrlhf_dbb.platform.actor_start import reason_of_failure, started_actors
from openrlhf_dbb.platform.vllm_requests import (
    Finished,
    Request,
    answers,
    sampling_params,
)
from openrlhf_dbb.secrets import mask_process

Arguments = dict[str, Any]
"""Of vLLM, of its sampling, or of an actor of Ray, by name."""

_REPORT_EVERY_S = 0.5
_CHECK_HOSTS_EVERY_S = 10
_KEPT = "finished prompts are kept, the same command goes on with the others"
_SMALL_MODEL = 80_000_000  # bytes: 20 million parameters in float32


class EngineActor:
    """One vLLM engine, which generates during calls of :meth:`work`."""

    def __init__(self, arguments: Arguments, sampling: Arguments) -> None:
        import vllm

        mask_process()
        self._sampling = sampling
        with reason_of_failure():
            self._engine = vllm.LLM(**arguments).llm_engine

    def work(self, requests: Sequence[Request]) -> tuple[list[Finished], int, int]:
        """Add requests, and generate for a while.

        Returns:
            What is finished; how many sequences are not; how many sequences the engine holds.
        """
        for request in requests:
            self._engine.add_request(
                str(request.number),
                {"prompt_token_ids": request.prompt},
                sampling_params(self._sampling, request),
            )
        finished = []
        end = time.monotonic() + _REPORT_EVERY_S
        while self._engine.has_unfinished_requests() and time.monotonic() < end:
            for output in self._engine.step():
                if output.finished:
                    finished.append(answers(int(output.request_id), output))
        capacity = self._engine.vllm_config.scheduler_config.max_num_seqs
        return finished, self._engine.get_num_unfinished_requests(), capacity


def generate(
    arguments: Arguments,
    seeds: Sequence[int],
    sampling: Arguments,
    requests: Sequence[Request],
) -> Iterator[list[Finished]]:
    """Start an engine for each seed, which share the requests; yield answers as they finish.

    Ray must be running.

    Raises:
        RunError: an engine has died, or Ray has lost so many hosts that the engines' GPUs are not left.
    """
    import ray

    options, arguments = _placed(arguments, len(seeds))
    actor = ray.remote(num_cpus=1, **options)(EngineActor)
    actors = [actor.remote(arguments | {"seed": seed}, sampling) for seed in seeds]
    waiting = deque(requests)
    calls = {engine.work.remote([]): engine for engine in actors}
    gpus = options.get("num_gpus", 0) * len(seeds)
    while calls:
        engine, (finished, unfinished, capacity) = _next_answer(calls, gpus)
        # Twice its capacity, so that the engine is full until its next call.
        room = math.ceil((2 * capacity - unfinished) / sampling["n"])
        # At most an equal share, so that all engines end together.
        count = max(0, min(room, math.ceil(len(waiting) / len(actors))))
        new = [waiting.popleft() for _ in range(count)]
        if new or unfinished:
            calls[engine.work.remote(new)] = engine
        yield finished


def _next_answer(calls: dict[Any, Any], gpus: int) -> tuple[Any, tuple[list[Finished], int, int]]:
    """Take the next call that has ended from the calls; return its engine and what it returned.

    Raises:
        RunError: the engine has died, or Ray has lost so many hosts that these GPUs are not left.
    """
    import ray

    answered: list[Any] = []
    while not answered:
        answered, _ = ray.wait(list(calls), timeout=_CHECK_HOSTS_EVERY_S)
        lost = None if answered else ray_start.find_lost(gpus)
        if lost is not None:
            raise RunError(f"{lost}; {_KEPT}")
    [call] = answered
    engine = calls.pop(call)
    try:
        return engine, ray.get(call)
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise  # with the exception of its constructor
        cause = f"{ray_start.KILLED} (see dmesg)"
        raise RunError(f"an engine has died: {cause}; {_KEPT}") from error


def _placed(arguments: Arguments, engines: int) -> tuple[Arguments, Arguments]:
    """Return Ray's options for an engine's actor, and vLLM's arguments."""
    if not cpu.active():
        gpus = arguments["tensor_parallel_size"]
        # Inside an actor, vLLM might otherwise start its ranks as further actors.
        backend = "mp" if gpus > 1 else "uni"
        return {"num_gpus": gpus}, arguments | {"distributed_executor_backend": backend}
    files = Path(arguments["model"]).glob("*.safetensors")
    is_small = 0 < sum(file.stat().st_size for file in files) < _SMALL_MODEL
    threads = 1
    dtype = "float32"
    if not is_small:
        threads = max(len(os.sched_getaffinity(0)) // engines, 1)
        if cpu.has_bf16():  # as in training
            dtype = "bfloat16"
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    # Only our worker lets vLLM take smaller blocks.
    on_cpu = {"enforce_eager": True, "dtype": dtype, "block_size": cpu.BLOCK}
    arguments = cpu.engine_arguments(arguments | on_cpu)
    del arguments["worker_extension_cls"]  # no new weights are sent during an evaluation
    return {"runtime_env": {"env_vars": variables}}, arguments


@contextmanager
def ray_started(engines: int | None, tensor_parallel_size: int, verbose: bool) -> Iterator[int]:
    """Run Ray in the block; yield the number of engines, by default what the GPUs allow.

    Raises:
        UsageError: Ray has too few GPUs for the engines.
        RunError: Ray or an engine does not start.
    """
    ray_start.prepare()
    import ray

    ray_start.start({"num_cpus": engines or 1, "num_gpus": 0}, {}, verbose=verbose)
    try:
        places = engines or 1
        if not cpu.active():
            places = ray_start.places(tensor_parallel_size)
        count = engines or max(1, places)
        if places < count:  # Ray would wait forever
            raise UsageError(
                f"Ray has GPUs, each with a CPU, for {places} engines with --tensor_parallel_size "
                f"{tensor_parallel_size}, not for {count}; "
                "lower --engines or --tensor_parallel_size"
            )
        with started_actors():
            yield count
    finally:
        ray.shutdown()
