"""Fetches the models of a run from the hub once, before its processes start.

Each engine and each rank would fetch them by itself otherwise, within the time that vLLM waits for its engine.
"""

from collections.abc import Sequence
from pathlib import Path, PurePath
from types import SimpleNamespace

from openrlhf_dbb.errors import UsageError

_WEIGHTS = (".safetensors", ".bin", ".pt")
_OTHER_FORMATS = (".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".ot", ".tflite")


def fetch_models(args: SimpleNamespace) -> None:
    """Fetch the policy and the other models that the arguments name; what is on disk already is not fetched.

    Raises:
        UsageError: a model is not on the hub, or the hub cannot be reached and the model is not on disk.
    """
    for section in ("actor", "reward", "critic"):  # the reference is the policy before training
        name = getattr(args, section).model_name_or_path
        if name and not Path(name).expanduser().exists():
            _fetch(name, f"--{section}.model_name_or_path")


def wanted_files(files: Sequence[str]) -> list[str]:
    """Return the files of a repository that transformers and vLLM read: weights of one format, and small files.

    Example:
        >>> wanted_files(["config.json", "a.safetensors", "pytorch_model.bin", "original/a.pth", "q4.gguf"])
        ['config.json', 'a.safetensors']
    """
    top = [file for file in files if "/" not in file]
    small = [file for file in top if PurePath(file).suffix not in (*_WEIGHTS, *_OTHER_FORMATS)]
    for suffix in _WEIGHTS:
        weights = [file for file in top if file.endswith(suffix)]
        if weights:
            return small + weights
    return small


def _fetch(name: str, flag: str) -> None:
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    reason = "HF_HUB_OFFLINE is set"
    try:
        if not constants.HF_HUB_OFFLINE:
            info = HfApi().model_info(name)
            snapshot_download(
                name, allow_patterns=wanted_files([file.rfilename for file in info.siblings or []])
            )
            return
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
    if not _is_on_disk(name):
        raise UsageError(
            f"{flag} {name}: it is not on this machine, and cannot be fetched from the hub ({reason}); fetch it with "
            f"hf download {name}, or name a folder"
        )


def _is_on_disk(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return False
    if not isinstance(config, str):
        return False
    return any(file.suffix in _WEIGHTS for file in Path(config).parent.iterdir())
