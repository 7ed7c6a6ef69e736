"""The run that a training continues: found in the store, compared with the settings, taken back to a checkpoint."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf_dbb import storage
from openrlhf_dbb.core.posteriors import dataset_digest
from openrlhf_dbb.data import TRAINING, Prompts
from openrlhf_dbb.driver.arguments import MODEL_FLAG, NO_ESTIMATOR, Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.saved import checkpoints
from openrlhf_dbb.storage.address import check_sqlite_path, parse_url

_LOADS = "ckpt.load_enable"
_LEARNING_RATE = "actor.adam.lr"
_RANKS = ("actor.num_nodes", "actor.num_gpus_per_node")
# What a run trains, and by what.
_SUBJECT = (
    MODEL_FLAG,
    "method",
    "estimator",
    TRAINING,
    "reward.remote_url",
    "reward.model_name_or_path",
)
# How it trains: flags that begin so, beside those of its strategy and estimator.
_KEPT = (
    "rollout.strategy",
    "algo.dynamic_filtering",
    "algo.advantage.estimator",
    "algo.advantage.no_std_norm",
    "actor.loss_agg",
    "actor.eps_clip_low_high",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "replay.",
    "rollouts.record",
    "rollouts.of_run",
    # A checkpoint can be loaded only with the sharding and the precision that saved it.
    "ds.param_dtype",
    "ds.zero_stage",
    "ds.tensor_parallel_size",
    "ds.ring_attn_size",
    "ds.lora.rank",
    "ds.lora.alpha",
    "ds.lora.target_modules",
    "data.chat_template_kwargs",
)


def find(settings: Settings) -> storage.RunRecord | None:
    """Return the run to continue, None for a new one.

    Raises:
        UsageError: there is no such run or database, or the run has finished.
        storage.StoreError: there is no such run, or the run of the warm start is not there.
    """
    if settings.estimator == NO_ESTIMATOR:
        return None
    args = settings.args
    if args.warm_start is not None:
        url = args.warm_start_url or args.store.url
        with storage.open_store(url, create=False, read_only=True) as source:
            source.find_run(args.warm_start)
    database = parse_url(args.store.url).path
    if args.resume is not None and database and not Path(database).exists():
        problem = f"--resume {args.resume}".rstrip() + f": there is no database {database}"
        advice = "name the run's with --store.url, or start in the folder where the run was started"
        raise UsageError(f"{problem}; {advice}")
    with open_store(settings) as store:
        if args.resume is not None:
            return _asked_for(store, args.resume)
        # OpenRLHF's flag: continue if there is something in the folder
        return _of_folder(store, args.ckpt.path) if args.ckpt.load_enable else None


def _asked_for(store: storage.PosteriorStore, name: str) -> storage.RunRecord:
    """Return the unfinished run that --resume names; "" is the latest one."""
    if not name:
        latest = store.latest_run(unfinished=True)
        if latest is None:
            raise UsageError(
                f"--resume: no unfinished run in {store.location}; start one without --resume"
            )
        return latest
    record = store.find_run(name)
    if record.status == "finished":
        ended = f"that run finished at step {record.last_step}"
        raise UsageError(f"--resume {record.name}: {ended}; {_new_run(record)}")
    return record


def _of_folder(store: storage.PosteriorStore, folder: str) -> storage.RunRecord | None:
    """Return the last unfinished run with checkpoints in a folder; None for a folder without any."""
    newest = None
    for run in store.runs():
        if run.config.get("ckpt.path") == folder and run.status != "finished":
            newest = run
    if newest is None and checkpoints.tags(Path(folder)):
        raise UsageError(
            f"--{_LOADS}: the checkpoints in {folder} belong to no unfinished run in {store.location}; "
            "name the run with --resume, or another --ckpt.path"
        )
    return newest


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[storage.PosteriorStore]:
    """Open the database of the run. A dry run that finds no file gets an empty database that is thrown away."""
    url = settings.args.store.url
    address = parse_url(url)
    with tempfile.TemporaryDirectory() as folder:
        if settings.args.dry_run and address.path and not Path(address.path).exists():
            check_sqlite_path(address.path, create=True)
            url = f"{folder}/dry_run.db"
        with storage.open_store(url) as store:
            store.location = address.location
            yield store


def continued(
    settings: Settings,
    prompts: Prompts,
    store: storage.PosteriorStore,
    record: storage.RunRecord,
) -> tuple[str | None, list[str]]:
    """Find that a run can go on with these settings.

    Returns:
        The tag of the checkpoint to continue from, None to start over, and notes for the user.

    Raises:
        UsageError: something differs that must not, no checkpoint is whole, or another process owns the run.
    """
    flags = settings.flags
    _check_same(record, flags, settings, prompts)
    checkpoint, notes = _checkpoint(Path(settings.args.ckpt.path), store, record)
    changed = _changes(record.config, flags)
    if changed:
        told = ", ".join(f"--{flag} {record.config[flag]} -> {flags[flag]}" for flag in changed)
        if checkpoint is not None and _LEARNING_RATE in changed:
            told += f"; the checkpoint keeps its own learning rate, so that --{_LEARNING_RATE} has no effect"
        notes.append(f"note: changed since the run began: {told}")
    take_over = settings.args.store.take_over
    try:
        if settings.args.dry_run:
            store.check_claimable(record.run_id, take_over=take_over)
        else:
            store.claim_run(record.run_id, take_over=take_over).release()
    except storage.StoreError as error:  # the storage names its parameter, not our flag
        raise UsageError(str(error).replace("(take_over)", "with --store.take_over")) from error
    return checkpoint, notes


def _changes(stored: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Return the flags with another value than at the first start."""
    changed = []
    for flag, value in flags.items():
        before = wherever_installed(stored.get(flag, value))
        if flag != _LOADS and wherever_installed(value) != before:
            changed.append(flag)
    return changed


def _check_same(
    record: storage.RunRecord, flags: Mapping[str, Any], settings: Settings, prompts: Prompts
) -> None:
    """Raise UsageError if something differs from the first start that must not."""
    stored = record.config
    begins = (*_KEPT, f"{settings.strategy.name}.", f"{settings.built_estimator.name}.")
    kept = [flag for flag in flags if flag in stored and flag.startswith(begins)]
    for flag in (*_SUBJECT, *kept):
        before = wherever_installed(stored.get(flag))
        _check_equal(record, f"--{flag}", before, wherever_installed(flags[flag]))
    if record.dataset_digest != dataset_digest(prompts.texts, prompts.labels):
        raise UsageError(
            f"--resume {record.name}: the prompts and labels, or their order, are not those that it was "
            f"trained with; give the same data set, or {_new_run(record)}"
        )
    ranks_before = math.prod(stored.get(flag, 1) for flag in _RANKS)
    ranks = math.prod(flags.get(flag, 1) for flag in _RANKS)
    _check_equal(record, " x ".join(f"--{flag}" for flag in _RANKS), ranks_before, ranks)


def wherever_installed(value: Any) -> Any:
    """Return a flag's value with the verifiers of this package by their names, wherever it is installed.

    Example:
        >>> wherever_installed(["/a/site-packages/openrlhf_dbb/rewards/math_answer.py", "/home/mine.py"])
        ['math_answer', '/home/mine.py']
    """
    if not isinstance(value, list):
        return value
    folder = ("openrlhf_dbb", "rewards")
    names = []
    for entry in value:
        path = Path(str(entry))
        names.append(path.stem if path.parent.parts[-2:] == folder else entry)
    return names


def _check_equal(record: storage.RunRecord, name: str, before: object, after: object) -> None:
    if before != after:
        command = record.config.get("command", "unknown")
        raise UsageError(
            f"--resume {record.name}: it was trained with {name} {before!r}, not {after!r}; "
            f"repeat its command with --resume {record.name} ({command}), or {_new_run(record)}"
        )


def _new_run(record: storage.RunRecord) -> str:
    return f"start a new run, with --warm_start {record.name} from its posteriors"


def _checkpoint(
    folder: Path, store: storage.PosteriorStore, record: storage.RunRecord
) -> tuple[str | None, list[str]]:
    """Return the newest whole checkpoint, or None to start over, and notes on those that are passed over."""
    newest, passed = checkpoints.newest_whole(folder, record.uuid, record.last_step)
    if newest is not None:
        return newest, [f"note: {why}; continuing from {newest}" for why in passed]
    recorded = [f"{tag} (step {step})" for step, tag in store.checkpoints(record)]
    was_finished = any(checkpoints.is_finished(folder, tag) for tag in checkpoints.tags(folder))
    if recorded or was_finished:
        there = "; ".join(passed) or f"there is no checkpoint in {folder}"
        raise UsageError(
            f"--resume {record.name}: {there}; the run has recorded {', '.join(recorded) or 'none'}; "
            f"restore one, give the --ckpt.path where one is, or {_new_run(record)}"
        )
    if not record.last_step:
        return None, []
    passed.append(f"no checkpoint of the {record.last_step} steps was finished")
    return None, [f"note: {'; '.join(passed)}; the run starts over from step 0"]
