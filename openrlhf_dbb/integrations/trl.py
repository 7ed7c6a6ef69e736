"""TRL's ``GRPOTrainer`` with advantages from stored posteriors; everything else is TRL's.

    from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer

    ours = {"estimator": "dbb", "store": "sqlite:///runs.db", "run_name": "first"}
    trainer = PosteriorGRPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=prompts, **ours)
    trainer.train()

``OVERRIDDEN`` and ``READ`` list what is reached of TRL beyond its documentation. A *step* is one generation batch;
TRL's ``global_step`` counts optimizer steps, of which a generation batch may have several.

Axes: R rollouts of a generation batch on all processes, B on this one, F reward functions.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import estimators
import storage
from estimators import RewardEstimator
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Floats, Key, Responses, Scored, StepExtras, rows_to_keep
from openrlhf_dbb.integrations import runs, versions
from openrlhf_dbb.integrations.held_out import HeldOut, Sample
from openrlhf_dbb.integrations.prompts import label_of, text_of
from openrlhf_dbb.spelling import did_you_mean

versions.check("trl")

from accelerate.utils import broadcast_object_list, gather, gather_object  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from openrlhf_dbb.integrations import trl_checkpoints as checkpoints  # noqa: E402

OVERRIDDEN = {
    "train": "resume_from_checkpoint, trial, ignore_keys_for_eval",
    "evaluate": "eval_dataset, ignore_keys, metric_key_prefix",
    "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
    "_generate_and_score_completions": "inputs",
    "log": "logs, start_time",
    "_save_checkpoint": "model, trial",
}
"""Methods and their parameters; a test holds the installed TRL to them."""

READ = (
    *("reward_func_names", "reward_weights", "multi_objective_aggregation", "scale_rewards", "num_generations"),
    *("num_generations_eval", "num_iterations", "eos_token_ids", "_metrics", "_logs"),
)
"""Attributes of TRL's trainer; a test holds the installed TRL to them."""

_log = logging.getLogger(__name__)


class PosteriorGRPOTrainer(GRPOTrainer):
    """TRL's trainer; of several processes, the first one owns the run and computes the advantages of all.

    ``scale_rewards`` keeps its meaning: "group" is (X - mean) / sqrt(variance) of the posterior, "none" is X - mean,
    "batch" divides that by the standard deviation of all rewards of the generation batch. TRL's 0.0001 in the
    denominator is left out: without variance the advantage is 0.

    Args:
        *args, **options: TRL's. ``train_dataset`` must be a ``datasets.Dataset``: every prompt has to be known.
        estimator: name, ``package.module:Class``, or an object; see :mod:`estimators`.
        parameters: of an estimator given by name, such as ``{"discount": 0.5}``.
        store: an open store, or its URL (``sqlite:///FILE``, ``postgresql://...``); None for the default.
        run_name: unique in the store; by default ``args.run_name``, or else the name of ``args.output_dir``.
        resume: True to continue that run with ``train(resume_from_checkpoint=...)``; "auto" to continue it if it is
            there, for a job that is started again by the same command.
        take_over: continue a run whose owner is on another machine and known to be dead.
        warm_start: run (name, uuid or number) whose final posteriors this one begins with; ignored by a resume.
        warm_start_weight: in (0, 1], multiplies the imported counts.
        warm_start_store: where that run is, if not in ``store``.
        label_column: column of the data sets that is stored with a prompt, and tells equal ones apart; None for none.
        keep_rollouts: how many of a step's rollouts are stored with their texts; None: all; 0: none.
        verifier: name of the reward function whose 0 or 1 the estimator sees, where there are several; what the others
            give is centred by its group, as GRPO does. Estimators of real rewards see the weighted sum instead.

    Attributes:
        posteriors: of the run, on the first process; None on the others.

    Raises:
        ValueError: an unknown estimator, or arguments that do not fit together.
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
        if resume not in (True, False, "auto"):
            raise ValueError(f"resume={resume!r} is unknown; use True, False or 'auto'")
        if isinstance(estimator, str):
            estimator = estimators.build(estimator, **(parameters or {}))  # before a model is loaded
        elif parameters is not None:
            raise ValueError(f"parameters {dict(parameters)} go with an estimator's name; the object has its own")
        runs.check_features(estimator)
        super().__init__(*args, **options)
        self._verifier = _verifier(verifier, estimator, self.reward_func_names, self.reward_weights.tolist())
        self._label_column, self._keep_rollouts = label_column, keep_rollouts
        self._check()
        self._form = "group_norm" if self.scale_rewards == "group" else "dr_grpo"
        self._read_prompts()
        self.posteriors: Posteriors | None = None
        self._resumes, self._ended = bool(resume), False
        self._logged: tuple[int, dict[str, float]] = 0, {}
        self._held_out, self._samples = HeldOut(), list[Sample]()
        self._scored: tuple[torch.Tensor, list[Any]] | None = None
        name = run_name or self.args.run_name or Path(self.args.output_dir).name

        def create() -> Posteriors:
            return Posteriors.create(
                store,
                name,
                *zip(*self._keys, strict=True),
                estimator=estimator,
                warm_start=warm_start,
                warm_start_weight=warm_start_weight,
                warm_start_store=warm_start_store,
                model=self._model_name,
                dataset=str(self.train_dataset.info.dataset_name or ""),
                reward=", ".join(self.reward_func_names),
                config=_shown(self.args.to_dict()),
            )

        def go_on() -> Posteriors:
            keys = zip(*self._keys, strict=True)
            return runs.resume(store, name, *keys, estimator=estimator, take_over=take_over)

        def begin() -> str:
            is_there = runs.exists(store, name) if resume == "auto" else resume
            self.posteriors = go_on() if is_there else create()
            return self.posteriors.run.record.uuid

        self._state = checkpoints.PosteriorState(self._first(begin))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """TRL's training; the run is finished at its end, unless it was stopped before its last step.

        Args:
            resume_from_checkpoint: a folder, or True for the newest whole checkpoint of this run in ``output_dir``: the
                posteriors go back to its step, bit for bit. If there is none, all begins anew, the posteriors too.

        Raises:
            ValueError: the checkpoint is not whole or not of this run; the run has steps and no checkpoint is given, or
                none is found and there were some; or it is finished.
            storage.StoreError: the posteriors cannot go back to that step.
        """
        folder, self._state.step = self._first(lambda: self._beginning(resume_from_checkpoint))
        self._held_out = HeldOut()
        self._attach_state()
        result = super().train(folder, *args, **options)
        if self.state.global_step >= self.state.max_steps:
            self._first(lambda: self._run.finish())
            self._ended = True
        else:
            self._first(lambda: self._run.settle())
            _log.warning("stopped at %d of %d: the run can be resumed", self.state.global_step, self.state.max_steps)
        return result

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """TRL's evaluation; what each prompt scored is stored with the run, and no posterior changes."""
        self._samples = []
        metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        samples, self._samples = self._samples, []
        if samples:  # there are none if each of several data sets has come through here by itself
            self._first(lambda: self._record_held_out(metric_key_prefix.removeprefix("eval_"), samples))
        return metrics

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """TRL's; kept until the advantages are computed."""
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards, completion_ids_list
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, in training with advantages from the posteriors."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._scored is not None
        (rewards_R_F, responses_B), self._scored = self._scored, None
        if self.model.training:
            output["advantages"] = self._observe(inputs, rewards_R_F, responses_B, output["completion_mask"])
        else:
            self._keep(inputs, rewards_R_F, responses_B)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's; the numbers are stored too, in the row of the last step."""
        super().log(logs, start_time)  # adds its averages to logs
        step = self._state.step
        if not (self.model.training and step and self.accelerator.is_main_process):
            return
        if self._logged[0] != step:  # else further optimizer steps on the same rollouts, or the summary at the end
            a_step = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
            self._logged = step, {"plan/steps": math.ceil(self.state.max_steps / a_step)}
        self._logged[1].update(logs)
        self._run.record_metrics(step, self._logged[1])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's, once the posteriors are durable up to it."""
        tag = checkpoints.tag(self.state.global_step)

        def prepare() -> None:
            checkpoints.begin(self.args.output_dir, tag)
            self._run.checkpoint(self._state.step, tag)

        self._first(prepare)
        self._attach_state()
        super()._save_checkpoint(model, trial)

    @property
    def _run(self) -> Posteriors:
        assert self.posteriors is not None, "the first process alone has them"
        return self.posteriors

    @property
    def _model_name(self) -> str:
        return str(self.model.config._name_or_path)

    def _first(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on the first process, on all of them; where it fails there, all fail."""
        result, error = None, None
        if self.accelerator.is_main_process:
            try:
                result = work()
            except Exception as found:
                error = found
        shared = [result, error and str(error)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        if error is not None:
            raise error
        if shared[1] is not None:
            raise RuntimeError(f"the first process cannot go on: {shared[1]}")
        return shared[0]

    def _attach_state(self) -> None:
        """Have our line in the next checkpoint; a resume may have put an older copy in its place."""
        self.remove_callback(checkpoints.PosteriorState)
        self.add_callback(self._state)

    def _check(self) -> None:
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
        columns, label = self.train_dataset.column_names, self._label_column
        for argument, column in (("column", "prompt"), ("label_column", label)):
            if column is not None and column not in columns:
                raise ValueError(
                    f"{argument} {column!r} is not in train_dataset{did_you_mean(column, columns)}; it has "
                    f"{', '.join(columns)}"
                )
        if label is not None and self.args.remove_unused_columns:
            raise ValueError(f"remove_unused_columns=True drops label_column {label!r} before it is read; use False")

    def _read_prompts(self) -> None:
        """Keep text and label of every distinct prompt, and its place among them.

        Raises:
            ValueError: rows that only their images tell apart.
        """
        label = [] if self._label_column is None else [self._label_column]
        has_images = not {"image", "images"}.isdisjoint(self.train_dataset.column_names)
        self._places: dict[Key, int] = {}
        for number, row in enumerate(self.train_dataset.select_columns(["prompt", *label])):
            key = self._key(row)
            if has_images and key in self._places:
                raise ValueError(
                    f"row {number} of train_dataset has the prompt and label of an earlier one, and its image may "
                    "differ: name a column that tells them apart (label_column='id')"
                )
            self._places.setdefault(key, len(self._places))
        self._keys = list(self._places)

    def _key(self, row: Mapping[str, Any]) -> Key:
        label = None if self._label_column is None else row.get(self._label_column)
        return text_of(row["prompt"]), label_of(label)

    def _beginning(self, resume_from_checkpoint: str | bool | None) -> tuple[str | None, int]:
        """The checkpoint to begin with, and its step of the run; the posteriors go back there."""
        name = self._run.run.record.name
        if self._ended:
            raise ValueError(
                f"run {name!r} is finished; make a new trainer with another run_name, and warm_start={name!r} to begin "
                "with its posteriors"
            )
        if not resume_from_checkpoint and self._run.step:
            raise ValueError(
                f"run {name!r} has {self._run.step} steps, and train() would begin anew: call "
                "train(resume_from_checkpoint=True), or choose another run_name"
            )
        if resume_from_checkpoint and not self._resumes and not self._run.step:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} needs the posteriors of that run: make the trainer "
                "with resume=True; to go on from a model with new posteriors, pass it as model"
            )
        folder, step = None, 0
        if resume_from_checkpoint is True:
            folder, step = checkpoints.newest(self.args.output_dir, self._run)
        elif resume_from_checkpoint:
            folder = str(resume_from_checkpoint)
            step = checkpoints.step_of(Path(folder), self._run)
        self._run.roll_back(step)
        return folder, step

    def _observe(
        self, inputs: list[dict[str, Any]], rewards_R_F: torch.Tensor, responses_B: list[Any], mask_B: torch.Tensor
    ) -> torch.Tensor:
        """This process's advantages (B,), after one more step of the posteriors."""
        keys = [self._key(row) for row in inputs]
        unknown = next((key for key in keys if key not in self._places), None)
        if unknown is not None:
            raise ValueError(f"prompt {unknown[0][:80]!r} was not in train_dataset when the trainer was made")
        places = [self._places[key] for key in keys]
        lengths = [len(response) for response in responses_B]
        trained = mask_B.any(dim=1).tolist()  # not what mask_truncated_completions has masked
        device = rewards_R_F.device
        rows = gather(torch.tensor([*zip(places, lengths, trained, strict=True)], dtype=torch.long, device=device))

        places_R, tokens_R, trained_R = rows.cpu().numpy().T
        keys_R = [self._keys[place] for place in places_R]
        written = self._responses(keys_R, responses_B)

        def score() -> tuple[Floats, dict[str, float], int]:
            advantages, scored = self._score(_numpy(rewards_R_F), keys_R, tokens_R, trained_R, written)
            return advantages, scored.metrics, self._run.step

        advantages_R, metrics, self._state.step = self._first(score)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        logged = self._logs["advantages"]  # TRL's own are its last ones
        for _ in range(min(len(advantages_R), len(logged))):
            logged.pop()
        logged.extend(advantages_R.tolist())
        first = self.accelerator.process_index * len(inputs)
        return torch.tensor(advantages_R[first : first + len(inputs)], dtype=torch.float32, device=device)

    def _responses(self, keys_R: list[Key], responses_B: list[Any]) -> Responses | None:
        """What was written in all processes; each decodes those of its own that are kept."""
        if self._keep_rollouts == 0:
            return None
        first = self.accelerator.process_index * len(responses_B)
        kept = rows_to_keep(keys_R, self._state.step + 1, self._keep_rollouts).tolist()
        mine = {
            row: (
                self.processing_class.decode(responses_B[row - first], skip_special_tokens=True),
                responses_B[row - first][-1] not in self.eos_token_ids,
            )
            for row in kept
            if first <= row < first + len(responses_B)
        }
        texts, truncated = [""] * len(keys_R), np.full(len(keys_R), np.nan)
        for found in gather_object([mine]):
            for row, (text, cut) in found.items():
                texts[row], truncated[row] = text, cut
        return Responses(texts, truncated=truncated, keep=self._keep_rollouts)

    def _score(
        self, rewards_R_F: Floats, keys_R: list[Key], tokens: Any, trained: Any, responses: Responses | None
    ) -> tuple[Floats, Scored]:
        """The advantages of all R rollouts."""
        rewards, scores, weight = combine(
            rewards_R_F, _numpy(self.reward_weights), self._verifier, self.num_generations
        )
        prompts, labels = zip(*keys_R, strict=True)
        scored = self._run.observe(
            self._run.step + 1,
            prompts,
            labels,
            rewards,
            scores=scores,
            form=self._form,
            extras=StepExtras(tokens=tokens, trained=trained, responses=responses),
        )
        if self.scale_rewards == "none":
            return scored.advantages * weight, scored
        if self.scale_rewards == "batch":
            spread = np.std(rewards[~np.isnan(rewards)], ddof=1) if len(rewards) > 1 else 0.0
            return (scored.advantages / spread if spread > 0 else np.zeros(len(rewards))), scored
        return scored.advantages, scored

    def _keep(self, inputs: list[dict[str, Any]], rewards_R_F: torch.Tensor, responses_B: list[Any]) -> None:
        """Keep a batch of an evaluation until its end."""
        rewards, scores, _ = combine(_numpy(rewards_R_F), _numpy(self.reward_weights), self._verifier, group=1)
        rows_B = [
            (self._key(row), len(ids), ids[-1] not in self.eos_token_ids)
            for row, ids in zip(inputs, responses_B, strict=True)
        ]
        measured = (rewards if scores is None else scores).tolist()
        found = zip(gather_object(rows_B), measured, strict=True)
        self._samples += [Sample(prompt, score, tokens, truncated) for (prompt, tokens, truncated), score in found]

    def _record_held_out(self, benchmark: str, samples: list[Sample]) -> None:
        self._run.settle()
        self._held_out.record(
            self._run.store,
            self._run.run.record,
            self._run.step,
            benchmark,
            samples,
            self.num_generations_eval,
            model=self._model_name,
            config={"temperature": self.args.temperature, "max_completion_length": self.args.max_completion_length},
        )


def combine(
    rewards_R_F: Floats, weights_F: Floats, verifier: int | None, group: int
) -> tuple[Floats, Floats | None, float]:
    """What the posteriors are given of several reward functions.

    Args:
        rewards_R_F: NaN where a function returned None.
        weights_F: of the functions.
        verifier: index of the one whose score the estimator sees; None for their weighted sum.
        group: rollouts of a prompt; they are side by side.

    Returns:
        Rewards (R,), NaN where missing; scores (R,), None without a verifier; and what the rewards are to be multiplied
        by for TRL's scale. With a verifier of weight w the rewards are S + (others - their group's mean) / w.
    """
    weighted_R = np.nansum(rewards_R_F * weights_F, axis=1)
    if verifier is None:
        return np.where(np.isnan(rewards_R_F).all(axis=1), np.nan, weighted_R), None, 1.0
    scores_R, weight = rewards_R_F[:, verifier], float(weights_F[verifier])
    others = (weighted_R - np.nan_to_num(scores_R) * weight).reshape(-1, group)
    return scores_R + (others - others.mean(axis=1, keepdims=True)).reshape(-1) / weight, scores_R, weight


def _verifier(name: str | None, estimator: RewardEstimator, names: list[str], weights: list[float]) -> int | None:
    """Index of the reward function whose score the estimator sees; None for the weighted sum."""
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


def _numpy(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's arguments as they may be stored: plain JSON, no key to a service."""
    plain = json.loads(json.dumps(dict(values), default=str))
    hidden = [name for name in plain if name.endswith(("_token", "_key")) or name == "model_init_kwargs"]
    return {name: value for name, value in plain.items() if name not in hidden}
