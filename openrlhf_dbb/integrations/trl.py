"""TRL's ``GRPOTrainer`` with stored posteriors: advantages and draws from them, or a memory alone.

A *step* is one generation batch, on which several optimizer steps may train, TRL's ``global_step``.

Axes: R rollouts of a generation batch on all processes, B on this process, F reward functions; in evaluations P prompts
and N samples of a prompt.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Floats, Key
from openrlhf_dbb.core.posteriors import MemorySupportError, Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.core.strategies import RunFacts
from openrlhf_dbb.core.texts import in_type, response_text
from openrlhf_dbb.errors import did_you_mean
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.hosts import TRL, TRL_NAMES
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.secrets import own_log
from openrlhf_dbb.storage import TRAINING

shared.check_release("trl")

from accelerate import PartialState  # noqa: E402
from accelerate.utils import broadcast_object_list, gather_object  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerState  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import RepeatSampler  # noqa: E402

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


@dataclass(frozen=True)
class Settings(shared.Settings):
    """The settings of a run of TRL; docs/trl.md explains them."""

    resume: bool | str = False
    label_column: str | None = None
    verifier: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shared.check_text("label_column", self.label_column)
        shared.check_text("verifier", self.verifier)
        if not isinstance(self.resume, bool) and self.resume != "auto":
            raise ValueError(f"resume = {self.resume!r:.80}; give True, False or 'auto'")

    def with_real_memory(self) -> "Settings":
        """Return settings whose memory is of real rewards; these where that is chosen, or draws need another."""
        estimator, strategy = self.built
        chosen = dict(self.parameters or {})
        is_chosen = not isinstance(self.estimator, str) or "memory" in chosen
        if is_chosen or estimator.belief is estimator or strategy.draws:
            return self
        return replace(self, parameters=chosen | {"memory": "gaussian"})


class _Memory:
    """The run that follows the training of one trainer, which the first of several processes owns.

    The trainer has no attributes of ours but this one, since a subclass may have any others.

    Attributes:
        form: of the advantages that replace TRL's; None if these stay.
        strategy: draws the prompts.
        scored: what TRL has just scored: rewards (R, F), and the ids of this process's B responses.
        samples: of a held-out prompt's responses the verifier's score (NaN where missing), the length, whether it
            was cut.
        evaluated: the step of the last evaluation, and its results by benchmark.
    """

    def __init__(self, trainer: "_Hooks", settings: Settings, form: str | None) -> None:
        """Note the settings; ValueError for those that do not fit the trainer."""
        estimator, strategy = settings.built
        group = trainer.num_generations
        settings.check(TRL, TRL_NAMES, group)
        column = settings.label_column
        _check_column(column, trainer.train_dataset)
        if column is not None and trainer.args.remove_unused_columns:
            raise ValueError(f"label_column={column!r} would be removed; use remove_unused_columns=False")
        features = getattr(trainer.train_dataset, "features", None) or {}
        self._label_type = str(getattr(features.get(column), "dtype", ""))
        names = trainer.reward_func_names
        self._verifier = _verifier(settings.verifier, estimator, names, trainer.reward_weights.tolist())
        self.trainer = trainer
        self.settings = settings
        if settings.verifier is None and len(names) > 1:
            self.settings = settings.with_real_memory()
        if self.settings is not settings:
            self.say(
                f"the memory is of the weighted sum of {', '.join(names)}, a real number; to remember "
                "right and wrong, give verifier=, one of these"
            )
        self.form = form
        self.strategy = strategy
        self._logged: tuple[int, dict[str, float]] = (0, {})
        self._opened: shared.Steps | None = None
        self.scored: tuple[torch.Tensor, Any] | None = None
        self.samples: dict[Key, list[tuple[float, int, bool]]] = {}
        self.evaluated: tuple[int, dict[str, storage.EvaluationRows]] = (-1, {})
        model = getattr(trainer.model, "config", None)
        self._model_name = str(getattr(model, "_name_or_path", ""))
        groups = trainer.args.generation_batch_size // group
        self._facts = RunFacts(groups, group, trainer.args.seed)
        self._run_name = settings.run_name or trainer.args.run_name or Path(trainer.args.output_dir).name

    def attempt(self, what: str, work: Callable[..., Any], *given: Any) -> None:
        """Do ``work``, which ``what`` names, with what is given; on all processes together."""
        work(*given)

    def read_prompts(self) -> None:
        """Note text and label of every row; refuse what would go wrong unnoticed."""
        if not isinstance(self.trainer.train_dataset, Dataset):
            problem = f"train_dataset is a {type(self.trainer.train_dataset).__name__}"
            raise ValueError(f"{problem}; pass a datasets.Dataset, whose prompts are all known")
        column = self.settings.label_column
        columns = ["prompt"] if column is None else ["prompt", column]
        self._keys = [self._key(row) for row in self.trainer.train_dataset.select_columns(columns)]
        if len(set(self._keys)) < len(self._keys) and self._has_images():
            raise ValueError("prompts and labels repeat, and their images may differ: give a label_column")
        differ = [] if column is not None else _differing_columns(self.trainer.train_dataset, self._keys)
        if differ:
            self.say(
                f"rows of one prompt share a posterior, though they differ in {', '.join(differ)}; "
                "if these are other tasks, give what tells them apart as label_column="
            )

    def _has_images(self) -> bool:
        return not {"image", "images"}.isdisjoint(self.trainer.train_dataset.column_names)

    def _key(self, row: Mapping[str, Any]) -> Key:
        column = self.settings.label_column
        label = None if column is None else row.get(column)
        if isinstance(label, float):
            label = in_type(label, self._label_type)
        return text_of(row["prompt"]), label_of(label)

    def open(self) -> None:
        """Start or resume the run, on the first process."""
        store = self.settings.store
        resume = self.settings.resume
        if resume == "auto":
            resume = shared.stored_run(store, self._run_name, create=True) is not None
        elif not resume:
            shared.refuse_taken(store, self._run_name, "give another run_name=, or resume='auto' to continue it")
        self._begin(resume=bool(resume))

    def _begin(self, *, resume: bool) -> None:
        settings = self.settings
        chosen = {"strategy": settings.strategy, **settings.strategy_parameters}
        # Texts with images, and those of environments, are told apart by their labels.
        by_label = self._has_images() or self.trainer.environment_factories is not None
        self._opened = shared.Steps(
            settings,
            self._run_name,
            resume,
            self._keys,
            self._facts,
            passive=self.form is None,
            many_labels=by_label,
            model=self._model_name,
            reward=", ".join(self.trainer.reward_func_names),
            dataset=str(self.trainer.train_dataset.info.dataset_name or ""),
            config={**self.trainer.args.to_dict(), "posteriors": chosen},
        )
        self.trainer.posteriors = self._opened.posteriors

    @property
    def steps(self) -> shared.Steps:
        if self._opened is None:  # not the first process, or the memory has ended
            raise RuntimeError("no run is open in this process")
        return self._opened

    @property
    def run(self) -> Posteriors:
        return self.steps.posteriors

    def say(self, line: str) -> None:
        if self.trainer.accelerator.is_main_process:
            _log.warning("%s", line)

    def record_log(self, logs: dict[str, float]) -> None:
        """Store numbers, on the first process alone: users may call ``log`` there alone."""
        step = self.run.step
        if self._logged[0] != step:  # else another optimizer step on the same rollouts, or the summary at the end
            batches = self.trainer.args.steps_per_generation * self.trainer.num_iterations
            optimizer_steps = batches / self.trainer.args.gradient_accumulation_steps
            planned = math.ceil(self.trainer.state.max_steps / optimizer_steps)
            self._logged = (step, {"plan/steps": planned})
        self._logged[1].update(logs)
        self.run.record_metrics(step, self._logged[1])

    def save(self) -> None:
        """Write what a resume needs into the checkpoint that TRL is about to write; on the first process."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"  # TRL's
        folder = Path(self.trainer.args.output_dir) / name
        # transformers writes this file last. Without it an older checkpoint of this name is not whole.
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.steps.save(folder)

    def end_training(self) -> None:
        """Finish the run unless the training was stopped before its last step; on the first process."""
        if self.trainer.state.global_step >= self.trainer.state.max_steps:
            self.run.finish()
        else:
            self.run.settle()

    def _just_scored(self) -> tuple[Floats, list[Any]]:
        """Return the rewards (R, F) and this process's B responses that TRL has just scored."""
        if self.scored is None:
            raise ValueError("this trainer does not score completions by TRL's _calculate_rewards")
        rewards_R_F, responses_B = self.scored
        return _numpy(rewards_R_F), responses_B

    def observe(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> None:
        """Do one more step of the posteriors, with what TRL has generated and scored."""

        def mine() -> list[tuple[Key, int, bool, bool, float]]:
            _, responses_B = self._just_scored()
            trained_B = output["completion_mask"].any(dim=1).tolist()  # TRL may have masked a response
            rows_B = zip(inputs, responses_B, trained_B, output["advantages"].tolist(), strict=True)
            return [
                (self._key(row), len(ids), self._is_cut(ids), trained, advantage)
                for row, ids, trained, advantage in rows_B
            ]

        keys_R, tokens_R, cut_R, trained_R, theirs_R = zip(*_gathered(mine), strict=True)
        # TRL has just gathered the completions of this batch for its own log.
        texts_R = [response_text(completion) for completion in self.trainer._logs["completion"]][-len(keys_R) :]
        responses = Responses(texts_R, truncated=cut_R, keep=self.settings.keep_rollouts)
        extras = StepExtras(tokens=tokens_R, trained=trained_R, responses=responses)
        advantages_R, mean_R, metrics = _on_first(lambda: self._score(keys_R, theirs_R, extras))
        self.fill_table(mean_R)
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)
        if self.form is not None:
            self._use(advantages_R, output, len(inputs))

    def _use(self, advantages_R: list[float], output: dict[str, Any], rollouts: int) -> None:
        """Put this process's advantages in place of TRL's, and those of all processes into TRL's log."""
        first = self.trainer.accelerator.process_index * rollouts
        mine = advantages_R[first : first + rollouts]
        device = output["advantages"].device
        output["advantages"] = torch.tensor(mine, dtype=torch.float32, device=device)
        logged = self.trainer._logs["advantages"]  # the last ones are TRL's own advantages of this batch
        for _ in range(min(len(advantages_R), len(logged))):
            logged.pop()
        logged.extend(advantages_R)

    def _score(
        self, keys_R: Sequence[Key], theirs_R: Sequence[float], extras: StepExtras
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Return advantages, unless TRL's stay, the means of the prompts, and metrics; on the first process.

        ``theirs_R`` are TRL's own advantages.
        """
        rewards_R_F, _ = self._just_scored()
        weights_F = _numpy(self.trainer.reward_weights)
        group = self.trainer.num_generations
        rewards_R, scores_R, scale = combine(rewards_R_F, weights_F, self._verifier, group)
        if self.form is None:
            estimator, _ = self.settings.built
            if self._verifier is not None and estimator.belief.support == "real":
                rewards_R = scores_R  # such a memory sees the rewards, and the user has named the verifier
            scored = self.steps.observe(keys_R, rewards_R, scores_R, None, extras, theirs_R)
            return [], scored.mean.tolist(), scored.metrics
        scored = self.steps.observe(keys_R, rewards_R, scores_R, self.form, extras)
        advantages_R = scored.advantages
        if self.trainer.scale_rewards == "none":
            advantages_R = advantages_R * scale
        elif self.trainer.scale_rewards == "batch":
            known = rewards_R[~np.isnan(rewards_R)]
            spread = np.std(known, ddof=1) if len(known) > 1 else 0.0
            advantages_R = advantages_R / spread if spread > 0 else np.zeros(len(rewards_R))
        return advantages_R.tolist(), scored.mean.tolist(), scored.metrics

    def sample(self, inputs: list[dict[str, Any]]) -> None:
        """Note the responses of an evaluation's batch, of all processes."""
        rewards_R_F, _ = self._just_scored()
        _, scores_R, _ = combine(rewards_R_F, _numpy(self.trainer.reward_weights), self._verifier, group=1)

        def mine() -> list[tuple[Key, int, bool]]:
            _, responses_B = self._just_scored()
            rows_B = zip(inputs, responses_B, strict=True)
            return [(self._key(row), len(ids), self._is_cut(ids)) for row, ids in rows_B]

        for (prompt, tokens, cut), value in zip(_gathered(mine), scores_R.tolist(), strict=True):
            self.samples.setdefault(prompt, []).append((value, tokens, cut))
        self.fill_table([math.nan] * len(scores_R))

    def fill_table(self, mean_R: list[float]) -> None:
        """Add to our column of the table that TRL logs on the first process; it needs columns of one length."""
        if self._opened is not None:
            self.trainer._logs["extra"]["posterior_mean"].extend(mean_R)

    def _is_cut(self, ids: Sequence[int]) -> bool:
        return len(ids) > 0 and ids[-1] not in self.trainer.eos_token_ids

    def record_held_out(self, prefix: str, samples: dict[Key, list[tuple[float, int, bool]]]) -> None:
        """Store an evaluation's samples, on the first process.

        Those of several benchmarks after one step become one evaluation.
        """
        self.run.settle()
        step = self.run.step
        if step != self.evaluated[0]:
            self.evaluated = (step, {})
        texts, labels = map(list, zip(*samples, strict=True))
        # TRL fills up its last batch with further samples of some prompts.
        kept_P_N = [samples_N[: self.trainer.num_generations_eval] for samples_N in samples.values()]
        scores, tokens, truncated = np.moveaxis(np.array([kept_P_N]), 3, 0)
        none = np.array([None])  # the trainer extracts no answers
        benchmark = prefix.removeprefix("eval_")
        results = Results(benchmark, [], scores, none, labels, tokens.astype(np.int64), truncated > 0, texts)
        self.evaluated[1][benchmark] = stored_rows(results, self.run.store)
        self._record_evaluation()

    def _record_evaluation(self) -> None:
        """Store the last evaluation."""
        step, rows = self.evaluated
        self.run.store.record_evaluation(
            TRAINING,
            list(rows.values()),
            run=self.run.run.record,
            step=step,
            model=self._model_name,
            config={
                "temperature": self.trainer.args.temperature,
                "max_completion_length": self.trainer.args.max_completion_length,
            },
        )


class _PassiveMemory(_Memory):
    """The memory of :func:`remember`: whatever it cannot take, TRL trains on."""

    _has_ended = False  # on all processes

    def attempt(self, what: str, work: Callable[..., Any], *given: Any) -> None:
        """Do ``work``; if it fails, on all processes, end the memory."""
        if self._has_ended:
            return
        try:
            work(*given)
        except Exception as error:  # nothing that a memory meets may end the training
            self._has_ended = True
            self._end(what, error)

    def record_log(self, logs: dict[str, float]) -> None:
        try:
            super().record_log(logs)
        except Exception as error:  # as above; the other processes learn of it with the next batch
            self._end("storing what TRL logged", error)

    def _end(self, what: str, error: Exception) -> None:
        """Close the run, so that it can be resumed, and say once what is lost."""
        self.trainer._logs["extra"].pop("posterior_mean", None)
        if self._opened is None:  # not the first process, or it has said so
            return
        run = self.run
        self._opened = None
        self.trainer.posteriors = None
        lost = f"no step after {run.step} of run {run.run.record.name!r} is remembered; the training goes on without"
        try:
            _give_up(run, reachable=not isinstance(error, storage.StoreError))
        except Exception as failure:  # nothing that a memory meets may end the training
            lost += f" (the run could not be closed: {failure})"
        _log.warning("remembering has ended: %s failed: %s: %s; %s", what, type(error).__name__, error, lost)

    def open(self) -> None:
        """Start or resume the run, on the first process; with ``resume="auto"`` start one that cannot be resumed."""
        settings = self.settings
        if settings.resume:
            is_needed = settings.resume is True
            record = shared.stored_run(settings.store, self._run_name, create=not is_needed)
            if record is not None and record.parameters.get("memory") == "gaussian":
                self.settings = settings.with_real_memory()  # as after its first step
            try:
                if record is not None or is_needed:
                    self._begin(resume=True)
                    return
            except (storage.StoreError, ValueError) as error:
                if is_needed:
                    raise
                _log.warning("run %r is not continued: %s", self._run_name, error)
        self._begin_new()

    def _begin_new(self) -> None:
        """Begin a run, under another name if this one is taken, and say so."""
        self._begin(resume=False)
        name = self.run.run.record.name
        if name != self._run_name:
            _log.warning(
                "there is a run named %r: this training is remembered as %r; give another run_name=, or resume='auto' "
                "to continue the first",
                self._run_name,
                name,
            )

    def follow(self, checkpoint: str | bool | None) -> None:
        """Take the run to where TRL begins, on the first process.

        That is back to the checkpoint, or to a new run if it is not of this one.
        """
        self.evaluated = (-1, {})
        run = self.run
        name = run.run.record.name
        output = Path(self.trainer.args.output_dir)
        folder = get_last_checkpoint(output) if checkpoint is True else checkpoint
        reason = "it has steps, and this training begins without a checkpoint"
        if folder:
            try:
                self.steps.go_back(Path(folder), output)
                return
            except ValueError as error:
                reason = str(error)
        if run.step:
            _log.warning("run %r is not continued: %s", name, reason)
            _give_up(run, reachable=True)
            self._begin_new()
        elif folder:
            _log.warning("run %r begins without what was before: %s", name, reason)

    def _score(
        self, keys_R: Sequence[Key], theirs_R: Sequence[float], extras: StepExtras
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Do a step; a memory of right and wrong that meets other rewards in the first one begins again."""
        try:
            return super()._score(keys_R, theirs_R, extras)
        except MemorySupportError as error:
            real = self.settings.with_real_memory()
            if self.run.step or real is self.settings:
                raise
            _log.warning("the memory is of real rewards, since %s", error)
            self._begin_again(real)
        return super()._score(keys_R, theirs_R, extras)

    def _begin_again(self, settings: Settings) -> None:
        """Replace a run without steps."""
        former = self.run
        former.store.delete_run(former.run.record)
        former.close()
        self.settings = settings
        self._begin(resume=False)
        if self.evaluated[1]:
            self._record_evaluation()


class _Hooks(GRPOTrainer):
    """Where TRL's trainer calls the memory. It passes TRL's arguments on as they are."""

    posteriors: Posteriors | None = None
    _dbb: _Memory

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate as TRL does, and store the scores of each prompt with the run. No posterior changes."""
        self._dbb.samples = {}
        metrics: dict[str, float] = super().evaluate(*args, **options)
        prefix = args[2] if len(args) > 2 else options.get("metric_key_prefix", "eval")
        samples = self._dbb.samples
        self._dbb.samples = {}
        if samples:  # with several data sets, TRL calls this method for each of them inside the outer call
            store = self._dbb.record_held_out
            self._dbb.attempt("storing an evaluation", _on_first, lambda: store(prefix, samples))
        return metrics

    def _calculate_rewards(self, *args: Any, **options: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **options)
        responses = args[3] if len(args) > 3 else options.get("completion_ids_list")
        self._dbb.scored = (rewards, responses)
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
        self._dbb.attempt("saving the posteriors of a checkpoint", _on_first, self._dbb.save)
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
        given = inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **options).arguments
        _check_column(settings.label_column, given.get("train_dataset"))
        super().__init__(*args, **options)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError("multi_objective_aggregation: posteriors are of one reward; use 'sum_then_normalize'")
        scaling = self.scale_rewards
        if settings.form is not None and scaling != "group":
            raise ValueError(f"form {settings.form!r} is given; leave out scale_rewards={scaling!r}")
        # For "batch" too, _score divides X - p by the spread of the batch.
        form = settings.form or ("group_norm" if scaling == "group" else "batch_centered")
        self._dbb = _Memory(self, settings, form)
        self._dbb.read_prompts()
        _on_first(self._dbb.open)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step.

        ``resume_from_checkpoint`` is a folder, or True for the newest whole checkpoint of this run in ``output_dir``.
        The posteriors go back to its step, bit for bit. If there is no checkpoint yet, the run starts over.

        Raises:
            ValueError: the checkpoint is not whole or not of this run, or the run has steps and no checkpoint is given.
        """
        folder = _on_first(lambda: self._beginning(resume_from_checkpoint))
        self._passes = 0
        if folder:
            self._passes = int(TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}").epoch or 0)
        self._dbb.evaluated = (-1, {})
        result = super().train(folder, *args, **options)
        _on_first(self._dbb.end_training)
        return result

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        """Return TRL's sampler, past the orders of the whole passes before a checkpoint; TRL would begin with them."""
        sampler = super()._get_train_sampler(dataset)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(self._passes):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training and self._dbb.strategy.draws:
            inputs = self._drawn(inputs)
        return super()._generate_and_score_completions(inputs)

    def _drawn(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this process's share of the generation batch that the strategy draws, in place of TRL's own.

        TRL's sampler cannot draw it: the data loader takes rows from it before the last batch is observed.
        """
        rows = _on_first(lambda: self._dbb.steps.draw())
        rows_R = [row for row in rows for _ in range(self.num_generations)]
        first = self.accelerator.process_index * len(inputs)
        rows_B = rows_R[first : first + len(inputs)]
        return [{name: row[name] for name in inputs[0]} for row in map(self.train_dataset.__getitem__, rows_B)]

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
            for newest in sorted(checkpoints, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
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

    _dbb: _PassiveMemory

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step."""
        checkpoint = args[0] if args else options.get("resume_from_checkpoint")
        self._dbb.attempt("the start of the training", _on_first, lambda: self._dbb.follow(checkpoint))
        result = super().train(*args, **options)
        self._dbb.attempt("finishing the run", _on_first, self._dbb.end_training)
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
    settings.check(TRL, TRL_NAMES)  # a wrong name is refused first
    for name in ("strategy", "form"):
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            raise ValueError(
                f"{name} = {value!r} changes a training, and remember changes none; use PosteriorGRPOTrainer"
            )
    hooked = cast(_Hooks, trainer)  # at the end of this function
    memory = _PassiveMemory(hooked, settings, form=None)
    try:
        memory.read_prompts()
    except Exception as error:  # whatever the data holds, TRL may train on it
        memory.say(f"this training is not remembered: {error}")
        return
    _on_first(memory.open)
    memory.fill_table([math.nan] * len(trainer._logs["prompt"]))
    hooked._dbb = memory
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_Remembering, cls), {})  # of this one object


def _give_up(run: Posteriors, *, reachable: bool) -> None:
    """Close a run; another process may resume it at once if its store is reachable."""
    try:
        if reachable and run.run.record.status != "finished":
            run.settle()
            run.run.release()
    finally:
        run.close()


def _check_column(name: str | None, dataset: Any) -> None:
    """Refuse a label_column that is none of the data set's."""
    columns = getattr(dataset, "column_names", None)
    if name is not None and columns is not None and name not in columns:
        raise ValueError(f"label_column={name!r} is none of {', '.join(columns)}{did_you_mean(name, columns)}")


def _differing_columns(dataset: Dataset, keys: list[Key]) -> list[str]:
    """Return the columns, apart from the prompt, in which rows with one key differ."""
    first_of: dict[Key, int] = {}
    twins = []
    for row, key in enumerate(keys):
        first = first_of.setdefault(key, row)
        if first < row:
            twins.append((first, row))
    differ = []
    for name in dataset.column_names:
        if twins and name != "prompt":
            values = dataset.select_columns([name])[:][name]
            if any(repr(values[first]) != repr(values[row]) for first, row in twins):
                differ.append(name)
    return differ


def _on_first(work: Callable[[], Any]) -> Any:
    """Run ``work`` on the first process and return its result on all; if it fails there, all fail."""
    result = None
    error: Exception | None = None
    if PartialState().is_main_process:
        try:
            result = work()
        except Exception as failure:
            error = failure
    outcome = [result, None if error is None else str(error)]
    broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RuntimeError(f"the first process cannot go on: {outcome[1]}")
    return outcome[0]


def _gathered(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what ``work`` returns on all processes, joined; if it fails on one, all fail."""
    rows: list[Any] = []
    error: Exception | None = None
    try:
        rows = work()
    except Exception as failure:
        error = failure
    outcomes = gather_object([(rows, None if error is None else f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    for _, failed in outcomes:
        if failed is not None:
            raise RuntimeError(f"another process cannot go on: {failed}")
    return [row for rows, _ in outcomes for row in rows]


def combine(rewards_R_F: Floats, weights_F: Floats, verifier: int | None, group: int) -> tuple[Floats, Floats, float]:
    """Return rewards and scores, (R,) each, and the factor that brings the rewards to TRL's scale; NaN where missing.

    ``verifier`` is the index of the function whose score S the estimator sees. With its weight w, and ``group``
    rollouts of a prompt side by side, the rewards are S + (others - their group's mean) / w. Without a verifier rewards
    and scores are the weighted sum.
    """
    weighted_R = np.nansum(rewards_R_F * weights_F, axis=1)
    if verifier is None:
        rewards_R = np.where(np.isnan(rewards_R_F).all(axis=1), np.nan, weighted_R)
        return rewards_R, rewards_R, 1.0
    scores_R, weight = rewards_R_F[:, verifier], float(weights_F[verifier])
    others = (weighted_R - np.nan_to_num(scores_R) * weight).reshape(-1, group)
    return scores_R + (others - others.mean(axis=1, keepdims=True)).reshape(-1) / weight, scores_R, weight


def _verifier(name: str | None, estimator: RewardEstimator, names: list[str], weights: list[float]) -> int | None:
    """Return the index of the reward function whose score the estimator sees; None for the weighted sum."""
    if name is not None:
        _check_verifier(name, names)
    if estimator.support == "real" and (name is None or estimator.belief is estimator):
        return None
    if name is None and len(names) > 1:
        raise ValueError(f"{estimator.name!r} needs one score of 0 or 1: give verifier, one of {', '.join(names)}")
    index = 0 if name is None else names.index(name)
    if not weights[index] > 0:
        raise ValueError(f"the weight of verifier {names[index]!r} is {weights[index]:g}; it must be above 0")
    return index


def _check_verifier(name: str, names: list[str]) -> None:
    """Refuse a name that is none of the reward functions', or of several."""
    if name not in names:
        raise ValueError(f"verifier {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}")
    if names.count(name) > 1:
        raise ValueError(
            f"verifier {name!r} is the name of {names.count(name)} reward functions; give each its own: "
            'function.__name__ = "correct"'
        )


def _numpy(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()
