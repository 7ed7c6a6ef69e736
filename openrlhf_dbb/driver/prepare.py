"""Reads data, tokenizer and benchmarks, tries the reward, and completes the settings: seconds, cheapest first."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openrlhf_dbb import presets, storage, tiny, upstream
from openrlhf_dbb.data import HELD_OUT, TRAINING, Prompts, choose, control_tokens, load
from openrlhf_dbb.driver import capacity, fit
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, OUTPUTS, Settings
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading
from openrlhf_dbb.evaluation.evaluated_model import Model, refuse_code
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.presets.made import cache
from openrlhf_dbb.rewards import MATH_FILE, reward_file
from openrlhf_dbb.rewards.math_answer import boxes_needed

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = (*OUTPUTS, "logger.wandb.run_name")
_TEMPLATE = "data.apply_chat_template"
LEAST_STEPS_A_CHECKPOINT = 10


@dataclass
class Prepared:
    """Holds all that a training begins with. Each step of :func:`prepare` reads earlier results and adds its own."""

    settings: Settings
    resumed: storage.RunRecord | None = None  # the run to continue, if any
    loaded: dict[str, Any] = field(default_factory=dict)  # data sets by their flags
    tokenizer: Any = None
    prompts: Prompts = field(init=False)
    benchmarks: Mapping[str, BenchmarkPrompts] = field(default_factory=dict)  # beside --eval.dataset, by name
    notes: list[str] = field(default_factory=list)  # lines that the user should see
    # Of ``start.begin``; not for --estimator none.
    run: storage.RunRecord | None = None  # nobody owns it yet
    store_url: str = ""
    location: str = ""  # the URL of the store for people, without a password
    checkpoint: str | None = None  # to continue from; None: from the beginning
    warm_start: storage.WarmStart | None = None

    def questions(self, flag: str) -> list[Any]:
        """Return the prompts of a data set, as texts or as messages; nothing if the flag names none."""
        return self.loaded[flag][self.settings.args.data.input_key][:] if flag in self.loaded else []


def prepare(settings: Settings, resumed: storage.RunRecord | None) -> Prepared:
    """Take all steps; the settings are complete then. Raise UsageError for what cannot work."""
    prepared = Prepared(settings, resumed)
    read_data(prepared)  # before torch is imported
    with upstream.imports_for_driver():
        for step in (read_model, apply_template, choose_prompts, try_reward, find_control_tokens, read_benchmarks):
            step(prepared)
    complete(prepared)
    return prepared


def read_data(prepared: Prepared) -> None:
    """Load the data sets. The user's files come first; then missing files of the preset are made."""
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    args = prepared.settings.openrlhf_args()
    backend = LightBackend(args)
    names = {TRAINING: args.data.prompt_dataset, HELD_OUT: args.eval.dataset}
    own_first = sorted(names.items(), key=lambda each: str(cache("")) in (each[1] or ""))
    for flag, name in (*own_first, ("", args.actor.model_name_or_path)):
        for made in (tiny, smollm2):
            if str(made.default_folder()) in (name or ""):
                made.prepare(made.default_folder())
        if flag and name:
            try:
                with upstream.quiet():
                    prepared.loaded[flag] = load(args, backend, flag)
            except (DatasetsError, OSError, RuntimeError) as error:  # the last: a loading script
                raise _cannot_be_loaded(f"--{flag} {name}", error) from error


def read_model(prepared: Prepared) -> None:
    """Load the model's configuration and tokenizer, and fit the settings to its size."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    args, name = prepared.settings.args, prepared.settings.args.actor.model_name_or_path
    try:
        for section in () if args.trust_remote_code else ("actor", "reward", "critic"):
            if model := getattr(args, section).model_name_or_path:  # OpenRLHF would run its code without a question
                refuse_code(f"--{section}.model_name_or_path", model)
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        # as OpenRLHF's trainer makes it
        prepared.tokenizer = get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        raise _cannot_be_loaded(f"--actor.model_name_or_path {name}", error) from error
    shape = capacity.Shape.of(config)
    prepared.settings = fit.fitted(dataclasses.replace(prepared.settings, shape=shape))


def _cannot_be_loaded(what: str, error: Exception) -> UsageError:
    return UsageError(f"{what} cannot be loaded: {str(error).strip().splitlines()[0]}")


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


def choose_prompts(prepared: Prepared) -> None:
    args, loaded = prepared.settings.openrlhf_args(), prepared.loaded
    with upstream.quiet():
        prepared.prompts = choose(loaded[TRAINING], args, LightBackend(args), prepared.tokenizer, loaded.get(HELD_OUT))


def try_reward(prepared: Prepared) -> None:
    """Score some prompts by the reward's file; say which labels a response earns only in a box."""
    prompts, url = prepared.prompts, (prepared.settings.args.reward.remote_url or [""])[0]
    warnings: list[str] = []
    if url == str(MATH_FILE):
        # Its labels have been verified, it refuses a repeated question, and a process to try it takes most of a second.
        warnings = boxes_needed(prompts.labels)
    elif url.endswith(".py"):
        warnings = reward_file.check(url, prompts.texts, prompts.labels, prepared.settings.built_estimator)
    prepared.notes += [f"warning: {warning}" for warning in warnings]


def find_control_tokens(prepared: Prepared) -> None:
    applied = prepared.settings.args.data.apply_chat_template
    for flag in prepared.loaded:
        found = control_tokens(f"--{flag}", prepared.questions(flag), prepared.tokenizer, applied)
        prepared.notes += [f"warning: {warning}" for warning in found]


def read_benchmarks(prepared: Prepared) -> None:
    """Read the prompts of ``--eval.benchmarks``, as the command ``evaluate`` makes them.

    A response may be as long as in training, without that limit as long as its benchmark's longest prompt leaves.
    """
    settings, args, by_name = prepared.settings, prepared.settings.args, dict[str, BenchmarkPrompts]()
    # A preset that does not say how often evaluates; complete() then sets --eval.steps.
    evaluates = args.eval.steps > 0 or (settings.preset != presets.NONE and "eval.steps" not in settings.origin)
    if not args.eval.benchmarks or settings.estimator == NO_ESTIMATOR or not evaluates:
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
        every = {"eval.steps": tenth, "ckpt.save_steps": max(tenth, min(steps, LEAST_STEPS_A_CHECKPOINT))}
        left_open = {flag: value for flag, value in every.items() if flag not in settings.origin}
        settings = settings.with_values(left_open, "a tenth of the run; checkpoints at least 10 steps apart")
    prepared.settings = settings
    if settings.shape is not None and settings.estimator != NO_ESTIMATOR:
        prepared.notes += capacity.checkpoint_warnings(settings.shape, settings.args)
