"""Loads the training prompts and the held-out prompts, and chooses the prompts that a run trains on."""

import csv
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import tasks, upstream
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILE
from openrlhf_dbb.rewards.math_answer import unreadable_labels

TRAINING, HELD_OUT = "data.prompt_dataset", "eval.dataset"  # flags that name data sets
_RATE, _SOURCE = "known pass rate", "source of the prompt"  # columns that are added to the training data
TEXT_FILES = (".json", ".jsonl", ".csv")
FILES = (*TEXT_FILES, ".parquet")  # suffixes of the files that records() reads


@dataclass(frozen=True)
class Prompts:
    texts: list[str]  # as the model sees them, with the template applied
    labels: list[str]  # all empty without ``--data.label_key``
    rows: list[int]  # their row numbers in the loaded data set, from 0
    pass_rates: list[list[float]] | None  # successes and attempts of each, NaN where unknown; None without a column
    sources: list[str] | None  # the value of ``--data.group_key`` of each; None without the flag
    report: str  # a line that says how many prompts are used and why others are not


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

    data, names = args.data, attrgetter(flag)(args)
    split, shares = (args.eval.split, None) if flag == HELD_OUT else (data.prompt_split, data.prompt_probs)
    if data.label_key is None and any(Path(url).parent == MATH_FILE.parent for url in args.reward.remote_url or []):
        raise UsageError("--data.label_key is missing: name the column that holds the answer to verify against")
    parts = [_read(name.strip(), split, args, backend, flag) for name in names.split(",")]
    if shares is None:
        rows = concatenate_datasets(parts)
    else:
        odds = [float(share) for share in shares.split(",")]
        rows = interleave_datasets(parts, probabilities=odds, seed=args.train.seed, stopping_strategy="all_exhausted")
    rows = rows.select(range(min(data.max_samples, len(rows))))
    if len(rows) == 0:
        raise UsageError(f"--{flag} {names} has no rows")
    # A held-out prompt may be there several times.
    if flag == TRAINING and data.label_key is not None and not data.drop_duplicates:
        _refuse(_contradictions(rows[data.input_key][:], rows[data.label_key][:]), len(rows), f"--{flag} {names}")
    return rows


def _read(name: str, split: str, args: SimpleNamespace, backend: Any, flag: str) -> Any:
    from datasets import Dataset

    data, source = args.data, f"--{flag} {name}"
    flags = ("input_key", "label_key", *(("pass_rate_key", "group_key") if flag == TRAINING else ()))
    keys = {key_flag: key for key_flag in flags if (key := getattr(data, key_flag)) is not None}
    if tasks.is_spec(name):
        if "pass_rate_key" in keys:
            raise UsageError(f"{source}: a program makes it, without pass rates; leave --data.pass_rate_key out")
        problems = tasks.problems(name, data.task_instruction)
        group = {_SOURCE: name.partition("?")[0]} if "group_key" in keys else {}
        made = [{data.input_key: each["prompt"], data.label_key: each["label"]} | group for each in problems]
        return Dataset.from_list(made)
    rows = None
    if Path(name).suffix in TEXT_FILES:
        found = records(Path(name), source, data.max_samples)
        places, read = list(found), list(found.values())
        names = {column for record in read for column in record}
    else:
        blend = upstream.load("openrlhf.datasets.utils", "blending_datasets")
        rows = blend(name, None, backend, args.train.seed, max_count=data.max_samples, dataset_split=split)
        places = [f"row {number}" for number in range(1, len(rows) + 1)]
        names = set(rows.column_names)
        tops = names & {part for key in keys.values() for part in (key, key.partition(".")[0])}
        read = rows.select_columns(sorted(tops)).to_list()
    columns = {key: [_value(record, key) for record in read] for key in keys.values()}
    for key_flag, key in keys.items():
        if names and all(value is None for value in columns[key]):
            raise UsageError(f"{source} has no column {key!r} (--data.{key_flag}); it has {', '.join(sorted(names))}")
    prompts, labels = columns[data.input_key], columns.get(data.label_key, ["-"] * len(places))
    kind = next((type(prompt) for prompt in prompts if prompt and isinstance(prompt, (str, list))), None)
    seen = zip(places, prompts, labels, strict=True)
    bad = {place: fault for place, prompt, label in seen if (fault := _fault(prompt, label, kind))}
    added: dict[str, list[Any]] = {}
    if "group_key" in keys:
        added[_SOURCE] = [str(value) for value in columns[data.group_key]]
    if "pass_rate_key" in keys:
        added[_RATE] = [_pass_rate(value, data.pass_rate_attempts) for value in columns[data.pass_rate_key]]
        bad |= {place: rate for place, rate in zip(places, added[_RATE], strict=True) if isinstance(rate, str)}
    _refuse(bad, len(places), source)
    added[data.input_key] = prompts
    if "label_key" in keys:
        added[data.label_key] = list(map(label_text, labels))
    if rows is None:
        extra = names & {data.image_key, "datasource"}
        return Dataset.from_dict(added | {key: [record.get(key) for record in read] for key in extra})
    for key, column in added.items():
        if key not in names or key == data.label_key:
            rows = rows.remove_columns(names & {key}).add_column(key, column)
    return rows


def records(path: Path, source: str, most: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the first rows of a file by place ("line 4"); numbers of a text file as they are written.

    Raise UsageError if the file or a row is broken.
    """
    # 2.50 and 1e-5 are answers as they stand, and 23 digits are too many for a column of numbers.
    load = functools.partial(json.loads, parse_float=str, parse_int=str)
    rows: Any = []
    found, place = {}, ""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(islice(csv.DictReader(file, strict=True), most))
        elif (text := path.read_text(encoding="utf-8-sig")).lstrip().startswith("["):
            rows = load(text)
        else:
            lines = ((f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
            for place, line in islice(lines, most):
                found[place] = load(line)
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{source} cannot be read: {place and f'{place}: broken JSON: '}{error}") from error
    found |= {f"row {number}": row for number, row in enumerate(rows[:most], 1)}
    fault = "it is no JSON object, or has more fields than the header"
    odd = {place: fault for place, row in found.items() if not isinstance(row, dict) or None in row}
    _refuse(odd, len(found), source)
    return found


def _value(record: Any, key: str) -> Any:
    """Return the value of a column, at the top or by dots below it; None without one."""
    if isinstance(record, dict) and key in record:
        return record[key]
    for field in key.split("."):
        record = record.get(field) if isinstance(record, dict) else None
    return record


def _fault(prompt: Any, label: Any, kind: type | None) -> str | None:
    """Return why a row cannot be used: all prompts are texts, or all are messages; a label is a text or a number."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return "no prompt"
    if not isinstance(prompt, (str, list)) or not isinstance(prompt, kind or object):
        return f"its prompt is a {type(prompt).__name__}; all have to be texts, or all lists of messages"
    if label is None or (isinstance(label, float) and math.isnan(label)) or not str(label).strip():
        return "no label"
    if isinstance(label, (bool, list, dict)):
        return f"its label is a {type(label).__name__}; write it as text, or name a field of it, as in label.answer"
    if isinstance(prompt, str):
        return None
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"its message {number} has no texts as role and content (an image is <image> in the text)"
    last = prompt[-1]["role"]
    return None if last in ("user", "tool") else f"its last message is of role {last}; end with the user's"


def label_text(label: Any) -> str:
    """Return a label as text; a float as the shortest decimal, without ".0": integers with gaps are floats."""
    return f"{Decimal(str(label)):f}".removesuffix(".0") if isinstance(label, float) else str(label)


def _pass_rate(value: Any, attempts: int | None) -> list[float] | str:
    """Return successes and attempts of a known rate, a number or "5/8"; NaN if missing; or why it is no rate."""
    if value is None or value == "" or value != value:
        return [math.nan, math.nan]
    counted, slash, of = str(value).partition("/")
    try:
        successes, tried = float(counted), float(of) if slash else 1.0
    except ValueError:
        successes, tried = math.nan, 1.0
    if not (tried >= 1 and 0 <= successes <= tried):
        return f"its pass rate is {value!r}; write a number in [0, 1], or successes/attempts"
    if attempts is None and not slash:
        return "its pass rate has no number of attempts; give --data.pass_rate_attempts"
    return [successes, tried] if attempts is None else [attempts * successes / tried, float(attempts)]


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


def _contradictions(prompts: list[Any], labels: list[str]) -> dict[str, str]:
    """Return the rows whose prompt an earlier row has with another label: a posterior belongs to both."""
    first: dict[str, tuple[int, str]] = {}
    bad = {}
    for number, (prompt, label) in enumerate(zip(prompts, labels, strict=True), 1):
        earlier, other = first.setdefault(_prompt_key(prompt), (number, label.strip()))
        if other != label.strip():
            bad[f"row {number}"] = f"its label is {label.strip()!r}, but the same prompt in row {earlier} has {other!r}"
    return bad


def _prompt_key(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _refuse(bad: dict[str, str], total: int, source: str) -> None:
    if bad:
        shown = [f"{place}: {fault}" for place, fault in islice(bad.items(), 5)] + ["..."] * (len(bad) > 5)
        raise UsageError(f"{source}: {len(bad)} of {total} rows cannot be used: {'; '.join(shown)}; fix or drop them")


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


def choose(loaded: Any, args: SimpleNamespace, backend: Any, tokenizer: Any, held_out: Any = None) -> Prompts:
    """Choose the rows of the loaded data set that are trained on.

    Rows with an earlier row's prompt are dropped with ``--data.drop_duplicates``; too long and empty prompts always;
    prompts of the loaded held-out data if the training data are tasks, whose two seeds may give the same problem.
    Raise UsageError if fewer prompts are left than one rollout batch has, or messages have no chat template.
    """
    from jinja2 import TemplateError
    from openrlhf.datasets import PromptDataset, prompts_dataset

    source, prompts = f"--{TRAINING} {args.data.prompt_dataset}", loaded[args.data.input_key][:]
    if isinstance(prompts[0], list) and not args.data.apply_chat_template:
        raise UsageError(f"{source}: the prompts are messages; give --data.apply_chat_template, and a model with one")
    upstream.replace(prompts_dataset, "tqdm", lambda rows, **_: rows)  # without a bar
    first = {key: row for row, key in reversed(list(enumerate(map(_prompt_key, prompts))))}
    kept = sorted(first.values()) if args.data.drop_duplicates else list(range(len(prompts)))
    tested = set(map(_prompt_key, held_out[args.data.input_key][:])) if held_out is not None else set()
    untested = [row for row in kept if _prompt_key(prompts[row]) not in tested]
    made = any(tasks.is_spec(name.strip()) for name in args.data.prompt_dataset.split(","))
    rows = untested if made else kept
    try:
        seen = PromptDataset(loaded.select(rows), tokenizer, backend, input_template=args.data.input_template)
    except TemplateError as error:
        raise UsageError(
            f"{source}: the model's chat template refuses a prompt: {error}; change the prompt, or leave the template "
            "out with --no-data.apply_chat_template"
        ) from error
    limit = int(args.data.max_len - (args.rollout.max_new_tokens or 1))  # OpenRLHF would cut longer ones from the left
    lengths = list(map(len, tokenizer(seen.prompts, add_special_tokens=False)["input_ids"]))
    unwanted = _left_out(args.data.leave_out, list(zip(seen.prompts, map(str, seen.labels), strict=True)))
    fits = [i for i, length in enumerate(lengths) if 0 < length <= limit and i not in unwanted]
    labels = [str(seen.labels[i]) for i in fits]
    counts = (
        (len(prompts) - len(kept), "duplicates dropped"),
        (len(kept) - len(first), "duplicates kept, which share a posterior (--data.drop_duplicates drops them)"),
        (len(kept) - len(untested), f"in --{HELD_OUT} {'dropped' if made else 'too'}"),
        (sum(length > limit for length in lengths), f"of more than {limit} tokens dropped"),
        (lengths.count(0), "without a token dropped"),
        (len(unwanted), "left out by --data.leave_out"),
    )
    notes = [f"{count} {what}" for count, what in counts if count]
    if not any(labels):
        notes.append("no labels: a reward function gets empty ones (--data.label_key names their column)")
    report = "; ".join([f"{len(fits)} of {len(prompts)} prompts", *notes])
    if len(fits) < args.rollout.batch_size:
        raise UsageError(f"{source} leaves {report}: below --rollout.batch_size {args.rollout.batch_size}; lower it")
    used = loaded.select([rows[i] for i in fits])
    rates, sources = (used[key][:] if key in used.column_names else None for key in (_RATE, _SOURCE))
    if rates is not None:
        report += f"; {sum(not math.isnan(rate[0]) for rate in rates)} with a pass rate"
    return Prompts([seen.prompts[i] for i in fits], labels, [rows[i] for i in fits], rates, sources, report)
