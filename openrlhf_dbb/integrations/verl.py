"""verl's trainers with advantages from stored posteriors; everything else is verl's.

    export VERL_USE_EXTERNAL_MODULES=openrlhf_dbb.integrations.verl
    python -m verl.trainer.main_ppo algorithm.adv_estimator=posterior \\
        +algorithm.posterior.estimator=dbb +algorithm.posterior.store=sqlite:////data/runs.db ...

verl imports this module in each of its processes. It registers the estimator ``posterior`` and puts a subclass in the
place of each of verl's three trainers (``sync``, ``colocate_async``, ``separate_async``); with another estimator these
do what verl's do. ``OVERRIDDEN`` and ``CALLED`` list what is reached of verl beyond its documentation. The trainer runs
in one process, and owns the run.

A *step* is one call of verl's ``_compute_advantage``; ``separate_async`` makes several in each of its global steps.

Axes: R rows (trajectories) of a batch, T tokens of the longest response, S rollouts (verl's sessions) among the rows: a
rollout may have left several trajectories, and rows that verl appended as padding belong to none.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import estimators
from estimators import RewardEstimator
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Floats, Key, Positions, Responses, StepExtras
from openrlhf_dbb.integrations import runs, versions
from openrlhf_dbb.integrations.prompts import label_of, text_of
from openrlhf_dbb.spelling import did_you_mean

versions.check("verl")

import transfer_queue as tq  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.core_algos import register_adv_est  # noqa: E402
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer  # noqa: E402

NAME = "posterior"
"""Value of ``algorithm.adv_estimator``, and the key of our settings beside it."""

OVERRIDDEN = {
    "__init__": "config",
    "_load_checkpoint": "",
    "_compute_advantage": "batch, metrics",
    "_save_checkpoint": "",
    "_compute_metrics": "batch, metrics, timing_raw, global_steps, epoch",
    "fit": "agent_loop_manager",
}
"""Methods of verl's trainer and their parameters; a test holds the installed verl to them."""

CALLED = {
    "verl.trainer.ppo.ray_trainer.compute_advantage": "data, adv_estimator, gamma, lam, num_repeat, "
    "norm_adv_by_std_in_grpo, config",
    "verl.trainer.ppo.v1.utils.compute_advantage_for_multi_trajectories": "data, batch_keys, adv_estimator, gamma, "
    "lam, num_repeat, norm_adv_by_std_in_grpo, config",
    "transfer_queue.kv_batch_get": "keys, partition_id, select_fields",
}
"""Functions that stand between ``_compute_advantage`` and :func:`advantages`; held to likewise."""

_log = logging.getLogger(__name__)
_FIELDS = ["raw_prompt", "reward_model", "rm_scores", "response_mask", "responses"]
_SAVED = "posteriors.json"


@dataclass(frozen=True)
class Settings:
    """``algorithm.posterior``.

    Attributes:
        estimator: name or ``package.module:Class``; see :mod:`estimators`.
        parameters: of the estimator, such as ``{discount: 0.5}``.
        store: URL (``sqlite:////ABSOLUTE/FILE``, ``postgresql://...``); None for the default. verl prints its
            configuration: a URL with a password belongs into the environment variable of the default.
        run_name: unique in the store; by default ``trainer.experiment_name``.
        warm_start: run (name, uuid or number) whose final posteriors a new run begins with.
        warm_start_weight: in (0, 1], multiplies the imported counts.
        warm_start_store: where that run is, if not in ``store``.
        take_over: continue a run whose owner is on another machine and known to be dead.
        keep_rollouts: how many of a step's rollouts are stored with their texts; null: all; 0: none.
    """

    estimator: str = "dbb"
    parameters: dict[str, Any] = field(default_factory=dict)
    store: str | None = None
    run_name: str | None = None
    warm_start: str | None = None
    warm_start_weight: float = 1.0
    warm_start_store: str | None = None
    take_over: bool = False
    keep_rollouts: int | None = KEEP

    @classmethod
    def of(cls, config: DictConfig) -> Settings:
        """verl's configuration, checked before anything is loaded.

        Raises:
            ValueError: an unknown setting or estimator, or something of verl's that does not go with posteriors.
        """
        given = config.algorithm.get(NAME) or {}
        values = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else dict(given)
        known = [one.name for one in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(
                    f"algorithm.{NAME}.{name} is not a setting{did_you_mean(name, known)}; there are {', '.join(known)}"
                )
        filtering = config.algorithm.get("filter_groups")
        if filtering is not None and filtering.get("enable", False):
            raise ValueError(
                "algorithm.filter_groups.enable=True drops groups before they can be observed, and the posteriors "
                "would never see a prompt that is always or never solved; use False"
            )
        settings = cls(**values)
        runs.check_features(settings.build())
        return settings

    def build(self) -> RewardEstimator:
        """The estimator."""
        return estimators.build(self.estimator, **self.parameters)


@dataclass(frozen=True)
class Batch:
    """What a batch has of each of its S rollouts, and which rows are theirs.

    Attributes:
        rollout_R: (R,) each row's rollout; -1 for padding.
        last_S: (S,) row of each rollout's last trajectory, which carries its reward.
        prompts, labels: (S,) as in the data set.
        scores_S: (S,) the reward function's, without any KL penalty; NaN where it gave NaN.
        tokens_S: (S,) tokens that the model generated, over all trajectories.
        responses: token ids of each rollout's last trajectory.
    """

    rollout_R: Positions
    last_S: Positions
    prompts: list[str]
    labels: list[str]
    scores_S: Floats
    tokens_S: Positions
    responses: list[torch.Tensor]

    @classmethod
    def of(cls, batch: KVBatchMeta) -> Batch:
        """Read them from TransferQueue, where verl keeps what the batch only names."""
        rollout_R = np.full(len(batch), -1)
        last: list[tuple[int, int]] = []  # of each rollout: number of its last trajectory, and its row
        places: dict[str, int] = {}
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding", False):
                continue
            rollout, number = key.rsplit("_", 1)  # {uid}_{session}_{number of the trajectory}
            place = rollout_R[row] = places.setdefault(rollout, len(places))
            if place == len(last):
                last.append((int(number), row))
            else:
                last[place] = max(last[place], (int(number), row))
        last_S = np.array([row for _, row in last])
        data = tq.kv_batch_get(keys=list(batch.keys), partition_id=batch.partition_id, select_fields=_FIELDS)
        scores_R = _row_sums(data["rm_scores"])
        tokens_R = _row_sums(data["response_mask"]).astype(np.int64)
        real = rollout_R >= 0
        messages = _objects(data, "raw_prompt")
        rewarding = _objects(data, "reward_model") if "reward_model" in data.keys() else [None] * len(batch)  # noqa: SIM118
        return cls(
            rollout_R=rollout_R,
            last_S=last_S,
            prompts=[text_of(messages[row]) for row in last_S],
            labels=[_label(rewarding[row]) for row in last_S],
            scores_S=scores_R[last_S],
            tokens_S=np.bincount(rollout_R[real], weights=tokens_R[real], minlength=len(last)).astype(np.int64),
            responses=[data["responses"][int(row)] for row in last_S],
        )


class Texts(Sequence[str]):
    """Responses, decoded when they are asked for."""

    def __init__(self, responses: list[torch.Tensor], tokenizer: Any) -> None:
        self._responses, self._tokenizer = responses, tokenizer

    def __len__(self) -> int:
        return len(self._responses)

    def __getitem__(self, place: Any) -> Any:
        return self._tokenizer.decode(self._responses[place], skip_special_tokens=True)


class Turn:
    """One step: verl asks :func:`advantages` for the advantages, and we answer with those of the rollouts read before.

    Attributes:
        metrics: of the step, to be logged; empty until then.
    """

    def __init__(self, posteriors: Posteriors, rollouts: Batch, form: str, responses: Responses | None) -> None:
        self._posteriors, self._rollouts, self._form, self._responses = posteriors, rollouts, form, responses
        self.metrics: dict[str, float] = {}

    def advantages_R(self, rewards_R_T: torch.Tensor, mask_R_T: torch.Tensor) -> Floats:
        """Observe the step; 0 for padding."""
        rollouts = self._rollouts
        kept_R = mask_R_T.any(dim=-1).cpu().numpy()  # rollout correction may have masked a whole response
        trained_S = np.zeros(len(rollouts.last_S), dtype=np.bool_)
        trained_S[rollouts.rollout_R[kept_R & (rollouts.rollout_R >= 0)]] = True
        scored = self._posteriors.observe(
            self._posteriors.step + 1,
            rollouts.prompts,
            rollouts.labels,
            _row_sums(rewards_R_T)[rollouts.last_S],
            scores=rollouts.scores_S,
            form=self._form,
            extras=StepExtras(tokens=rollouts.tokens_S, trained=trained_S, responses=self._responses),
        )
        self.metrics = scored.metrics
        return np.where(rollouts.rollout_R >= 0, scored.advantages[rollouts.rollout_R], 0.0)


_TURN: ContextVar[Turn] = ContextVar("turn")


@register_adv_est(NAME)
def advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (R, T) of the batch at hand, the same at each token of a response.

    Args:
        token_level_rewards: (R, T) with the KL penalty, if there is one.
        response_mask: (R, T) 1 where a token was generated and is trained on.

    Raises:
        ValueError: the trainer is not one of ours.
    """
    turn = _TURN.get(None)
    if turn is None:
        raise ValueError(
            f"algorithm.adv_estimator={NAME} has no trainer that knows the prompts; use trainer.use_v1=True and "
            f"trainer.v1.trainer_mode {', '.join(TRAINERS)}"
        )
    values = torch.as_tensor(turn.advantages_R(token_level_rewards, response_mask), dtype=torch.float32)
    result = values.to(response_mask.device).unsqueeze(-1) * response_mask
    return result, result


class WithPosteriors(PPOTrainer):
    """What each of verl's trainers becomes; see ``OVERRIDDEN``.

    ``algorithm.norm_adv_by_std_in_grpo`` keeps its meaning: True is (X - mean) / sqrt(variance) of the posterior, False
    is X - mean. verl's 0.000001 in the denominator is left out: without variance the advantage is 0.

    Attributes:
        posteriors: of the run; None with another estimator, with ``trainer.val_only`` and before they are loaded.
    """

    def __init__(self, config: DictConfig) -> None:
        self.posteriors: Posteriors | None = None
        self._settings = Settings.of(config) if config.algorithm.adv_estimator == NAME else None
        self._form = "group_norm" if config.algorithm.get("norm_adv_by_std_in_grpo", True) else "dr_grpo"
        super().__init__(config)

    def _load_checkpoint(self) -> None:
        """verl's; then the run is created, or goes back to the step that the checkpoint is of."""
        super()._load_checkpoint()
        if self._settings is not None and not self.config.trainer.get("val_only", False):
            self.posteriors = self._open(self._settings)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's, with our estimator's answer."""
        if self.posteriors is None or self._settings is None:
            return super()._compute_advantage(batch, metrics)
        rollouts, keep = Batch.of(batch), self._settings.keep_rollouts
        responses = Responses(Texts(rollouts.responses, self.tokenizer), keep=keep) if keep != 0 else None
        turn = Turn(self.posteriors, rollouts, self._form, responses)
        token = _TURN.set(turn)
        try:
            batch = super()._compute_advantage(batch, metrics)
        finally:
            _TURN.reset(token)
        metrics.update(turn.metrics)
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **options: Any) -> None:
        """verl's, stored too in the row of the last step."""
        super()._compute_metrics(batch, metrics, *args, **options)
        if self.posteriors is not None and self.posteriors.step:
            planned = self.total_training_steps * self.posteriors.step / max(self.global_steps, 1)
            self.posteriors.record_metrics(self.posteriors.step, {**metrics, "plan/steps": round(planned)})

    def _save_checkpoint(self) -> None:
        """verl's, once every step up to here is durable."""
        if self.posteriors is not None:
            name = _tag(self.global_steps)
            folder = Path(self.config.trainer.default_local_dir) / name
            folder.mkdir(parents=True, exist_ok=True)
            self.posteriors.checkpoint(self.posteriors.step, name)
            saved = {"run": self.posteriors.run.record.uuid, "step": self.posteriors.step}
            (folder / _SAVED).write_text(json.dumps(saved))
        super()._save_checkpoint()

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's; at its end the run is finished. A run that was interrupted can be resumed."""
        try:
            super().fit(agent_loop_manager)
            if self.posteriors is not None:
                self.posteriors.finish()
        finally:
            if self.posteriors is not None:
                self.posteriors.close()

    def _open(self, settings: Settings) -> Posteriors:
        trainer = self.config.trainer
        name = settings.run_name or str(trainer.experiment_name)
        prompts, labels = zip(*keys_of(self.train_dataset), strict=True)
        if not runs.exists(settings.store, name):
            if self.global_steps:
                _log.warning("verl goes on from global step %d, and run %r is new", self.global_steps, name)
            return Posteriors.create(
                settings.store,
                name,
                prompts,
                labels,
                estimator=settings.estimator,
                parameters=settings.parameters,
                warm_start=settings.warm_start,
                warm_start_weight=settings.warm_start_weight,
                warm_start_store=settings.warm_start_store,
                model=str(self.config.actor_rollout_ref.model.path),
                dataset=", ".join(Path(file).name for file in _files(self.config.data.train_files)),
                method=f"verl {trainer.v1.trainer_mode}",
            )
        if trainer.resume_mode == "disable":
            raise ValueError(
                f"run {name!r} is in the store, and trainer.resume_mode=disable begins anew; choose another "
                f"+algorithm.{NAME}.run_name"
            )
        posteriors = runs.resume(
            settings.store, name, prompts, labels, estimator=settings.build(), take_over=settings.take_over
        )
        try:
            posteriors.roll_back(self._step_of_checkpoint(posteriors))
        except BaseException:
            posteriors.close()
            raise
        return posteriors

    def _step_of_checkpoint(self, posteriors: Posteriors) -> int:
        """The step of the run that the loaded checkpoint is of; 0 if verl begins from the start.

        Raises:
            ValueError: it is not a checkpoint of this run as it now is.
        """
        trainer, name = self.config.trainer, _tag(self.global_steps)
        if self.global_steps == 0:
            runs.check_beginning(posteriors, Path(trainer.default_local_dir))
            return 0
        resumed = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        folder = Path(resumed) if resumed else Path(trainer.default_local_dir) / name
        try:
            saved = json.loads((folder / _SAVED).read_text())
            run, step = str(saved["run"]), int(saved["step"])
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"checkpoint {folder} was not saved with posteriors ({error}): choose another "
                f"+algorithm.{NAME}.run_name, and +algorithm.{NAME}.warm_start={posteriors.run.record.name}"
            ) from None
        runs.check_checkpoint(posteriors, folder, run, step, name)
        return step


class Sync(WithPosteriors, PPOTrainerSync):
    """``trainer.v1.trainer_mode=sync``."""


class ColocateAsync(WithPosteriors, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=colocate_async``."""


class SeparateAsync(WithPosteriors, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=separate_async``."""


TRAINERS = {"sync": Sync, "colocate_async": ColocateAsync, "separate_async": SeparateAsync}
TRAINER_REGISTRY.update(TRAINERS)  # register_trainer refuses a name that is taken


def keys_of(dataset: Any) -> list[Key]:
    """Text and label of every row of a training data set of verl's, in its order; equal ones once.

    Raises:
        ValueError: the data set is empty, or has messages that are neither text nor JSON.
    """
    keys = dict.fromkeys(
        (text_of(row["raw_prompt"]), _label(row.get("reward_model")))
        for row in map(dataset.__getitem__, range(len(dataset)))
    )
    if not keys:
        raise ValueError("data.train_files has no prompts that are short enough; see data.max_prompt_length")
    return list(keys)


def _label(reward_model: Mapping[str, Any] | None) -> str:
    """The data set's ``reward_model.ground_truth``."""
    return label_of(None if reward_model is None else reward_model.get("ground_truth"))


def _objects(data: Any, name: str) -> list[Any]:
    """A column of TransferQueue that is not tensors: lists come as they are, others wrapped."""
    return [getattr(value, "data", value) for value in data[name]]


def _row_sums(rows: torch.Tensor) -> Floats:
    """(R,) sums of a padded or a jagged tensor's rows, in float64."""
    return np.array([row.double().sum().item() for row in rows.unbind(0)])


def _files(files: Any) -> list[str]:
    return [str(files)] if isinstance(files, str | os.PathLike) else [str(file) for file in files]


def _tag(global_step: int) -> str:
    """What verl calls the checkpoint of a global step."""
    return f"global_step_{global_step}"
