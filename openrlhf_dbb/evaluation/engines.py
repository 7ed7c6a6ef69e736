import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Key, Results, Row, as_results
from openrlhf_dbb.evaluation.verifiers import VERIFIERS
from openrlhf_dbb.platform import cpu, ray_start
from openrlhf_dbb.rewards.answers import without_thought
from openrlhf_dbb.secrets import mask_process

_ENDED = re.compile(r"^\(\w+ pid=\d+\) ERROR .*?\] ([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)


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


@contextmanager
def reason_of_failure() -> Iterator[None]:
    """Raise RunError with the reason if vLLM does not start in the block, which an actor runs.

    On CUDA vLLM's engine is a process of its own. It writes the reason into the log of this actor and nowhere else.
    """
    try:
        yield
    except RuntimeError as error:
        log = Path("/proc/self/fd/1")
        ended = _ENDED.search(log.read_text(errors="replace")) if log.is_file() else None
        if ended is None:
            raise
        raise RunError(f"vLLM did not start: {ended[1]}") from error


@contextmanager
def started_actors() -> Iterator[None]:
    """Raise the RunError of an actor that could not be made. Ray hands over its text alone."""
    from ray.exceptions import RayActorError

    try:
        yield
    except RayActorError as error:
        _, raised, line = str(error).rpartition(f"{RunError.__module__}.{RunError.__name__}: ")
        if not raised:
            raise
        raise RunError(line.strip()) from error


class EngineActor:
    """One vLLM engine, which generates during calls of :meth:`work`."""

    def __init__(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
        import vllm

        mask_process()
        self._sampling = sampling
        with reason_of_failure():
            self._engine = vllm.LLM(**arguments).llm_engine

    def work(self, requests: Sequence[Request]) -> tuple[list[Finished], int, int]:
        """Add requests, generate for a while; return what is finished, how many sequences are not, and the capacity."""
        for request in requests:
            parameters = sampling_params(self._sampling, request)
            self._engine.add_request(str(request.number), {"prompt_token_ids": request.prompt}, parameters)
        end, finished = time.monotonic() + 0.5, []  # an engine reports this often
        while self._engine.has_unfinished_requests() and time.monotonic() < end:
            finished += [answers(int(output.request_id), output) for output in self._engine.step() if output.finished]
        capacity = self._engine.vllm_config.scheduler_config.max_num_seqs
        return finished, self._engine.get_num_unfinished_requests(), capacity


def generate(
    arguments: dict[str, Any], seeds: Sequence[int], sampling: dict[str, Any], requests: Sequence[Request]
) -> Iterator[list[Finished]]:
    """Start an engine for each seed, which share the requests; yield answers as they finish. Ray must be running."""
    import ray

    options, arguments = _placed(arguments, len(seeds))
    actor = ray.remote(num_cpus=1, **options)(EngineActor)
    actors = [actor.remote(arguments | {"seed": seed}, sampling) for seed in seeds]
    waiting = deque(requests)
    calls = {each.work.remote([]): each for each in actors}
    while calls:
        (call,), _ = ray.wait(list(calls))
        engine = calls.pop(call)
        finished, unfinished, capacity = ray.get(call)
        # Twice its capacity, so that the engine is full until its next call.
        room = math.ceil((2 * capacity - unfinished) / sampling["n"])
        # At most an equal share, so that all engines end together.
        count = max(0, min(room, math.ceil(len(waiting) / len(actors))))
        given = [waiting.popleft() for _ in range(count)]
        if given or unfinished:
            calls[engine.work.remote(given)] = engine
        yield finished


def _placed(arguments: dict[str, Any], engines: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Ray's options for an engine's actor, and vLLM's arguments."""
    if not cpu.active():
        gpus = arguments["tensor_parallel_size"]
        # Inside an actor, vLLM might otherwise start its ranks as further actors.
        return {"num_gpus": gpus}, arguments | {"distributed_executor_backend": "mp" if gpus > 1 else "uni"}
    weights = sum(file.stat().st_size for file in Path(arguments["model"]).glob("*.safetensors"))
    is_small = 0 < weights < 80_000_000  # bytes: 20 million parameters in float32
    threads = 1 if is_small else max(len(os.sched_getaffinity(0)) // engines, 1)
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    dtype = "bfloat16" if cpu.has_bf16() and not is_small else "float32"  # as in training
    # Only our worker lets vLLM take smaller blocks.
    arguments = cpu.engine_arguments(arguments | {"enforce_eager": True, "dtype": dtype, "block_size": cpu.BLOCK})
    del arguments["worker_extension_cls"]  # no new weights are sent during an evaluation
    return {"runtime_env": {"env_vars": variables}}, arguments


@contextmanager
def ray_started(engines: int | None, tensor_parallel_size: int, verbose: bool) -> Iterator[int]:
    """Run Ray in the block; yield the number of engines, by default what the GPUs allow."""
    ray_start.prepare()
    import ray

    ray_start.start({"num_cpus": engines or 1, "num_gpus": 0}, {}, verbose=verbose)
    try:
        places = (engines or 1) if cpu.active() else ray_start.places(tensor_parallel_size)
        count = engines or max(1, places)
        if places < count:  # Ray would wait forever
            raise UsageError(
                f"Ray has GPUs, each with a CPU, for {places} engines with --tensor_parallel_size "
                f"{tensor_parallel_size}, not for {count}; lower --engines or --tensor_parallel_size"
            )
        with started_actors():
            yield count
    finally:
        ray.shutdown()


Generate = Callable[[Sequence[Request]], Iterable[list[Finished]]]
"""Answers requests in any order; may yield empty lists while no request is finished."""


def answer(prompts: Mapping[str, BenchmarkPrompts], keys: Sequence[Key], generate: Generate) -> Iterator[Row]:
    """Answer and verify the prompts of ``keys``, in this order; yield each row when it is verified.

    Threads verify while the engines generate, so that the engines never wait.
    """
    requests = [
        Request(number, prompts[key.benchmark].tokens[key.place], prompts[key.benchmark].max_new_tokens)
        for number, key in enumerate(keys)
    ]
    verified: deque[Future[Row]] = deque()
    # Most threads wait for a verifier process.
    with ThreadPoolExecutor(8, thread_name_prefix="verify") as pool:
        for several in generate(requests):
            verified.extend(pool.submit(_verify, prompts, keys[each.number], each) for each in several)
            while verified and verified[0].done():
                yield verified.popleft().result()
        for row in verified:
            yield row.result()


def _verify(prompts: Mapping[str, BenchmarkPrompts], key: Key, finished: Finished) -> Row:
    of, (_, responses, tokens, truncated) = prompts[key.benchmark], finished
    label, verify = of.labels[key.place], VERIFIERS[of.benchmark.verifier]
    answered = [without_thought(response, of.texts[key.place]) or "" for response in responses]
    scores, extracted = map(list, zip(*(verify(response, label) for response in answered), strict=True))
    asked = of.ids[key.place], of.texts[key.place], label
    return Row(*key, *asked, scores, extracted, tokens, truncated, responses)


def answer_once(prompts: Mapping[str, BenchmarkPrompts], generate: Generate) -> dict[str, Results]:
    """Answer all prompts in a single evaluation run; return the results by benchmark."""
    keys = [Key(name, 0, place) for name, asked in prompts.items() for place in range(len(asked.texts))]
    rows = sorted(answer(prompts, keys, generate))
    return {name: as_results([row for row in rows if row.benchmark == name]) for name in prompts}
