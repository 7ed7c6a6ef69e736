"""The record of rollouts that a run writes, or that it trains on in the place of generated ones."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf_dbb import chosen, storage
from openrlhf_dbb.core.posteriors import dataset_digest
from openrlhf_dbb.core.recorded import ABOUT, DATA_SET, Record, Recorder
from openrlhf_dbb.data import Prompts
from openrlhf_dbb.driver.arguments import MODEL_FLAG, Settings
from openrlhf_dbb.driver.resume import open_store
from openrlhf_dbb.driver.rules.recorded import OF_RUN, RECORD
from openrlhf_dbb.errors import UsageError

# What else must be the same: sizes of a step, and what the log-probs are of.
_SAME = (
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.temperature",
    "data.max_len",
)


def folder_of(ckpt_path: str) -> Path:
    """Return the folder of a run's own record."""
    return Path(ckpt_path) / "rollouts"


def prepared(
    settings: Settings, prompts: Prompts, tokenizer: Any, *, is_new: bool
) -> tuple[dict[str, Any], Record | None]:
    """Return what a record says of this run, and the record to train on; nothing without the flags.

    Raises:
        UsageError: the record is not there, is damaged or does not fit, or a new run would write over one.
    """
    rollouts = settings.args.rollouts
    if not rollouts.record and not rollouts.of_run:
        return {}, None
    about = _description(settings, prompts, tokenizer)
    if rollouts.of_run:
        return about, _opened(settings, about)
    folder = folder_of(settings.args.ckpt.path)
    if is_new and (folder / ABOUT).exists():
        problem = f"{folder} holds recorded rollouts already"
        raise UsageError(f"--{RECORD}: {problem}; move them, or give another --ckpt.path")
    return about, None


def _description(settings: Settings, prompts: Prompts, tokenizer: Any) -> dict[str, Any]:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    digest = dataset_digest(prompts.texts, prompts.labels)
    same = {
        DATA_SET: digest,
        "the vocabulary (digest)": hashlib.blake2b(words.encode(), digest_size=16).hexdigest(),
    }
    for flag in _SAME:
        same[f"--{flag}"] = settings.values[flag]
    return {"run": settings.run_name, "model": settings.values[MODEL_FLAG], "same": same}


def recorder(settings: Settings, about: Mapping[str, Any]) -> Recorder | None:
    """Return what writes the run's record; None without ``--rollouts.record``."""
    if not settings.args.rollouts.record:
        return None
    return Recorder(folder_of(settings.args.ckpt.path), about)


def _opened(settings: Settings, about: Mapping[str, Any]) -> Record:
    name = settings.args.rollouts.of_run
    folder = Path(name)
    try:
        if not folder.is_dir():
            with open_store(settings) as store:
                folder = folder_of(store.find_run(name).config.get("ckpt.path", name))
        record = Record(folder)
        record.check(about["same"])
        record.batch(1, with_log_probs=chosen.needs_log_probs(settings.args))
    except (ValueError, storage.StoreError) as error:
        raise UsageError(f"--{OF_RUN} {name}: {error}") from error
    return record


def notes(settings: Settings, record: Record | None) -> list[str]:
    """Return a line for the start: what is recorded, or what is trained on."""
    if record is not None:
        rest = "no engine is started, nothing is evaluated"
        return [f"rollouts   {record.steps} recorded steps of {record.about.get('run')}: {rest}"]
    if settings.args.rollouts.record:
        return [f"rollouts   recorded in {folder_of(settings.args.ckpt.path)}"]
    return []
