"""Creates the run to train, or finds the run to continue and checks that it is the same training."""

import contextlib
import functools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb import methods, storage
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.choices import dataset_digest
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.data import Prompts
from openrlhf_dbb.driver.arguments import Settings
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.errors import UsageError
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
    prepared: Prepared
    store_url: str
    location: str  # the URL of the store for people, without a password
    notes: list[str]  # lines that the user should see
    checkpoint: str | None = None  # the checkpoint to continue from; None: from the beginning
    warm_start: storage.WarmStart | None = None


def find(settings: Settings) -> storage.RunRecord | None:
    """Return the run to continue, None for a new one; UsageError or StoreError if it or the warm start is not there."""
    if settings.estimator == NO_ESTIMATOR:
        return None
    args = settings.args
    with _open_store(settings) as store:
        resumed = _to_resume(settings, store)
    if args.warm_start is not None:
        with storage.open_store(args.warm_start_url or args.store.url, create=False) as source:
            source.find_run(args.warm_start)
    return resumed


def begin(prepared: Prepared) -> Start | None:
    """Create the run, or find that it can go on; None for ``--estimator none``, which trains without a run.

    A dry run creates its run in a database that is thrown away.
    """
    settings = prepared.settings
    if settings.estimator == NO_ESTIMATOR:
        return None
    with contextlib.ExitStack() as stack:
        store = made_in = stack.enter_context(_open_store(settings))
        start = functools.partial(Start, prepared=prepared, store_url=store.url, location=store.location)
        if prepared.resumed is not None:
            checkpoint, notes = _check_resumable(settings, store, prepared.resumed, prepared.prompts)
            return start(prepared.resumed, checkpoint=checkpoint, notes=notes + prepared.notes)
        if settings.args.dry_run:
            name = settings.run_name
            if store.is_taken(name):
                raise UsageError(f"--run_name {name}: there is such a run in {store.location}; give another name")
            settings = settings.with_values({"warm_start_url": settings.args.warm_start_url or store.url}, "--dry_run")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            made_in = stack.enter_context(storage.open_store(f"{folder}/dry_run.db"))
        record, warm_start, notes = _create(settings, made_in, prepared.prompts)
        return start(record, warm_start=warm_start, notes=notes + prepared.notes)


def _create(
    settings: Settings, store: storage.PosteriorStore, prompts: Prompts
) -> tuple[storage.RunRecord, storage.WarmStart | None, list[str]]:
    args, identity = settings.args, _identity(settings)
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
        return posteriors.run.record, warm_start, notes


@contextlib.contextmanager
def _open_store(settings: Settings) -> Iterator[storage.PosteriorStore]:
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


def _to_resume(settings: Settings, store: storage.PosteriorStore) -> storage.RunRecord | None:
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


def _check_resumable(
    settings: Settings, store: storage.PosteriorStore, record: storage.RunRecord, prompts: Prompts
) -> tuple[str | None, list[str]]:
    """Return the checkpoint to continue from, and notes. Raise UsageError if something differs from the first start."""
    identity, changed = _identity(settings), _changed(settings, record)
    kept = {*_FORMAT_OF_CHECKPOINTS, *(flag for flag in settings.flags if methods.is_piece(flag, settings.strategy))}
    same_rows = record.dataset_digest == dataset_digest(prompts.texts, prompts.labels)
    for what, stored, given in (
        ("model", record.model, identity["model"]),
        ("method", record.method, identity["method"]),
        ("estimator", record.estimator, settings.estimator),
        ("estimator parameters", record.parameters, settings.parameters),
        ("data set", record.dataset, identity["dataset"]),
        ("prompts and labels", "these" if same_rows else "of other content or order", "these"),
        ("reward", record.reward, identity["reward"]),
        *((flag, *both) for flag, both in changed.items() if flag.startswith("ranks ") or flag[2:] in kept),
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
    return checkpoint, notes


def _new_run(record: storage.RunRecord) -> str:
    return f"start a new run, with --warm_start {record.name} from its posteriors"


def _changed(settings: Settings, record: storage.RunRecord) -> dict[str, tuple[Any, Any]]:
    now = _plain(settings.flags)
    changed = {f"--{flag}": (record.config[flag], value) for flag, value in now.items() if flag in record.config}
    if set(_RANKS) <= record.config.keys():
        before, after = (math.prod(flags[flag] for flag in _RANKS) for flags in (record.config, now))
        changed["ranks (--actor.num_nodes x --actor.num_gpus_per_node)"] = before, after
    return {flag: (before, after) for flag, (before, after) in changed.items() if before != after}


def _checkpoint(folder: Path, store: storage.PosteriorStore, record: storage.RunRecord) -> tuple[str | None, list[str]]:
    """Return the newest whole checkpoint, or None to start over, and notes on those that are passed over."""
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


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags as JSON holds them: infinities (OpenRLHF's "no limit") as text, tuples as lists."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items()}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _identity(settings: Settings) -> dict[str, Any]:
    args = settings.args
    identity = {
        "method": settings.method,
        "model": args.actor.model_name_or_path,
        "dataset": args.data.prompt_dataset,
        "reward": ",".join(args.reward.remote_url or []) or str(args.reward.model_name_or_path),
    }
    return dict(without_secrets(identity))
