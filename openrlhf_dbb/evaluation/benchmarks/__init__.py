"""Benchmarks: what is asked and how it is verified, one TOML file each; a user's own is one more file.

An entry says where the data are (a hub data set at a commit, or a file), what its columns hold, what the prompt looks
like, and which verifier judges the answers. Nothing is loaded here: see ``loading``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.verifiers import KINDS
from openrlhf_dbb.presets import read_toml

FOLDER = Path(__file__).parent
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Name in ``datasets`` of the reader of a file, by suffix."""

GROUPS = ("ID", "OOD", "")
PAPER = ("math500", "minerva", "aime24", "aime25", "amc24", "olympiad", "mmlu_pro", "gpqa_diamond", "bbh")
"""The columns of the paper's Table 1, in its order."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: on the command line, and of its results on disk.
        title: heading in tables.
        group: "ID" (in distribution in the paper), "OOD" (out of distribution), or "" for neither.
        source: whose definition is followed.
        hub: id of a data set on the Hugging Face hub, or a local folder laid out like one; "" with ``file``.
        revision: the hub's commit; "main" is the newest.
        file: a JSON lines, JSON or Parquet file; "" with ``hub``.
        configs: configurations of the hub data set, concatenated in this order; () for the default one.
        forms: what replaces ``{form}`` in the template, per configuration; () if the template has no ``{form}``.
        split: of the data set.
        question: column of the question.
        answer: column of the label (of a list, its first entry); not used with ``choices``.
        options: column with the list of options if the label is a letter; "" for none.
        choices: columns with one option each, the correct one first; they are shuffled, always in the same way.
        id: column of the benchmark's own id; "" for the row's place.
        template: the prompt; ``{question}``, ``{options}`` and ``{form}`` are filled in, the rest is used verbatim.
        chat_template: whether the model's chat template is applied to the prompt.
        verifier: one of ``verifiers.KINDS``.
        max_tokens: limit on the response length, unless the command line gives another.
    """

    name: str
    title: str
    group: str = ""
    source: str = ""
    hub: str = ""
    revision: str = "main"
    file: str = ""
    configs: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    split: str = "train"
    question: str = "input"
    answer: str = "label"
    options: str = ""
    choices: tuple[str, ...] = ()
    id: str = ""
    template: str = "{question}"
    chat_template: bool = True
    verifier: str = "math"
    max_tokens: int = 4096


def names() -> list[str]:
    """Benchmarks known by name: the paper's in the order of its table, then others."""
    found = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return sorted(found, key=lambda name: PAPER.index(name) if name in PAPER else len(PAPER))


def find_all(text: str, *, question: str = "input", answer: str = "label") -> list[Benchmark]:
    """The benchmarks of a command line such as ``aime24,mine=data.jsonl``, each as for :func:`find`.

    Raises:
        UsageError: there is none, one is there twice, or as for :func:`find`.
    """
    found: dict[str, Benchmark] = {}
    for part in filter(None, text.split(",")):
        entry = find(part, question=question, answer=answer)
        if entry.name in found:
            raise UsageError(f"{entry.name} is named twice; name it once")
        found[entry.name] = entry
    if not found:
        raise UsageError(f"no benchmark is named; available: {', '.join(names())}; or NAME=FILE")
    return list(found.values())


def find(text: str, *, question: str = "input", answer: str = "label") -> Benchmark:
    """The benchmark given on the command line as ``text``.

    Args:
        text: a known name; the path of a TOML file; or ``NAME=FILE``, a data file whose prompts are used verbatim,
            without a chat template, and verified by Math-Verify.
        question: column of the prompts in such a data file.
        answer: column of the labels in such a data file.

    Raises:
        UsageError: there is no such benchmark or file, or the file has a mistake.
    """
    name, equals, path = text.partition("=")
    if equals:
        return _from_data_file(name, Path(path), question, answer)
    if text.endswith(".toml"):
        return read(Path(text))
    if text not in names():
        raise UsageError(
            f"unknown benchmark {text!r}; available: {', '.join(names())}; "
            "or NAME=FILE (.jsonl, .json, .parquet), or the path of a benchmark's .toml file"
        )
    return read(FOLDER / f"{text}.toml")


def read(path: Path) -> Benchmark:
    """The benchmark in a TOML file, named like the file.

    ``configs`` may be a table: configuration = form of its answers. A relative ``file`` is relative to the TOML file.

    Raises:
        UsageError: there is no such file, it is not TOML, a key is unknown or missing, or a value is not allowed.
    """
    if not path.is_file():
        raise UsageError(f"there is no benchmark file {path}")
    try:
        entry = read_toml(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    for key, value in entry.items():
        if key not in _TYPES:
            raise UsageError(f"{path}: unknown key {key!r}; available: {', '.join(sorted(_TYPES))}")
        if type(value) not in _TYPES[key]:
            allowed = " or ".join(known.__name__ for known in _TYPES[key])
            raise UsageError(f"{path}: {key} must be of type {allowed}, got {value!r}")
    configs = entry.pop("configs", ())
    forms = tuple(configs.values()) if isinstance(configs, dict) else ()
    if "file" in entry:
        entry["file"] = str(path.parent / entry["file"])
    entry["choices"] = tuple(entry.get("choices", ()))
    values: dict[str, Any] = {"title": path.stem, **entry}
    benchmark = Benchmark(name=path.stem, configs=tuple(configs), forms=forms, **values)
    check(benchmark, str(path))
    return benchmark


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("title", "group", "source", "hub", "revision", "file", "split"), (str,)),
    **dict.fromkeys(("question", "answer", "options", "id", "template", "verifier"), (str,)),
    "chat_template": (bool,),
    "max_tokens": (int,),
    "choices": (list,),
    "configs": (list, dict),
}
"""Keys of an entry's file, and their types."""


def _from_data_file(name: str, path: Path, question: str, answer: str) -> Benchmark:
    if not name or "/" in name:
        raise UsageError(f"{name!r} in {name}={path} cannot be the name of a benchmark; write NAME=FILE")
    benchmark = Benchmark(name, name, file=str(path), question=question, answer=answer, chat_template=False)
    check(benchmark, str(path))
    return benchmark


def check(benchmark: Benchmark, where: str) -> None:
    """Raise UsageError, starting with ``where``, if the entry contradicts itself or a value is not allowed."""
    for wrong, what in _mistakes(benchmark):
        if wrong:
            raise UsageError(f"{where}: {what}")


def _mistakes(entry: Benchmark) -> list[tuple[bool, str]]:
    listed = bool(entry.options or entry.choices)
    return [
        (bool(entry.hub) == bool(entry.file), "give either hub = (a data set's id) or file = (a data file)"),
        (
            bool(entry.file) and Path(entry.file).suffix not in READERS,
            f"data file {entry.file!r}: its name must end in {', '.join(READERS)}",
        ),
        (bool(entry.file) and not Path(entry.file).is_file(), f"there is no data file {entry.file}"),
        (entry.group not in GROUPS, f"group must be 'ID', 'OOD' or '', got {entry.group!r}"),
        (entry.verifier not in KINDS, f"unknown verifier {entry.verifier!r}; available: {', '.join(KINDS)}"),
        (bool(entry.options and entry.choices), "give options (a column of lists) or choices (columns), not both"),
        ("{question}" not in entry.template, "the template has no {question}"),
        (listed and "{options}" not in entry.template, "the template has no {options}"),
        (not listed and "{options}" in entry.template, "{options} in the template needs options or choices"),
        ("{form}" in entry.template and not entry.forms, "{form} in the template needs a table [configs]"),
        (entry.max_tokens < 1, f"max_tokens must be at least 1, got {entry.max_tokens}"),
    ]
