"""OpenRLHF's trainer with a posterior store behind it: start, resume, step, checkpoint, evaluation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import openrlhf.trainer.ppo_trainer as ppo_trainer
import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer

import estimators
import storage
from openrlhf_dbb import probes, prompts, upstream
from openrlhf_dbb.advantages import PosteriorExperienceMaker
from openrlhf_dbb.posterior import Posteriors
from openrlhf_dbb.rollouts import WholeBatchGenerator

MARK = "openrlhf_dbb"
"""Key of our entry in OpenRLHF's checkpoint states."""


@dataclass(frozen=True)
class RunPlan:
    """What the trainer needs beside OpenRLHF's arguments; made by the preflight, sent to the actor.

    Attributes:
        store_url: where the posteriors are; kept out of ``args``, which OpenRLHF sends to its trackers.
        run_id: the run to own, created or checked by the preflight.
        estimator, parameters: as in :func:`estimators.build`.
        rows: rows of the data set to train on.
    """

    store_url: str = field(repr=False)
    run_id: int
    estimator: str
    parameters: dict[str, Any]
    rows: list[int]


@dataclass
class Progress:
    """What the driver's progress bar shows; steps are global steps."""

    step: int = 0
    total: int = 0
    reward: float | None = None
    accuracy: dict[int, float] = field(default_factory=dict)
    phase: str = "starting"


class PosteriorTrainer(upstream.plain_class(PPOTrainer)):  # type: ignore[misc]
    """Upstream's loop, unchanged; a step is stored while it is trained on, and reported once both are done."""

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, plan: RunPlan, **generate_kwargs: Any) -> None:
        # Upstream never seeds this process, so that the order of the prompts would differ between runs.
        torch.manual_seed(strategy.args.train.seed)
        _train_on(plan.rows, strategy.args)
        super().__init__(pretrain, strategy, *groups, **generate_kwargs)
        self.samples_generator = WholeBatchGenerator(
            strategy=strategy,
            prompts_dataloader=self.prompts_dataloader,
            eval_dataloader=self.eval_dataloader,
            tokenizer=self.tokenizer,
            vllm_engines=self.vllm_engines,
        )
        self.experience_maker = PosteriorExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            strategy,
            self.tokenizer,
        )
        self._store = storage.open_store(plan.store_url)
        self._run = self._store.claim_run(plan.run_id)
        data = self.prompts_dataloader.dataset
        labels = [str(label) for label in data.labels]
        self._posteriors = Posteriors(
            estimators.build(plan.estimator, **plan.parameters),
            self._run,
            self._store.register_prompts(data.prompts, labels),
            data.prompts,
            labels,
        )
        self.experience_maker.posteriors = self._posteriors
        self._probed = probes.of(self.args, data.prompts, labels)
        self._progress = Progress(total=len(data) * self.args.train.num_episodes // self.args.rollout.batch_size)

    def progress(self) -> Progress:
        """The newest numbers; may be called while :meth:`fit` runs."""
        return self._progress

    def fit(self, global_step: int = 0) -> None:
        """Train to the end and evaluate the result."""
        super().fit(global_step)
        # The trackers are closed by now. A last step that is no multiple of eval.steps is evaluated here.
        self.wandb_logger = self.tensorboard_logger = None
        if self._evaluates and self._progress.step not in self._progress.accuracy:
            self._evaluate_now(self._progress.step)

    def finish(self) -> Progress:
        """Mark the run as finished: called once the model is saved, since a finished run is not resumed."""
        self._run.finish()
        self._progress.phase = "finished"
        return self._progress

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Upstream's states; the store is rolled back to their step, which later steps may have left behind.

        Raises:
            storage.StoreError: the checkpoint belongs to another run, or is newer than the store.
        """
        states = super().init_checkpoint_states()
        if not states:  # a checkpoint folder without a complete checkpoint: killed during the first one
            states = {
                "episode": 0,
                "global_step": 0,
                "total_consumed_prompts": 0,
                "data_loader_state_dict": {},
            }
        mark = states.get(MARK)
        step = states["global_step"]
        if step and (mark is None or mark["run"] != self._run.record.uuid):
            owner = f"run {mark['run']}" if mark else "a run without posteriors"
            raise storage.StoreError(
                f"the checkpoint in {self.args.ckpt.path} belongs to {owner}, not to {self._run.record.name} "
                f"({self._run.record.uuid}); give the --ckpt.path of that run"
            )
        self._run.roll_back(step)
        self._posteriors.load()
        self._progress.step = step
        if mark:
            self.samples_generator.held = mark["held"]
            self._progress.accuracy = dict(mark["accuracy"])
        # Another shuffle for every episode, also when one starts from a fresh data loader.
        torch.manual_seed(self.args.train.seed + states["episode"])
        self._progress.phase = "training"
        if step == 0 and self._evaluates:
            self._evaluate_now(0)
        return states

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """One rollout batch: probes, posteriors, advantages, optimizer steps, weight sync.

        The posteriors are written meanwhile; the step is reported, and may be saved, once they are.

        Raises:
            RuntimeError: the batch did not lead to an optimizer step.
            storage.StoreError: the posteriors cannot be written.
        """
        self.experience_maker.step = global_step + 1
        began = time.monotonic()
        self.experience_maker.probed = self._probe(rollout_samples) if self._probed else None
        probe_time = time.monotonic() - began
        status, step = super().train_step(rollout_samples, global_step)
        if "policy_loss" not in status and step > self.args.critic.freezing_steps + 1:
            raise RuntimeError(f"step {step} trained nothing: {len(rollout_samples)} rollouts are no optimizer step")
        status |= self.experience_maker.metrics
        if self._probed:
            status["timing/probe"] = probe_time
        began = time.monotonic()
        self._progress.phase = "waiting for the store"  # seen only where it takes long
        self._posteriors.settle()
        self._progress.phase = "training"
        status["timing/store_wait"] = time.monotonic() - began
        verified = [r.rewards.item() for r in rollout_samples if r.rewards is not None and not _is_missing(r)]
        if verified:  # without a reward function a reward model scores later, and nothing is missing
            status["rollout/reward_mean"] = sum(verified) / len(verified)
        self._progress.step, self._progress.reward = step, status["rollout/reward_mean"]
        return status, step

    def _probe(self, rollouts: list[Any]) -> probes.Probes:
        """More rollouts, for their scores alone, of the batch's probed prompts under the policy of this step."""
        found = {(rollout.prompts[0], str(rollout.labels[0])): rollout for rollout in rollouts}
        asked = {prompt: rollout for prompt, rollout in found.items() if prompt in self._probed}
        scores: list[list[float]] = []
        if asked:
            self._progress.phase = "probing"
            samples = self.args.probe.samples
            scores = self.samples_generator.score_more(list(asked.values()), samples, **self.generate_kwargs)
            self._progress.phase = "training"
        return probes.Probes(list(asked), np.array(scores).reshape(len(asked), self.args.probe.samples))

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        """Add our state to the checkpoint, and make the store durable up to it beforehand."""
        states = client_states if client_states is not None else {}
        states[MARK] = {
            "run": self._run.record.uuid,
            "held": self.samples_generator.held,
            "accuracy": self._progress.accuracy,
        }
        if self.samples_generator.at_end_of_episode:
            # A finished data loader would serve its whole episode again after a resume.
            states |= {"episode": states["episode"] + 1, "data_loader_state_dict": {}}
        if global_step % self.args.ckpt.save_steps == 0:
            self._run.record_checkpoint(global_step, f"global_step{global_step}")
        super().save_logs_and_checkpoints(global_step, logs_dict, states)

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Upstream's evaluation; the mean accuracy is kept for the summary."""
        logs = super().evaluate(global_step, **generate_kwargs)
        accuracies = [value for name, value in logs.items() if name.endswith("_pass1")]
        if accuracies:
            self._progress.accuracy[global_step] = sum(accuracies) / len(accuracies)
        return logs

    @property
    def _evaluates(self) -> bool:
        return self.eval_dataloader is not None and self.args.eval.steps != float("inf")

    def _evaluate_now(self, step: int) -> None:
        self._progress.phase = "evaluating"
        kwargs = self.generate_kwargs | {
            "temperature": self.args.eval.temperature,
            "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
        }
        self.evaluate(step, **kwargs)
        self._progress.phase = "training"


def _train_on(rows: list[int], args: SimpleNamespace) -> None:
    """Let upstream's ``prepare_datasets`` load the chosen rows, and nested label columns.

    It looks ``blending_datasets`` up in its module; only the training data set is asked for with a maximum.
    """
    load = ppo_trainer.blending_datasets

    def chosen(datasets: str, *positional: Any, **options: Any) -> Any:
        if "max_count" in options:
            return prompts.load_rows(args, positional[1]).select(rows)
        return prompts.with_columns(load(datasets, *positional, **options), args)

    upstream.replace(ppo_trainer, "blending_datasets", chosen)


def _is_missing(rollout: Any) -> bool:
    return bool(rollout.info.get("missing", torch.zeros(1)).any())
