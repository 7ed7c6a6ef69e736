"""Prepares a training: everything that can be refused before an engine starts, cheapest first; then the run."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import estimators, presets, storage, tiny, upstream
from openrlhf_dbb.data import HELD_OUT, TRAINING, Prompts, choose, control_tokens, load
from openrlhf_dbb.driver import capacity, checks, cluster, cpu_fit, gpu_fit, start
from openrlhf_dbb.driver.arguments import OUTPUTS
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading, prompting
from openrlhf_dbb.evaluation.evaluated_model import Model, refuse_code
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.presets.made import cache
from openrlhf_dbb.rewards import MATH_FILE, reward_file
from openrlhf_dbb.rewards.math_answer import boxes_needed

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = (*OUTPUTS, "logger.wandb.run_name")
_TEMPLATE = "data.apply_chat_template"
LEAST_STEPS_A_CHECKPOINT = 10


def check(settings: Settings) -> storage.RunRecord | None:
    """Check the flags, the database and the files: a second, without torch. Return the run to continue, if any."""
    checks.check(settings)
    cluster.check_gpus(settings)
    cluster.check_places(settings)
    resumed, args = None, settings.args
    if settings.estimator != NO_ESTIMATOR:
        with start.open_store(settings) as store:
            resumed = start.to_resume(settings, store)
        if args.warm_start is not None:
            with storage.open_store(args.warm_start_url or args.store.url, create=False) as source:
                source.find_run(args.warm_start)
    return resumed


def prepare(
    settings: Settings, resumed: storage.RunRecord | None, before_the_run: Callable[[Settings], None] = lambda _: None
) -> tuple[Settings, Start | None]:
    """Load data and tokenizer, and complete the settings; then create or find the run. Takes seconds.

    Args:
        resumed: from :func:`check`.
        before_the_run: may refuse the settings; called when all other checks have passed.

    Returns:
        The complete settings, and the start; None for ``--estimator none``, which trains without a run.
    """
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    args = settings.args
    for_loaders = settings.openrlhf_args()
    backend = LightBackend(for_loaders, on_cpu=settings.on_cpu)
    # The rows are read before torch is imported, and files of one's own before a preset's model is made.
    names = {TRAINING: args.data.prompt_dataset, HELD_OUT: args.eval.dataset}
    loaded: dict[str, Any] = {}
    own_first = sorted(names.items(), key=lambda each: str(cache("")) in (each[1] or ""))
    for flag, name in (*own_first, ("", args.actor.model_name_or_path)):
        for made in (tiny, smollm2):
            if str(made.default_folder()) in (name or ""):
                made.prepare(made.default_folder())
        if flag and name:
            try:
                with upstream.quiet():
                    loaded[flag] = load(for_loaders, backend, flag)
            except (DatasetsError, OSError, RuntimeError) as error:  # the last: a loading script
                reason = str(error).strip().splitlines()[0]
                raise UsageError(f"--{flag} {name} cannot be loaded: {reason}") from error
    asked = {flag: rows[args.data.input_key][:] for flag, rows in loaded.items()}
    with upstream.imports_for_driver():
        config, tokenizer = _load_model_files(args)
        shape = capacity.Shape.of(config)
        settings = dataclasses.replace(settings, shape=shape)
        if shape is not None:
            settings = (cpu_fit if settings.on_cpu else gpu_fit).fitted(settings)
        leaves_open = settings.preset != presets.NONE and _TEMPLATE not in settings.origin
        if leaves_open and not args.data.input_template and getattr(tokenizer, "chat_template", None):
            settings = settings.with_values({_TEMPLATE: True}, "the model has a chat template")
            for_loaders.data.apply_chat_template = True
        with upstream.quiet():
            prompts = choose(loaded[TRAINING], for_loaders, backend, tokenizer, loaded.get(HELD_OUT))
        url, warnings = (args.reward.remote_url or [""])[0], []
        if url.endswith(".py"):
            name = "point" if settings.estimator == NO_ESTIMATOR else settings.estimator  # takes any number
            estimator = estimators.build(name, **settings.parameters)
            warnings += reward_file.check(url, prompts.texts, prompts.labels, estimator)
        if url == str(MATH_FILE):
            warnings += boxes_needed(prompts.labels)
        for flag, questions in asked.items():
            warnings += control_tokens(f"--{flag}", questions, tokenizer, for_loaders.data.apply_chat_template)
        evaluated = _benchmarks(settings, tokenizer)
    settings = complete(settings, resumed, prompts)
    if resumed is None:
        before_the_run(settings)
    if settings.estimator == NO_ESTIMATOR:
        return settings, None
    with start.open_store(settings) as store:
        if resumed is None:
            begun = start.create(settings, store, prompts)
        else:
            begun = start.resume(settings, store, resumed, prompts)
    if resumed is not None:
        before_the_run(settings)
    notes = [*begun.notes, *(capacity.checkpoint_warnings(shape, settings.args) if shape else [])]
    notes += [f"warning: {warning}" for warning in warnings]
    return settings, dataclasses.replace(begun, benchmarks=evaluated, notes=notes, held_out=asked.get(HELD_OUT, []))


def complete(settings: Settings, resumed: storage.RunRecord | None, prompts: Prompts) -> Settings:
    """Return the settings with the values that follow from the store and the data. Nothing changes them afterwards.

    - A resumed run continues in its own folders, unless the command line names others.
    - An estimator that forgets by policy updates learns how many updates make one pass over the prompts.
    - Where a pass has no fixed cost, the training ends after as many rollouts as its episodes would cost.
    - With a preset, a run evaluates and saves ten times where no interval is given, and saves at most every 10 steps.
    """
    if resumed is not None:
        places = {flag: resumed.config[flag] for flag in _PLACES if flag in resumed.config and not settings.given(flag)}
        places |= {"run_name": resumed.name, "ckpt.load_enable": True}
        settings = settings.with_values(places, f"run {resumed.name}")
    elif settings.args.resume is not None:  # OpenRLHF alone
        settings = settings.with_values({"ckpt.load_enable": True}, "--resume")
    args, parameters = settings.args, settings.parameters
    if parameters.get("forgetting") == "updates" and parameters["updates_per_epoch"] == 0:
        flag = f"{estimators.get(settings.estimator).name}.updates_per_epoch"
        updates = len(prompts.texts) / args.rollout.batch_size
        settings = settings.with_values({flag: updates}, "prompts / rollout.batch_size")
    rollouts = len(prompts.texts) * args.rollout.n_samples_per_prompt * args.train.num_episodes
    if settings.strategy.needs_budget and args.train.max_rollouts is None:
        settings = settings.with_values({"train.max_rollouts": rollouts}, "prompts x samples x episodes")
    if settings.preset != presets.NONE:
        steps = (args.train.max_rollouts or rollouts) // (args.rollout.batch_size * args.rollout.n_samples_per_prompt)
        tenth = max(1, steps // 10)
        # A checkpoint takes 16 bytes a parameter: a checkpoint after every step of a short run takes longer than it.
        every = {"eval.steps": tenth, "ckpt.save_steps": max(tenth, min(steps, LEAST_STEPS_A_CHECKPOINT))}
        left_open = {flag: value for flag, value in every.items() if flag not in settings.origin}
        settings = settings.with_values(left_open, "a tenth of the run; checkpoints at least 10 steps apart")
    return settings


def _load_model_files(args: SimpleNamespace) -> tuple[Any, Any]:
    """Return the model's configuration and tokenizer. Raise UsageError if there is no such model."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    name = args.actor.model_name_or_path
    try:
        for section in () if args.trust_remote_code else ("actor", "reward", "critic"):
            if model := getattr(args, section).model_name_or_path:  # OpenRLHF would run its code without a question
                refuse_code(f"--{section}.model_name_or_path", model)
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        tokenizer = get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--actor.model_name_or_path {name} cannot be loaded: {reason}") from error
    if args.data.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"--{_TEMPLATE}: the tokenizer of --actor.model_name_or_path {name} has no template; leave it out, or give "
            "--data.input_template"
        )
    return config, tokenizer


def _benchmarks(settings: Settings, tokenizer: Any) -> dict[str, BenchmarkPrompts]:
    """Return the prompts of ``--eval.benchmarks`` by name, as the command ``evaluate`` makes them.

    A response may be as long as in training. Without ``--rollout.max_new_tokens`` it may be as long as the longest
    prompt of its benchmark leaves.
    """
    args = settings.args
    # A preset that does not say how often evaluates; complete() then sets --eval.steps.
    evaluates = args.eval.steps > 0 or (settings.preset != presets.NONE and "eval.steps" not in settings.origin)
    if not args.eval.benchmarks or settings.estimator == NO_ESTIMATOR or not evaluates:
        return {}
    model = Model(args.actor.model_name_or_path, None, "", None, tokenizer)
    limit, response = args.data.max_len, args.rollout.max_new_tokens
    by_name = {}
    try:
        for entry in benchmarks.find_all(args.eval.benchmarks):
            with upstream.quiet():
                loaded = loading.load(entry)
            prepared = prompting.prepare(loaded, model, chat_template=None, max_new_tokens=response)
            longest = max(map(len, prepared.tokens))
            if longest + (response or 1) > limit:
                raise UsageError(
                    f"the longest prompt of {entry.name} ({longest} tokens) and a response of {response} do not fit "
                    f"into --data.max_len {limit}; raise it, or leave this benchmark out"
                )
            by_name[entry.name] = dataclasses.replace(prepared, max_new_tokens=response or limit - longest)
    except UsageError as error:
        raise UsageError(f"--eval.benchmarks: {error}") from error
    return by_name
