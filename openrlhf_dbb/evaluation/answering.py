"""Prompts of benchmarks answered by engines, each response verified by its benchmark's verifier.

Axes: P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from openrlhf_dbb.evaluation import verifiers
from openrlhf_dbb.evaluation.engines import Finished, Request
from openrlhf_dbb.evaluation.journal import Key, Row
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import Results

_VERIFYING = 8  # threads; most of them wait for a verifier process

Generate = Callable[[Sequence[Request]], Iterable[list[Finished]]]
"""Answers requests in any order; now and then an empty list while there are none."""


def answer(prompts: Mapping[str, BenchmarkPrompts], keys: Sequence[Key], generate: Generate) -> Iterator[Row]:
    """Answer and verify the prompts of ``keys``, which are asked for in this order; each row as soon as it is verified.

    Verification runs in threads beside the engines, which never wait for it.

    Args:
        prompts: by benchmark.
    """
    requests = [
        Request(number, prompts[key.benchmark].tokens[key.index], prompts[key.benchmark].max_new_tokens)
        for number, key in enumerate(keys)
    ]
    verified: SimpleQueue[Future[Row]] = SimpleQueue()
    left = len(keys)
    pool = ThreadPoolExecutor(_VERIFYING, thread_name_prefix="verify")
    try:
        for finished in generate(requests):
            for each in finished:
                key = keys[each.number]
                pool.submit(_verify, key, each, prompts[key.benchmark]).add_done_callback(verified.put)
            while not verified.empty():
                left -= 1
                yield verified.get().result()
        while left:
            left -= 1
            yield verified.get().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _verify(key: Key, finished: Finished, prompts: BenchmarkPrompts) -> Row:
    label = prompts.labels[key.index]
    labels = [label] * len(finished.responses)
    verdicts = verifiers.verify_all(prompts.benchmark.verifier, finished.responses, labels)
    return Row(
        key=key,
        scores=[verdict.score for verdict in verdicts],
        answers=[verdict.answer for verdict in verdicts],
        responses=finished.responses,
        tokens=finished.tokens,
        truncated=finished.truncated,
    )


def answer_once(prompts: Mapping[str, BenchmarkPrompts], generate: Generate) -> dict[str, Results]:
    """The results of a single evaluation run over all prompts, by benchmark."""
    keys = [Key(name, 0, index) for name, of in prompts.items() for index in range(len(of.texts))]
    rows = {row.key: row for row in answer(prompts, keys, generate)}
    return {name: _results(of, [rows[key] for key in keys if key.benchmark == name]) for name, of in prompts.items()}


def _results(prompts: BenchmarkPrompts, rows: Sequence[Row]) -> Results:
    """P rows, in the order of the prompts, as arrays."""
    return Results(
        benchmark=prompts.benchmark.name,
        ids=prompts.ids,
        scores_R_P_N=np.array([[row.scores for row in rows]], dtype=np.float64),  # None becomes NaN
        answers_R_P_N=np.array([[row.answers for row in rows]], dtype=object),
        labels=prompts.labels,
        tokens_R_P_N=np.array([[row.tokens for row in rows]]),
        truncated_R_P_N=np.array([[row.truncated for row in rows]]),
    )
