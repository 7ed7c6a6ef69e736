"""Everything that can be refused before an engine starts, cheapest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import storage
from openrlhf_dbb import presets, tiny, upstream
from openrlhf_dbb.core.step import probed_prompts
from openrlhf_dbb.data import Prompts, choose, load_held_out, load_training
from openrlhf_dbb.driver import capacity, checks, cluster, start, validation
from openrlhf_dbb.driver.arguments import OUTPUTS
from openrlhf_dbb.driver.flags import NO_ESTIMATOR, estimator_class
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.driver.strategy import DriverStrategy
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cuda
from openrlhf_dbb.rewards import reward_file

# Flags whose values name a run's folders: a resumed run keeps those it was started with.
_PLACES = (*OUTPUTS, "logger.wandb.run_name")
_TEMPLATE = "data.apply_chat_template"
LEAST_STEPS_A_CHECKPOINT = 10


def check(settings: Settings) -> storage.RunRecord | None:
    """What a second tells, without torch: flags, database, files.

    Returns:
        The run to continue; None for a new one.

    Raises:
        UsageError, storage.StoreError: what is wrong and what to do, in one line.
    """
    checks.check(settings)
    cluster.check_gpus(settings)
    cluster.check_places(settings)
    resumed = None
    if settings.estimator != NO_ESTIMATOR:
        with start.open_store(settings) as store:
            resumed = start.to_resume(settings, store)
        if settings.warm_start is not None:
            with start.source_store(settings) as source:
                source.find_run(settings.warm_start)
    _check_reward(settings.args)
    _check_files(settings.args)
    return resumed


def prepare(
    settings: Settings, resumed: storage.RunRecord | None, before_the_run: Callable[[Settings], None] = lambda _: None
) -> tuple[Settings, Start | None]:
    """What takes seconds: data, device, tokenizer. Then the run is created or found.

    Args:
        resumed: from :func:`check`.
        before_the_run: what else may refuse the settings, called when all other checks have passed.

    Returns:
        The complete settings, which is what is printed, stored and used, and the start; that is None for
        ``--estimator none``: OpenRLHF alone, without a run.

    Raises:
        UsageError, storage.StoreError: what is wrong and what to do, in one line.
    """
    args = settings.args
    if _is_tiny(args.actor.model_name_or_path):
        tiny.prepare(tiny.default_folder())
    for_loaders = settings.openrlhf_args()
    strategy = DriverStrategy(for_loaders, on_cpu=settings.on_cpu)
    rows = _loaded("data.prompt_dataset", args.data.prompt_dataset, load_training, for_loaders, strategy)
    held_out = None
    if args.eval.dataset:
        held_out = _loaded("eval.dataset", args.eval.dataset, load_held_out, for_loaders, strategy)
    _check_sources(held_out, args)
    _check_device(settings)
    with upstream.imports_for_driver():
        config, tokenizer = _load_model_files(args)
        settings = _fitted(settings, config)
        if _wants_chat_template(settings, tokenizer):
            settings = settings.with_values({_TEMPLATE: True}, "the model has a chat template")
            for_loaders.data.apply_chat_template = True
        with upstream.quiet():
            prompts = choose(rows, for_loaders, strategy, tokenizer)
        file = _reward_file(args)
        warning = reward_file.check(file, prompts.texts, prompts.labels) if file else None
        validated = {}
        if settings.estimator != NO_ESTIMATOR and checks.has_eval_steps(settings):
            validated = validation.prepare(args, tokenizer)
    settings = complete(settings, resumed, prompts)
    if settings.estimator == NO_ESTIMATOR:
        before_the_run(settings)
        return settings, None
    keys = zip(prompts.texts, prompts.labels, strict=True)
    if args.probe.fraction and not probed_prompts(keys, args.probe.fraction, args.train.seed):
        raise UsageError(
            f"--probe.fraction {args.probe.fraction:g} chooses none of the {len(prompts.texts)} prompts; raise it"
        )
    if resumed is None:
        before_the_run(settings)
    with start.open_store(settings) as store:
        if resumed is None:
            begun = start.create(settings, store, prompts)
        else:
            begun = start.resume(settings, store, resumed, prompts)
    if resumed is not None:
        before_the_run(settings)
    notes = list(begun.notes)
    shape = capacity.Shape.of(config)
    if shape is not None:
        notes.append(f"checkpoints {capacity.describe_checkpoints(shape, settings.args)}")
    if warning:
        notes.append(f"warning: {warning}")
    return settings, dataclasses.replace(begun, benchmarks=validated, notes=notes)


def _check_sources(held_out: Any, args: SimpleNamespace) -> None:
    """Refuse a benchmark that is called like a data source of ``--eval.dataset``: one would hide the other."""
    if held_out is None:
        return
    sources = set(held_out["datasource"][:]) if "datasource" in held_out.column_names else {"default"}
    twice = [entry.name for entry in validation.entries(args) if entry.name in sources]
    if twice:
        raise UsageError(
            f"--eval.benchmarks {twice[0]}: --eval.dataset {args.eval.dataset} has a data source of this name; give "
            "another NAME=FILE, or leave one of them out"
        )


def complete(settings: Settings, resumed: storage.RunRecord | None, prompts: Prompts) -> Settings:
    """The settings with what only the store and the data tell; nothing changes them any more.

    - A resumed run continues in its own folders, unless the command line names others.
    - An estimator that forgets by policy updates is told how many of them make one pass over the prompts.
    - Where a pass has no fixed cost, the training ends by the rollouts that its episodes would cost.
    - A preset that does not say how often the policy is evaluated does so ten times; one that does not say how often
      it is saved does so ten times at most, and once in a run of fewer than 20 steps.
    """
    if resumed is not None:
        places = {
            flag: resumed.config[flag]
            for flag in _PLACES
            if flag in resumed.config and settings.origin.get(flag) != "command line"
        }
        places |= {"run_name": resumed.name, "ckpt.load_enable": True}
        settings = settings.with_values(places, f"run {resumed.name}")
    elif settings.resume is not None:  # OpenRLHF alone
        settings = settings.with_values({"ckpt.load_enable": True}, "--resume")
    args, parameters = settings.args, settings.parameters
    if parameters.get("updates_per_epoch") == 0 and parameters.get("forgetting", "updates") == "updates":
        flag = f"{estimator_class(settings.estimator).name}.updates_per_epoch"
        updates = len(prompts.texts) / args.rollout.batch_size
        settings = settings.with_values({flag: updates}, "prompts / rollout.batch_size")
    rollouts = len(prompts.texts) * args.rollout.n_samples_per_prompt * args.train.num_episodes
    if settings.strategy.needs_budget and args.train.max_rollouts is None:
        settings = settings.with_values({"train.max_rollouts": rollouts}, "prompts x samples x episodes")
    if settings.preset != presets.NONE:
        steps = (args.train.max_rollouts or rollouts) // (args.rollout.batch_size * args.rollout.n_samples_per_prompt)
        if "eval.steps" not in settings.origin:
            settings = settings.with_values({"eval.steps": max(1, steps // 10)}, "a tenth of the run")
        if "ckpt.save_steps" not in settings.origin:
            # A checkpoint takes 16 bytes a parameter: one after every step of a short run would take longer than it.
            every = max(1, steps // 10, min(steps, LEAST_STEPS_A_CHECKPOINT))
            settings = settings.with_values({"ckpt.save_steps": every}, "a tenth of the run, at least 10 steps")
    return settings


def _wants_chat_template(settings: Settings, tokenizer: Any) -> bool:
    """Whether a preset is used that leaves the template to us, and the model has one."""
    if settings.preset == presets.NONE or _TEMPLATE in settings.origin or settings.args.data.input_template:
        return False
    return bool(getattr(tokenizer, "chat_template", None))


def _check_device(settings: Settings) -> None:
    """Raise UsageError if torch cannot use the GPUs that NVIDIA's driver shows."""
    if settings.on_cpu:
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"NVIDIA's driver shows {settings.machine.describe()}, but torch {torch.__version__} cannot use them: the "
            f"driver does not work with its CUDA {torch.version.cuda}; update or repair it"
        )


def _fitted(settings: Settings, config: Any) -> Settings:
    """Return the settings with dynamic micro-batches sized for the GPUs, and print what may not fit.

    Args:
        config: the model's.

    Raises:
        UsageError: the disk has no room for the checkpoints.
    """
    shape, host = capacity.Shape.of(config), settings.machine
    if shape is None:
        return settings
    capacity.check_disk(shape, settings.args)
    if settings.on_cpu:
        return settings
    if settings.args.train.dynamic_batch_enable:
        limits = capacity.token_limits(shape, settings.args, host.gpus)
        ours = {flag: limit for flag, limit in limits.items() if settings.origin.get(flag) == cuda.PADDED}
        settings = settings.with_values(ours, f"fits on {host.describe()}, estimated")
    import psutil

    for line in capacity.check(shape, settings.args, host.gpus, host=psutil.virtual_memory().total):
        print(line, flush=True)
    return settings


def _check_reward(args: SimpleNamespace) -> None:
    urls = args.reward.remote_url or []
    for url in urls:
        if url.endswith(".py") and not Path(url).is_file():
            raise UsageError(f"--reward.remote_url {url}: no such file")
        if url.endswith(".py") and len(urls) > 1:
            raise UsageError(f"--reward.remote_url {','.join(urls)}: a reward file is asked alone; name one")


def _reward_file(args: SimpleNamespace) -> str | None:
    """The file of the reward function, if the reward is one."""
    url = (args.reward.remote_url or [""])[0]
    return url if url.endswith(".py") else None


def _check_files(args: SimpleNamespace) -> None:
    """Model and data, where their names are paths."""
    model = args.actor.model_name_or_path
    if model.startswith((".", "/", "~")) and not _is_tiny(model) and not (Path(model) / "config.json").is_file():
        raise UsageError(f"--actor.model_name_or_path {model}: no model there (config.json is missing)")
    for flag, named in (("data.prompt_dataset", args.data.prompt_dataset), ("eval.dataset", args.eval.dataset)):
        for part in (named or "").split(","):
            path = Path(part.split("@")[0].strip())
            if path.suffix in checks.FILES and not _is_tiny(str(path)):
                if not path.is_file():
                    raise UsageError(f"--{flag} {path}: no such file")
                if path.stat().st_size == 0:
                    raise UsageError(f"--{flag} {path} is empty")


def _is_tiny(path: str) -> bool:
    """Whether a path is one of the small model and its data, which are made when they are needed."""
    return path.startswith(str(tiny.default_folder()))


def _load_model_files(args: SimpleNamespace) -> tuple[Any, Any]:
    """The model's configuration and tokenizer, which also tell whether there is such a model."""
    from openrlhf.utils import get_tokenizer
    from transformers import AutoConfig

    name = args.actor.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
        return config, get_tokenizer(name, None, "left", None, use_fast=not args.data.disable_fast_tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--actor.model_name_or_path {name} cannot be loaded: {reason}") from error


def _loaded(flag: str, name: str, load: Callable[..., Any], *given: Any) -> Any:
    """What ``load`` gives; a data set that cannot be had is named."""
    from datasets import disable_progress_bars
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    try:
        with upstream.quiet():
            return load(*given)
    except (DatasetsError, FileNotFoundError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--{flag} {name} cannot be loaded: {reason}") from error
