"""Ask engines for responses to the prompts of benchmarks, and verify the responses meanwhile."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Key, Results, Row, as_results
from openrlhf_dbb.evaluation.verifiers import VERIFIERS
from openrlhf_dbb.platform.vllm_requests import Finished, Request
from openrlhf_dbb.rewards.answers import without_thought

Generate = Callable[[Sequence[Request]], Iterable[list[Finished]]]
"""Answers requests in any order; may yield empty lists while no request is finished."""

Asked = Mapping[str, BenchmarkPrompts]
"""The prompts of each benchmark, by its name."""


def answer(prompts: Asked, keys: Sequence[Key], generate: Generate) -> Iterator[Row]:
    """Answer and verify the prompts of ``keys``, in this order; yield each row when it is verified.

    Threads verify while the engines generate, so that the engines never wait.
    """
    requests = []
    for number, key in enumerate(keys):
        benchmark = prompts[key.benchmark]
        requests.append(Request(number, benchmark.tokens[key.place], benchmark.max_new_tokens))
    verified: deque[Future[Row]] = deque()
    # Most threads wait for a verifier process.
    with ThreadPoolExecutor(8, thread_name_prefix="verify") as pool:
        for several in generate(requests):
            for finished in several:
                key = keys[finished.number]
                verified.append(pool.submit(_verify, prompts[key.benchmark], key, finished))
            while verified and verified[0].done():
                yield verified.popleft().result()
        for row in verified:
            yield row.result()


def _verify(prompts: BenchmarkPrompts, key: Key, finished: Finished) -> Row:
    prompt = prompts.texts[key.place]
    label = prompts.labels[key.place]
    verify = VERIFIERS[prompts.benchmark.verifier]
    said = [without_thought(response, prompt) or "" for response in finished.responses]
    verdicts = [verify(response, label) for response in said]
    return Row(
        *key,
        id=prompts.ids[key.place],
        prompt=prompt,
        label=label,
        scores=[verdict.score for verdict in verdicts],
        answers=[verdict.answer for verdict in verdicts],
        tokens=finished.tokens,
        truncated=finished.truncated,
        responses=finished.responses,
    )


def keys_of(prompts: Asked, runs: int) -> list[Key]:
    """Return the keys of all prompts in each evaluation run, run after run."""
    keys = []
    for run in range(runs):
        for name, benchmark in prompts.items():
            keys += [Key(name, run, place) for place in range(len(benchmark.texts))]
    return keys


def answer_once(prompts: Asked, generate: Generate) -> dict[str, Results]:
    """Answer all prompts in a single evaluation run; return the results by benchmark."""
    keys = keys_of(prompts, runs=1)
    rows_of: dict[str, list[Row]] = {name: [] for name in prompts}
    for row in sorted(answer(prompts, keys, generate)):
        rows_of[row.benchmark].append(row)
    return {name: as_results(rows) for name, rows in rows_of.items()}
