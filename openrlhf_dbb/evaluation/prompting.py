import hashlib
import json
from dataclasses import dataclass
from typing import Any

from openrlhf_dbb.data import control_tokens
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.evaluated_model import Model
from openrlhf_dbb.evaluation.loading import Loaded


@dataclass(frozen=True)
class BenchmarkPrompts(Loaded):
    """The P prompts of a benchmark for one model, with the texts as this model sees them."""

    tokens: list[list[int]]
    max_new_tokens: int  # limit on the response length
    chat_template: bool  # whether the model's chat template was applied

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest possible response."""
        return max(map(len, self.tokens)) + self.max_new_tokens

    def about(self) -> dict[str, Any]:
        """Return the settings, which are equal if the same prompts are answered alike."""
        entry = self.benchmark
        content = json.dumps([self.ids, self.texts, self.labels]).encode()
        return {
            **{name: getattr(entry, name) for name in ("title", "group", "split", "verifier")},
            "data": entry.hub or entry.file,
            "revision": entry.revision if entry.hub else None,
            "prompts": len(self.texts),
            "digest": hashlib.sha256(content).hexdigest()[:32],
            "chat_template": self.chat_template,
            "max_new_tokens": self.max_new_tokens,
        }


def prepare(
    loaded: Loaded, model: Model, *, chat_template: bool | None, max_new_tokens: int | None
) -> BenchmarkPrompts:
    """Apply the chat template and tokenize as OpenRLHF: no special tokens but those in the text; None: the benchmark's.

    Refuse a chat template that the command line asks for and the tokenizer lacks, and a prompt that is too long.
    """
    tokenizer, benchmark = model.tokenizer, loaded.benchmark
    wanted = benchmark.chat_template if chat_template is None else chat_template
    if chat_template and not tokenizer.chat_template:
        raise UsageError(f"--chat_template: the tokenizer of {model.name} has none; leave the flag out")
    applied = wanted and bool(tokenizer.chat_template)
    texts = loaded.texts
    if applied:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    notes = loaded.notes + control_tokens(f"benchmark {benchmark.name}", loaded.texts, tokenizer, applied)
    seen = {"texts": texts, "tokens": tokens, "max_new_tokens": max_new_tokens or benchmark.max_tokens, "notes": notes}
    prompts = BenchmarkPrompts(**(vars(loaded) | seen), chat_template=applied)
    if model.context is not None and prompts.longest > model.context:
        raise UsageError(
            f"benchmark {benchmark.name}: its longest prompt ({max(map(len, tokens))} tokens) and --max_new_tokens "
            f"{prompts.max_new_tokens} do not fit into the context of {model.name} ({model.context} tokens); "
            "lower --max_new_tokens"
        )
    return prompts
