"""A benchmark's prompts as the model sees them: chat template applied, tokenized, checked for length.

Axes: P prompts of a benchmark.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.evaluated_model import Model
from openrlhf_dbb.evaluation.loading import Loaded


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The prompts of a benchmark for one model.

    Attributes:
        benchmark: the entry.
        ids: P, the benchmark's own.
        texts: P, as the model sees them.
        tokens: P lists of token ids.
        labels: P correct answers.
        data_digest: of the loaded data.
        max_new_tokens: limit on the response length.
        chat_template: whether the model's chat template was applied.
        notes: what readers of the results should know, one line each.
    """

    benchmark: Benchmark
    ids: list[str]
    texts: list[str]
    tokens: list[list[int]]
    labels: list[str]
    data_digest: str
    max_new_tokens: int
    chat_template: bool
    notes: list[str]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest possible response."""
        return max(map(len, self.tokens)) + self.max_new_tokens

    def about(self) -> dict[str, Any]:
        """What is recorded; equal if and only if the same prompts are answered and verified in the same way."""
        entry = self.benchmark
        texts = hashlib.blake2b(json.dumps(self.texts).encode(), digest_size=16).hexdigest()
        return {
            "title": entry.title,
            "group": entry.group,
            "data": entry.hub or entry.file,
            "revision": entry.revision if entry.hub else None,
            "split": entry.split,
            "verifier": entry.verifier,
            "prompts": len(self.texts),
            "data_digest": self.data_digest,
            "prompts_digest": texts,
            "chat_template": self.chat_template,
            "max_new_tokens": self.max_new_tokens,
        }


def prepare(
    loaded: Loaded, model: Model, *, chat_template: bool | None, max_new_tokens: int | None
) -> BenchmarkPrompts:
    """Apply the chat template and tokenize, as OpenRLHF does in training: no special tokens except those in the text.

    Args:
        chat_template: None for the entry's choice, which is ignored if the tokenizer has no chat template.
        max_new_tokens: None for the entry's.

    Raises:
        UsageError: a prompt is empty, or a chat template was asked for and the tokenizer has none.
    """
    tokenizer, benchmark = model.tokenizer, loaded.benchmark
    wanted = benchmark.chat_template if chat_template is None else chat_template
    if chat_template and not tokenizer.chat_template:
        raise UsageError(f"--chat_template: the tokenizer of {model.name} has none; leave the flag out")
    applied = wanted and bool(tokenizer.chat_template)
    texts = [_chat(tokenizer, prompt) for prompt in loaded.prompts] if applied else list(loaded.prompts)
    tokens = _tokens(texts, loaded, model)
    empty = [loaded.ids[i] for i, ids in enumerate(tokens) if not ids]
    if empty:
        raise UsageError(
            f"benchmark {benchmark.name}: the prompt of {empty[0]!r} is empty; fix the data or the template"
        )
    return BenchmarkPrompts(
        benchmark=benchmark,
        ids=loaded.ids,
        texts=texts,
        tokens=tokens,
        labels=loaded.labels,
        data_digest=loaded.digest,
        max_new_tokens=max_new_tokens or benchmark.max_tokens,
        chat_template=applied,
        notes=loaded.notes,
    )


def _tokens(texts: list[str], loaded: Loaded, model: Model) -> list[list[int]]:
    try:
        found: list[list[int]] = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more specific
        raise UsageError(
            f"benchmark {loaded.benchmark.name}: the tokenizer of {model.name} cannot encode its prompts ({error}); "
            "evaluate a model whose vocabulary covers them"
        ) from error
    return found


def _chat(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def sequence_length(prompts: Iterable[BenchmarkPrompts], model: Model, limit: int | None) -> int:
    """Longest sequence that the engines must support, in tokens.

    Args:
        limit: ``--max_model_len``; None for as long as needed.

    Raises:
        UsageError: a prompt with its longest possible response exceeds the limit or the model's context.
    """
    longest = max(prompts, key=lambda each: each.longest)
    needed = longest.longest
    for what, tokens in (("--max_model_len", limit), (f"the context of {model.name}", model.context)):
        if tokens is not None and needed > tokens:
            raise UsageError(
                f"benchmark {longest.benchmark.name}: its longest prompt ({needed - longest.max_new_tokens} tokens) "
                f"and --max_new_tokens {longest.max_new_tokens} do not fit into {what} ({tokens} tokens); "
                "lower --max_new_tokens"
            )
    return limit or needed
