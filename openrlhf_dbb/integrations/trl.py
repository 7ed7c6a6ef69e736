"""TRL's ``GRPOTrainer`` with stored posteriors: advantages and draws from them, or a memory alone.

A *step* is one generation batch, on which several optimizer steps may train, TRL's ``global_step``.

Axes: R rollouts of a generation batch on all processes, B on this process, F reward functions; in evaluations P prompts
and N samples of a prompt.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from openrlhf_dbb import storage
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Floats, Key, Responses, StepExtras
from openrlhf_dbb.core.strategies import RunFacts
from openrlhf_dbb.errors import did_you_mean
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.storage import TRAINING

shared.check_release("trl")

from accelerate import PartialState  # noqa: E402
from accelerate.utils import broadcast_object_list, gather_object  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerState  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

_log = logging.getLogger(__name__)


@dataclass
class PosteriorGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig``, which refuses ``num_generations=1``, with one rollout a prompt allowed."""

    def __post_init__(self) -> None:
        config: Any = self
        group = config.num_generations
        if group == 1:
            # TRL only checks these two values here; the trainer reads them later.
            config.num_generations, config.num_generations_eval = 2, config.num_generations_eval or 1
        super().__post_init__()
        config.num_generations = group


@dataclass(frozen=True)
class Settings(shared.Settings):
    """The settings of a run of TRL; docs/trl.md explains them."""

    resume: bool | str = False
    label_column: str | None = None
    verifier: str | None = None


class PosteriorGRPOTrainer(GRPOTrainer):
    """TRL's trainer. Of several processes, the first owns the run and computes the advantages of all.

    Args:
        *args, **options: TRL's, and :class:`Settings`. ``train_dataset`` must be a ``datasets.Dataset``.

    Attributes:
        posteriors: of the run, on the first process; None on the others.

    Raises:
        ValueError: a name is unknown, or arguments do not fit together.
        storage.StoreError: the name is taken, the store cannot be opened, or the warm start or resume does not fit.
    """

    posteriors: Posteriors | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        names = {field.name for field in fields(Settings)} & options.keys()
        settings = Settings(**{name: options.pop(name) for name in names})
        _ = settings.built  # an error is raised before a model is loaded
        super().__init__(*args, **options)
        self._begin(settings)

    def _begin(self, settings: Settings, *, scores: bool = True) -> None:
        """Start or resume the run; without ``scores`` the advantages stay TRL's."""
        estimator, self._strategy = settings.built
        if self.num_generations < estimator.min_rollouts:
            raise ValueError(f"num_generations={self.num_generations} is too few for {estimator.name!r}; use 'auto'")
        if settings.form is not None and self.scale_rewards != "group":
            raise ValueError(f"form {settings.form!r} is given; leave out scale_rewards={self.scale_rewards!r}")
        self._settings, self._scores = settings, scores
        self._verifier = _verifier(settings.verifier, estimator, self.reward_func_names, self.reward_weights.tolist())
        # For "batch" too, _observe divides X - p by the spread of the batch.
        self._form = settings.form or ("group_norm" if self.scale_rewards == "group" else "batch_centered")
        self._logged: tuple[int, dict[str, float]] = 0, {}
        # Of a held-out prompt's responses the verifier's score (NaN where missing), the length, whether it was cut.
        self._samples: dict[Key, list[tuple[float, int, bool]]] = {}
        self._evaluated: tuple[int, dict[str, storage.EvaluationRows]] = -1, {}  # step, and results by benchmark
        self._scored: tuple[torch.Tensor, list[Any]] | None = None
        self._model_name = str(self.model.config._name_or_path)
        keys, groups = self._read_prompts(), self.args.generation_batch_size // self.num_generations
        name = settings.run_name or self.args.run_name or Path(self.args.output_dir).name
        chosen = {"strategy": settings.strategy, **settings.strategy_parameters}
        facts, config = RunFacts(groups, self.num_generations, self.args.seed), {"posteriors": chosen}
        about: dict[str, Any] = {"model": self._model_name, "reward": ", ".join(self.reward_func_names)}
        about |= {"dataset": str(self.train_dataset.info.dataset_name or ""), "config": self.args.to_dict() | config}

        def begin() -> None:
            resumes = shared.run_exists(settings.store, name) if settings.resume == "auto" else bool(settings.resume)
            self._steps = shared.Steps(settings, name, resumes, keys, facts, **about)
            self.posteriors = self._steps.posteriors

        _on_first(begin)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step.

        ``resume_from_checkpoint`` is a folder, or True for the newest whole checkpoint of this run in ``output_dir``.
        The posteriors go back to its step, bit for bit. If there is no checkpoint yet, the run starts over.

        Raises:
            ValueError: the checkpoint is not whole or not of this run, or the run has steps and no checkpoint is given.
        """
        folder = _on_first(lambda: self._beginning(resume_from_checkpoint))
        self._passes = int(TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}").epoch or 0) if folder else 0
        self._evaluated = -1, {}
        result = super().train(folder, *args, **options)
        is_done = self.state.global_step >= self.state.max_steps
        _on_first(lambda: self._run.finish() if is_done else self._run.settle())
        return result

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        """Return TRL's sampler, past the orders of the whole passes before a checkpoint; TRL would begin with them."""
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self._passes if sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as TRL does, and store the scores of each prompt with the run. No posterior changes."""
        self._samples = {}
        metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        samples, self._samples = self._samples, {}
        if samples:  # with several data sets, TRL calls this method for each of them inside the outer call
            _on_first(lambda: self._record_held_out(metric_key_prefix.removeprefix("eval_"), samples))
        return metrics

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards, completion_ids_list
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training and self._strategy.draws:
            inputs = self._drawn(inputs)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._scored is not None
        (rewards_R_F, responses_B), self._scored = self._scored, None
        if self.model.training:
            advantages_R = self._observe(inputs, rewards_R_F, responses_B, output["completion_mask"])
            if self._scores:
                first, device = self.accelerator.process_index * len(inputs), output["advantages"].device
                mine = advantages_R[first : first + len(inputs)]
                output["advantages"] = torch.tensor(mine, dtype=torch.float32, device=device)
                logged = self._logs["advantages"]  # the last ones are TRL's own advantages of this batch
                for _ in range(min(len(advantages_R), len(logged))):
                    logged.pop()
                logged.extend(advantages_R.tolist())
        else:
            self._logs["extra"]["posterior_mean"].extend([math.nan] * len(rewards_R_F))  # as long as TRL's own columns
            _, scores_R, _ = combine(_numpy(rewards_R_F), _numpy(self.reward_weights), self._verifier, group=1)
            rows_B = zip(map(self._key, inputs), responses_B, strict=True)
            rows_R = gather_object([(key, len(ids), ids[-1] not in self.eos_token_ids) for key, ids in rows_B])
            for (prompt, tokens, cut), value in zip(rows_R, scores_R.tolist(), strict=True):
                self._samples.setdefault(prompt, []).append((value, tokens, cut))
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, and store the numbers in the row of the last step."""
        super().log(logs, start_time)  # adds TRL's averages to logs
        if not (self.model.training and self.accelerator.is_main_process and self._run.step):
            return
        step = self._run.step
        if self._logged[0] != step:  # else another optimizer step on the same rollouts, or the summary at the end
            a_step = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
            self._logged = step, {"plan/steps": math.ceil(self.state.max_steps / a_step)}
        self._logged[1].update(logs)
        self._run.record_metrics(step, self._logged[1])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        def prepare() -> None:
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"  # TRL's name
            # transformers writes this file last. Without it an older checkpoint of this name is not whole.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            self._steps.save(folder)

        _on_first(prepare)
        super()._save_checkpoint(model, trial)

    @property
    def _run(self) -> Posteriors:
        assert self.posteriors is not None, "only the first process has them"
        return self.posteriors

    def _read_prompts(self) -> list[Key]:
        """Return text and label of every row; refuse what would go wrong unnoticed."""
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError("multi_objective_aggregation: posteriors are of one reward; use 'sum_then_normalize'")
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError("posteriors need to know every prompt of train_dataset: pass a datasets.Dataset")
        label = [] if self._settings.label_column is None else [self._settings.label_column]
        if label and self.args.remove_unused_columns:
            raise ValueError(f"label_column={label[0]!r} would be removed; use remove_unused_columns=False")
        keys = [self._key(row) for row in self.train_dataset.select_columns(["prompt", *label])]
        if len(set(keys)) < len(keys) and not {"image", "images"}.isdisjoint(self.train_dataset.column_names):
            raise ValueError("prompts and labels repeat, and their images may differ: give a label_column")
        return keys

    def _key(self, row: Mapping[str, Any]) -> Key:
        label = None if self._settings.label_column is None else row.get(self._settings.label_column)
        return text_of(row["prompt"]), label_of(label)

    def _beginning(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Take the posteriors, and the draws, back to the checkpoint; return its folder, if there is one."""
        if not resume_from_checkpoint and self._run.step:
            raise ValueError(f"run {self._run.run.record.name!r} has steps: call train(resume_from_checkpoint=True)")
        folder, output = None, Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            found = output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            for newest in sorted(found, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
                try:
                    self._check(newest)
                    folder = newest
                    break
                except ValueError as error:
                    _log.warning("passed over: %s", error)
        elif resume_from_checkpoint:
            folder = Path(str(resume_from_checkpoint))
            self._check(folder)
        self._steps.go_back(folder, output)
        return None if folder is None else str(folder)

    def _check(self, folder: Path) -> None:
        try:  # transformers writes this file after the model, the optimizer and the random state
            TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"checkpoint {folder} is not whole: {TRAINER_STATE_NAME}: {error}") from None
        self._steps.saved_in(folder)

    def _drawn(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this process's share of the generation batch that the strategy draws, in place of TRL's own.

        TRL's sampler cannot draw it: the data loader takes rows from it before the last batch is observed.
        """
        rows = _on_first(lambda: self._steps.draw())
        first = self.accelerator.process_index * len(inputs)
        rows_B = [row for row in rows for _ in range(self.num_generations)][first : first + len(inputs)]
        return [{name: row[name] for name in inputs[0]} for row in map(self.train_dataset.__getitem__, rows_B)]

    def _observe(
        self, inputs: list[dict[str, Any]], rewards_R_F: torch.Tensor, responses_B: list[Any], mask_B: torch.Tensor
    ) -> Floats:
        """Do one more step of the posteriors; return the advantages of all processes (R,)."""
        rows_B = zip(inputs, responses_B, mask_B.any(dim=1).tolist(), strict=True)  # TRL may have masked a response
        mine_B = [(self._key(row), len(ids), ids[-1] not in self.eos_token_ids, some) for row, ids, some in rows_B]
        keys_R, tokens_R, cut_R, trained_R = zip(*gather_object(mine_B), strict=True)
        # TRL has just gathered the completions of this batch for its own log.
        texts_R = [_text(completion) for completion in self._logs["completion"]][-len(keys_R) :]
        responses = Responses(texts_R, truncated=cut_R, keep=self._settings.keep_rollouts)

        def score() -> tuple[Floats, dict[str, float]]:
            weights = _numpy(self.reward_weights)
            rewards, scores, scale = combine(_numpy(rewards_R_F), weights, self._verifier, self.num_generations)
            extras = StepExtras(tokens=tokens_R, trained=trained_R, responses=responses)
            scored = self._steps.observe(keys_R, rewards, scores, self._form, extras)
            advantages = scored.advantages
            if self.scale_rewards == "none":
                advantages = advantages * scale
            elif self.scale_rewards == "batch":
                spread = np.std(rewards[~np.isnan(rewards)], ddof=1) if len(rewards) > 1 else 0.0
                advantages = advantages / spread if spread > 0 else np.zeros(len(rewards))
            self._logs["extra"]["posterior_mean"].extend(scored.mean.tolist())
            return advantages, scored.metrics

        advantages_R, metrics = _on_first(score)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return advantages_R

    def _record_held_out(self, benchmark: str, samples: dict[Key, list[tuple[float, int, bool]]]) -> None:
        """Store a benchmark's samples; those of several benchmarks after one step become one evaluation."""
        self._run.settle()
        store, step = self._run.store, self._run.step
        if step != self._evaluated[0]:
            self._evaluated = step, {}
        texts, labels = map(list, zip(*samples, strict=True))
        # TRL fills up its last batch with further samples of some prompts.
        kept_P_N = [samples_N[: self.num_generations_eval] for samples_N in samples.values()]
        scores, tokens, truncated = np.moveaxis(np.array([kept_P_N]), 3, 0)
        none = np.array([None])  # the trainer extracts no answers
        results = Results(benchmark, [], scores, none, labels, tokens.astype(np.int64), truncated > 0, texts)
        self._evaluated[1][benchmark] = stored_rows(results, store)
        config = {"temperature": self.args.temperature, "max_completion_length": self.args.max_completion_length}
        rows, run = list(self._evaluated[1].values()), self._run.run.record
        store.record_evaluation(TRAINING, rows, run=run, step=step, model=self._model_name, config=config)


def remember(trainer: GRPOTrainer, **ours: Any) -> None:
    """Let a ``GRPOTrainer`` keep posteriors of its prompts. It trains as before: the advantages stay TRL's.

    Call it before ``train()``, which then is that of :class:`PosteriorGRPOTrainer`. ``ours`` are of :class:`Settings`;
    the stored advantages are those of ``estimator``, by default "point".
    """
    settings, cls = Settings(**{"estimator": "point"} | ours), type(trainer)
    trainer.__class__ = type(cls.__name__, (PosteriorGRPOTrainer, cls), {})  # of this one object
    cast(PosteriorGRPOTrainer, trainer)._begin(settings, scores=False)


def _on_first(work: Callable[[], Any]) -> Any:
    """Run ``work`` on the first process and return its result on all; if it fails there, all fail."""
    result, error = None, None
    if PartialState().is_main_process:
        try:
            result = work()
        except Exception as failure:
            error = failure
    outcome = [result, error and str(error)]
    broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RuntimeError(f"the first process cannot go on: {outcome[1]}")
    return outcome[0]


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
    if name is not None and name not in names:
        raise ValueError(f"verifier {name!r} is none of {', '.join(names)}{did_you_mean(name, names)}")
    if estimator.support == "real" and (name is None or estimator.belief is estimator):
        return None
    if name is None and len(names) > 1:
        raise ValueError(f"{estimator.name!r} needs one score of 0 or 1: give verifier, one of {', '.join(names)}")
    index = 0 if name is None else names.index(name)
    if not weights[index] > 0:
        raise ValueError(f"the weight of verifier {names[index]!r} is {weights[index]:g}; it must be above 0")
    return index


def _text(completion: str | list[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)


def _numpy(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()
