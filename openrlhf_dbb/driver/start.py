"""Creates the run to train, or finds the run to continue and checks that it is the same training."""

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_dbb import methods, storage
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.choices import dataset_digest
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.data import TRAINING, Prompts
from openrlhf_dbb.driver.arguments import MODEL_FLAG, NO_ESTIMATOR, Settings
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.storage.engine import check_sqlite_path
from openrlhf_dbb.storage.url import choose_url, parse_url

# What a run trains, and by what.
_SUBJECT = (MODEL_FLAG, "method", "estimator", TRAINING, "reward.remote_url", "reward.model_name_or_path")
_RANKS = "actor.num_nodes", "actor.num_gpus_per_node"
# A checkpoint can be loaded only with the sharding and the precision that saved it.
_FORMAT_OF_CHECKPOINTS = (
    "ds.param_dtype", "ds.zero_stage", "ds.tensor_parallel_size", "ds.ring_attn_size", "ds.lora.rank",
    "ds.lora.alpha", "ds.lora.target_modules",
)  # fmt: skip


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


def begin(prepared: Prepared) -> None:
    """Create the run, or find that it can go on; nothing for ``--estimator none``, which trains without a run.

    A dry run creates its run in a database that is thrown away.
    """
    settings = prepared.settings
    if settings.estimator == NO_ESTIMATOR:
        return
    with contextlib.ExitStack() as stack:
        store = made_in = stack.enter_context(_open_store(settings))
        prepared.store_url, prepared.location = store.url, store.location
        if prepared.resumed is not None:
            _resume(prepared, store, prepared.resumed)
            return
        if settings.args.dry_run:
            name = settings.run_name
            if store.is_taken(name):
                raise UsageError(f"--run_name {name}: there is such a run in {store.location}; give another name")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            made_in = stack.enter_context(storage.open_store(f"{folder}/dry_run.db"))
        _create(prepared, made_in, settings.args.warm_start_url or store)


def _create(prepared: Prepared, store: storage.PosteriorStore, source: storage.PosteriorStore | str) -> None:
    settings, prompts, flags = prepared.settings, prepared.prompts, _plain(prepared.settings.flags)
    reward = ",".join(flags["reward.remote_url"] or []) or str(flags["reward.model_name_or_path"])
    with Posteriors.create(
        store,
        settings.run_name,
        prompts.texts,
        prompts.labels,
        estimator=settings.estimator,
        parameters=settings.parameters,
        warm_start=settings.args.warm_start,
        warm_start_weight=settings.args.warm_start_weight,
        warm_start_store=source,
        pass_rates=prompts.pass_rates,
        model=flags[MODEL_FLAG],
        dataset=flags[TRAINING],
        reward=reward,
        method=settings.method,
        config=flags | {"command": settings.command},
    ) as posteriors:
        prepared.run, prepared.warm_start = record, warm = posteriors.run.record, posteriors.warm_start
        for what in ("model", "dataset", "reward"):
            ours = getattr(record, what)
            if warm is not None and (theirs := getattr(warm.source, what)) != ours:
                used = f"run {settings.args.warm_start} used another {what}: {theirs}, here {ours}"
                prepared.notes.append(f"warning: {used}")
        posteriors.run.release()  # the trainer claims it


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
        if record.status == "finished":
            ended = f"that run finished at step {record.last_step}"
            raise UsageError(f"--resume {record.name}: {ended}; {_new_run(record)}")
        return record
    if resume is not None:
        latest = store.latest_run(unfinished=True)
        if latest is None:
            raise UsageError(f"--resume: no unfinished run in {store.location}; start one without --resume")
        return latest
    if not settings.args.ckpt.load_enable:  # OpenRLHF's flag: continue if there is something in the folder
        return None
    same = [run for run in store.runs() if run.config.get("ckpt.path") == folder and run.status != "finished"]
    if not same and checkpoints.tags(Path(folder)):
        raise UsageError(
            f"--ckpt.load_enable: the checkpoints in {folder} belong to no unfinished run in {store.location}; "
            "name the run with --resume, or another --ckpt.path"
        )
    return same[-1] if same else None


def _resume(prepared: Prepared, store: storage.PosteriorStore, record: storage.RunRecord) -> None:
    settings, stored, now = prepared.settings, record.config, _plain(prepared.settings.flags)
    _check_same(record, now, settings, prepared.prompts)
    prepared.run, (prepared.checkpoint, notes) = record, _checkpoint(Path(settings.args.ckpt.path), store, record)
    prepared.notes += notes
    changed = [flag for flag in now if now[flag] != stored.get(flag, now[flag]) and flag != "ckpt.load_enable"]
    if changed:
        said = ", ".join(f"--{flag} {stored[flag]} -> {now[flag]}" for flag in changed)
        if prepared.checkpoint is not None and "actor.adam.lr" in changed:
            said += "; the checkpoint keeps its own learning rate, so that --actor.adam.lr has no effect"
        prepared.notes.append(f"note: changed since the run began: {said}")
    take_over = settings.args.store.take_over
    try:
        if settings.args.dry_run:
            store.check_claimable(record.run_id, take_over=take_over)
        else:
            store.claim_run(record.run_id, take_over=take_over).release()
    except storage.StoreError as error:  # the storage names its parameter, not our flag
        raise UsageError(str(error).replace("(take_over)", "with --store.take_over")) from error


def _check_same(record: storage.RunRecord, now: dict[str, Any], settings: Settings, prompts: Prompts) -> None:
    """Raise UsageError if something differs from the first start that must not."""
    stored = record.config
    pieces = {flag for flag in now if methods.is_piece(flag, settings.strategy, settings.built_estimator)}
    kept = [*_SUBJECT, *(flag for flag in now if flag in stored and flag in {*_FORMAT_OF_CHECKPOINTS, *pieces})]
    same_rows = record.dataset_digest == dataset_digest(prompts.texts, prompts.labels)
    ranks = (math.prod(flags.get(flag, 1) for flag in _RANKS) for flags in (stored, now))
    for what, before, after in (
        *((f"--{flag}", stored.get(flag), now[flag]) for flag in kept),
        ("prompts and labels", "these" if same_rows else "of other content or order", "these"),
        (" x ".join(f"--{flag}" for flag in _RANKS), *ranks),
    ):
        if before != after:
            raise UsageError(
                f"--resume {record.name}: it was trained with {what} {before!r}, not {after!r}; "
                f"give the same one, or {_new_run(record)}"
            )


def _new_run(record: storage.RunRecord) -> str:
    return f"start a new run, with --warm_start {record.name} from its posteriors"


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
