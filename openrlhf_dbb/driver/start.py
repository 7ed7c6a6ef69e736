"""The run behind a training: a new one, or one to continue, with all that must match."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import storage
from estimators.parameters import parameter_fields
from openrlhf_dbb import methods
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.data import Prompts
from openrlhf_dbb.driver.flags import estimator_class
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from storage.engine import check_sqlite_path
from storage.url import choose_url, parse_url

_FORMAT_OF_CHECKPOINTS = ("ds.param_dtype", "ds.zero_stage", "ds.tensor_parallel_size", "ds.ring_attn_size")


@dataclass(frozen=True)
class Start:
    """A checked start.

    Attributes:
        run: the run to train; owned by nobody yet.
        resumed: whether it has been trained before.
        checkpoint: the model checkpoint to continue from; None: from the beginning.
        store_url: absolute URL of its database.
        location: the same for people, without a password.
        prompts: what it trains on.
        warm_start: coverage of the imported posteriors, if any.
        notes: lines the user should see.
        benchmarks: what is evaluated beside ``--eval.dataset``, by name.
    """

    run: storage.RunRecord
    resumed: bool
    checkpoint: str | None
    store_url: str
    location: str
    prompts: Prompts
    warm_start: storage.WarmStart | None
    notes: list[str]
    benchmarks: Mapping[str, BenchmarkPrompts] = field(default_factory=dict)


@contextlib.contextmanager
def open_store(settings: Settings) -> Iterator[storage.PosteriorStore]:
    """The database of the run; where a dry run finds no file, an empty one in its place that is thrown away.

    Raises:
        storage.StoreError: it cannot be opened or made.
    """
    address = parse_url(choose_url(settings.store_url))
    with contextlib.ExitStack() as stack:
        url = settings.store_url
        if settings.dry_run and address.path and not Path(address.path).exists():
            check_sqlite_path(address.path, create=True)
            url = f"{stack.enter_context(tempfile.TemporaryDirectory())}/dry_run.db"
        store = stack.enter_context(storage.open_store(url))
        store.location = address.location
        yield store


def to_resume(settings: Settings, store: storage.PosteriorStore) -> storage.RunRecord | None:
    """The run to continue, or None for a new one.

    Raises:
        UsageError, storage.StoreError: no such run, or it is finished.
    """
    if settings.resume:
        record = store.find_run(settings.resume)
    elif settings.resume is not None:
        found = store.latest_run(unfinished=True)
        if found is None:
            raise UsageError(f"--resume: no unfinished run in {store.location}; start one without --resume")
        record = found
    elif settings.args.ckpt.load_enable:
        same = [run for run in store.runs() if run.config.get("ckpt.path") == settings.args.ckpt.path]
        unfinished = [run for run in same if run.status != "finished"]
        if not unfinished:
            if checkpoints.tags(Path(settings.args.ckpt.path)):
                raise UsageError(
                    f"--ckpt.load_enable: the checkpoints in {settings.args.ckpt.path} belong to no unfinished run in "
                    f"{store.location}; name the run with --resume, or another --ckpt.path"
                )
            return None
        record = unfinished[-1]
    else:
        return None
    if record.status == "finished":
        raise UsageError(
            f"--resume {record.name}: that run finished at step {record.last_step}; start a new run, "
            f"with --warm_start {record.name} to begin from its posteriors"
        )
    return record


def resume(settings: Settings, store: storage.PosteriorStore, record: storage.RunRecord, prompts: Prompts) -> Start:
    """Check that ``record`` is continued with what it was trained with, and that nobody else trains it.

    Raises:
        UsageError, storage.StoreError: what differs, or who owns the run.
    """
    identity = _identity(settings, prompts)
    # A parameter that the estimator has got since the run was made has its default.
    defaults = {field.name: field.default for field in parameter_fields(estimator_class(settings.estimator))}
    for what, stored, given in (
        ("model", record.model, identity["model"]),
        ("method", record.method, identity["method"]),
        ("estimator", record.estimator, identity["estimator"]),
        ("estimator parameters", defaults | record.parameters, identity["parameters"]),
        ("data set", record.dataset, identity["dataset"]),
        ("content of the data set", record.dataset_digest, identity["dataset_digest"]),
        ("reward", record.reward, identity["reward"]),
    ):
        if stored != given:
            raise UsageError(
                f"--resume {record.name}: it was trained with {what} {stored!r}, not {given!r}; "
                f"give the same one, or start a new run with --warm_start {record.name}"
            )
    _check_pieces(settings, record)
    checkpoint, notes = _choose_checkpoint(Path(settings.args.ckpt.path), store, record)
    if settings.dry_run:
        store.check_claimable(record.run_id, take_over=settings.take_over)
    else:
        store.claim_run(record.run_id, take_over=settings.take_over).release()
    notes += _probe_notes(settings, record)
    return Start(record, True, checkpoint, store.url, store.location, prompts, None, notes)


def _check_pieces(settings: Settings, record: storage.RunRecord) -> None:
    """The pieces of the method, which single flags may have changed, and what the checkpoints' format follows from."""
    ranks = {
        name: flags["actor.num_nodes"] * flags["actor.num_gpus_per_node"]
        for name, flags in (("made", record.config), ("given", settings.flags))
        if "actor.num_nodes" in flags
    }
    if len(set(ranks.values())) > 1:
        raise UsageError(
            f"--resume {record.name}: its checkpoints were saved by {ranks['made']} ranks, --actor.num_nodes x "
            f"--actor.num_gpus_per_node gives {ranks['given']}; give as many as before, or start a new run with "
            f"--warm_start {record.name}"
        )
    given = _plain(settings.flags)
    for flag in given:
        changed = flag in record.config and record.config[flag] != _as_stored(given[flag])
        if changed and (flag in _FORMAT_OF_CHECKPOINTS or methods.is_piece(flag, settings.strategy)):
            raise UsageError(
                f"--resume {record.name}: it was trained with --{flag} {record.config[flag]}, not {given[flag]}; "
                f"give the same one, or start a new run with --warm_start {record.name}"
            )


def _as_stored(value: Any) -> Any:
    """``value`` as it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def _probe_notes(settings: Settings, record: storage.RunRecord) -> list[str]:
    """Probes may differ from those the run was started with: they change nothing that is trained."""
    began, now = (
        {flag: flags.get(flag, 0) for flag in ("probe.fraction", "probe.samples")}
        for flags in (record.config, settings.flags)
    )
    if began == now or not (began["probe.fraction"] or now["probe.fraction"]):
        return []
    given = ", ".join(f"--{flag} {now[flag]:g} (was {began[flag]:g})" for flag in now if began[flag] != now[flag])
    return [f"note: the run was started with other probes; from here on {given}"]


def _choose_checkpoint(
    folder: Path, store: storage.PosteriorStore, record: storage.RunRecord
) -> tuple[str | None, list[str]]:
    """The newest whole checkpoint, None to start over, and notes on what is passed over.

    Raises:
        UsageError: checkpoints were made, but none can be used.
    """
    found, passed = checkpoints.newest_whole(folder, record.uuid, record.last_step)
    if found is not None:
        return found, [f"note: {why}; continuing from {found}" for why in passed]
    recorded = [f"{tag} (step {step})" for step, tag in store.checkpoints(record)]
    if recorded or any(checkpoints.is_finished(folder, tag) for tag in checkpoints.tags(folder)):
        there = "; ".join(passed) or f"there is no checkpoint in {folder}"
        raise UsageError(
            f"--resume {record.name}: {there}; the run has recorded {', '.join(recorded) or 'none'}; restore one, give "
            f"the --ckpt.path where one is, or start a new run with --warm_start {record.name}"
        )
    if record.last_step:
        passed.append(f"no checkpoint of the {record.last_step} steps was finished")
        return None, [f"note: {'; '.join(passed)}; the run starts over from step 0"]
    return None, []


def create(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    """A new run in the store, warm-started if asked for; a dry run leaves the store as it is.

    Raises:
        storage.StoreError: the name is taken, or the warm start's source does not fit.
    """
    if not settings.dry_run:
        return _create(settings, store, prompts)
    if any(run.name == settings.run_name for run in store.runs()):
        raise UsageError(f"--run_name {settings.run_name}: there is such a run in {store.location}; give another name")
    with tempfile.TemporaryDirectory() as folder, storage.open_store(f"{folder}/dry_run.db") as scratch:
        source = dataclasses.replace(settings, warm_start_url=settings.warm_start_url or store.url)
        return dataclasses.replace(_create(source, scratch, prompts), store_url=store.url, location=store.location)


def _create(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    identity = _identity(settings, prompts)
    posteriors = Posteriors.create(
        store,
        settings.run_name,
        prompts.texts,
        prompts.labels,
        estimator=settings.estimator,
        parameters=settings.parameters,
        warm_start=settings.warm_start,
        warm_start_weight=settings.warm_start_weight,
        warm_start_store=settings.warm_start_url,
        model=identity["model"],
        dataset=identity["dataset"],
        reward=identity["reward"],
        method=identity["method"],
        config=_plain(settings.flags),
    )
    with posteriors:
        warm_start, notes = posteriors.warm_start, []
        if warm_start is not None:
            source = warm_start.source
            for what, theirs, mine in (
                ("model", source.model, identity["model"]),
                ("data set", source.dataset, identity["dataset"]),
                ("reward", source.reward, identity["reward"]),
            ):
                if theirs != mine:
                    notes.append(f"warning: run {source.name} used another {what}: {theirs}, here {mine}")
        posteriors.run.release()  # the trainer claims it
        return Start(posteriors.run.record, False, None, store.url, store.location, prompts, warm_start, notes)


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """``flags`` with infinities (OpenRLHF's "no limit") as text, which JSON can hold."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in flags.items()}


def source_store(settings: Settings) -> storage.PosteriorStore:
    """The database that the warm start reads."""
    return storage.open_store(settings.warm_start_url or settings.store_url, create=False)


def _identity(settings: Settings, prompts: Prompts) -> dict[str, Any]:
    args = settings.args
    return {
        "method": settings.method,
        "estimator": settings.estimator,
        "parameters": settings.parameters,
        "model": args.actor.model_name_or_path,
        "dataset": args.data.prompt_dataset,
        "dataset_digest": prompts.digest,
        "reward": ",".join(args.reward.remote_url or []) or str(args.reward.model_name_or_path),
    }
