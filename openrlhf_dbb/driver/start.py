"""Creates the run to train, or finds the run to continue and checks that it is the same training."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_dbb import methods, storage
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.choices import dataset_digest
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.data import Prompts
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.storage.engine import check_sqlite_path
from openrlhf_dbb.storage.url import choose_url, parse_url

_RANKS = "actor.num_nodes", "actor.num_gpus_per_node"
# A checkpoint can be loaded only with the sharding and the precision that saved it.
_FORMAT_OF_CHECKPOINTS = (
    "ds.param_dtype", "ds.zero_stage", "ds.tensor_parallel_size", "ds.ring_attn_size", "ds.lora.rank",
    "ds.lora.alpha", "ds.lora.target_modules",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A run that is ready to be trained. Nobody owns it yet."""

    run: storage.RunRecord
    resumed: bool
    checkpoint: str | None  # the checkpoint to continue from; None: from the beginning
    store_url: str
    location: str  # the URL of the store for people, without a password
    prompts: Prompts
    warm_start: storage.WarmStart | None
    notes: list[str]  # lines that the user should see
    benchmarks: Mapping[str, BenchmarkPrompts] = field(default_factory=dict)  # beside --eval.dataset, by name
    held_out: list[Any] = field(default_factory=list)  # the prompts of --eval.dataset, as texts or as messages


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[storage.PosteriorStore]:
    """Open the database of the run. A dry run that finds no file gets an empty database that is thrown away."""
    url = settings.args.store.url
    address = parse_url(choose_url(url))
    with contextlib.ExitStack() as stack:
        if settings.args.dry_run and address.path:
            check_sqlite_path(address.path, create=True)
            try:
                tempfile.TemporaryFile(dir=Path(address.path).parent).close()  # which no folder ever shows
            except OSError as error:
                raise UsageError(f"--store.url {address.location}: its folder takes no files; name another") from error
            if not Path(address.path).exists():
                url = f"{stack.enter_context(tempfile.TemporaryDirectory())}/dry_run.db"
        store = stack.enter_context(storage.open_store(url))
        store.location = address.location
        yield store


def to_resume(settings: Settings, store: storage.PosteriorStore) -> storage.RunRecord | None:
    """Return the run to continue, or None for a new run. Raise UsageError if it has finished or there is none."""
    resume, folder = settings.args.resume, settings.args.ckpt.path
    if resume:
        record = store.find_run(resume)
    elif resume is not None:
        latest = store.latest_run(unfinished=True)
        if latest is None:
            raise UsageError(f"--resume: no unfinished run in {store.location}; start one without --resume")
        record = latest
    elif settings.args.ckpt.load_enable:  # OpenRLHF's flag: continue if there is something in the folder
        same = [run for run in store.runs() if run.config.get("ckpt.path") == folder and run.status != "finished"]
        if not same and checkpoints.tags(Path(folder)):
            raise UsageError(
                f"--ckpt.load_enable: the checkpoints in {folder} belong to no unfinished run in {store.location}; "
                "name the run with --resume, or another --ckpt.path"
            )
        return same[-1] if same else None
    else:
        return None
    if record.status == "finished":
        raise UsageError(f"--resume {record.name}: that run finished at step {record.last_step}; {_new_run(record)}")
    return record


def resume(settings: Settings, store: storage.PosteriorStore, record: storage.RunRecord, prompts: Prompts) -> Start:
    """Return the start of a run that goes on. Raise UsageError if something differs from its first start."""
    identity, changed = _identity(settings, prompts), _changed(settings, record)
    same_rows = record.dataset_digest == dataset_digest(prompts.texts, prompts.labels)
    for what, stored, given in (
        ("model", record.model, identity["model"]),
        ("method", record.method, identity["method"]),
        ("estimator", record.estimator, settings.estimator),
        ("estimator parameters", record.parameters, settings.parameters),
        ("data set", record.dataset, identity["dataset"]),
        ("prompts and labels", "these" if same_rows else "of other content or order", "these"),
        ("reward", record.reward, identity["reward"]),
        *((flag, *changed[flag]) for flag in changed if _must_stay(flag, settings)),
    ):
        if without_secrets(stored) != given:
            raise UsageError(
                f"--resume {record.name}: it was trained with {what} {stored!r}, not {given!r}; "
                f"give the same one, or {_new_run(record)}"
            )
    checkpoint, notes = _checkpoint(Path(settings.args.ckpt.path), store, record)
    changed.pop("--ckpt.load_enable", None)  # every resume sets it
    if changed:
        said = ", ".join(f"{flag} {before} -> {now}" for flag, (before, now) in changed.items())
        notes.append(f"note: changed since the run began: {said}")
        if checkpoint is not None and "--actor.adam.lr" in changed:
            notes[-1] += "; the checkpoint keeps its own learning rate, so that --actor.adam.lr has no effect"
    take_over = settings.args.store.take_over
    try:
        if settings.args.dry_run:
            store.check_claimable(record.run_id, take_over=take_over)
        else:
            store.claim_run(record.run_id, take_over=take_over).release()
    except storage.StoreError as error:  # the storage names its parameter, not our flag
        raise UsageError(str(error).replace("(take_over)", "with --store.take_over")) from error
    return Start(record, True, checkpoint, store.url, store.location, prompts, None, notes)


def _new_run(record: storage.RunRecord) -> str:
    return f"start a new run, with --warm_start {record.name} from its posteriors"


def _changed(settings: Settings, record: storage.RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return the flags, and the number of ranks, that differ from the first start, each with both values."""
    now = _plain(settings.flags)
    changed = {f"--{flag}": (record.config[flag], value) for flag, value in now.items() if flag in record.config}
    if set(_RANKS) <= record.config.keys():
        before, after = (math.prod(flags[flag] for flag in _RANKS) for flags in (record.config, now))
        changed["ranks (--actor.num_nodes x --actor.num_gpus_per_node)"] = before, after
    return {flag: (before, after) for flag, (before, after) in changed.items() if before != after}


def _must_stay(flag: str, settings: Settings) -> bool:
    name = flag.removeprefix("--")
    return name.startswith("ranks ") or name in _FORMAT_OF_CHECKPOINTS or methods.is_piece(name, settings.strategy)


def _checkpoint(folder: Path, store: storage.PosteriorStore, record: storage.RunRecord) -> tuple[str | None, list[str]]:
    """Return the newest whole checkpoint, or None to start over, and notes on those that are passed over.

    Raises UsageError if checkpoints were made and none can be used.
    """
    newest, passed = checkpoints.newest_whole(folder, record.uuid, record.last_step)
    if newest is not None:
        return newest, [f"note: {why}; continuing from {newest}" for why in passed]
    recorded = [f"{tag} (step {step})" for step, tag in store.checkpoints(record)]
    if recorded or any(checkpoints.is_finished(folder, tag) for tag in checkpoints.tags(folder)):
        there = "; ".join(passed) or f"there is no checkpoint in {folder}"
        raise UsageError(
            f"--resume {record.name}: {there}; the run has recorded {', '.join(recorded) or 'none'}; restore one, give "
            f"the --ckpt.path where one is, or {_new_run(record)}"
        )
    if record.last_step:
        passed.append(f"no checkpoint of the {record.last_step} steps was finished")
        return None, [f"note: {'; '.join(passed)}; the run starts over from step 0"]
    return None, []


def create(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    """Create a run, warm-started if asked for. A dry run creates it in a database that is thrown away."""
    if not settings.args.dry_run:
        return _create(settings, store, prompts)
    if store.is_taken(settings.run_name):
        raise UsageError(f"--run_name {settings.run_name}: there is such a run in {store.location}; give another name")
    with tempfile.TemporaryDirectory() as folder, storage.open_store(f"{folder}/dry_run.db") as scratch:
        source = settings.with_values({"warm_start_url": settings.args.warm_start_url or store.url}, "--dry_run")
        return dataclasses.replace(_create(source, scratch, prompts), store_url=store.url, location=store.location)


def _create(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    args, identity = settings.args, _identity(settings, prompts)
    posteriors = Posteriors.create(
        store,
        settings.run_name,
        prompts.texts,
        prompts.labels,
        estimator=settings.estimator,
        parameters=settings.parameters,
        warm_start=args.warm_start,
        warm_start_weight=args.warm_start_weight,
        warm_start_store=args.warm_start_url,
        pass_rates=prompts.pass_rates,
        config=_plain(settings.flags) | {"command": settings.command},
        **identity,
    )
    with posteriors:
        warm_start, notes = posteriors.warm_start, []
        for what in ("model", "dataset", "reward"):
            ours = identity[what]
            if warm_start is not None and (theirs := getattr(warm_start.source, what)) != ours:
                notes.append(f"warning: run {args.warm_start} used another {what}: {theirs}, here {ours}")
        posteriors.run.release()  # the trainer claims it
        return Start(posteriors.run.record, False, None, store.url, store.location, prompts, warm_start, notes)


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags as JSON holds them: infinities (OpenRLHF's "no limit") as text, tuples as lists."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items()}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _identity(settings: Settings, prompts: Prompts) -> dict[str, Any]:
    args = settings.args
    identity = {
        "method": settings.method,
        "model": args.actor.model_name_or_path,
        "dataset": args.data.prompt_dataset,
        "reward": ",".join(args.reward.remote_url or []) or str(args.reward.model_name_or_path),
    }
    return dict(without_secrets(identity))
