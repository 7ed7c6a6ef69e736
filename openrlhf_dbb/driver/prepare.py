"""Prepares a training, cheapest first: the run to continue, data, model, reward, benchmarks; then the run in the store.

:func:`find`, :func:`prepare` and :func:`begin` are called in this order; Ray starts beside the second.
"""

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import chosen, presets, storage, tiny, upstream
from openrlhf_dbb.actors.progress import NO_END_TOKEN
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.recorded import Record
from openrlhf_dbb.core.strategies import with_sources
from openrlhf_dbb.data import (
    HELD_OUT,
    TRAINING,
    Prompts,
    choose,
    control_tokens,
    give_template_arguments,
    load,
)
from openrlhf_dbb.driver import fit, recorded
from openrlhf_dbb.driver.arguments import MODEL_FLAG, NO_ESTIMATOR, OUTPUTS, Settings
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.resume import continued, find, open_store
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.model import Model, cannot_be_loaded, first_sentence, refuse_code
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.rewards import MATH_FILE, reward_file
from openrlhf_dbb.rewards.math_answer import boxes_needed

__all__ = ["Prepared", "begin", "find", "prepare"]

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = (*OUTPUTS, "logger.wandb.run_name")
_LOADS = {"ckpt.load_enable": True}
_TEMPLATE = "data.apply_chat_template"
_TEMPLATE_ARGUMENTS = "data.chat_template_kwargs"
_BUDGET = "train.max_rollouts"


@dataclass(frozen=True)
class Prepared:
    """What a training begins with.

    Attributes:
        settings: complete.
        resumed: the run to continue, if any.
        loaded: data sets by their flags.
        shape: of a dense model, else None.
        has_end_token: whether the model has one.
        machine: what fits the model and the machine, in words.
        threads: of the policy and of each engine; 0: torch's choice.
        engine_arguments: vLLM's that OpenRLHF does not set.
        benchmarks: beside --eval.dataset, by name.
        about: what a record of the run's rollouts says of it; empty if there is none.
        record: the rollouts to train on; None: they are generated.
        notes: lines that the user should see.
        run: nobody owns it yet; None with --estimator none, as the next three.
        store_url: of the run's store.
        location: the URL of the store for people, without a password.
        checkpoint: to continue from; None: from the beginning.
        warm_start: what the run begins with, if it has a warm start.
    """

    settings: Settings
    prompts: Prompts
    resumed: storage.RunRecord | None = None
    loaded: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    shape: fit.Shape | None = None
    has_end_token: bool = True
    machine: list[str] = field(default_factory=list)
    threads: int = 0
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    benchmarks: Mapping[str, BenchmarkPrompts] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    record: Record | None = None
    notes: list[str] = field(default_factory=list)
    run: storage.RunRecord | None = None
    store_url: str = ""
    location: str = ""
    checkpoint: str | None = None
    warm_start: storage.WarmStart | None = None

    def questions(self, flag: str) -> list[Any]:
        """Return the prompts of a data set, as texts or as messages; nothing if the flag names none."""
        return _questions(self.settings, self.loaded, flag)


def prepare(settings: Settings, resumed: storage.RunRecord | None) -> Prepared:
    """Read all that a training needs; complete the settings.

    Raises:
        UsageError: something cannot work.
    """
    loaded = read_data(settings)  # before torch is imported
    with upstream.imports_for_driver():
        config, tokenizer = read_model(settings)
        has_end_token = _has_end_token(settings.args.actor.model_name_or_path, config, tokenizer)
        shape = fit.Shape.of(config)
        settings = fit.fitted(settings, shape)
        settings = with_template(settings, tokenizer)
        prompts = choose_prompts(settings, loaded, tokenizer)
        settings = complete(settings, resumed, len(prompts.texts))
        _check_sources(settings, prompts)
        threads = fit.threads(settings.args, shape)
        warnings = [] if has_end_token else [NO_END_TOKEN]
        notes = [f"warning: {warning}" for warning in (*warnings, *prompts.warnings)]
        if shape is not None and settings.estimator != NO_ESTIMATOR:
            notes.extend(fit.checkpoint_warnings(shape, settings.args))
        about, record = recorded.prepared(settings, prompts, tokenizer, is_new=resumed is None)
        notes.extend(recorded.notes(settings, record))
        notes.extend(try_reward(settings, prompts))
        notes.extend(_control_tokens(settings, loaded, tokenizer))
        return Prepared(
            settings=settings,
            prompts=prompts,
            resumed=resumed,
            loaded=loaded,
            tokenizer=tokenizer,
            shape=shape,
            has_end_token=has_end_token,
            machine=fit.describe(settings, shape),
            threads=threads,
            engine_arguments={"threads": threads, **fit.engine_arguments(settings, shape)},
            benchmarks=read_benchmarks(settings, tokenizer),
            about=about,
            record=record,
            notes=notes,
        )


def read_data(settings: Settings) -> dict[str, Any]:
    """Make what is missing of the preset's files; return the data sets by their flags.

    Raises:
        UsageError: a data set cannot be loaded, or a preset's file cannot be made.
    """
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    args = settings.openrlhf_args()
    names = {TRAINING: args.data.prompt_dataset, HELD_OUT: args.eval.dataset}
    _make_files([*names.values(), args.actor.model_name_or_path])
    backend = LightBackend(args)
    loaded = {}
    for flag, name in names.items():
        if not name:
            continue
        try:
            with upstream.quiet():
                loaded[flag] = load(args, backend, flag)
        # RuntimeError: a loading script; ValueError: a name that the hub does not take
        except (DatasetsError, OSError, RuntimeError, ValueError) as error:
            raise _unreadable(f"--{flag} {name}", error) from error
    return loaded


def _make_files(names: list[str | None]) -> None:
    """Make the files of a preset that these names need."""
    for made in (tiny, smollm2):
        folder = made.default_folder()
        if any(str(folder) in (name or "") for name in names):
            made.prepare(folder)


def _questions(settings: Settings, loaded: Mapping[str, Any], flag: str) -> list[Any]:
    return loaded[flag][settings.args.data.input_key][:] if flag in loaded else []


def read_model(settings: Settings) -> tuple[Any, Any]:
    """Return the model's configuration and its tokenizer.

    Raises:
        UsageError: one of them cannot be loaded, or a model brings code along that is not trusted.
    """
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    args = settings.args
    name = args.actor.model_name_or_path
    # transformers would call it a wrong repository
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UsageError(f"--{MODEL_FLAG} {name}: there is no such folder")
    try:
        _refuse_code(args)
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        is_fast = not args.data.disable_fast_tokenizer
        # As OpenRLHF's trainer makes it
        tokenizer = get_tokenizer(name, None, "left", None, use_fast=is_fast)
    except (OSError, ValueError) as error:
        raise UsageError(cannot_be_loaded(f"--{MODEL_FLAG} {name}", name, error)) from error
    return config, tokenizer


def _refuse_code(args: SimpleNamespace) -> None:
    """Refuse models that bring code along: OpenRLHF would run it without a question."""
    if args.trust_remote_code:
        return
    for section in ("actor", "reward", "critic"):
        model = getattr(args, section).model_name_or_path
        if model:
            refuse_code(f"--{section}.model_name_or_path", model)


def _has_end_token(name: str, config: Any, tokenizer: Any) -> bool:
    """Return whether a model's tokenizer, configuration or generation settings name an end token."""
    from transformers import GenerationConfig

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    for source in (tokenizer, config, config.get_text_config()):
        if getattr(source, "eos_token_id", None) is not None:
            return True
    try:
        return GenerationConfig.from_pretrained(name).eos_token_id is not None
    except OSError:  # a model need not have such a file
        return False


def _unreadable(what: str, error: Exception) -> UsageError:
    from datasets.exceptions import DatasetGenerationError

    reason: BaseException = error
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        reason = error.__cause__  # the error itself says only that there was one
    return UsageError(f"{what} cannot be loaded: {first_sentence(reason)}")


def with_template(settings: Settings, tokenizer: Any) -> Settings:
    """Return settings that apply the model's chat template if it has one and nobody says otherwise.

    Raises:
        UsageError: a template, or its arguments, is asked for, and there is none.
    """
    data = settings.args.data
    has_one = bool(getattr(tokenizer, "chat_template", None))
    is_open = settings.preset != presets.NONE and _TEMPLATE not in settings.origin
    if data.apply_chat_template and not has_one:
        raise UsageError(
            f"--{_TEMPLATE}: the tokenizer of --{MODEL_FLAG} {settings.args.actor.model_name_or_path} has "
            "no template; leave it out, or give --data.input_template"
        )
    if has_one and is_open and not data.input_template:
        settings = settings.with_values({_TEMPLATE: True}, "the model has a chat template")
    arguments = data.chat_template_kwargs
    if arguments is None:
        return settings
    if not settings.args.data.apply_chat_template:
        raise UsageError(
            f"--{_TEMPLATE_ARGUMENTS} {arguments}: no chat template is applied; leave it out, "
            f"or give --{_TEMPLATE} and a model that has a template"
        )
    give_template_arguments(tokenizer, arguments, _TEMPLATE_ARGUMENTS)
    return settings


def choose_prompts(settings: Settings, loaded: Mapping[str, Any], tokenizer: Any) -> Prompts:
    """Return the prompts to train on."""
    args = settings.openrlhf_args()
    with upstream.quiet():
        return choose(loaded[TRAINING], args, LightBackend(args), tokenizer, loaded.get(HELD_OUT))


def complete(settings: Settings, resumed: storage.RunRecord | None, prompts: int) -> Settings:
    """Return the settings with what follows from the store and the number of prompts."""
    settings = _with_places(settings, resumed)
    args = settings.args
    planned = prompts * args.rollout.n_samples_per_prompt * args.train.num_episodes
    if settings.strategy.needs_budget and args.train.max_rollouts is None:
        settings = settings.with_values({_BUDGET: planned}, "prompts x samples x episodes")
    if settings.preset == presets.NONE:
        return settings
    steps = (args.train.max_rollouts or planned) // chosen.rollouts_of_a_step(args)
    tenth = max(1, steps // 10)
    # A checkpoint takes 16 bytes a parameter: one after every step of a short run takes longer than the steps.
    every = {"eval.steps": tenth, "ckpt.save_steps": max(tenth, min(steps, 10))}
    left_open = {flag: value for flag, value in every.items() if flag not in settings.origin}
    return settings.with_values(
        left_open, "a tenth of the run; checkpoints at least 10 steps apart"
    )


def _check_sources(settings: Settings, prompts: Prompts) -> None:
    """Refuse sources that do not fit the strategy, which the trainer would refuse minutes later."""
    strategy = settings.strategy
    sources = None if prompts.sources is None else dict(enumerate(prompts.sources))
    try:
        strategy.sampler(with_sources(strategy, chosen.facts(settings.args), sources))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _with_places(settings: Settings, resumed: storage.RunRecord | None) -> Settings:
    """Return the settings with name and folders of a run that is continued."""
    if resumed is None:
        if settings.args.resume is None:
            return settings
        return settings.with_values(_LOADS, "--resume")  # OpenRLHF alone
    values = {"run_name": resumed.name, **_LOADS}
    for flag in _PLACES:
        if flag in resumed.config and not settings.given(flag):
            values[flag] = resumed.config[flag]
    return settings.with_values(values, f"run {resumed.name}")


def try_reward(settings: Settings, prompts: Prompts) -> list[str]:
    """Try the reward on some prompts; return notes, also of labels that are earned only in a box."""
    args = settings.args
    urls = args.reward.remote_url or []
    estimator = settings.built_estimator
    if not urls or args.rollouts.of_run:  # recorded rollouts have their scores
        return []
    if urls[0] == str(MATH_FILE):
        # Its labels have been verified, it refuses a repeated question, and a process to try it takes most of a second.
        return _warnings(boxes_needed(prompts.labels))
    if urls[0].endswith(".py"):
        return _warnings(reward_file.check(urls[0], prompts.texts, prompts.labels, estimator))
    if args.train.agent_func_path:  # an agent scores its rollouts itself
        return []
    from openrlhf_dbb.rewards import reward_server  # here: others do not wait for aiohttp

    notes = []
    for url in urls:
        notes += reward_server.check(url, prompts.texts, prompts.labels, estimator)
    return notes


def _control_tokens(settings: Settings, loaded: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return notes on texts of prompts that the tokenizer reads as control tokens."""
    is_applied = settings.args.data.apply_chat_template
    notes = []
    for flag in loaded:
        questions = _questions(settings, loaded, flag)
        notes += _warnings(control_tokens(f"--{flag}", questions, tokenizer, is_applied))
    return notes


def _warnings(lines: list[str]) -> list[str]:
    return [f"warning: {line}" for line in lines]


def read_benchmarks(settings: Settings, tokenizer: Any) -> dict[str, BenchmarkPrompts]:
    """Return the prompts of ``--eval.benchmarks`` by name, as the command ``evaluate`` makes them.

    A response may be as long as in training, without that limit as long as its benchmark's longest prompt leaves.

    Raises:
        UsageError: a benchmark is unknown, or cannot be used.
    """
    args = settings.args
    by_name: dict[str, BenchmarkPrompts] = {}
    if not args.eval.benchmarks or settings.estimator == NO_ESTIMATOR or args.eval.steps < 1:
        return by_name
    model = Model(args.actor.model_name_or_path, None, "", None, tokenizer)
    try:
        for entry in benchmarks.find_all(args.eval.benchmarks):
            by_name[entry.name] = _benchmark(args, entry, model)
    except UsageError as error:
        raise UsageError(f"--eval.benchmarks: {error}") from error
    return by_name


def _benchmark(args: SimpleNamespace, entry: Any, model: Model) -> BenchmarkPrompts:
    limit = args.data.max_len
    response = args.rollout.max_new_tokens
    with upstream.quiet():
        loaded = loading.load(entry)
    prompts = loading.prepare(loaded, model, chat_template=None, max_new_tokens=response)
    longest = max(map(len, prompts.tokens))
    if longest + (response or 1) > limit:
        raise UsageError(
            f"the longest prompt of {entry.name} ({longest} tokens) and a response of {response} do not fit "
            f"into --data.max_len {limit}; raise it, or leave this benchmark out"
        )
    return dataclasses.replace(prompts, max_new_tokens=response or limit - longest)


def begin(prepared: Prepared) -> Prepared:
    """Create the run, or find that it can go on; return what was prepared with the run.

    ``--estimator none`` trains without a run. A dry run creates its run in a database that is thrown away.

    Raises:
        UsageError: the name is taken, or the run cannot go on with these settings.
        storage.StoreError: the warm start does not fit.
    """
    settings = prepared.settings
    if settings.estimator == NO_ESTIMATOR:
        return prepared
    with open_store(settings) as store:
        prepared = dataclasses.replace(prepared, store_url=store.url, location=store.location)
        record = prepared.resumed
        if record is not None:
            checkpoint, notes = continued(settings, prepared.prompts, store, record)
            prepared.notes.extend(notes)
            return dataclasses.replace(prepared, run=record, checkpoint=checkpoint)
        if not settings.args.dry_run:
            return _created(prepared, store, store)
        if store.is_taken(settings.run_name):
            problem = f"there is such a run in {store.location}"
            raise UsageError(f"--run_name {settings.run_name}: {problem}; give another name")
        with (
            tempfile.TemporaryDirectory() as folder,
            storage.open_store(f"{folder}/dry_run.db") as thrown_away,
        ):
            return _created(prepared, store, thrown_away)


def _created(
    prepared: Prepared, store: storage.PosteriorStore, made_in: storage.PosteriorStore
) -> Prepared:
    """Create the run in one store; another run of ``store`` may seed it."""
    settings = prepared.settings
    prompts = prepared.prompts
    flags = settings.flags
    urls = flags["reward.remote_url"] or []
    begun = Posteriors.create(
        made_in,
        settings.run_name,
        prompts.texts,
        prompts.labels,
        estimator=settings.estimator,
        parameters=settings.parameters,
        warm_start=settings.args.warm_start,
        warm_start_weight=settings.args.warm_start_weight,
        warm_start_store=settings.args.warm_start_url or store,
        pass_rates=prompts.pass_rates,
        model=flags[MODEL_FLAG],
        dataset=flags[TRAINING],
        reward=",".join(urls) or str(flags["reward.model_name_or_path"]),
        method=settings.method,
        config=flags | {"command": settings.command},
    )
    with begun:
        run = begun.run.record
        warm_start = begun.warm_start
        begun.run.release()  # the trainer claims it
    if warm_start is not None:
        prepared.notes.extend(_differences(settings.args.warm_start, warm_start.source, run))
    return dataclasses.replace(prepared, run=run, warm_start=warm_start)


def _differences(name: str, source: storage.RunRecord, run: storage.RunRecord) -> list[str]:
    """Return warnings of what the run of a warm start has used, and this run does not."""
    notes = []
    for what in ("model", "dataset", "reward"):
        theirs = getattr(source, what)
        ours = getattr(run, what)
        if theirs != ours:
            notes.append(f"warning: run {name} used another {what}: {theirs}, here {ours}")
    return notes
