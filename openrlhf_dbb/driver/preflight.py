"""Everything that can be refused before an engine starts, cheapest first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimators
import storage
from estimators import FORMS
from openrlhf_dbb import cpu, upstream
from openrlhf_dbb.core import probes
from openrlhf_dbb.driver import start
from openrlhf_dbb.driver.arguments import Settings
from openrlhf_dbb.driver.checks import check as check_pieces
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.prompts import Prompts, choose
from openrlhf_dbb.tiny import model as tiny_model


def check(settings: Settings) -> start.Start | None:
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
            resumed = start.to_resume(settings, store)
        if resumed is not None:
            start.adopt_places(settings, resumed)
        if settings.warm_start is not None:
            with start.source_store(settings) as source:
                source.find_run(settings.warm_start)
    if args.actor.model_name_or_path.startswith(str(tiny_model.default_folder())):
        tiny_model.prepare(tiny_model.default_folder())
    _check_reward(args)
    tokenizer = _load_tokenizer(args)
    prompts = _choose_prompts(args, tokenizer)
    if settings.estimator == NO_ESTIMATOR:
        return None
    if args.probe.fraction and not probes.of(args, prompts.texts, prompts.labels):
        raise UsageError(
            f"--probe.fraction {args.probe.fraction:g} chooses none of the {len(prompts.texts)} prompts; raise it"
        )
    start.count_updates(settings, prompts)
    start.plan_rollouts(settings, prompts)
    with storage.open_store(settings.store_url) as store:
        if resumed is not None:
            return start.resume(settings, store, resumed, prompts)
        return start.create(settings, store, prompts)


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
    check_pieces(settings)
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
    estimator = estimators.build(settings.estimator, **settings.parameters)
    group, fewest = args.rollout.n_samples_per_prompt, estimator.min_rollouts
    if group < fewest:
        raise UsageError(
            f"--estimator {settings.estimator} needs --rollout.n_samples_per_prompt {fewest} or more, "
            f"got {group}: one rollout alone has no deviation from its mean"
        )
    if settings.warm_start is not None and not estimator.state_fields + estimator.shared_fields:
        raise UsageError(f"--warm_start: --estimator {settings.estimator} keeps no history that it could start from")
    if not args.vllm.num_engines:
        raise UsageError("--vllm.num_engines is missing; name the number of engines that generate the rollouts")
    _check_batches(args)
    shortest, longest = args.rollout.min_new_tokens, args.rollout.max_new_tokens
    if not 0 <= shortest <= (shortest if longest is None else longest):
        raise UsageError(f"--rollout.min_new_tokens {shortest} is out of range; give 0 to --rollout.max_new_tokens")
    if args.probe.fraction and not (args.reward.remote_url or args.train.agent_func_path):
        raise UsageError("--probe.fraction needs rewards at generation; give --reward.remote_url")
    if args.ckpt.best_metric_key not in ("", "none") and not (args.eval.dataset and args.eval.steps > 0):
        raise UsageError(
            f"--ckpt.best_metric_key {args.ckpt.best_metric_key} needs evaluations; give --eval.dataset and "
            "--eval.steps, or leave it out"
        )
    if args.ckpt.max_num < 2:
        raise UsageError(
            f"--ckpt.max_num {args.ckpt.max_num}: the old checkpoint is deleted before the new one is whole; "
            "use 2 or more"
        )


def _check_batches(args: SimpleNamespace) -> None:
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if rollouts % args.train.batch_size:
        raise UsageError(
            f"a rollout batch of {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} samples = "
            f"{rollouts} is not a multiple of --train.batch_size {args.train.batch_size} (samples); "
            "left-over rollouts would vanish"
        )
    ranks = upstream.data_parallel_ranks(args)
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
        source = path.read_text(encoding="utf-8")
        try:
            compile(source, url, "exec")
        except SyntaxError as error:
            raise UsageError(f"--reward.remote_url {url}: line {error.lineno}: {error.msg}") from error
        if "reward_func" not in source:
            raise UsageError(f"--reward.remote_url {url} defines no reward_func(queries, prompts, labels)")


def _load_tokenizer(args: SimpleNamespace) -> Any:
    """The model's tokenizer, which also tells whether there is such a model."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    name = args.actor.model_name_or_path
    if name.startswith((".", "/", "~")) and not (Path(name) / "config.json").is_file():
        raise UsageError(f"--actor.model_name_or_path {name}: no model there (config.json is missing)")
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=True)
        return get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--actor.model_name_or_path {name} cannot be loaded: {reason}") from error


def _choose_prompts(args: SimpleNamespace, tokenizer: Any) -> Prompts:
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError
    from openrlhf.utils import get_strategy

    for part in args.data.prompt_dataset.split(","):
        path = Path(part.split("@")[0].strip())
        if path.suffix in (".json", ".jsonl", ".csv", ".parquet", ".arrow"):
            if not path.is_file():
                raise UsageError(f"--data.prompt_dataset {path}: no such file")
            if path.stat().st_size == 0:
                raise UsageError(f"--data.prompt_dataset {path} is empty")
    disable_progress_bars()
    try:
        with upstream.quiet():
            return choose(args, get_strategy(args), tokenizer)
    except (DatasetsError, FileNotFoundError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--data.prompt_dataset {args.data.prompt_dataset} cannot be loaded: {reason}") from error
