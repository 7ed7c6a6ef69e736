"""Benchmarks, one TOML file each: where the questions are, the columns, prompt and verifier."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb import tasks
from openrlhf_dbb.data.files import FILES
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.verifiers import VERIFIERS
from openrlhf_dbb.toml_file import read_toml

NAMES = (
    "math500",
    "minerva",
    "aime24",
    "aime25",
    "amc24",
    "olympiad",
    "mmlu_pro",
    "gpqa_diamond",
    "bbh",
)
"""The columns of the paper's Table 1, in its order."""


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark's TOML file says; the defaults are those of a file without the key."""

    name: str  # on the command line, and of its results
    title: str  # heading in tables
    # Is averaged: "ID" (in distribution in the paper), "OOD" (out of distribution), or another.
    group: str = ""
    # Id on the Hugging Face hub, a local folder laid out like one, or a spec; "" with ``file``.
    hub: str = ""
    revision: str = "main"  # the hub's commit; "main" is the newest
    file: str = ""  # a JSON lines, JSON, CSV or Parquet file; "" with ``hub``
    configs: tuple[str, ...] = ()  # of the hub data set, concatenated in this order; (): the one
    forms: tuple[str, ...] = ()  # text for ``{form}`` in the template, one for each configuration
    split: str = "train"
    instruction: str = tasks.INSTRUCTION  # follows the question of a spec, in a line of its own
    question: str = "input"  # column
    answer: str = "label"  # column of the label (of a list, its first entry); not with ``choices``
    options: str = ""  # column with the list of options if the label is a letter
    # Columns with one option each, the correct one first; shuffled by the row's id.
    choices: tuple[str, ...] = ()
    id: str = ""  # column of the benchmark's own id; "" for the row's place
    template: str = "{question}"  # the prompt; {question}, {options} and {form} are filled in
    chat_template: bool = True  # whether the model's chat template is applied to the prompt
    verifier: str = "math"  # one of ``verifiers.VERIFIERS``
    max_tokens: int = 4096  # limit on the response length, unless the command line gives another


def find_all(text: str) -> list[Benchmark]:
    """Return the benchmarks of a list such as ``aime24,mine=data.jsonl``.

    Raises:
        UsageError: one cannot be found or read, none is named, or one is named twice.
    """
    entries = [find(part) for part in text.split(",") if part]
    if not entries or len({entry.name for entry in entries}) < len(entries):
        names = ", ".join(NAMES)
        raise UsageError(f"{text!r}: name one benchmark or more, none twice: {names}; or NAME=FILE")
    return entries


def find(text: str) -> Benchmark:
    """Return the benchmark with a known name, of a TOML file, ``NAME=FILE``, or a task's spec.

    ``NAME=FILE`` has columns ``input``, a prompt used verbatim, and ``label``. A TOML file names
    its benchmark; its ``configs`` may be a table, configuration = form of its answers, and its
    ``file`` relative to it. ``openrlhf_dbb.tasks`` explains specs.

    Raises:
        UsageError: there is no such benchmark, or its file cannot be read or has a wrong value.
    """
    if tasks.is_spec(text):
        return Benchmark(
            text,
            text.removeprefix(tasks.PREFIX),
            hub=text,
            question="prompt",
            verifier="reasoning_gym",
        )
    name, equals, file = text.partition("=")
    if equals and "/" not in name:  # a URL may hold a = and a token behind it
        return Benchmark(name, name, file=file, chat_template=False)
    if text in NAMES:
        return _read(Path(__file__).with_name(f"{text}.toml"))
    if text.endswith(".toml"):
        return _read(Path(text))
    raise UsageError(
        f"unknown benchmark {text!r}; available: {', '.join(NAMES)}; "
        f"or NAME=FILE ({', '.join(FILES)}), or the path of a benchmark's .toml file"
    )


def _read(path: Path) -> Benchmark:
    """Return the benchmark of a TOML file."""
    try:
        entry: dict[str, Any] = {"title": path.stem, **read_toml(path)}
        configs = entry.pop("configs", ())
        if isinstance(configs, dict):
            entry["forms"] = tuple(configs.values())
        if "file" in entry:
            entry["file"] = str(path.parent / entry["file"])
        entry["choices"] = tuple(entry.get("choices", ()))
        benchmark = Benchmark(name=path.stem, configs=tuple(configs), **entry)
        _check(benchmark)
    except (OSError, ValueError, TypeError) as error:  # a TypeError names an unknown key
        raise UsageError(f"{path}: {error}") from error
    return benchmark


def _check(benchmark: Benchmark) -> None:
    """Raise ValueError if the verifier or the template cannot be used."""
    if benchmark.verifier not in VERIFIERS:
        allowed = ", ".join(VERIFIERS)
        raise ValueError(f"verifier must be one of {allowed}, got {benchmark.verifier!r}")
    if "{question}" not in benchmark.template:
        raise ValueError("the template has no {question}")
    has_options = bool(benchmark.options or benchmark.choices)
    if has_options != ("{options}" in benchmark.template):
        raise ValueError("{options} in the template and options or choices need each other")
