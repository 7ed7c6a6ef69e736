import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from openrlhf_dbb import data, tasks
from openrlhf_dbb.core.texts import label_text, prompt_text
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.rewards.answers import ALPHABET
from openrlhf_dbb.rewards.math_answer import unreadable_labels
from openrlhf_dbb.saved import best_model

LAST = "model"
ADAPTER = "adapter_config.json"
_MAY_NAME_CODE = (
    "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip


class Model(NamedTuple):
    """A model folder, or a model on the hub."""

    name: str  # absolute folder, or hub id
    revision: str | None  # the hub's commit; None for a folder
    fingerprint: str  # changes when the model's files change
    context: int | None  # longest sequence in tokens; None if the model's configuration does not say
    tokenizer: Any


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
        labels.append(label if benchmark.file and label.strip() else label.strip())
    if not ids:
        raise _error(benchmark, "the data set has no rows")
    return BenchmarkPrompts(benchmark, ids, texts, labels, _notes_on_labels(benchmark, ids, labels))


def _notes_on_labels(benchmark: Benchmark, ids: list[str], labels: list[str]) -> list[str]:
    """Return a line on labels that are compared as text; refuse others that cannot be read."""
    reasons = {"": "the label is empty"}
    if benchmark.verifier.startswith("math"):
        reasons.update(unreadable_labels(filter(None, labels)))
    bad = [(row_id, reasons[label]) for row_id, label in zip(ids, labels, strict=True) if label in reasons]
    if not bad:
        return []
    if benchmark.verifier != "math_or_text" or not all(labels):
        raise _error(benchmark, f"row {bad[0][0]!r} ({len(bad)} such rows): {bad[0][1]}")
    rows = ", ".join(row_id for row_id, _ in bad)
    return [f"{len(bad)} of {len(ids)} labels are compared as text, as no answer can be read like them: rows {rows}"]


def prepare(
    loaded: BenchmarkPrompts, model: Model, chat_template: bool | None, max_new_tokens: int | None
) -> BenchmarkPrompts:
    """Apply the chat template and tokenize as OpenRLHF: no special tokens but those in the text; None: the benchmark's.

    Raise UsageError for a template that is asked for and missing, and for a prompt that is too long.
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
            f"{limit} do not fit into the context of {model.name} ({model.context} tokens); lower --max_new_tokens"
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
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    if tasks.is_spec(benchmark.hub):
        return tasks.problems(benchmark.hub, benchmark.instruction)
    where = benchmark.file or benchmark.hub
    try:
        if benchmark.file:
            table = list(data.records(Path(where), f"benchmark {benchmark.name}: {where}").values())
            names = list(dict.fromkeys(column for record in table for column in record))
        else:
            table = datasets.load_dataset(where, config, split=benchmark.split, revision=benchmark.revision)
            names = table.column_names
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        says_why = isinstance(error, (DatasetNotFoundError, ConnectionError))
        offline = f"; load it once with network, or give {benchmark.name}=FILE" * isinstance(error, ConnectionError)
        reason = error if says_why else error.__cause__ or error
        raise _error(benchmark, f"{where} cannot be read: {reason}{offline}") from error
    label = benchmark.choices or (benchmark.answer,)
    for column in filter(None, (benchmark.question, *label, benchmark.options, benchmark.id)):
        if names and column not in names:
            there = data.listed_names(names)
            raise _error(benchmark, f"{column!r} is not a column of {where}; it has {there}")
    return table


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
        if isinstance(label, (bool, dict)):
            raise ValueError(data.label_fault(label))
        return "", label_text(label)
    elif str(label) not in ALPHABET[: len(options)]:
        raise ValueError(f"has {len(options)} options, but the label {label!r}")
    listed = (f"({letter}) {option}" for letter, option in zip(ALPHABET, options, strict=False))
    return "\n".join(listed), str(label)


def _text(benchmark: Benchmark, row: dict[str, Any], column: str) -> str:
    text = row.get(column)
    if isinstance(text, bytes):
        text = prompt_text(text)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has no text in column {column!r}: {text!r}")
    return text if benchmark.file else text.strip()


def _error(benchmark: Benchmark, problem: str) -> UsageError:
    return UsageError(f"benchmark {benchmark.name}: {problem}")


def choose(name: str) -> str:
    """Return the best model, else the last one, of a run's folder; otherwise ``name``."""
    run = Path(name).expanduser()
    for kind, folder in (("best", run / best_model.NAME), ("last", run / LAST)):
        if (folder / "config.json").is_file():
            print(f"{name}: evaluating its {kind} model, {folder}")
            return str(folder)
    return name


def refuse_code(flag: str, name: str) -> None:
    """Raise UsageError if to load the model of a flag, or an adapter's base, would run code that it brings along.

    transformers runs what a configuration names under "auto_map", and ``custom_generate/generate.py``. Raises
    OSError or ValueError if there is no such model.
    """
    from transformers.utils import cached_file

    quiet: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    adapter = cached_file(name, ADAPTER, **quiet)
    bases = [json.loads(Path(adapter).read_bytes())["base_model_name_or_path"]] if adapter else []
    for model, file in itertools.product((name, *bases), (*_MAY_NAME_CODE, "custom_generate/generate.py")):
        found = cached_file(model, file, **quiet)
        # "auto_map" may stand at any depth.
        if found and (file.endswith(".py") or '"auto_map": ' in json.dumps(json.loads(Path(found).read_bytes()))):
            raise UsageError(
                f"{flag} {name} brings code along, named in {found}, which loading would run; read the code and give "
                "--trust_remote_code, or name another model"
            )


def find_model(name: str, *, trusted: bool = False) -> Model:
    """Return the model of ``--model``; refuse one that cannot be loaded, or an untrusted one with code."""
    folder = Path(name).expanduser()
    if is_folder := folder.is_dir():
        name = str(folder.resolve())
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise UsageError(f"--model {name} has no weights; name a run's folder, or one with a saved model")
    from transformers import AutoConfig, AutoTokenizer

    try:
        if not trusted:
            refuse_code("--model", name)
        adapter = folder / ADAPTER
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"] if adapter.is_file() else name
        config = AutoConfig.from_pretrained(base, trust_remote_code=trusted)
        revision = None if is_folder else config._commit_hash
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--model {name} cannot be loaded: {reason}; name a folder, or OWNER/NAME") from error
    files = fingerprint(folder) if is_folder else f"commit {revision}"
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return Model(name=name, revision=revision, fingerprint=files, context=context, tokenizer=tokenizer)


@contextmanager
def merged(name: str, parent: Path, *, trusted: bool = False) -> Iterator[str]:
    """Yield the model as vLLM loads it: an adapter merged into its base, within the block."""
    if not (Path(name) / ADAPTER).is_file():
        yield name
        return
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    with TemporaryDirectory(prefix="merged-", dir=parent) as folder:
        model = AutoPeftModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=trusted)
        model.merge_and_unload().save_pretrained(folder)
        AutoTokenizer.from_pretrained(name, trust_remote_code=trusted).save_pretrained(folder)
        yield folder


def fingerprint(folder: Path) -> str:
    """Hash the names, sizes and times of a model's files, not its card's; to read 16 GB would take half a minute."""
    files = sorted(path for path in folder.glob("[!.]*") if path.is_file() and path.name != best_model.CARD)
    listing = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()[:32]


def default_name(model: str) -> str:
    """Return the name of the model (``Qwen3-8B`` of ``Qwen/Qwen3-8B``), or of the run that saved it."""
    parts = Path(model).parts
    return parts[-2] if len(parts) > 1 and parts[-1] in (LAST, best_model.NAME) else parts[-1]
