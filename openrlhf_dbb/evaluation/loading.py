"""The questions of a benchmark as prompts with labels, loaded from the hub or a file by ``datasets``."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import verifiers
from openrlhf_dbb.evaluation.benchmarks import READERS, Benchmark, check

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PLACE = re.compile(r"(\{question\}|\{options\}|\{form\})")


@dataclass(frozen=True)
class Loaded:
    """A benchmark's questions; P prompts.

    Attributes:
        benchmark: the entry.
        ids: P unique ids.
        prompts: P texts, before any chat template.
        labels: P correct answers, as the verifier expects them.
        digest: of all ids, prompts and labels in order, as 32 hex digits.
        notes: what readers of the results should know, one line each.
    """

    benchmark: Benchmark
    ids: list[str]
    prompts: list[str]
    labels: list[str]
    digest: str
    notes: list[str]


def load(benchmark: Benchmark, *, limit: int | None = None, template: str | None = None) -> Loaded:
    """Load a benchmark.

    Args:
        benchmark: the entry (``benchmarks.find``).
        limit: at most this many prompts: the first rows, taken evenly from the configurations.
        template: a prompt template instead of the entry's.

    Raises:
        UsageError: the data cannot be loaded (no network, gated, no such data set or file), a column is missing, a row
            has no question, or a label cannot be read; the message names the benchmark, and the row.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    if template is not None:
        benchmark = dataclasses.replace(benchmark, template=template)
        check(benchmark, f"benchmark {benchmark.name} with the given template")
    pieces = _PLACE.split(benchmark.template)
    ids, prompts, labels = [], [], []
    for row in _rows(benchmark, limit):
        options, label = _options_and_label(benchmark, row)
        question = _text(benchmark, row, benchmark.question)
        parts = {"{question}": question, "{options}": options, "{form}": row.form}
        ids.append(row.id)
        prompts.append("".join(parts.get(part, part) for part in pieces))
        labels.append(verifiers.normal_label(benchmark.verifier, label))
    if not ids:
        raise _error(benchmark, "the data set has no rows")
    if len(set(ids)) < len(ids):
        raise _error(benchmark, f"column {benchmark.id!r} has an id twice; leave out id = {benchmark.id!r}")
    notes = _check_labels(benchmark, ids, labels)
    return Loaded(benchmark, ids, prompts, labels, _digest(ids, prompts, labels), notes)


@dataclass(frozen=True)
class _DataRow:
    """A row of the data set with its id and the form of its configuration's answers."""

    id: str
    form: str
    columns: dict[str, Any]


def _rows(benchmark: Benchmark, limit: int | None) -> Iterator[_DataRow]:
    configs: tuple[str | None, ...] = benchmark.configs or (None,)
    tables = [_table(benchmark, config) for config in configs]
    sizes = _shares([len(table) for table in tables], limit)
    for i, (config, table, size) in enumerate(zip(configs, tables, sizes, strict=True)):
        form = benchmark.forms[i] if benchmark.forms else ""
        for place, columns in enumerate(table.select(range(size))):
            own = columns[benchmark.id] if benchmark.id else place
            yield _DataRow(f"{config}/{own}" if len(configs) > 1 else str(own), form, columns)


def _shares(sizes: list[int], limit: int | None) -> list[int]:
    """How many rows of each configuration make up ``limit``: one of each in turn while there are any left."""
    left = sum(sizes) if limit is None else limit
    shares = [0] * len(sizes)
    while left > 0 and shares != sizes:
        for i, size in enumerate(sizes):
            if left > 0 and shares[i] < size:
                shares[i] += 1
                left -= 1
    return shares


def _table(benchmark: Benchmark, config: str | None) -> Any:
    """One configuration as a ``datasets.Dataset`` with the columns named by the entry."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        if benchmark.file:
            reader = READERS[Path(benchmark.file).suffix]
            table = datasets.load_dataset(reader, data_files=benchmark.file, split="train")
        else:
            table = datasets.load_dataset(benchmark.hub, config, split=benchmark.split, revision=benchmark.revision)
    except DatasetNotFoundError as error:
        raise _error(benchmark, _why_not_found(benchmark, str(error))) from error
    except ConnectionError as error:
        raise _error(
            benchmark,
            f"{error}: no network, and not in the cache; load it once on a machine with network access and copy its "
            f"$HF_HOME/datasets to {datasets.config.HF_DATASETS_CACHE}, or give the data as {benchmark.name}=FILE "
            f"({', '.join(READERS)}, with columns input and label)",
        ) from error
    except StopIteration as error:
        raise _error(benchmark, f"{benchmark.file} is empty") from error
    except (DatasetsError, OSError, ValueError) as error:
        raise _error(
            benchmark, f"{benchmark.file or benchmark.hub} cannot be read: {error.__cause__ or error}"
        ) from error
    answer = "" if benchmark.choices else benchmark.answer
    named = (benchmark.question, answer, benchmark.options, benchmark.id, *benchmark.choices)
    columns = list(dict.fromkeys(filter(None, named)))
    for column in columns:
        if column not in table.column_names:
            has = ", ".join(table.column_names)
            raise _error(benchmark, f"{column!r} is not a column of {benchmark.file or benchmark.hub}; it has {has}")
    return table.select_columns(columns)


def _why_not_found(benchmark: Benchmark, said: str) -> str:
    if "gated" in said:
        return (
            f"{benchmark.hub} is gated: accept its terms at https://huggingface.co/datasets/{benchmark.hub}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        )
    return f"{said} (data set {benchmark.hub}, revision {benchmark.revision})"


def _options_and_label(benchmark: Benchmark, row: _DataRow) -> tuple[str, str]:
    if benchmark.choices:
        options = [_text(benchmark, row, column) for column in benchmark.choices]
        # In the order of their hashes: a shuffle that is the same everywhere and does not depend on other rows.
        order = sorted(range(len(options)), key=lambda i: hashlib.sha256(f"{row.id}\n{i}".encode()).digest())
        return _listed([options[i] for i in order]), LETTERS[order.index(0)]
    label = row.columns[benchmark.answer]
    if isinstance(label, list):
        label = label[0] if label else None
    if label is None:
        raise _error(benchmark, f"row {row.id!r} has no label (column {benchmark.answer!r})")
    if not benchmark.options:
        return "", str(label)
    options = row.columns[benchmark.options]
    if str(label) not in LETTERS[: len(options)]:
        raise _error(benchmark, f"row {row.id!r} has {len(options)} options, but the label {label!r}")
    return _listed(options), str(label)


def _listed(options: list[str]) -> str:
    return "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=False))


def _text(benchmark: Benchmark, row: _DataRow, column: str) -> str:
    text = row.columns[column]
    if not isinstance(text, str) or not text.strip():
        raise _error(benchmark, f"row {row.id!r} has no text in column {column!r}: {text!r}")
    return text if benchmark.file else text.strip()


def _check_labels(benchmark: Benchmark, ids: list[str], labels: list[str]) -> list[str]:
    why = verifiers.check_labels(benchmark.verifier, labels)
    bad = [(row, reason) for row, reason in zip(ids, why, strict=True) if reason is not None]
    if not bad:
        return []
    if benchmark.verifier == "math_or_text" and all(labels):
        rows = ", ".join(row for row, _ in bad)
        return [f"{len(bad)} of {len(ids)} labels are compared as text, as Math-Verify cannot read them: rows {rows}"]
    raise _error(benchmark, f"row {bad[0][0]!r} ({len(bad)} such rows): {bad[0][1]}")


def _digest(*columns: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        for text in column:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _error(benchmark: Benchmark, what: str) -> UsageError:
    return UsageError(f"benchmark {benchmark.name}: {what}")
