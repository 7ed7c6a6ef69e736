"""``--eval.benchmarks``: what a training evaluates, found and prepared as the command ``evaluate`` does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading, prompting
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.model import Model
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts

FLAG = "--eval.benchmarks"


def entries(args: SimpleNamespace) -> list[Benchmark]:
    """The entries of the benchmarks that are named; none of their data is loaded.

    Raises:
        UsageError: there is no such benchmark or file, or one is named twice.
    """
    try:
        return benchmarks.find_all(args.eval.benchmarks) if args.eval.benchmarks else []
    except UsageError as error:
        raise UsageError(f"{FLAG}: {error}") from error


def prepare(args: SimpleNamespace, tokenizer: Any) -> dict[str, BenchmarkPrompts]:
    """The prompts of the benchmarks, by name, as ``evaluate`` makes them; a response may be as long as in training.

    Without ``--rollout.max_new_tokens`` it may be as long as the longest prompt of its benchmark leaves.

    Args:
        tokenizer: of the model that is trained.

    Raises:
        UsageError: data cannot be loaded, or a prompt with its longest response does not fit into ``--data.max_len``.
    """
    from datasets import disable_progress_bars

    disable_progress_bars()
    model = Model(args.actor.model_name_or_path, None, "", None, tokenizer)
    found = {}
    for entry in entries(args):
        try:
            with upstream.quiet():
                loaded = loading.load(entry)
            given = prompting.prepare(loaded, model, chat_template=None, max_new_tokens=args.rollout.max_new_tokens)
        except UsageError as error:
            raise UsageError(f"{FLAG}: {error}") from error
        found[entry.name] = _fitting(given, args)
    return found


def _fitting(prompts: BenchmarkPrompts, args: SimpleNamespace) -> BenchmarkPrompts:
    longest, limit = max(map(len, prompts.tokens)), args.data.max_len
    response = args.rollout.max_new_tokens
    if longest + (response or 1) > limit:
        asked = f"and --rollout.max_new_tokens {response} do" if response else "does"
        raise UsageError(
            f"{FLAG}: the longest prompt of {prompts.benchmark.name} ({longest} tokens) {asked} not fit into "
            f"--data.max_len {limit}; raise it, or leave this benchmark out"
        )
    return dataclasses.replace(prompts, max_new_tokens=response or limit - longest)
