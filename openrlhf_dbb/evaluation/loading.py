import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openrlhf_dbb import data, tasks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.evaluated_model import Model
from openrlhf_dbb.rewards.answers import ALPHABET
from openrlhf_dbb.rewards.math_answer import unreadable_labels


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The P prompts of a benchmark; :func:`prepare` makes them those of one model."""

    benchmark: Benchmark
    ids: list[str]
    texts: list[str]  # as the model sees them; before :func:`prepare` without any chat template
    labels: list[str]  # as the verifier expects them
    notes: list[str]  # lines that a reader of the results should know
    tokens: list[list[int]] = field(default_factory=list)
    max_new_tokens: int = 0  # limit on the response length
    chat_template: bool = False  # whether the model's chat template was applied

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


def load(benchmark: Benchmark, *, limit: int | None = None) -> BenchmarkPrompts:
    """Load a benchmark; with a limit its first rows, taken evenly from the configurations. Refuse faulty data."""
    pieces = re.split(r"(\{question\}|\{options\}|\{form\})", benchmark.template)
    ids, texts, labels = [], [], []
    for row_id, form, row in _rows(benchmark, limit):
        try:
            options, label = _options_and_label(benchmark, row_id, row)
            parts = {"{question}": _text(benchmark, row, benchmark.question), "{options}": options, "{form}": form}
        except ValueError as error:
            raise _error(benchmark, f"row {row_id!r} {error}") from error
        ids.append(row_id)
        # Piece by piece: a question may itself contain "{options}".
        texts.append("".join(parts.get(piece, piece) for piece in pieces))
        labels.append(label.strip())
    if not ids:
        raise _error(benchmark, "the data set has no rows")
    is_math = benchmark.verifier.startswith("math")
    reasons = {"": "the label is empty"} | (unreadable_labels(filter(None, labels)) if is_math else {})
    bad = [(row_id, reasons[label]) for row_id, label in zip(ids, labels, strict=True) if label in reasons]
    if bad and (benchmark.verifier != "math_or_text" or not all(labels)):
        raise _error(benchmark, f"row {bad[0][0]!r} ({len(bad)} such rows): {bad[0][1]}")
    rows = ", ".join(row_id for row_id, _ in bad)
    note = f"{len(bad)} of {len(ids)} labels are compared as text, as no answer can be read like them: rows {rows}"
    return BenchmarkPrompts(benchmark, ids, texts, labels, [note] if bad else [])


def prepare(
    loaded: BenchmarkPrompts, model: Model, chat_template: bool | None, max_new_tokens: int | None
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
    limit = max_new_tokens or benchmark.max_tokens
    prompts = replace(loaded, texts=texts, tokens=tokens, max_new_tokens=limit, chat_template=applied)
    if model.context is not None and prompts.longest > model.context:
        raise UsageError(
            f"benchmark {benchmark.name}: its longest prompt ({max(map(len, tokens))} tokens) and --max_new_tokens "
            f"{prompts.max_new_tokens} do not fit into the context of {model.name} ({model.context} tokens); "
            "lower --max_new_tokens"
        )
    return prompts


def _rows(benchmark: Benchmark, limit: int | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the id of each row, the form of answers that its configuration asks for, and its columns."""
    configs: tuple[str | None, ...] = benchmark.configs or (None,)
    tables = [_table(benchmark, config) for config in configs]
    # The first row of each configuration, then the second of each, and so on.
    in_turn = sorted((place, i) for i, table in enumerate(tables) for place in range(len(table)))[:limit]
    for i, place in sorted((i, place) for place, i in in_turn):
        row = tables[i][place]
        name = str(row.get(benchmark.id) if benchmark.id else place)
        form = benchmark.forms[i] if benchmark.forms else ""
        yield f"{configs[i]}/{name}" if len(configs) > 1 else name, form, row


def _table(benchmark: Benchmark, config: str | None) -> Any:
    """Return the rows of one configuration: a list or a ``datasets.Dataset`` of dictionaries."""
    import datasets
    from datasets.exceptions import DatasetsError

    if tasks.is_spec(benchmark.hub):
        return tasks.problems(benchmark.hub, benchmark.instruction)
    try:
        if benchmark.file:
            source = f"benchmark {benchmark.name}: {benchmark.file}"
            table = list(data.records(Path(benchmark.file), source).values())
            names = list(dict.fromkeys(column for record in table for column in record))
        else:
            table = datasets.load_dataset(benchmark.hub, config, split=benchmark.split, revision=benchmark.revision)
            names = table.column_names
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise _error(benchmark, _why_not_loaded(benchmark, error)) from error
    label = benchmark.choices or (benchmark.answer,)
    for column in filter(None, (benchmark.question, *label, benchmark.options, benchmark.id)):
        if names and column not in names:
            where = benchmark.file or benchmark.hub
            raise _error(benchmark, f"{column!r} is not a column of {where}; it has {', '.join(names)}")
    return table


def _why_not_loaded(benchmark: Benchmark, error: Exception) -> str:
    import datasets

    if "gated" in str(error):
        return (
            f"{benchmark.hub} is gated: accept its terms at https://huggingface.co/datasets/{benchmark.hub}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, ConnectionError):
        cache = datasets.config.HF_DATASETS_CACHE
        return f"{error}: no network, and not in {cache}; load it once with network, or give {benchmark.name}=FILE"
    return f"{benchmark.file or benchmark.hub} cannot be read: {error.__cause__ or error}"


def _options_and_label(benchmark: Benchmark, row_id: str, row: dict[str, Any]) -> tuple[str, str]:
    label: Any = row.get(benchmark.answer)
    label = next(iter(label), None) if isinstance(label, list) else label
    options = row.get(benchmark.options) or []
    if benchmark.choices:
        options = [_text(benchmark, row, column) for column in benchmark.choices]
        # In the order of their hashes: a shuffle that is the same everywhere and does not depend on other rows.
        order = sorted(range(len(options)), key=lambda i: hashlib.sha256(f"{row_id}\n{i}".encode()).digest())
        options, label = [options[i] for i in order], ALPHABET[order.index(0)]
    elif label is None:
        raise ValueError(f"has no label (column {benchmark.answer!r})")
    elif not benchmark.options:
        return "", data.label_text(label)
    elif str(label) not in ALPHABET[: len(options)]:
        raise ValueError(f"has {len(options)} options, but the label {label!r}")
    listed = (f"({letter}) {option}" for letter, option in zip(ALPHABET, options, strict=False))
    return "\n".join(listed), str(label)


def _text(benchmark: Benchmark, row: dict[str, Any], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has no text in column {column!r}: {text!r}")
    return text if benchmark.file else text.strip()


def _error(benchmark: Benchmark, problem: str) -> UsageError:
    return UsageError(f"benchmark {benchmark.name}: {problem}")
