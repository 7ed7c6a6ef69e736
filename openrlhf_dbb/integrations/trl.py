"""TRL's ``GRPOTrainer`` with advantages from stored posteriors.

    from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer

    ours = {"estimator": "dbb", "store": "sqlite:///runs.db", "run_name": "first"}
    trainer = PosteriorGRPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=prompts, **ours)
    trainer.train()

A *step* is one generation batch. TRL's ``global_step`` counts optimizer steps, several of which may train on one
generation batch.

Axes: R rollouts of a generation batch on all processes, B on this process, F reward functions; in evaluations P prompts
and N samples of a prompt.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_dbb import storage
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.posteriors import Posteriors, as_estimator
from openrlhf_dbb.core.step import Floats, Key, Responses, StepExtras
from openrlhf_dbb.errors import did_you_mean
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.storage import TRAINING

shared.check_release("trl")

from accelerate.utils import broadcast_object_list, gather, gather_object  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback, TrainerState  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

_log = logging.getLogger(__name__)


@dataclass
class PosteriorGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig``, which refuses ``num_generations=1``, with one rollout a prompt allowed.

    A posterior has a mean from earlier visits, where TRL has only the group. The generation batch then has to be even.
    """

    def __post_init__(self) -> None:
        config: Any = self
        group = config.num_generations
        if group == 1:
            # TRL only checks these two values here; the trainer reads them later.
            config.num_generations, config.num_generations_eval = 2, config.num_generations_eval or 1
        super().__post_init__()
        config.num_generations = group


class PosteriorState(TrainerCallback, ExportableState):
    """Puts the uuid of the run and its last observed step into the ``trainer_state.json`` of every checkpoint."""

    def __init__(self, run: str = "", step: int = 0) -> None:
        self.run, self.step = run, step

    def state(self) -> dict[str, Any]:
        """Return the state as transformers stores it."""
        return {"args": {"run": self.run, "step": self.step}, "attributes": {}}


class PosteriorGRPOTrainer(GRPOTrainer):
    """TRL's trainer. Of several processes, the first owns the run and computes the advantages of all.

    ``scale_rewards`` keeps its meaning: "group" is (X - mean) / sqrt(variance) of the posterior, "none" is X - mean,
    "batch" divides X - mean by the standard deviation of all rewards of the generation batch. Without TRL's 0.0001 in
    the denominator, the advantage is 0 where the variance is 0.

    Args:
        *args, **options: TRL's. ``train_dataset`` must be a ``datasets.Dataset``, since every prompt must be known.
        estimator, parameters, store, warm_start, warm_start_weight, warm_start_store: as in
            :meth:`openrlhf_dbb.Posteriors.create`.
        run_name: unique in the store; by default ``args.run_name``, else the name of ``args.output_dir``.
        resume: True continues that run with ``train(resume_from_checkpoint=...)``; "auto" continues the run if it
            exists, so that the same command starts and restarts a job.
        take_over: continue a run whose owner is on another machine and known to be dead.
        label_column: column of the data sets that is stored with a prompt and tells equal prompts apart.
        keep_rollouts: number of a step's rollouts that are stored with their texts; None stores all, 0 none.
        verifier: name of the reward function whose 0 or 1 the estimator sees, if there are several. The other rewards
            are centred by their group, as GRPO does. Estimators of real rewards see the weighted sum instead.

    Attributes:
        posteriors: of the run, on the first process; None on the others.

    Raises:
        ValueError: the estimator is unknown, or arguments do not fit together.
        storage.StoreError: the name is taken, the store cannot be opened, or the warm start or resume does not fit.
    """

    def __init__(
        self,
        *args: Any,
        estimator: str | RewardEstimator = "dbb",
        parameters: Mapping[str, Any] | None = None,
        store: storage.PosteriorStore | str | None = None,
        run_name: str | None = None,
        resume: bool | str = False,
        take_over: bool = False,
        warm_start: str | None = None,
        warm_start_weight: float = 1.0,
        warm_start_store: storage.PosteriorStore | str | None = None,
        label_column: str | None = None,
        keep_rollouts: int | None = KEEP,
        verifier: str | None = None,
        **options: Any,
    ) -> None:
        estimator = as_estimator(estimator, parameters)  # an error is raised before a model is loaded
        super().__init__(*args, **options)
        if self.num_generations < estimator.min_rollouts:
            raise ValueError(
                f"estimator {estimator.name!r} needs num_generations of {estimator.min_rollouts} or more, got "
                f"{self.num_generations}; give as many, or use estimator='auto'"
            )
        self._verifier = _verifier(verifier, estimator, self.reward_func_names, self.reward_weights.tolist())
        self._label_column, self._keep_rollouts = label_column, keep_rollouts
        # For "batch" too, _observe divides X - mean by the spread of the batch.
        self._form = "group_norm" if self.scale_rewards == "group" else "batch_centered"
        self._place = self._read_prompts()
        self._keys = list(self._place)
        self.posteriors: Posteriors | None = None
        self._logged: tuple[int, dict[str, float]] = 0, {}
        # Of a held-out prompt's responses the verifier's score (NaN where missing), the length, whether it was cut.
        self._samples: dict[Key, list[tuple[float, int, bool]]] = {}
        self._evaluated: tuple[int, dict[str, storage.EvaluationRows]] = -1, {}  # step, and results by benchmark
        self._scored: tuple[torch.Tensor, list[Any]] | None = None
        self._model_name = str(self.model.config._name_or_path)
        name = run_name or self.args.run_name or Path(self.args.output_dir).name

        def begin() -> str:
            self.posteriors = shared.open_run(
                shared.run_exists(store, name) if resume == "auto" else bool(resume),
                store,
                name,
                self._keys,
                estimator=estimator,
                take_over=take_over,
                warm_start=warm_start,
                warm_start_weight=warm_start_weight,
                warm_start_store=warm_start_store,
                model=self._model_name,
                dataset=str(self.train_dataset.info.dataset_name or ""),
                reward=", ".join(self.reward_func_names),
                config=json.loads(json.dumps(self.args.to_dict(), default=str)),
            )
            return self.posteriors.run.record.uuid

        self._state = PosteriorState(self._on_first(begin))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as TRL does, and finish the run unless the training was stopped before its last step.

        Args:
            resume_from_checkpoint: a folder, or True for the newest whole checkpoint of this run in ``output_dir``. The
                posteriors go back to its step, bit for bit. If there is no checkpoint yet, the run starts over.

        Raises:
            ValueError: the checkpoint is not whole or not of this run, or the run has steps and no checkpoint is given.
            storage.StoreError: the posteriors cannot go back to that step.
        """
        folder, self._state.step = self._on_first(lambda: self._beginning(resume_from_checkpoint))
        self._passes = int(TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}").epoch or 0) if folder else 0
        self._evaluated = -1, {}
        self._attach_state()
        result = super().train(folder, *args, **options)
        if self.state.global_step >= self.state.max_steps:
            self._on_first(lambda: self._run.finish())
        else:
            self._on_first(lambda: self._run.settle())
            _log.warning("stopped at %d of %d: the run can be resumed", self.state.global_step, self.state.max_steps)
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
            self._on_first(lambda: self._record_held_out(metric_key_prefix.removeprefix("eval_"), samples))
        return metrics

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards, completion_ids_list
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score as TRL does; in training the advantages come from the posteriors."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._scored is not None
        (rewards_R_F, responses_B), self._scored = self._scored, None
        if self.model.training:
            output["advantages"] = self._observe(inputs, rewards_R_F, responses_B, output["completion_mask"])
        else:
            self._keep_samples(inputs, rewards_R_F, responses_B)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, and store the numbers in the row of the last step."""
        super().log(logs, start_time)  # adds TRL's averages to logs
        step = self._state.step
        if not (self.model.training and step and self.accelerator.is_main_process):
            return
        if self._logged[0] != step:  # else another optimizer step on the same rollouts, or the summary at the end
            a_step = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
            self._logged = step, {"plan/steps": math.ceil(self.state.max_steps / a_step)}
        self._logged[1].update(logs)
        self._run.record_metrics(step, self._logged[1])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as TRL does, once the posteriors are durable up to the checkpoint."""
        tag = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"  # its folder, and its name in the store

        def prepare() -> None:
            # transformers writes this file last. Without it an older checkpoint of this name is not whole.
            (Path(self.args.output_dir) / tag / TRAINER_STATE_NAME).unlink(missing_ok=True)
            self._run.checkpoint(self._state.step, tag)

        self._on_first(prepare)
        self._attach_state()
        super()._save_checkpoint(model, trial)

    @property
    def _run(self) -> Posteriors:
        assert self.posteriors is not None, "only the first process has them"
        return self.posteriors

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the first process and return its result on all; if it fails there, all fail."""
        result, error = None, None
        if self.accelerator.is_main_process:
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

    def _attach_state(self) -> None:
        """Put our state into the next checkpoint. A resume may have replaced it by an older copy."""
        self.remove_callback(PosteriorState)
        self.add_callback(self._state)

    def _read_prompts(self) -> dict[Key, int]:
        """Return text and label of every distinct prompt with its place; refuse what would go wrong unnoticed."""
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} normalizes each reward function by "
                "itself, and the posteriors are of their sum; use 'sum_then_normalize'"
            )
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"train_dataset is a {type(self.train_dataset).__name__}; posteriors need to know every prompt: pass a "
                "datasets.Dataset"
            )
        label = [] if self._label_column is None else [self._label_column]
        has_images = not {"image", "images"}.isdisjoint(self.train_dataset.column_names)
        places: dict[Key, int] = {}
        for number, row in enumerate(self.train_dataset.select_columns(["prompt", *label])):
            key = self._key(row)
            if has_images and key in places:
                raise ValueError(
                    f"row {number} of train_dataset has the prompt and label of an earlier one, and its image may "
                    "differ: name a column that tells them apart (label_column='id')"
                )
            places.setdefault(key, len(places))
        return places

    def _key(self, row: Mapping[str, Any]) -> Key:
        label = None if self._label_column is None else row.get(self._label_column)
        return text_of(row["prompt"]), label_of(label)

    def _beginning(self, resume_from_checkpoint: str | bool | None) -> tuple[str | None, int]:
        """Take the posteriors back to the checkpoint; return its folder, or None, and its step of the run."""
        if not resume_from_checkpoint and self._run.step:
            raise ValueError(
                f"run {self._run.run.record.name!r} has {self._run.step} steps, and train() would start over: call "
                "train(resume_from_checkpoint=True), or choose another run_name"
            )
        folder, step = None, 0
        if resume_from_checkpoint is True:
            output = Path(self.args.output_dir)
            found = output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            for newest in sorted(found, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
                try:
                    step, folder = _step_of(newest, self._run), str(newest)
                    break
                except ValueError as error:
                    _log.warning("passed over: %s", error)
            else:
                shared.check_start_over(self._run, output)
        elif resume_from_checkpoint:
            folder = str(resume_from_checkpoint)
            step = _step_of(Path(folder), self._run)
        self._run.roll_back(step)
        return folder, step

    def _observe(
        self, inputs: list[dict[str, Any]], rewards_R_F: torch.Tensor, responses_B: list[Any], mask_B: torch.Tensor
    ) -> torch.Tensor:
        """Do one more step of the posteriors; return this process's advantages (B,)."""
        keys = [self._key(row) for row in inputs]
        unknown = next((key for key in keys if key not in self._place), None)
        if unknown is not None:
            raise ValueError(
                f"prompt {unknown[0][:80]!r} with label {unknown[1][:80]!r} is not in train_dataset; if the label is "
                "missing, use remove_unused_columns=False"
            )
        places = [self._place[key] for key in keys]
        lengths, cut = [len(ids) for ids in responses_B], [ids[-1] not in self.eos_token_ids for ids in responses_B]
        trained = mask_B.any(dim=1).tolist()  # mask_truncated_completions may have masked a response
        device = rewards_R_F.device
        rows_B = torch.tensor([*zip(places, lengths, trained, cut, strict=True)], dtype=torch.long, device=device)
        places_R, tokens_R, trained_R, cut_R = gather(rows_B).cpu().numpy().T
        keys_R = [self._keys[place] for place in places_R]
        # TRL has just gathered the completions of this batch for its own log.
        texts_R = [_text(completion) for completion in self._logs["completion"]][-len(keys_R) :]
        responses = Responses(texts_R, truncated=cut_R, keep=self._keep_rollouts)
        extras = StepExtras(tokens=tokens_R, trained=trained_R, responses=responses)

        def score() -> tuple[Floats, dict[str, float], int]:
            weights = _numpy(self.reward_weights)
            rewards, scores, scale = combine(_numpy(rewards_R_F), weights, self._verifier, self.num_generations)
            prompts, labels = zip(*keys_R, strict=True)
            step = self._run.step + 1
            scored = self._run.observe(step, prompts, labels, rewards, scores=scores, form=self._form, extras=extras)
            advantages = scored.advantages
            if self.scale_rewards == "none":
                advantages = advantages * scale
            elif self.scale_rewards == "batch":
                spread = np.std(rewards[~np.isnan(rewards)], ddof=1) if len(rewards) > 1 else 0.0
                advantages = advantages / spread if spread > 0 else np.zeros(len(rewards))
            self._logs["extra"]["posterior_mean"].extend(scored.mean.tolist())
            return advantages, scored.metrics, step

        advantages_R, metrics, self._state.step = self._on_first(score)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        logged = self._logs["advantages"]  # the last ones are TRL's own advantages of this batch
        for _ in range(min(len(advantages_R), len(logged))):
            logged.pop()
        logged.extend(advantages_R.tolist())
        first = self.accelerator.process_index * len(inputs)
        return torch.tensor(advantages_R[first : first + len(inputs)], dtype=torch.float32, device=device)

    def _keep_samples(self, inputs: list[dict[str, Any]], rewards_R_F: torch.Tensor, responses_B: list[Any]) -> None:
        """Keep a batch of an evaluation until the evaluation ends."""
        self._logs["extra"]["posterior_mean"].extend([math.nan] * len(rewards_R_F))  # as long as TRL's own columns
        rewards, scores, _ = combine(_numpy(rewards_R_F), _numpy(self.reward_weights), self._verifier, group=1)
        rows_B = zip(map(self._key, inputs), responses_B, strict=True)
        rows_R = gather_object([(key, len(ids), ids[-1] not in self.eos_token_ids) for key, ids in rows_B])
        scored_R = zip(rows_R, (rewards if scores is None else scores).tolist(), strict=True)
        for (prompt, tokens, cut), value in scored_R:
            self._samples.setdefault(prompt, []).append((value, tokens, cut))

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


def combine(
    rewards_R_F: Floats, weights_F: Floats, verifier: int | None, group: int
) -> tuple[Floats, Floats | None, float]:
    """Combine the values of several reward functions for the posteriors.

    Args:
        rewards_R_F: NaN where a function returned None.
        weights_F: of the functions.
        verifier: index of the function whose score the estimator sees; None for the weighted sum.
        group: rollouts of a prompt, which are side by side.

    Returns:
        Rewards (R,), NaN where missing; scores (R,), None without a verifier; and the factor that brings the rewards to
        TRL's scale. With a verifier of weight w and score S the rewards are S + (others - their group's mean) / w.
    """
    weighted_R = np.nansum(rewards_R_F * weights_F, axis=1)
    if verifier is None:
        return np.where(np.isnan(rewards_R_F).all(axis=1), np.nan, weighted_R), None, 1.0
    scores_R, weight = rewards_R_F[:, verifier], float(weights_F[verifier])
    others = (weighted_R - np.nan_to_num(scores_R) * weight).reshape(-1, group)
    return scores_R + (others - others.mean(axis=1, keepdims=True)).reshape(-1) / weight, scores_R, weight


def _verifier(name: str | None, estimator: RewardEstimator, names: list[str], weights: list[float]) -> int | None:
    """Return the index of the reward function whose score the estimator sees; None for the weighted sum."""
    if name is not None and name not in names:
        raise ValueError(
            f"verifier {name!r} is not a reward function{did_you_mean(name, names)}; there are {', '.join(names)}"
        )
    if estimator.support == "real":
        return None
    if name is None and len(names) > 1:
        raise ValueError(
            f"estimator {estimator.name!r} needs one score of 0 or 1, and there are {len(names)} reward functions "
            f"({', '.join(names)}): name the one it sees (verifier={names[0]!r}), or use estimator='gaussian'"
        )
    index = 0 if name is None else names.index(name)
    if not weights[index] > 0:
        raise ValueError(f"the weight of verifier {names[index]!r} is {weights[index]:g}; it must be above 0")
    return index


def _step_of(folder: Path, posteriors: Posteriors) -> int:
    """Return the step of a checkpoint; refuse one that is not whole, or not of this run as it now is."""
    try:  # transformers writes this file after the model, the optimizer and the random state
        saved = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        ours = saved.stateful_callbacks.get(PosteriorState.__name__)
        run, step = (ours["args"]["run"], int(ours["args"]["step"])) if ours is not None else ("", 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"checkpoint {folder} is not whole: {TRAINER_STATE_NAME}: {error}; use an older one") from None
    if ours is None:
        raise ValueError(
            f"checkpoint {folder} was not saved by PosteriorGRPOTrainer; pass it as model, to begin with new posteriors"
        )
    shared.check_checkpoint(posteriors, folder, run, step, f"{PREFIX_CHECKPOINT_DIR}-{saved.global_step}")
    return step


def _text(completion: str | list[dict[str, Any]]) -> str:
    """Return a completion as text; of messages, their contents."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)


def _numpy(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()
