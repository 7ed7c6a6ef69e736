"""Loads the training prompts and the held-out prompts, and chooses the prompts that a run trains on."""

import bz2
import codecs
import contextlib
import csv
import functools
import gzip
import io
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import tasks, upstream
from openrlhf_dbb.core.texts import (
    content_text,
    contradictions,
    in_type,
    is_missing,
    label_text,
    number_of,
    prompt_text,
    unusable,
)
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILE
from openrlhf_dbb.rewards.math_answer import unreadable_labels

TRAINING, HELD_OUT = "data.prompt_dataset", "eval.dataset"  # flags that name data sets
_RATE, _SOURCE = "known pass rate", "source of the prompt"  # columns that are added to the training data
TEXT_FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
FILES = (*TEXT_FILES, ".parquet")  # suffixes of the files that records() reads
_OTHERS = (".py", ".arrow")  # suffixes of the files that OpenRLHF reads
_UNPACK = {b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress}
_PACKED = {b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip"}
PACKINGS = (".gz", ".bz2", ".xz")
# Between columns, though the name of the file tells another separator.
_SEPARATORS = {
    "\t": "name the file .tsv",
    ";": "save it with commas between the columns",
    "|": "save it with commas between the columns",
    ",": "name the file .csv",
}
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins with the mark of UTF-16
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class Prompts:
    texts: list[str]  # as the model sees them, with the template applied
    labels: list[str]  # all empty without ``--data.label_key``
    rows: list[int]  # their row numbers in the loaded data set, from 0
    pass_rates: list[list[float]] | None  # successes and attempts of each, NaN where unknown; None without a column
    sources: list[str] | None  # the value of ``--data.group_key`` of each; None without the flag
    report: str  # a line that says how many prompts are used and why others are not
    warnings: list[str] = field(default_factory=list)  # of what the user should change


def load(args: SimpleNamespace, backend: Any, flag: str) -> Any:
    """Return the data set of a flag, at most ``--data.max_samples`` rows, with labels as text.

    Columns are ``--data.input_key`` and ``--data.label_key``, of training data also rate and source; dots in
    a key reach into nested columns. ``backend`` is OpenRLHF's DeepSpeed strategy, or what its loader takes for one.
    Raise UsageError if a row cannot be used, a column is missing, or the reward needs a label key.
    """
    rows = _load(args, backend, flag)
    if args.reward.remote_url and Path(args.reward.remote_url[0]) == MATH_FILE:
        labels = rows[args.data.label_key][:]
        unreadable = unreadable_labels(labels, rows[args.data.input_key][:])
        bad = {
            f"row {number}": f"no answer can earn the label {label[:60]!r} ({unreadable[label]})"
            for number, label in enumerate(labels, 1)
            if label in unreadable
        }
        _refuse(bad, len(labels), f"--{flag} {attrgetter(flag)(args)}")
    return rows


def train_on(rows: list[int], args: SimpleNamespace) -> None:
    """Make OpenRLHF's trainer load the chosen rows of the training data, and all held-out rows."""
    import openrlhf.trainer.ppo_trainer as ppo_trainer

    def chosen(datasets: str, probabilities: str | None, strategy: Any, *_: Any, **options: Any) -> Any:
        if "max_count" in options:  # OpenRLHF's trainer gives it for the training data only
            return _load(args, strategy, TRAINING).select(rows)
        return _load(args, strategy, HELD_OUT)

    upstream.replace(ppo_trainer, "blending_datasets", chosen)


def _load(args: SimpleNamespace, backend: Any, flag: str) -> Any:
    from datasets import concatenate_datasets, interleave_datasets

    data = args.data
    listed = attrgetter(flag)(args)
    rewards = args.reward.remote_url or []
    if data.label_key is None and any(Path(url).parent == MATH_FILE.parent for url in rewards):
        problem = "--data.label_key is missing"
        raise UsageError(f"{problem}: name the column that holds the answer to verify against")
    parts = [_read(name, args, backend, flag) for name in _names(listed)]
    if flag == HELD_OUT or data.prompt_probs is None:
        rows = concatenate_datasets(parts)
    else:
        rows = interleave_datasets(
            parts,
            probabilities=[float(share) for share in data.prompt_probs.split(",")],
            seed=args.train.seed,
            stopping_strategy="all_exhausted",
        )
    rows = rows.select(range(min(data.max_samples, len(rows))))
    if len(rows) == 0:
        raise UsageError(f"--{flag} {listed} has no rows")
    if flag == TRAINING and data.label_key is not None:
        labels = rows[data.label_key][:]
        if data.drop_duplicates:  # two labels of one problem differ in how it is made again
            labels = [tasks.answer(label) for label in labels]
        _refuse(contradictions(rows[data.input_key][:], labels), len(rows), f"--{flag} {listed}")
    return rows


def _names(listed: str) -> list[str]:
    """Return the data sets of a flag's value; a file with a comma in its path is one."""
    if os.path.exists(listed):
        return [listed]
    return [name.strip() for name in listed.split(",")]


@dataclass(frozen=True)
class _Table:
    places: list[str]  # of the rows, for messages
    records: list[dict[str, Any]]  # the rows, with the columns that are asked for
    names: set[str]  # of all columns
    rows: Any = None  # the whole ``datasets.Dataset``; None for a text file


def _read(name: str, args: SimpleNamespace, backend: Any, flag: str) -> Any:
    """Return one data set with its prompts, and with labels, rates and sources as texts."""
    from datasets import Dataset

    data = args.data
    source = f"--{flag} {name}"
    keys = _keys(data, flag)
    if tasks.is_spec(name):
        return Dataset.from_list(_problems(name, source, data, keys))
    is_file = kind_of(Path(name)) != "" and Path(name).suffix != ".parquet"
    if is_file or ("," in name and os.path.isfile(name)):
        table = _from_file(name, source, data.max_samples)
    else:
        table = _from_dataset(name, source, args, backend, flag, list(keys.values()))
    added = _checked(table, _columns(table, keys, source), data, source)
    if table.rows is None:
        for extra in sorted(table.names & {data.image_key, "datasource"}):
            added[extra] = [record.get(extra) for record in table.records]
        return Dataset.from_dict(added)
    rows = table.rows
    for key, column in added.items():
        rows = rows.remove_columns(table.names & {key}).add_column(key, column)
    return rows


def _keys(data: SimpleNamespace, flag: str) -> dict[str, str]:
    """Return the columns that the flags name, by flag."""
    keys = {"input_key": data.input_key, "label_key": data.label_key}
    if flag == TRAINING:
        keys["pass_rate_key"] = data.pass_rate_key
        keys["group_key"] = data.group_key
    return {key_flag: key for key_flag, key in keys.items() if key is not None}


def _problems(name: str, source: str, data: SimpleNamespace, keys: Mapping[str, str]) -> list[Any]:
    """Return the rows of a task."""
    if "pass_rate_key" in keys:
        problem = "a program makes it, without pass rates"
        raise UsageError(f"{source}: {problem}; leave --data.pass_rate_key out")
    rows = []
    for made in tasks.problems(name, data.task_instruction):
        row = {data.input_key: made["prompt"], data.label_key: made["label"]}
        if "group_key" in keys:
            row[_SOURCE] = name.partition("?")[0]
        rows.append(row)
    return rows


def _from_file(name: str, source: str, most: int) -> _Table:
    rows = records(Path(name), source, most)
    names = {column for record in rows.values() for column in record}
    return _Table(list(rows), list(rows.values()), names)


def _from_dataset(
    name: str,
    source: str,
    args: SimpleNamespace,
    backend: Any,
    flag: str,
    keys: list[str],
) -> _Table:
    """Read Parquet files, folders and data sets of the hub as OpenRLHF does."""
    if "," in name:
        raise UsageError(f"{source}: a comma parts data sets; rename the folder")
    if os.path.isfile(name) and Path(name).suffix not in (".parquet", *_OTHERS):
        known = ", ".join(FILES)
        raise UsageError(f"{source}: files of this kind are not read; give {known}, or .jsonl.gz")
    if Path(name).suffix == ".parquet" and os.path.isfile(name):
        _check_parquet(name, source)
    blend = upstream.load("openrlhf.datasets.utils", "blending_datasets")
    split = args.eval.split if flag == HELD_OUT else args.data.prompt_split
    rows = blend(
        name,
        None,
        backend,
        args.train.seed,
        max_count=args.data.max_samples,
        dataset_split=split,
    )
    names = set(rows.column_names)
    needed = {part for key in keys for part in (key, key.partition(".")[0])}
    places = [f"row {number}" for number in range(1, len(rows) + 1)]
    table = rows.select_columns(sorted(names & needed)).with_format("arrow")[:]
    return _Table(places, _table_rows(table), names, rows)


def _table_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a ``pyarrow.Table``; 0.1 in 32 bits is 0.1, not 0.10000000149011612."""
    import pyarrow

    kinds = {pyarrow.float32(): "float32", pyarrow.float16(): "float16"}
    short = {column.name: kinds[column.type] for column in table.schema if column.type in kinds}
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows if short else []:
        for name, kind in short.items():
            if row[name] is not None:
                row[name] = float(str(in_type(row[name], kind)))
    return rows


def _check_parquet(name: str, source: str) -> None:
    """Raise UsageError for a file of which datasets would not say what is wrong with it."""
    from pyarrow import parquet

    try:
        rows = parquet.read_metadata(name).num_rows
        _refuse_repeated(parquet.read_schema(name).names)
    except ValueError as error:
        raise UsageError(f"{source} cannot be read: {error}") from error
    if rows == 0:
        raise UsageError(f"{source} has no rows")


def _columns(table: _Table, keys: Mapping[str, str], source: str) -> dict[str, list[Any]]:
    """Return the values of the columns by their keys; refuse a column that is not there."""
    columns = {}
    for key_flag, key in keys.items():
        columns[key] = [_decoded(_value(record, key)) for record in table.records]
        if table.names and all(value is None for value in columns[key]):
            column = f"column {key!r} (--data.{key_flag})"
            if key in table.names:
                raise UsageError(f"{source}: {column} is empty; name another one, or fill it")
            there = listed_names(sorted(table.names))
            raise UsageError(f"{source} has no {column}; it has {there}")
    return columns


def _checked(
    table: _Table, columns: Mapping[str, list[Any]], data: SimpleNamespace, source: str
) -> dict[str, list[Any]]:
    """Return the columns as a training reads them; refuse rows that it cannot use."""
    prompts = [_plain_prompt(prompt) for prompt in columns[data.input_key]]
    labels = columns[data.label_key] if data.label_key is not None else ["-"] * len(prompts)
    bad = _faults(table.places, prompts, labels)
    added: dict[str, list[Any]] = {}
    if data.group_key in columns:
        added[_SOURCE] = [str(value) for value in columns[data.group_key]]
    if data.pass_rate_key in columns:
        values = columns[data.pass_rate_key]
        rates = [_pass_rate(value, data.pass_rate_attempts) for value in values]
        for place, rate in zip(table.places, rates, strict=True):
            if isinstance(rate, str):
                bad[place] = rate
        added[_RATE] = rates
    _refuse(bad, len(table.places), source)
    added[data.input_key] = prompts
    if data.label_key is not None:
        added[data.label_key] = list(map(label_text, labels))
    return added


def _faults(places: list[str], prompts: list[Any], labels: list[Any]) -> dict[str, str]:
    """Return the places of the rows that cannot be used, and why."""
    kind = None
    bad = {}
    for place, prompt, label in zip(places, prompts, labels, strict=True):
        fault = _prompt_fault(prompt, kind) or label_fault(label)
        if fault:
            bad[place] = fault
        if kind is None and prompt and isinstance(prompt, (str, list)):
            kind = type(prompt)
    return bad


def listed_names(names: Iterable[str]) -> str:
    """Return names of columns for a message; one with blanks around it is quoted."""
    return ", ".join(name if name and name == name.strip() else repr(name) for name in names)


def kind_of(path: Path) -> str:
    """Return the suffix of a data file, one of ``FILES``; "" for a file that is none.

    Example:
        >>> kind_of(Path("a/B.JSONL.gz")), kind_of(Path("a.csv")), kind_of(Path("notes.txt"))
        ('.jsonl', '.csv', '')
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FILES else ""


def records(path: Path, source: str, most: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the first rows of a file by place ("line 4"); numbers of a text file as they are written.

    A text file may be packed by gzip, bzip2 or xz. A file of another kind is read like JSON.

    Raises:
        UsageError: the file or a row is broken, or is not UTF-8; the message names ``source``.
    """
    kind = kind_of(path)
    rows: Any
    try:
        if kind == ".parquet":
            from pyarrow import parquet

            _refuse_repeated(parquet.read_schema(path).names)
            rows = _numbered(_table_rows(parquet.read_table(path)), most)
        elif kind in (".csv", ".tsv"):
            rows = _numbered(_csv_rows(_text(path), "," if kind == ".csv" else "\t"), most)
        else:
            rows = _json_rows(_text(path), most)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, csv.Error, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which source names
        line = " ".join(str(reason).split())
        raise UsageError(f"{source} cannot be read: {line}") from error
    fault = "it is no JSON object, or has more fields than the header"
    odd = {place: fault for place, row in rows.items() if not isinstance(row, dict) or None in row}
    _refuse(odd, len(rows), source)
    return rows


def _text(path: Path) -> str:
    """Return the text of a file in UTF-8, perhaps packed by gzip, bzip2 or xz; ValueError for another one."""
    content = path.read_bytes()
    for start, unpack in _UNPACK.items():
        if content.startswith(start):
            content = unpack(content)
            break
    for start, name in _PACKED.items():
        if content.startswith(start):
            raise ValueError(f"it is packed by {name}; unpack it, or pack it by gzip, bzip2 or xz")
    for mark, encoding in _ENCODINGS.items():
        if content.startswith(mark):
            raise ValueError(f"it is in {encoding}; convert it: iconv -f {encoding} -t UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{error}; convert it to UTF-8") from error


def _numbered(rows: Iterable[Any], most: int | None) -> dict[str, Any]:
    return {f"row {number}": row for number, row in enumerate(islice(rows, most), 1)}


def _csv_rows(text: str, delimiter: str) -> Iterable[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # by default a field may have 131,072 characters
    header = text.partition("\n")[0]
    for other, advice in _SEPARATORS.items():
        if delimiter not in header and other in header:
            raise ValueError(f"its header has no {delimiter!r}, but {other!r}; {advice}")
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    _refuse_repeated([name for name in rows.fieldnames or [] if name])
    return rows


def _refuse_repeated(names: Sequence[str]) -> None:
    """Raise ValueError if a column or key is there twice; one would hide the other."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice; rename or drop one")


def _row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([key for key, _ in pairs])
    return dict(pairs)


def _json_rows(text: str, most: int | None) -> dict[str, Any]:
    """Return the entries of one list, or the values of lines, with numbers as they are written."""
    # 2.50 and 1e-5 are answers as they stand, and 23 digits are too many for a column of numbers.
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=_row)
    if text.lstrip().startswith("["):
        return _numbered(decoder.decode(text), most)
    rows = {}
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    for number, line in islice(lines, most):
        try:
            rows[f"line {number}"] = decoder.decode(line)
        except ValueError as error:
            raise ValueError(f"line {number}: broken JSON: {error}") from error
    return rows


def _decoded(value: Any) -> Any:
    """Return bytes as text: Spark and Impala write texts into binary columns."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):  # refused with its row
            return value.decode("utf-8-sig")
    return value


def _value(record: Any, key: str) -> Any:
    """Return the value of a column, at the top or by dots below it; None without one."""
    if isinstance(record, dict) and key in record:
        return record[key]
    for part in key.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def _plain_prompt(prompt: Any) -> Any:
    """Return a prompt as the chat template takes it: text parts of a message become one text."""
    if not isinstance(prompt, list):
        return prompt
    messages = []
    for message in prompt:
        if isinstance(message, dict) and "content" in message:
            message = {**message, "content": content_text(message["content"])}
        messages.append(message)
    return messages


def _prompt_fault(prompt: Any, kind: type | None) -> str | None:
    """Return why a prompt cannot be used; ``kind``: all are texts, or all are messages."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return "no prompt"
    if not isinstance(prompt, (str, list)) or not isinstance(prompt, kind or object):
        found = type(prompt).__name__
        return f"its prompt is a {found}; all have to be texts, or all lists of messages"
    return None if isinstance(prompt, str) else _messages_fault(prompt)


def _messages_fault(messages: list[Any]) -> str | None:
    """Return why a model cannot answer messages."""
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            problem = f"its message {number} has no texts as role and content"
            return f"{problem} (an image is <image> in the text)"
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        return f"its last message is of role {last}; end with the user's"
    if not messages[-1]["content"].strip():
        return "its last message is empty"
    return None


def label_fault(label: Any) -> str | None:
    """Return why no verifier can use a label, which is a text or a number; None if it can."""
    if is_missing(label) or not str(label).strip():
        return "no label"
    if isinstance(label, (bool, list, dict)):
        kind = type(label).__name__
        return f"its label is a {kind}; write it as text, or name a field of it, as in label.answer"
    if isinstance(label, (float, Decimal)) and math.isinf(label):
        return "its label is infinite, perhaps too large for its column; write it as text"
    try:
        label_text(label)
    except ValueError as error:
        return str(error)
    return None


def _pass_rate(value: Any, attempts: int | None) -> list[float] | str:
    """Return successes and attempts of a known rate, a number or "5/8"; NaN if missing; or why it is no rate."""
    if value is None or value == "" or value != value:
        return [math.nan, math.nan]
    counted, slash, of = str(value).partition("/")
    try:
        successes = number_of(counted)
        tried = number_of(of) if slash else 1.0
    except ValueError:
        successes, tried = math.nan, 1.0
    if not (1 <= tried < math.inf and 0 <= successes <= tried):
        return f"its pass rate is {value!r}; write a number in [0, 1], or successes/attempts"
    if attempts is None and not slash:
        return "its pass rate has no number of attempts; give --data.pass_rate_attempts"
    return [successes, tried] if attempts is None else [attempts * successes / tried, float(attempts)]


def give_template_arguments(tokenizer: Any, arguments: str, flag: str) -> None:
    """Let a tokenizer's chat template get the arguments of a flag, a JSON object, in every call.

    Raises:
        UsageError: there is no template, or it does not read an argument, or sets it itself.
    """
    given = json.loads(arguments)
    if not tokenizer.chat_template:
        raise UsageError(f"--{flag}: the tokenizer has no chat template; leave it out")
    for name in given:
        problem = f"--{flag}: the tokenizer's chat template does not read {name!r}"
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UsageError(f"{problem}; name one that it reads, or leave it out")
        if name in ("messages", "add_generation_prompt"):
            raise UsageError(f"--{flag}: {name!r} is set for each prompt; leave it out")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **given)


def control_tokens(source: str, prompts: Sequence[Any], tokenizer: Any, applied: bool) -> list[str]:
    """Return a warning if questions of a data set contain control tokens of the model, such as an end of turn.

    Without a chat template (``applied``) a token that all prompts have is the data's own template.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = [p if isinstance(p, str) else "\n".join(message["content"] for message in p) for p in prompts]
    for token in (str(token) for token in added if token.special):
        rows = [row for row, text in enumerate(texts, 1) if token in text]
        if rows and (applied or len(rows) < len(texts)):
            found = f"{len(rows)} of {len(texts)} prompts contain the control token {token!r}, first row {rows[0]}"
            return [f"{source}: {found}: the model does not read it as text; take it out"]
    return []


def _refuse(bad: Mapping[str, str], total: int, source: str) -> None:
    if bad:
        raise UsageError(f"{source}: {unusable(bad, total)}")


def _left_out(file: str | None, pairs: list[tuple[str, str]]) -> set[int]:
    if file is None:
        return set()
    named = records(Path(file), f"--data.leave_out {file}").values()
    unwanted = {(row.get("prompt"), row.get("label")) for row in named}
    found = {place for place, pair in enumerate(pairs) if pair in unwanted}
    if named and not found:
        raise UsageError(
            f"--data.leave_out {file}: none of its {len(named)} prompts, as the model sees them, is in --{TRAINING}; "
            "name the file that openrlhf-dbb prompts wrote for a run with this data set and chat template"
        )
    return found


def choose(
    loaded: Any,
    args: SimpleNamespace,
    backend: Any,
    tokenizer: Any,
    held_out: Any = None,
) -> Prompts:
    """Choose the rows of the loaded data set that are trained on.

    Rows with an earlier row's prompt are dropped with ``--data.drop_duplicates``; too long and
    empty prompts always; prompts of the loaded held-out data if the training data are tasks, whose
    two seeds may give the same problem.

    Raises:
        UsageError: fewer prompts are left than one rollout batch has, or messages have no template.
    """
    data = args.data
    source = f"--{TRAINING} {data.prompt_dataset}"
    if isinstance(loaded[0][data.input_key], list) and not data.apply_chat_template:
        problem = "the prompts are messages; give --data.apply_chat_template, and a model with one"
        raise UsageError(f"{source}: {problem}")
    prompts = [prompt_text(prompt) for prompt in loaded[data.input_key][:]]
    warnings = _label_warnings(held_out, data)
    rows, notes = _distinct(prompts, held_out, args, warnings)
    seen = _as_the_model_sees(loaded.select(rows), args, backend, tokenizer, source)
    labels = [str(label) for label in seen.labels]
    fits, dropped, advice = _fitting(seen.prompts, labels, args, tokenizer)
    notes += dropped
    if not any(labels):
        empty = "a reward function gets empty ones (--data.label_key names their column)"
        notes.append(f"no labels: {empty}")
    report = "; ".join([f"{len(fits)} of {len(prompts)} prompts", *notes])
    needed = args.rollout.batch_size
    if len(fits) < needed:
        problem = f"{source} leaves {report}: below --rollout.batch_size {needed}"
        raise UsageError(f"{problem}; {advice or 'lower it, or give more prompts'}")
    if advice:
        warnings.append(f"--{TRAINING}: {advice}")
    used = loaded.select([rows[i] for i in fits])
    rates = used[_RATE][:] if _RATE in used.column_names else None
    if rates is not None:
        report += f"; {sum(not math.isnan(rate[0]) for rate in rates)} with a pass rate"
    return Prompts(
        texts=[seen.prompts[i] for i in fits],
        labels=[labels[i] for i in fits],
        rows=[rows[i] for i in fits],
        pass_rates=rates,
        sources=used[_SOURCE][:] if _SOURCE in used.column_names else None,
        report=report,
        warnings=warnings,
    )


def _distinct(
    prompts: list[str], held_out: Any, args: SimpleNamespace, warnings: list[str]
) -> tuple[list[int], list[str]]:
    """Return the rows without duplicates and, of tasks, held-out problems; and their counts.

    Prompts of a data set that are held out, too, stay, and are a warning.
    """
    first: dict[str, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    kept = list(first.values()) if args.data.drop_duplicates else list(range(len(prompts)))
    tested = set(map(prompt_text, [] if held_out is None else held_out[args.data.input_key][:]))
    untested = [row for row in kept if prompts[row] not in tested]
    both = len(kept) - len(untested)
    made = any(map(tasks.is_spec, _names(args.data.prompt_dataset)))
    if both and not made:
        problem = f"--{TRAINING}: {both} of {len(kept)} prompts are in --{HELD_OUT}, too"
        warnings.append(f"{problem}, so that they are not held out; drop them from one of the two")
    notes = _counted(
        (len(prompts) - len(kept), "duplicates dropped"),
        (
            len(kept) - len(first),
            "duplicates kept, which share a posterior (--data.drop_duplicates drops them)",
        ),
        (both, f"in --{HELD_OUT} {'dropped' if made else 'too'}"),
    )
    return untested if made else kept, notes


def _counted(*counts: tuple[int, str]) -> list[str]:
    return [f"{count} {what}" for count, what in counts if count]


def _as_the_model_sees(
    rows: Any,
    args: SimpleNamespace,
    backend: Any,
    tokenizer: Any,
    source: str,
) -> Any:
    """Return OpenRLHF's data set of the prompts, with their template applied."""
    from jinja2 import TemplateError
    from openrlhf.datasets import PromptDataset, prompts_dataset

    upstream.replace(prompts_dataset, "tqdm", lambda rows, **_: rows)  # without a bar
    try:
        return PromptDataset(rows, tokenizer, backend, input_template=args.data.input_template)
    except TemplateError as error:
        raise UsageError(
            f"{source}: the model's chat template refuses a prompt: {error}; change the prompt, or "
            "leave the template out with --no-data.apply_chat_template"
        ) from error


def _fitting(
    texts: Sequence[str], labels: list[str], args: SimpleNamespace, tokenizer: Any
) -> tuple[list[int], list[str], str]:
    """Return the places of the prompts that are used, counts of the others, and advice.

    The advice is empty unless many prompts are too long, or none has a token.
    """
    longest = args.data.max_len
    response = args.rollout.max_new_tokens
    limit = int(longest - (response or 1))  # OpenRLHF would cut longer ones from the left
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lengths = list(map(len, tokens))
    too_long = sum(length > limit for length in lengths)
    unwanted = _left_out(args.data.leave_out, list(zip(texts, labels, strict=True)))
    fits = [i for i, n in enumerate(lengths) if 0 < n <= limit and i not in unwanted]
    notes = _counted(
        (too_long, f"of more than {limit} tokens dropped (--data.max_len {longest})"),
        (lengths.count(0), "without a token dropped"),
        (len(unwanted), "left out by --data.leave_out"),
    )
    advice = ""
    if set(lengths) == {0}:
        model = args.actor.model_name_or_path
        advice = f"the tokenizer of {model} makes no token of any; put its files into the folder"
    elif too_long > len(lengths) / 10:
        advice = f"{too_long} prompts have more than {limit} tokens; raise --data.max_len {longest}"
        if response:
            advice += f", which also has to hold --rollout.max_new_tokens {response}"
    return fits, notes, advice


def _label_warnings(held_out: Any, data: SimpleNamespace) -> list[str]:
    """Return a warning if a held-out prompt has two labels; it may be there several times."""
    if held_out is None or data.label_key is None:
        return []
    labels = [tasks.answer(label) for label in held_out[data.label_key][:]]
    bad = contradictions(held_out[data.input_key][:], labels)
    if not bad:
        return []
    place, reason = next(iter(bad.items()))
    rows = f"{len(bad)} of {len(labels)} rows"
    problem = f"--{HELD_OUT}: {rows} have another label than an earlier row of their prompt"
    return [f"{problem}, {place}: {reason}; fix or drop them"]
