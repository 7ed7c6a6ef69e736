"""Everything that can be refused before an engine starts, cheapest first; ends with a run to train."""

from __future__ import annotations

import ast
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimators
import storage
from openrlhf_dbb import cpu
from openrlhf_dbb.arguments import NO_ESTIMATOR, Settings, tiny_folder
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.posterior import FORMS
from openrlhf_dbb.prompts import Prompts, choose

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir", "logger.wandb.run_name")


@dataclass(frozen=True)
class Start:
    """A checked start.

    Attributes:
        run: the run to train; owned by nobody yet.
        resumed: whether it has been trained before.
        store_url: absolute URL of its database.
        location: the same for people, without a password.
        prompts: what it trains on.
        warm_start: coverage of the imported posteriors, if any.
        notes: lines the user should see.
    """

    run: storage.RunRecord
    resumed: bool
    store_url: str
    location: str
    prompts: Prompts
    warm_start: storage.WarmStart | None
    notes: list[str]


def check(settings: Settings) -> Start | None:
    """Check a command line against the machine, the model, the data and the store; create or find the run.

    Returns:
        None for ``--estimator none``: OpenRLHF alone, without a run.

    Raises:
        UsageError, storage.StoreError: what is wrong and what to do, in one line.
    """
    args = settings.args
    check_arguments(settings)
    if settings.estimator != NO_ESTIMATOR:
        # Before anything slow: is the database there, and the runs that are asked for?
        with storage.open_store(settings.store_url) as store:
            resumed = _run_to_resume(settings, store)
            if resumed is not None:
                _adopt_places(settings, resumed)
        if settings.warm_start is not None:
            with _source_store(settings) as source:
                source.find_run(settings.warm_start)
    if str(tiny_folder()) in (args.actor.model_name_or_path or ""):
        from openrlhf_dbb import tiny_model

        tiny_model.prepare(tiny_folder())
    _check_reward(args)
    tokenizer = _load_tokenizer(args)
    prompts = _choose_prompts(args, tokenizer)
    if settings.estimator == NO_ESTIMATOR:
        return None
    with storage.open_store(settings.store_url) as store:
        return _resume(settings, store, prompts) if resumed else _create(settings, store, prompts)


def check_arguments(settings: Settings) -> None:
    """What the arguments alone tell.

    Raises:
        UsageError: a combination that cannot work.
    """
    args = settings.args
    if cpu.active():
        cpu.check_flags(args)
    for flag, value in (
        ("actor.model_name_or_path", args.actor.model_name_or_path),
        ("data.prompt_dataset", args.data.prompt_dataset),
    ):
        if not value:
            raise UsageError(f"--{flag} is missing; name one, or leave out --preset none to start from a preset")
    if settings.estimator == NO_ESTIMATOR:
        if settings.warm_start is not None:
            raise UsageError(f"--warm_start needs an estimator with a history; --estimator is {NO_ESTIMATOR}")
        args.ckpt.load_enable |= settings.resume is not None
        return
    if args.train.async_enable:
        raise UsageError("--train.async_enable is not supported with --estimator yet; leave it out")
    form = args.algo.advantage.estimator
    if form not in FORMS:
        raise UsageError(
            f"--algo.advantage.estimator {form} has no place for --estimator {settings.estimator}; "
            f"use {' or '.join(FORMS)}, or --estimator {NO_ESTIMATOR} for OpenRLHF's own advantages"
        )
    group, fewest = args.rollout.n_samples_per_prompt, estimators.get(settings.estimator).min_rollouts
    if group < fewest:
        raise UsageError(
            f"--estimator {settings.estimator} needs --rollout.n_samples_per_prompt {fewest} or more, got {group}: "
            "one rollout alone has no deviation from its mean"
        )
    _check_batches(args)
    if args.ckpt.max_num < 2:
        raise UsageError(f"--ckpt.max_num {args.ckpt.max_num}: the old checkpoint is deleted before the new one is whole; use 2 or more")


def _check_batches(args: SimpleNamespace) -> None:
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if rollouts % args.train.batch_size:
        raise UsageError(
            f"a rollout batch of {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} samples = "
            f"{rollouts} is not a multiple of --train.batch_size {args.train.batch_size} (samples); "
            "left-over rollouts would vanish"
        )
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node // args.ds.ring_attn_size // args.ds.tensor_parallel_size
    if args.train.batch_size % (args.train.micro_batch_size * ranks):
        raise UsageError(
            f"--train.batch_size {args.train.batch_size} is not a multiple of --train.micro_batch_size "
            f"{args.train.micro_batch_size} x {ranks} ranks"
        )
    if not args.train.dynamic_batch_enable and rollouts % (args.rollout.micro_batch_size * ranks):
        raise UsageError(
            f"{rollouts} rollouts a step are not a multiple of --rollout.micro_batch_size "
            f"{args.rollout.micro_batch_size} x {ranks} ranks, so that ranks would get unequal shares"
        )


def _check_reward(args: SimpleNamespace) -> None:
    for url in args.reward.remote_url or []:
        if not url.endswith(".py"):
            continue
        path = Path(url)
        if not path.is_file():
            raise UsageError(f"--reward.remote_url {url}: no such file")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=url)
        except SyntaxError as error:
            raise UsageError(f"--reward.remote_url {url}: line {error.lineno}: {error.msg}") from error
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        names |= {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
        names |= {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
        if "reward_func" not in names:
            raise UsageError(f"--reward.remote_url {url} defines no reward_func(queries, prompts, labels)")


def _load_tokenizer(args: SimpleNamespace) -> Any:
    """The model's tokenizer, which also tells whether there is such a model."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    name = args.actor.model_name_or_path
    if (os.path.sep in name and not os.path.exists(name) and name.count("/") != 1) or name.startswith((".", "/")):
        if not (Path(name) / "config.json").is_file():
            raise UsageError(f"--actor.model_name_or_path {name}: no model there (config.json is missing)")
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=True)
        return get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--actor.model_name_or_path {name} cannot be loaded: {reason}") from error


def _choose_prompts(args: SimpleNamespace, tokenizer: Any) -> Prompts:
    from datasets.exceptions import DatasetsError
    from openrlhf.utils import get_strategy

    for part in args.data.prompt_dataset.split(","):
        path = Path(part.split("@")[0].strip())
        if path.suffix in (".json", ".jsonl", ".csv", ".parquet", ".arrow"):
            if not path.is_file():
                raise UsageError(f"--data.prompt_dataset {path}: no such file")
            if path.stat().st_size == 0:
                raise UsageError(f"--data.prompt_dataset {path} is empty")
    try:
        return choose(args, get_strategy(args), tokenizer)
    except (DatasetsError, FileNotFoundError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--data.prompt_dataset {args.data.prompt_dataset} cannot be loaded: {reason}") from error


def _run_to_resume(settings: Settings, store: storage.PosteriorStore) -> storage.RunRecord | None:
    """The run to continue, or None for a new one."""
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


def _adopt_places(settings: Settings, record: storage.RunRecord) -> None:
    settings.run_name = record.name
    settings.args.ckpt.load_enable = True
    for flag in _PLACES:
        if settings.origin.get(flag) == "command line" or flag not in record.config:
            continue
        *sections, name = flag.split(".")
        node = settings.args
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, record.config[flag])
        settings.flags[flag] = record.config[flag]


def _resume(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    record = _run_to_resume(settings, store)
    assert record is not None
    identity = _identity(settings, prompts)
    for what, stored, given in (
        ("model", record.model, identity["model"]),
        ("estimator", record.estimator, identity["estimator"]),
        ("estimator parameters", record.parameters, identity["parameters"]),
        ("data set", record.dataset, identity["dataset"]),
        ("content of the data set", record.dataset_digest, identity["dataset_digest"]),
        ("reward", record.reward, identity["reward"]),
    ):
        if stored != given:
            raise UsageError(
                f"--resume {record.name}: it was trained with {what} {stored!r}, not {given!r}; give the same one, "
                f"or start a new run with --warm_start {record.name}"
            )
    _check_checkpoint(settings.args, record)
    run = store.claim_run(record.run_id, take_over=settings.take_over)
    run.release()
    return Start(record, True, store.url, store.location, prompts, None, [])


def _check_checkpoint(args: SimpleNamespace, record: storage.RunRecord) -> None:
    folder = Path(args.ckpt.path) / "_actor"
    latest = folder / "latest"
    if not latest.is_file():
        if record.last_step and folder.parent.is_dir() is False:
            raise UsageError(f"--resume {record.name}: there is no folder {folder.parent}; give --ckpt.path")
        return  # killed before the first checkpoint: the run starts over
    tag = latest.read_text(encoding="utf-8").strip()
    if not (folder / tag).is_dir():
        known = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UsageError(f"{latest} names {tag}, which is not there; write one of {', '.join(known) or 'none'} into it")


def _create(settings: Settings, store: storage.PosteriorStore, prompts: Prompts) -> Start:
    identity = _identity(settings, prompts)
    estimator = estimators.build(settings.estimator, **settings.parameters)
    run = store.create_run(
        settings.run_name,
        **identity,
        estimator_version=estimator.version,
        state_fields=list(estimator.state_fields),
        config=_plain(settings.flags),
    )
    ids = store.register_prompts(prompts.texts, prompts.labels)
    warm_start, notes = None, []
    if settings.warm_start is not None:
        with _source_store(settings) as source:
            record = source.find_run(settings.warm_start)
            warm_start = run.warm_start(source, record, ids, weight=settings.warm_start_weight)
        for what, theirs, mine in (
            ("model", record.model, identity["model"]),
            ("data set", record.dataset, identity["dataset"]),
            ("reward", record.reward, identity["reward"]),
        ):
            if theirs != mine:
                notes.append(f"warning: run {record.name} used another {what}: {theirs}, here {mine}")
    start = Start(run.record, False, store.url, store.location, prompts, warm_start, notes)
    run.release()
    return start


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """``flags`` with infinities (OpenRLHF's "no limit") as text, which JSON can hold."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in flags.items()}


def _source_store(settings: Settings) -> storage.PosteriorStore:
    return storage.open_store(settings.warm_start_url or settings.store_url, create=False)


def _identity(settings: Settings, prompts: Prompts) -> dict[str, Any]:
    args = settings.args
    return {
        "estimator": settings.estimator,
        "parameters": settings.parameters,
        "model": args.actor.model_name_or_path,
        "dataset": args.data.prompt_dataset,
        "dataset_digest": prompts.digest,
        "reward": ",".join(args.reward.remote_url or []) or str(args.reward.model_name_or_path),
    }
