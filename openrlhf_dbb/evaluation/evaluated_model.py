"""The model to be evaluated: located, checked and fingerprinted before an engine starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.core import best_model
from openrlhf_dbb.errors import UsageError

LAST = "model"
"""Folder of the trained model in that of its run."""

_BLOCKS, _BLOCK_BYTES = 64, 64 * 1024


@dataclass(frozen=True)
class Model:
    """A model folder, or a model on the hub.

    Attributes:
        name: absolute folder, or hub id.
        revision: the hub's commit; None for a folder.
        fingerprint: changes with the model's content: the commit, or :func:`fingerprint`.
        context: longest sequence in tokens; None if the model's configuration does not say.
        tokenizer: its tokenizer.
    """

    name: str
    revision: str | None
    fingerprint: str
    context: int | None
    tokenizer: Any


def choose(name: str) -> str:
    """``name``, or where that is the folder of a run, its best model, else its last one; says which.

    Raises:
        UsageError: it is the folder of a run that has saved neither.
    """
    folder = Path(name).expanduser()
    saved = (best_model.NAME, LAST, "checkpoints")
    if (folder / "config.json").is_file() or not any((folder / each).is_dir() for each in saved):
        return name
    return best_or_last(name, folder / best_model.NAME, folder / LAST)


def best_or_last(run: str, best: Path, last: Path) -> str:
    """The folder of a run's best model by its evaluations, or of its last one where there is no best; says which.

    Args:
        run: what the run is called.
        best, last: where they would be.

    Raises:
        UsageError: there is neither.
    """
    said = best_model.read(best)
    if said is not None:
        print(f"{run}: its best model, by {said.measure} {said.value:.4g} after step {said.step}: {best}")
        return str(best)
    if (last / "config.json").is_file():
        print(f"{run}: its last model, as it has kept no best one: {last}")
        return str(last)
    raise UsageError(
        f"{run} has saved no model: there is neither {best} nor {last}; wait for its end, or give another --model"
    )


def find(name: str) -> Model:
    """The model of ``--model``; from the hub, its configuration and tokenizer are downloaded.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        name = str(folder.resolve())
    elif folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) != 2:
        raise UsageError(f"--model {name}: there is no such folder; name one, or a model on the hub (OWNER/NAME)")
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
        revision = None if folder.is_dir() else config._commit_hash
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--model {name} cannot be loaded: {reason}; name a model folder, or a model on the hub (OWNER/NAME)"
        ) from error
    return Model(
        name=name,
        revision=revision,
        fingerprint=fingerprint(folder) if folder.is_dir() else f"commit {revision}",
        context=getattr(config.get_text_config(), "max_position_embeddings", None),
        tokenizer=tokenizer,
    )


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"--model {folder} has no config.json; name a run's folder, or one in which a training saved its model "
            "(runs/RUN/model, not its checkpoints)"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UsageError(f"--model {folder} has no weights (*.safetensors or *.bin); name a folder with weights")


def fingerprint(folder: Path) -> str:
    """Hash of a model folder's files, 32 hex digits: names, sizes, and 64 blocks spread over each.

    Reading all of 16 GB would take half a minute, and a training step changes weights everywhere.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        step = max(_BLOCK_BYTES, size // _BLOCKS)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
