"""The prompts and labels of a benchmark, as the verifier expects them and one model sees them."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from openrlhf_dbb import tasks
from openrlhf_dbb.core.texts import contradictions, label_text, prompt_text, unusable
from openrlhf_dbb.data.files import label_fault, listed_names, records
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.model import Model
from openrlhf_dbb.rewards.answers import ALPHABET
from openrlhf_dbb.rewards.math_answer import unreadable_labels

Row = dict[str, Any]
"""A row of a benchmark's data by column."""

_PLACEHOLDERS = re.compile(r"(\{question\}|\{options\}|\{form\})")


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
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest possible response."""
        return self.longest_prompt + self.max_new_tokens

    def about(self) -> dict[str, Any]:
        """Return the settings, which are equal if the same prompts are answered alike."""
        entry = self.benchmark
        content = json.dumps([self.ids, self.texts, self.labels]).encode()
        return {
            "title": entry.title,
            "group": entry.group,
            "split": entry.split,
            "verifier": entry.verifier,
            "data": entry.hub or entry.file,
            "revision": entry.revision if entry.hub else None,
            "prompts": len(self.texts),
            "digest": hashlib.sha256(content).hexdigest()[:32],
            "chat_template": self.chat_template,
            "max_new_tokens": self.max_new_tokens,
        }


def load(benchmark: Benchmark, *, limit: int | None = None) -> BenchmarkPrompts:
    """Load a benchmark; with a limit its first rows, taken evenly from the configurations.

    Raises:
        UsageError: the data cannot be read, a row has no question or no usable label, or a file
            has a question with two labels.
    """
    pieces = _PLACEHOLDERS.split(benchmark.template)
    ids = []
    texts = []
    labels = []
    for row_id, form, row in _rows(benchmark, limit):
        try:
            options, label = _options_and_label(benchmark, row_id, row)
            question = _text(benchmark, row, benchmark.question)
        except ValueError as error:
            raise _error(benchmark, f"{_row_name(benchmark, row_id)} {error}") from error
        parts = {"{question}": question, "{options}": options, "{form}": form}
        ids.append(row_id)
        # Piece by piece: a question may itself contain "{options}".
        texts.append("".join(parts.get(piece, piece) for piece in pieces))
        is_verbatim = benchmark.file and label.strip()
        labels.append(label if is_verbatim else label.strip())
    if not ids:
        raise _error(benchmark, "the data set has no rows")
    if benchmark.file:  # those of the hub are as they are
        places = [_row_name(benchmark, row_id) for row_id in ids]
        bad_rows = contradictions(texts, labels, places)
        if bad_rows:
            raise _error(benchmark, unusable(bad_rows, len(ids)))
    return BenchmarkPrompts(benchmark, ids, texts, labels, _notes_on_labels(benchmark, ids, labels))


def _notes_on_labels(benchmark: Benchmark, ids: list[str], labels: list[str]) -> list[str]:
    """Return a line on labels that are compared as text; refuse others that cannot be read."""
    reasons = {"": "the label is empty"}
    if benchmark.verifier.startswith("math"):
        reasons.update(unreadable_labels(filter(None, labels)))
    rows = zip(ids, labels, strict=True)
    bad = [(row_id, reasons[label]) for row_id, label in rows if label in reasons]
    if not bad:
        return []
    if benchmark.verifier != "math_or_text" or not all(labels):
        first, reason = bad[0]
        place = _row_name(benchmark, first)
        raise _error(benchmark, f"{place} ({len(bad)} such rows): {reason}")
    compared = f"{len(bad)} of {len(ids)} labels are compared as text"
    named = ", ".join(row_id for row_id, _ in bad)
    return [f"{compared}, as no answer can be read like them: rows {named}"]


def prepare(
    loaded: BenchmarkPrompts,
    model: Model,
    chat_template: bool | None,
    max_new_tokens: int | None,
) -> BenchmarkPrompts:
    """Apply the chat template and tokenize as OpenRLHF: no special tokens but those in the text.

    Args:
        chat_template, max_new_tokens: as asked for; None: the benchmark's.

    Raises:
        UsageError: a template is asked for and missing, or a prompt is too long.
    """
    tokenizer = model.tokenizer
    benchmark = loaded.benchmark
    if chat_template and not tokenizer.chat_template:
        raise UsageError(
            f"--chat_template: the tokenizer of {model.name} has none; leave the flag out"
        )
    if chat_template is None:
        chat_template = benchmark.chat_template
    is_applied = chat_template and bool(tokenizer.chat_template)
    texts = loaded.texts
    if is_applied:
        texts = [_chat(tokenizer, text) for text in texts]
    prompts = replace(
        loaded,
        texts=texts,
        tokens=tokenizer(texts, add_special_tokens=False)["input_ids"],
        max_new_tokens=max_new_tokens or benchmark.max_tokens,
        chat_template=is_applied,
    )
    if model.context is not None and prompts.longest > model.context:
        raise UsageError(
            f"benchmark {benchmark.name}: its longest prompt ({prompts.longest_prompt} tokens) and "
            f"--max_new_tokens {prompts.max_new_tokens} do not fit into the context of "
            f"{model.name} ({model.context} tokens); lower --max_new_tokens, or name a model "
            "with a longer context"
        )
    return prompts


def _chat(tokenizer: Any, text: str) -> str:
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _rows(benchmark: Benchmark, limit: int | None) -> Iterator[tuple[str, str, Row]]:
    """Yield the id of each row, the form of answers of its configuration, and its columns."""
    configs = benchmark.configs or (None,)
    tables = [_table(benchmark, config) for config in configs]
    rows = [(place, i) for i, table in enumerate(tables) for place in range(len(table))]
    # The first row of each configuration, then the second of each, and so on.
    rows.sort()
    for place, number in sorted(rows[:limit], key=itemgetter(1)):
        row = tables[number][place]
        row_id = str(row.get(benchmark.id) if benchmark.id else place)
        if len(configs) > 1:
            row_id = f"{configs[number]}/{row_id}"
        yield row_id, benchmark.forms[number] if benchmark.forms else "", row


def _table(benchmark: Benchmark, config: str | None) -> Any:
    """Return the rows of one configuration: a list or a ``datasets.Dataset`` of dictionaries."""
    if tasks.is_spec(benchmark.hub):
        return tasks.problems(benchmark.hub, benchmark.instruction)
    if benchmark.file:
        table, names = _of_file(benchmark)
    else:
        table, names = _of_hub(benchmark, config)
    labels = benchmark.choices or (benchmark.answer,)
    for column in (benchmark.question, *labels, benchmark.options, benchmark.id):
        if column and names and column not in names:
            where = benchmark.file or benchmark.hub
            there = listed_names(names)
            raise _error(benchmark, f"{column!r} is not a column of {where}; it has {there}")
    return table


def _of_file(benchmark: Benchmark) -> tuple[list[Row], list[str]]:
    """Return the rows of a file, and its columns."""
    source = f"benchmark {benchmark.name}: {benchmark.file}"
    table = list(records(Path(benchmark.file), source).values())
    return table, list(dict.fromkeys(name for row in table for name in row))


def _of_hub(benchmark: Benchmark, config: str | None) -> tuple[Any, list[str]]:
    """Return one configuration of a data set on the hub, and its columns."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        table = datasets.load_dataset(
            benchmark.hub,
            config,
            split=benchmark.split,
            revision=benchmark.revision,
        )
    except ConnectionError as error:
        raise _unreadable(
            benchmark, f"{error}; load it once with network, or give {benchmark.name}=FILE"
        ) from error
    except DatasetNotFoundError as error:
        raise _unreadable(benchmark, error) from error
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise _unreadable(benchmark, error.__cause__ or error) from error
    return table, table.column_names


def _unreadable(benchmark: Benchmark, reason: object) -> UsageError:
    return _error(benchmark, f"{benchmark.file or benchmark.hub} cannot be read: {reason}")


def _options_and_label(benchmark: Benchmark, row_id: str, row: Row) -> tuple[str, str]:
    """Return the lines of options, "" without any, and the label; ValueError for a faulty row."""
    if benchmark.choices:
        choices = [_text(benchmark, row, column) for column in benchmark.choices]
        order = _shuffled(row_id, len(choices))
        return _listed([choices[place] for place in order]), ALPHABET[order.index(0)]
    label = row.get(benchmark.answer)
    if isinstance(label, list):
        label = next(iter(label), None)
    if label is None:
        raise ValueError(f"has no label (column {benchmark.answer!r})")
    if not benchmark.options:
        return "", _open_label(benchmark, label)
    options = row.get(benchmark.options) or []
    if str(label) not in ALPHABET[: len(options)]:
        raise ValueError(f"has {len(options)} options, but the label {label!r}")
    return _listed(options), str(label)


def _open_label(benchmark: Benchmark, label: Any) -> str:
    """Return the text of a label that is no option; ValueError for one that cannot be used."""
    fault = label_fault(label)
    if fault and (benchmark.file or isinstance(label, (bool, dict))):
        raise ValueError(f"cannot be used: {fault}")
    return label_text(label)


def _shuffled(row_id: str, size: int) -> list[int]:
    """Return 0 to size - 1 in an order that is the same everywhere, whatever the other rows are."""
    return sorted(
        range(size),
        key=lambda place: hashlib.sha256(f"{row_id}\n{place}".encode()).digest(),
    )


def _listed(options: list[Any]) -> str:
    lines = [f"({letter}) {option}" for letter, option in zip(ALPHABET, options, strict=False)]
    return "\n".join(lines)


def _text(benchmark: Benchmark, row: Row, column: str) -> str:
    text = row.get(column)
    if isinstance(text, bytes):
        text = prompt_text(text)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has no text in column {column!r}: {text!r}")
    return text if benchmark.file else text.strip()


def _row_name(benchmark: Benchmark, row_id: str) -> str:
    """Return a row's name for messages; rows of a file without ids are counted from 1 there."""
    if benchmark.file and not benchmark.id and row_id.isdigit():
        return f"row {int(row_id) + 1}"
    return f"row {row_id!r}"


def _error(benchmark: Benchmark, problem: str) -> UsageError:
    return UsageError(f"benchmark {benchmark.name}: {problem}")
