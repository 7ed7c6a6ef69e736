"""The model that is evaluated: located, checked for code, told from another, an adapter merged."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.saved import best_model

LAST = "model"
ADAPTER = "adapter_config.json"
_BASE = "base_model_name_or_path"
# Files of which every tokenizer that needs files has one
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_MAY_BRING_CODE = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "custom_generate/generate.py",
)


class Model(NamedTuple):
    """A model folder, or a model on the hub."""

    name: str  # absolute folder, or hub id
    revision: str | None  # the hub's commit; None for a folder
    fingerprint: str  # changes when the model's files change
    context: int | None  # longest sequence in tokens; None if the configuration does not say
    tokenizer: Any


def choose(name: str) -> str:
    """Return the best model, else the last one, of a run's folder; otherwise ``name``."""
    run = Path(name).expanduser()
    for kind, part in (("best", best_model.NAME), ("last", LAST)):
        folder = run / part
        if (folder / "config.json").is_file():
            print(f"{name}: evaluating its {kind} model, {folder}")
            return str(folder)
    return name


def refuse_code(flag: str, name: str) -> None:
    """Refuse a model of a flag if to load it, or an adapter's base, would run code that it brings.

    transformers runs what a configuration names under "auto_map", and
    ``custom_generate/generate.py``.

    Raises:
        UsageError: the model brings code along.
        OSError, ValueError: there is no such model.
    """
    models = [name]
    adapter = _cached(name, ADAPTER)
    if adapter:
        models.append(json.loads(Path(adapter).read_bytes())[_BASE])
    for model in models:
        for file in _MAY_BRING_CODE:
            path = _cached(model, file)
            if path and _brings_code(Path(path)):
                raise UsageError(
                    f"{flag} {name} brings code along, named in {path}, which loading would run; "
                    "read the code and give --trust_remote_code, or name another model"
                )


def cannot_be_loaded(what: str, name: str, error: BaseException) -> str:
    """Return in one line why a model's configuration or tokenizer cannot be loaded, and a cure if one is known.

    Args:
        what: the flag, with its value.
        name: folder, or hub id.
    """
    folder = Path(name).expanduser()
    has_config = (folder / "config.json").is_file()
    if has_config and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return (
            f"{what} cannot be loaded: the folder has no tokenizer; "
            "save the model's into it with tokenizer.save_pretrained(FOLDER)"
        )
    return f"{what} cannot be loaded: {first_sentence(error)}"


def first_sentence(error: BaseException) -> str:
    """Return the first line of an error's text; all lines, as one, if the first announces a list.

    Example:
        >>> first_sentence(OSError("no file\\ntraceback")), first_sentence(OSError("one of:\\n(1) a"))
        ('no file', 'one of: (1) a')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].rstrip().endswith(":"):
        return " ".join(line.strip() for line in lines)
    return lines[0]


def _cached(model: str, file: str) -> str | None:
    """Return the path of a model's file; None if the model has no such file."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        model,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def _brings_code(file: Path) -> bool:
    if file.suffix == ".py":
        return True
    # "auto_map" may stand at any depth.
    return '"auto_map": ' in json.dumps(json.loads(file.read_bytes()))


def find_model(name: str, *, trusted: bool = False) -> Model:
    """Return the model of ``--model``.

    Raises:
        UsageError: it has no weights, cannot be loaded, or brings code and is not ``trusted``.
    """
    folder = Path(name).expanduser()
    is_folder = folder.is_dir()
    if is_folder:
        name = str(folder.resolve())
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise UsageError(
                f"--model {name} has no weights; name a run's folder, or one with a saved model"
            )
    from transformers import AutoConfig, AutoTokenizer

    try:
        if not trusted:
            refuse_code("--model", name)
        base = name
        adapter = folder / ADAPTER
        if adapter.is_file():
            base = json.loads(adapter.read_text(encoding="utf-8"))[_BASE]
        config = AutoConfig.from_pretrained(base, trust_remote_code=trusted)
        revision = None if is_folder else config._commit_hash
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=revision or "main",
            trust_remote_code=trusted,
        )
    except (OSError, ValueError) as error:
        reason = cannot_be_loaded(f"--model {name}", name, error)
        raise UsageError(f"{reason}; name a folder, or OWNER/NAME") from error
    return Model(
        name=name,
        revision=revision,
        fingerprint=fingerprint(folder) if is_folder else f"commit {revision}",
        context=getattr(config.get_text_config(), "max_position_embeddings", None),
        tokenizer=tokenizer,
    )


@contextmanager
def merged(name: str, parent: Path, *, trusted: bool = False) -> Iterator[str]:
    """Yield the model as vLLM loads it: an adapter merged into its base, within the block."""
    if not (Path(name) / ADAPTER).is_file():
        yield name
        return
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    with TemporaryDirectory(prefix="merged-", dir=parent) as folder:
        model = AutoPeftModelForCausalLM.from_pretrained(
            name,
            dtype="auto",
            trust_remote_code=trusted,
        )
        model.merge_and_unload().save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trusted)
        tokenizer.save_pretrained(folder)
        yield folder


def fingerprint(folder: Path) -> str:
    """Hash the names, sizes and times of a model's files, not its card's.

    To read 16 GB would take half a minute.
    """
    lines = []
    for path in sorted(folder.glob("[!.]*")):
        if path.is_file() and path.name != best_model.CARD:
            lines.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def default_name(model: str) -> str:
    """Return the name of the model (``Qwen3-8B`` of ``Qwen/Qwen3-8B``), or of the run it is of."""
    parts = Path(model).parts
    if len(parts) > 1 and parts[-1] in (LAST, best_model.NAME):
        return parts[-2]
    return parts[-1]
