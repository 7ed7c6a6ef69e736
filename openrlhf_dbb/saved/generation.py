"""The state of the generation in a checkpoint: draws, and prompts to ask for again. JSON, never pickle.

Checkpoints of earlier releases have it in DeepSpeed's client states, and still resume.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf_dbb.core import exact_json
from openrlhf_dbb.saved import checkpoints

FILE = "posteriors.json"
_MARK = "generation"  # the entry of before


def save(folder: Path, state: Mapping[str, Any]) -> dict[str, int]:
    """Write the state beside the ranks' files of a checkpoint, before its manifest is made.

    Returns:
        The files of the checkpoint as this host sees them, as :func:`checkpoints.complete` takes them.
    """
    # The manifest names the files that other hosts do not share
    folder.mkdir(parents=True, exist_ok=True)
    text = exact_json.dumps(dict(state), "the state of the generation")
    (folder / FILE).write_text(text, encoding="utf-8")
    return checkpoints.sizes(folder)


def load(folder: Path, mark: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`save` has written; ``mark`` is our entry in the client states of the checkpoint.

    Raises:
        ValueError: the file is no such state.
    """
    path = folder / FILE
    state = exact_json.loads(path.read_text(encoding="utf-8")) if path.exists() else mark[_MARK]
    return dict(state)
