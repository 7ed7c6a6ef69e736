"""Prepares a training, cheapest first: the run to continue, data, model, reward, benchmarks; then the run in the store.

:func:`find`, :func:`prepare` and :func:`begin` are called in this order; Ray starts beside the second.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_dbb import presets, storage, tiny, upstream
from openrlhf_dbb.actors.progress import NO_END_TOKEN
from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.core.posteriors import Posteriors, dataset_digest
from openrlhf_dbb.data import (
    HELD_OUT,
    TRAINING,
    Prompts,
    choose,
    control_tokens,
    give_template_arguments,
    load,
)
from openrlhf_dbb.driver import fit
from openrlhf_dbb.driver.arguments import MODEL_FLAG, NO_ESTIMATOR, OUTPUTS, Settings
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts, Model, refuse_code
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.rewards import MATH_FILE, reward_file
from openrlhf_dbb.rewards.math_answer import boxes_needed
from openrlhf_dbb.storage.address import check_sqlite_path, parse_url

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = (*OUTPUTS, "logger.wandb.run_name")
_TEMPLATE = "data.apply_chat_template"
_TEMPLATE_ARGUMENTS = "data.chat_template_kwargs"
# What a run trains, and by what.
_SUBJECT = (MODEL_FLAG, "method", "estimator", TRAINING, "reward.remote_url", "reward.model_name_or_path")
_RANKS = "actor.num_nodes", "actor.num_gpus_per_node"
# How it trains: flags that begin so, beside those of its strategy and estimator.
_KEPT = (
    "rollout.strategy", "algo.dynamic_filtering", "algo.advantage.estimator", "algo.advantage.no_std_norm",
    "actor.loss_agg", "actor.eps_clip_low_high", "rollout.batch_size", "rollout.n_samples_per_prompt", "replay.",
    # A checkpoint can be loaded only with the sharding and the precision that saved it.
    "ds.param_dtype", "ds.zero_stage", "ds.tensor_parallel_size", "ds.ring_attn_size", "ds.lora.rank",
    "ds.lora.alpha", "ds.lora.target_modules",
    _TEMPLATE_ARGUMENTS,
)  # fmt: skip


@dataclass
class Prepared:
    """Holds all that a training begins with. Each step of :func:`prepare` reads earlier results and adds its own."""

    settings: Settings
    resumed: storage.RunRecord | None = None  # the run to continue, if any
    loaded: dict[str, Any] = field(default_factory=dict)  # data sets by their flags
    tokenizer: Any = None
    shape: fit.Shape | None = None  # of a dense model
    has_end_token: bool = True  # of the model
    prompts: Prompts = field(init=False)
    machine: list[str] = field(default_factory=list)  # what fits the model and the machine, in words
    threads: int = 0  # of the policy and of each engine; 0: torch's choice
    engine_arguments: dict[str, Any] = field(default_factory=dict)  # that OpenRLHF does not set
    benchmarks: Mapping[str, BenchmarkPrompts] = field(default_factory=dict)  # beside --eval.dataset, by name
    notes: list[str] = field(default_factory=list)  # lines that the user should see
    # Of :func:`begin`; not for --estimator none.
    run: storage.RunRecord | None = None  # nobody owns it yet
    store_url: str = ""
    location: str = ""  # the URL of the store for people, without a password
    checkpoint: str | None = None  # to continue from; None: from the beginning
    warm_start: storage.WarmStart | None = None

    def questions(self, flag: str) -> list[Any]:
        """Return the prompts of a data set, as texts or as messages; nothing if the flag names none."""
        return self.loaded[flag][self.settings.args.data.input_key][:] if flag in self.loaded else []


def find(settings: Settings) -> storage.RunRecord | None:
    """Return the run to continue, None for a new one; UsageError or StoreError if it or the warm start is not there."""
    if settings.estimator == NO_ESTIMATOR:
        return None
    args = settings.args
    if args.warm_start is not None:
        with storage.open_store(args.warm_start_url or args.store.url, create=False) as source:
            source.find_run(args.warm_start)
    database = parse_url(args.store.url).path
    if args.resume is not None and database and not Path(database).exists():
        problem = f"--resume {args.resume}".rstrip() + f": there is no database {database}"
        advice = "name the run's with --store.url, or start in the folder where the run was started"
        raise UsageError(f"{problem}; {advice}")
    with _open_store(settings) as store:
        if args.resume is not None:
            return _asked_for(store, args.resume)
        # OpenRLHF's flag: continue if there is something in the folder
        return _of_folder(store, args.ckpt.path) if args.ckpt.load_enable else None


def _asked_for(store: storage.PosteriorStore, resume: str) -> storage.RunRecord:
    """Return the unfinished run that --resume names; "" is the latest one."""
    if not resume:
        latest = store.latest_run(unfinished=True)
        if latest is None:
            raise UsageError(f"--resume: no unfinished run in {store.location}; start one without --resume")
        return latest
    record = store.find_run(resume)
    if record.status == "finished":
        ended = f"that run finished at step {record.last_step}"
        raise UsageError(f"--resume {record.name}: {ended}; {_new_run(record)}")
    return record


def _of_folder(store: storage.PosteriorStore, folder: str) -> storage.RunRecord | None:
    """Return the last unfinished run with checkpoints in a folder; None for a folder without any."""
    same = [run for run in store.runs() if run.config.get("ckpt.path") == folder and run.status != "finished"]
    if not same and checkpoints.tags(Path(folder)):
        raise UsageError(
            f"--ckpt.load_enable: the checkpoints in {folder} belong to no unfinished run in {store.location}; "
            "name the run with --resume, or another --ckpt.path"
        )
    return same[-1] if same else None


@contextlib.contextmanager
def _open_store(settings: Settings) -> Iterator[storage.PosteriorStore]:
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


def prepare(settings: Settings, resumed: storage.RunRecord | None) -> Prepared:
    """Take all steps; the settings are complete then. Raise UsageError for what cannot work."""
    prepared = Prepared(settings, resumed)
    read_data(prepared)  # before torch is imported
    with upstream.imports_for_driver():
        for step in (read_model, apply_template, choose_prompts, complete, fit_machine, find_faults, read_benchmarks):
            step(prepared)
    return prepared


def read_data(prepared: Prepared) -> None:
    """Make what is missing of the preset's files, and load the data sets."""
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    args = prepared.settings.openrlhf_args()
    backend = LightBackend(args)
    names = {TRAINING: args.data.prompt_dataset, HELD_OUT: args.eval.dataset}
    for made in (tiny, smollm2):
        if any(str(made.default_folder()) in (name or "") for name in (*names.values(), args.actor.model_name_or_path)):
            made.prepare(made.default_folder())
    for flag, name in names.items():
        if name:
            try:
                with upstream.quiet():
                    prepared.loaded[flag] = load(args, backend, flag)
            # RuntimeError: a loading script; ValueError: a name that the hub does not take
            except (DatasetsError, OSError, RuntimeError, ValueError) as error:
                raise _cannot_be_loaded(f"--{flag} {name}", error) from error


def read_model(prepared: Prepared) -> None:
    """Load the model's configuration and tokenizer, and fit the settings to its size."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    args, name = prepared.settings.args, prepared.settings.args.actor.model_name_or_path
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():  # transformers would call it a wrong repository
        raise UsageError(f"--{MODEL_FLAG} {name}: there is no such folder")
    try:
        for section in () if args.trust_remote_code else ("actor", "reward", "critic"):
            if model := getattr(args, section).model_name_or_path:  # OpenRLHF would run its code without a question
                refuse_code(f"--{section}.model_name_or_path", model)
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        # as OpenRLHF's trainer makes it
        prepared.tokenizer = get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(f"--actor.model_name_or_path {name}", error) from error
    prepared.has_end_token = _has_end_token(name, config, prepared.tokenizer)
    if not prepared.has_end_token:
        prepared.notes.append(f"warning: {NO_END_TOKEN}")
    prepared.shape = fit.Shape.of(config)
    prepared.settings = fit.fitted(prepared.settings, prepared.shape)


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


def _cannot_be_loaded(what: str, error: Exception) -> UsageError:
    from datasets.exceptions import DatasetGenerationError

    reason: BaseException = error
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        reason = error.__cause__  # the error itself says only that there was one
    return UsageError(f"{what} cannot be loaded: {str(reason).strip().splitlines()[0]}")


def apply_template(prepared: Prepared) -> None:
    """Apply the model's chat template if it has one and neither preset nor command line says otherwise."""
    settings, has_one = prepared.settings, bool(getattr(prepared.tokenizer, "chat_template", None))
    leaves_open = settings.preset != presets.NONE and _TEMPLATE not in settings.origin
    if has_one and leaves_open and not settings.args.data.input_template:
        prepared.settings = settings.with_values({_TEMPLATE: True}, "the model has a chat template")
    if settings.args.data.apply_chat_template and not has_one:
        raise UsageError(
            f"--{_TEMPLATE}: the tokenizer of --actor.model_name_or_path {settings.args.actor.model_name_or_path} has "
            "no template; leave it out, or give --data.input_template"
        )
    arguments = settings.args.data.chat_template_kwargs
    if arguments is not None:
        if not prepared.settings.args.data.apply_chat_template:
            raise UsageError(
                f"--{_TEMPLATE_ARGUMENTS} {arguments}: no chat template is applied; leave it out, "
                f"or give --{_TEMPLATE} and a model that has a template"
            )
        give_template_arguments(prepared.tokenizer, arguments, _TEMPLATE_ARGUMENTS)


def choose_prompts(prepared: Prepared) -> None:
    args, loaded = prepared.settings.openrlhf_args(), prepared.loaded
    with upstream.quiet():
        prepared.prompts = choose(loaded[TRAINING], args, LightBackend(args), prepared.tokenizer, loaded.get(HELD_OUT))
    prepared.notes += [f"warning: {warning}" for warning in prepared.prompts.warnings]


def complete(prepared: Prepared) -> None:
    """Set the values that follow from the store and the data. Nothing changes the settings afterwards."""
    settings, resumed, number = prepared.settings, prepared.resumed, len(prepared.prompts.texts)
    if resumed is not None:
        places = {flag: resumed.config[flag] for flag in _PLACES if flag in resumed.config and not settings.given(flag)}
        places |= {"run_name": resumed.name, "ckpt.load_enable": True}
        settings = settings.with_values(places, f"run {resumed.name}")
    elif settings.args.resume is not None:  # OpenRLHF alone
        settings = settings.with_values({"ckpt.load_enable": True}, "--resume")
    args = settings.args
    rollouts = number * args.rollout.n_samples_per_prompt * args.train.num_episodes
    if settings.strategy.needs_budget and args.train.max_rollouts is None:
        settings = settings.with_values({"train.max_rollouts": rollouts}, "prompts x samples x episodes")
    if settings.preset != presets.NONE:
        steps = (args.train.max_rollouts or rollouts) // (args.rollout.batch_size * args.rollout.n_samples_per_prompt)
        tenth = max(1, steps // 10)
        # A checkpoint takes 16 bytes a parameter: a checkpoint after every step of a short run takes longer than it.
        every = {"eval.steps": tenth, "ckpt.save_steps": max(tenth, min(steps, 10))}
        left_open = {flag: value for flag, value in every.items() if flag not in settings.origin}
        settings = settings.with_values(left_open, "a tenth of the run; checkpoints at least 10 steps apart")
    prepared.settings = settings


def fit_machine(prepared: Prepared) -> None:
    """Say what fits the model and this machine, for people, Ray and vLLM."""
    settings, shape = prepared.settings, prepared.shape
    prepared.machine = fit.describe(settings, shape)
    prepared.threads = fit.threads(settings.args, shape)
    prepared.engine_arguments = {"threads": prepared.threads, **fit.engine_arguments(settings, shape)}
    if shape is not None and settings.estimator != NO_ESTIMATOR:
        prepared.notes += fit.checkpoint_warnings(shape, settings.args)


def find_faults(prepared: Prepared) -> None:
    """Try the reward on some prompts; warn of labels that are earned only in a box, and of texts."""
    prompts, args = prepared.prompts, prepared.settings.args
    url, warnings = (args.reward.remote_url or [""])[0], list[str]()
    if url == str(MATH_FILE):
        # Its labels have been verified, it refuses a repeated question, and a process to try it takes most of a second.
        warnings = boxes_needed(prompts.labels)
    elif url.endswith(".py"):
        warnings = reward_file.check(url, prompts.texts, prompts.labels, prepared.settings.built_estimator)
    elif url and not args.train.agent_func_path:  # an agent scores its rollouts itself
        _try_servers(prepared)
    for flag in prepared.loaded:
        questions, applied = prepared.questions(flag), args.data.apply_chat_template
        warnings += control_tokens(f"--{flag}", questions, prepared.tokenizer, applied)
    prepared.notes += [f"warning: {warning}" for warning in warnings]


def _try_servers(prepared: Prepared) -> None:
    from openrlhf_dbb.rewards import reward_server  # here: others do not wait for aiohttp

    prompts = prepared.prompts
    estimator = prepared.settings.built_estimator
    for url in prepared.settings.args.reward.remote_url:
        prepared.notes += reward_server.check(url, prompts.texts, prompts.labels, estimator)


def read_benchmarks(prepared: Prepared) -> None:
    """Read the prompts of ``--eval.benchmarks``, as the command ``evaluate`` makes them.

    A response may be as long as in training, without that limit as long as its benchmark's longest prompt leaves.
    """
    settings, args, by_name = prepared.settings, prepared.settings.args, dict[str, BenchmarkPrompts]()
    if not args.eval.benchmarks or settings.estimator == NO_ESTIMATOR or args.eval.steps < 1:
        return
    model = Model(args.actor.model_name_or_path, None, "", None, prepared.tokenizer)
    limit, response = args.data.max_len, args.rollout.max_new_tokens
    try:
        for entry in benchmarks.find_all(args.eval.benchmarks):
            with upstream.quiet():
                loaded = loading.load(entry)
            asked = loading.prepare(loaded, model, chat_template=None, max_new_tokens=response)
            longest = max(map(len, asked.tokens))
            if longest + (response or 1) > limit:
                raise UsageError(
                    f"the longest prompt of {entry.name} ({longest} tokens) and a response of {response} do not fit "
                    f"into --data.max_len {limit}; raise it, or leave this benchmark out"
                )
            by_name[entry.name] = dataclasses.replace(asked, max_new_tokens=response or limit - longest)
    except UsageError as error:
        raise UsageError(f"--eval.benchmarks: {error}") from error
    prepared.benchmarks = by_name


def begin(prepared: Prepared) -> None:
    """Create the run, or find that it can go on; nothing for ``--estimator none``, which trains without a run.

    A dry run creates its run in a database that is thrown away.
    """
    settings, prompts, flags = prepared.settings, prepared.prompts, prepared.settings.flags
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
            reward=",".join(flags["reward.remote_url"] or []) or str(flags["reward.model_name_or_path"]),
            method=settings.method,
            config=flags | {"command": settings.command},
        )
        with begun:
            prepared.run, prepared.warm_start = begun.run.record, begun.warm_start
            begun.run.release()  # the trainer claims it
    if begun.warm_start is not None:
        for what in ("model", "dataset", "reward"):
            theirs, ours = getattr(begun.warm_start.source, what), getattr(begun.run.record, what)
            if theirs != ours:
                used = f"run {settings.args.warm_start} used another {what}: {theirs}, here {ours}"
                prepared.notes.append(f"warning: {used}")


def _resume(prepared: Prepared, store: storage.PosteriorStore, record: storage.RunRecord) -> None:
    settings, stored, now = prepared.settings, record.config, prepared.settings.flags
    _check_same(record, now, settings, prepared.prompts)
    prepared.run, (prepared.checkpoint, notes) = record, _checkpoint(Path(settings.args.ckpt.path), store, record)
    prepared.notes += notes
    changed = [
        flag
        for flag in now
        if flag != "ckpt.load_enable"
        and wherever_installed(now[flag]) != wherever_installed(stored.get(flag, now[flag]))
    ]
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
    begins = (*_KEPT, f"{settings.strategy.name}.", f"{settings.built_estimator.name}.")
    kept = [*_SUBJECT, *(flag for flag in now if flag in stored and flag.startswith(begins))]
    for flag in kept:
        _check_equal(record, f"--{flag}", wherever_installed(stored.get(flag)), wherever_installed(now[flag]))
    if record.dataset_digest != dataset_digest(prompts.texts, prompts.labels):
        raise UsageError(
            f"--resume {record.name}: the prompts and labels, or their order, are not those that it was "
            f"trained with; give the same data set, or {_new_run(record)}"
        )
    stored_ranks = math.prod(stored.get(flag, 1) for flag in _RANKS)
    ranks = math.prod(now.get(flag, 1) for flag in _RANKS)
    _check_equal(record, " x ".join(f"--{flag}" for flag in _RANKS), stored_ranks, ranks)


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
