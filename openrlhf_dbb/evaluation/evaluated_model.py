import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from openrlhf_dbb.core import best_model
from openrlhf_dbb.errors import UsageError

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


def choose(name: str) -> str:
    """Return the best model, else the last one, of a run's folder; otherwise ``name``."""
    for folder in (Path(name).expanduser() / best_model.NAME, Path(name).expanduser() / LAST):
        if (folder / "config.json").is_file():
            print(f"{name}: evaluating its {'best' if folder.name == best_model.NAME else 'last'} model, {folder}")
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


def find(name: str, *, trusted: bool = False) -> Model:
    """Return the model of ``--model``; refuse one that cannot be loaded, or an untrusted one with code."""
    folder = Path(name).expanduser()
    is_folder = folder.is_dir()
    if is_folder:
        name = str(folder.resolve())
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise UsageError(f"--model {name} has no weights; name a run's folder, or one with a saved model")
    from transformers import AutoConfig, AutoTokenizer

    try:
        if not trusted:
            refuse_code("--model", name)
        adapter = folder / ADAPTER
        base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else name
        config = AutoConfig.from_pretrained(base, trust_remote_code=trusted)
        revision = None if is_folder else config._commit_hash
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--model {name} cannot be loaded: {reason}; name a folder, or OWNER/NAME") from error
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
