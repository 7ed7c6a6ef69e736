from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from openrlhf_dbb.evaluation.engines import Finished, Request
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Key, Results, Row, as_results
from openrlhf_dbb.evaluation.verifiers import VERIFIERS

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
        for answers in generate(requests):
            for finished in answers:
                key = keys[finished.number]
                verified.append(pool.submit(_verify, key, finished, prompts[key.benchmark]))
            while verified and verified[0].done():
                yield verified.popleft().result()
        for row in verified:
            yield row.result()


def _verify(key: Key, finished: Finished, prompts: BenchmarkPrompts) -> Row:
    _, responses, tokens, truncated = finished
    label, verify = prompts.labels[key.place], VERIFIERS[prompts.benchmark.verifier]
    verdicts = [verify(response, label) for response in responses]
    scores, answers = [verdict.score for verdict in verdicts], [verdict.answer for verdict in verdicts]
    asked = prompts.ids[key.place], prompts.texts[key.place], label
    return Row(*key, *asked, scores, answers, tokens, truncated, responses)


def answer_once(prompts: Mapping[str, BenchmarkPrompts], generate: Generate) -> dict[str, Results]:
    """Answer all prompts in a single evaluation run; return the results by benchmark."""
    keys = [Key(name, 0, place) for name, asked in prompts.items() for place in range(len(asked.texts))]
    rows = {row.key: row for row in answer(prompts, keys, generate)}
    return {name: as_results([rows[key] for key in keys if key.benchmark == name]) for name in prompts}
