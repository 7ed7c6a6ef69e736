"""TRL's ``GRPOTrainer`` with stored posteriors: advantages and draws from them, or a memory alone.

A *step* is one generation batch, on which several optimizer steps may train, TRL's ``global_step``.

Axes: R rollouts of a generation batch on all processes, B on this process.
"""

import inspect
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch

from openrlhf_dbb.core.filling import BudgetSpent
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.errors import did_you_mean
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.hosts import TRL, TRL_NAMES
from openrlhf_dbb.rewards.for_trl import prompts_end_with
from openrlhf_dbb.secrets import own_log

shared.check_release("trl")

from datasets import Dataset  # noqa: E402
from transformers import TrainerState  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

from openrlhf_dbb.integrations.trl_memory import READ, Memory  # noqa: E402
from openrlhf_dbb.integrations.trl_passive import PassiveMemory  # noqa: E402
from openrlhf_dbb.integrations.trl_processes import on_first  # noqa: E402
from openrlhf_dbb.integrations.trl_settings import Settings, check_column  # noqa: E402

__all__ = ["PosteriorGRPOConfig", "PosteriorGRPOTrainer", "Settings", "remember"]

_log = own_log(__name__)


@dataclass
class PosteriorGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig``, which refuses ``num_generations=1``, with one rollout a prompt allowed."""

    def __post_init__(self) -> None:
        config: Any = self
        group = config.num_generations
        if group == 1:
            # TRL only checks these two values here; the trainer reads them later.
            config.num_generations = 2
            config.num_generations_eval = config.num_generations_eval or 1
        super().__post_init__()
        config.num_generations = group


class _Hooks(GRPOTrainer):
    """Where TRL's trainer calls the memory. It passes TRL's arguments on as they are."""

    posteriors: Posteriors | None = None
    _dbb: Memory

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate as TRL does, and store the scores of each prompt with the run. No posterior changes."""
        self._dbb.samples = {}
        metrics: dict[str, float] = super().evaluate(*args, **options)
        prefix = args[2] if len(args) > 2 else options.get("metric_key_prefix", "eval")
        samples = self._dbb.samples
        self._dbb.samples = {}
        # With several data sets, TRL calls this method for each of them inside the outer call
        if samples:
            store = self._dbb.record_held_out
            self._dbb.attempt("storing an evaluation", on_first, lambda: store(prefix, samples))
        return metrics

    def _calculate_rewards(self, *args: Any, **options: Any) -> torch.Tensor:
        prompts = args[1] if len(args) > 1 else options.get("prompts")
        self._dbb.attempt("reading the chat template", self._dbb.read_template, prompts)
        with prompts_end_with(self._dbb.template_end):
            rewards: torch.Tensor = super()._calculate_rewards(*args, **options)
        completions = args[2] if len(args) > 2 else options.get("completions")
        ids = args[3] if len(args) > 3 else options.get("completion_ids_list")
        self._dbb.scored = (rewards, ids, completions)
        self._dbb.reads = list(self._pending_extra_logs.get(READ, []))
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._dbb.attempt("observing a batch", self._dbb.observe, inputs, output)
        else:
            self._dbb.attempt("observing an evaluation", self._dbb.sample, inputs)
        self._dbb.scored = None
        return output

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as TRL does, and store the numbers in the row of the last step."""
        super().log(logs, *args, **options)  # adds TRL's averages to logs
        if self.model.training and self.posteriors is not None and self.posteriors.step:
            self._dbb.record_log(logs)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        self._dbb.attempt("saving the posteriors of a checkpoint", on_first, self._dbb.save)
        super()._save_checkpoint(*args, **options)


class PosteriorGRPOTrainer(_Hooks):
    """TRL's trainer. Of several processes, the first owns the run and computes the advantages of all.

    Args:
        *args, **options: TRL's, and :class:`Settings`. ``train_dataset`` must be a ``datasets.Dataset``.

    Attributes:
        posteriors: of the run, on the first process; None on the others.

    Raises:
        ValueError: a name is unknown, or arguments do not fit together.
        storage.StoreError: the name is taken, the store cannot be opened, or the warm start or resume does not fit.
    """

    _passes = 0  # whole ones before the checkpoint that the training goes on from

    def __init__(self, *args: Any, **options: Any) -> None:
        names = {field.name for field in fields(Settings)} & options.keys()
        settings = Settings(**{name: options.pop(name) for name in names})
        settings.check(TRL, TRL_NAMES)  # an error is raised before a model is loaded
        given = (
            inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **options).arguments
        )
        check_column(settings.label_column, given.get("train_dataset"))
        super().__init__(*args, **options)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "multi_objective_aggregation: posteriors are of one reward; use 'sum_then_normalize'"
            )
        scaling = self.scale_rewards
        if settings.form is not None and scaling != "group":
            raise ValueError(
                f"form {settings.form!r} is given; leave out scale_rewards={scaling!r}"
            )
        # For "batch" too, _score divides X - p by the spread of the batch.
        form = settings.form or ("group_norm" if scaling == "group" else "batch_centered")
        self._dbb = Memory(self, settings, form)
        self._dbb.read_prompts()
        on_first(self._dbb.open)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any
    ) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step.

        ``resume_from_checkpoint`` is a folder, or True for the newest whole checkpoint of this run in ``output_dir``.
        The posteriors go back to its step, bit for bit. If there is no checkpoint yet, the run starts over.

        Raises:
            ValueError: the checkpoint is not whole or not of this run, or the run has steps and no checkpoint is given.
        """
        folder = on_first(lambda: self._beginning(resume_from_checkpoint))
        self._passes = 0
        if folder:
            self._passes = int(
                TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}").epoch or 0
            )
        self._dbb.evaluated = (-1, {})
        self._dbb.is_spent = False
        result = super().train(folder, *args, **options)
        on_first(self._dbb.end_training)
        return result

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        """Return TRL's sampler, past the orders of the whole passes before a checkpoint; TRL would begin with them."""
        sampler = super()._get_train_sampler(dataset)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(self._passes):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self._dbb.fills:
            output = self._dbb.fill(inputs)
        else:
            if self._dbb.strategy.draws:
                inputs = self._drawn(inputs)
            output = super()._generate_and_score_completions(inputs)
        return output if self._dbb.replays is None else self._dbb.replay(output)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Train as TRL does; where the limit of rollouts is spent, this step is the last one."""
        try:
            return super().training_step(*args, **options)
        except BudgetSpent:
            self.control.should_training_stop = True
            return torch.zeros((), device=self.accelerator.device)

    def generate_as_trl(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score one rollout of each row, as TRL does. Nothing is observed."""
        return super(_Hooks, self)._generate_and_score_completions(inputs)

    def _drawn(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this process's share of the generation batch that the strategy draws, in place of TRL's own.

        TRL's sampler cannot draw it: the data loader takes rows from it before the last batch is observed.
        """
        rows = on_first(lambda: self._dbb.steps.draw())
        rows_R = [row for row in rows for _ in range(self.num_generations)]
        first = self.accelerator.process_index * len(inputs)
        rows_B = rows_R[first : first + len(inputs)]
        return [
            {name: row[name] for name in inputs[0]}
            for row in map(self.train_dataset.__getitem__, rows_B)
        ]

    def _beginning(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Take the posteriors, and the draws, back to the checkpoint; return its folder, if there is one."""
        if not resume_from_checkpoint and self._dbb.run.step:
            raise ValueError(
                f"run {self._dbb.run.run.record.name!r} has steps: call train(resume_from_checkpoint=True)"
            )
        folder = None
        output = Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            checkpoints = output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            for newest in sorted(
                checkpoints, key=lambda path: int(path.name.split("-")[-1]), reverse=True
            ):
                try:
                    self._check(newest)
                    folder = newest
                    break
                except ValueError as error:
                    _log.warning("passed over: %s", error)
        elif resume_from_checkpoint:
            folder = Path(str(resume_from_checkpoint))
            self._check(folder)
        self._dbb.steps.go_back(folder, output)
        return None if folder is None else str(folder)

    def _check(self, folder: Path) -> None:
        try:  # transformers writes this file after the model, the optimizer and the random state
            TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:
            problem = f"checkpoint {folder} is not whole: {TRAINER_STATE_NAME}: {error}"
            raise ValueError(f"{problem}; use an older one") from None
        self._dbb.steps.saved_in(folder)


class _Remembering(_Hooks):
    """The base of a trainer that :func:`remember` has changed."""

    _dbb: PassiveMemory

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step."""
        checkpoint = args[0] if args else options.get("resume_from_checkpoint")
        self._dbb.attempt(
            "the start of the training", on_first, lambda: self._dbb.follow(checkpoint)
        )
        result = super().train(*args, **options)
        self._dbb.attempt("finishing the run", on_first, self._dbb.end_training)
        return result


def remember(trainer: GRPOTrainer, **ours: Any) -> None:
    """Let a ``GRPOTrainer`` keep posteriors of its prompts. It trains as before, whatever happens to the memory.

    Call it before ``train()``. ``ours`` are of :class:`Settings`, without ``strategy`` and ``form``; the
    estimator is "point" by default. Data that cannot be remembered, and a store that fails, end the memory
    with one warning.

    Raises:
        ValueError: a setting is unknown, wrong, or does not fit the trainer.
        storage.StoreError: the store cannot be opened, or the warm start or ``resume=True`` does not fit.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise ValueError(f"remember needs a GRPOTrainer, not {type(trainer).__name__}")
    if isinstance(trainer, _Hooks):
        raise ValueError("this trainer has a run already; call remember once, for a trainer of TRL")
    names = [field.name for field in fields(Settings)]
    for name in ours:
        if name not in names:
            near = did_you_mean(name, names)
            raise ValueError(f"remember has no setting {name!r}{near}; give {', '.join(names)}")
    settings = Settings(**{"estimator": "point", **ours})
    _ = settings.built  # a wrong name is refused first
    for name in ("strategy", "form", "replay", "max_rollouts", "probe_fraction"):
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            raise ValueError(
                f"{name} = {value!r} changes a training, and remember changes none; use PosteriorGRPOTrainer"
            )
    hooked = cast(_Hooks, trainer)  # at the end of this function
    memory = PassiveMemory(hooked, settings, form=None)
    try:
        memory.read_prompts()
    except Exception as error:  # whatever the data holds, TRL may train on it
        memory.say(f"this training is not remembered: {error}")
        return
    on_first(memory.open)
    memory.fill_table([math.nan] * len(trainer._logs["prompt"]))
    hooked._dbb = memory
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_Remembering, cls), {})  # of this one object
