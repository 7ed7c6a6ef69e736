"""A benchmark's prompts as the model sees them: chat template, tokens, and whether they fit.

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
class Prompts:
    """What a model is asked on a benchmark.

    Attributes:
        benchmark: the entry.
        ids: P, the benchmark's own.
        texts: P, as the model sees them.
        tokens: P lists of token ids.
        labels: P right answers.
        data_digest: of the loaded data.
        max_new_tokens: longest response.
        chat_template: whether the model's was applied.
        notes: what a reader of the results should know, a line each.
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
        """Tokens of the longest prompt with the longest response."""
        return max(map(len, self.tokens)) + self.max_new_tokens

    def about(self) -> dict[str, Any]:
        """What is recorded of it; equal if and only if the same is asked and verified in the same way."""
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


def prepare(loaded: Loaded, model: Model, *, chat_template: bool | None, max_new_tokens: int | None) -> Prompts:
    """Apply the chat template and tokenize, as OpenRLHF does in training: no special tokens but those of the text.

    Args:
        chat_template: None for what the entry says; it is left out in either case if the tokenizer has none.
        max_new_tokens: None for the entry's.

    Raises:
        UsageError: a prompt is empty, or the tokenizer has no chat template though one was asked for.
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
            f"benchmark {benchmark.name}: the prompt of {empty[0]!r} is empty; mend the data or the template"
        )
    return Prompts(
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
    except Exception as error:  # tokenizers raises no narrower class
        raise UsageError(
            f"benchmark {loaded.benchmark.name}: the tokenizer of {model.name} cannot encode its prompts ({error}); "
            "evaluate a model that knows their characters"
        ) from error
    return found


def _chat(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def sequence_length(prompts: Iterable[Prompts], model: Model, limit: int | None) -> int:
    """Longest sequence that the engines must hold, in tokens.

    Args:
        limit: ``--max_model_len``, None for no more than is needed.

    Raises:
        UsageError: a prompt with its longest response does not fit the limit or the model.
    """
    longest = max(prompts, key=lambda each: each.longest)
    needed = longest.longest
    for what, tokens in (("--max_model_len", limit), (f"the context of {model.name}", model.context)):
        if tokens is not None and needed > tokens:
            raise UsageError(
                f"benchmark {longest.benchmark.name}: its longest prompt ({needed - longest.max_new_tokens} tokens) "
                f"and --max_new_tokens {longest.max_new_tokens} do not fit {what} ({tokens} tokens); "
                "lower --max_new_tokens"
            )
    return limit or needed
