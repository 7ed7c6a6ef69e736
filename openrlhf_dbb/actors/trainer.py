"""OpenRLHF's trainer with a posterior store behind it: start, resume, step, checkpoint, evaluation."""

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer

from openrlhf_dbb import chosen, storage, upstream
from openrlhf_dbb.actors import evaluation, generation
from openrlhf_dbb.actors.experience_maker import PosteriorExperienceMaker
from openrlhf_dbb.actors.generation import (
    BudgetSpent,
    RolloutBatch,
    RolloutGenerator,
    prompts_of,
)
from openrlhf_dbb.actors.generation_ahead import GenerationAhead
from openrlhf_dbb.actors.model_card import model_card
from openrlhf_dbb.actors.progress import DIFFERENCE, GENERATING, TRAINING, Progress, StepOutcome
from openrlhf_dbb.actors.recorded import RecordedGenerator, as_recorded
from openrlhf_dbb.core import SET_ASIDE
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.probes import probed_prompts
from openrlhf_dbb.core.recorded import Record, Recorder
from openrlhf_dbb.core.step import Probes
from openrlhf_dbb.core.strategies import with_sources
from openrlhf_dbb.data import train_on
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.saved import checkpoints
from openrlhf_dbb.saved import generation as saved_generation
from openrlhf_dbb.saved.best_model import CARD, Best, BestModel
from openrlhf_dbb.storage.read import held_out, kept_rollouts

MARK = "openrlhf_dbb"  # our entry in OpenRLHF's checkpoint states


class PosteriorTrainer(upstream.plain_class(PPOTrainer)):  # type: ignore[misc]
    """OpenRLHF's trainer. A step is stored while it is trained on, and reported once both are done."""

    vllm_engines: Any
    prompts_dataloader: Any
    eval_dataloader: Any
    samples_generator: Any
    wandb_logger: Any
    tensorboard_logger: Any

    def __init__(
        self,
        pretrain: str,
        strategy: Any,
        *groups: Any,
        store_url: str,  # not in OpenRLHF's arguments, which go to its trackers
        run_uuid: str,
        checkpoint: str | None,  # loaded by every rank; None if the run starts from its beginning
        rows: list[int],  # of the data set, to train on
        sources: list[str] | None,  # of these rows
        benchmarks: Mapping[str, BenchmarkPrompts],
        progress: Progress,
        recorder: Recorder | None = None,  # of the rollouts
        record: Record | None = None,  # of another run, to train on
        **generate_kwargs: Any,
    ) -> None:
        # Upstream never seeds this process: the order of the prompts would differ between runs.
        torch.manual_seed(strategy.args.train.seed)
        train_on(rows, strategy.args)
        # Upstream never lets vLLM end a response at once, although the trained policy may. A response
        # that is never sampled is never corrected: where advantages do not sum to zero, all-wrong
        # groups push probability to it.
        generate_kwargs["min_new_tokens"] = 0
        upstream.mask_trackers()
        os.environ.setdefault("WANDB_RUN_ID", run_uuid)  # so that a resume continues the run at W&B
        os.environ.setdefault("WANDB_RESUME", "allow")
        super().__init__(pretrain, strategy, *groups, **generate_kwargs)
        self.progress = progress
        self.vllm_engines = self.vllm_engines or []  # None where rollouts come from a record
        self._recorder = recorder
        self._record = record
        self._held_out = self.eval_dataloader
        self.eval_dataloader = None  # upstream's loop would evaluate held-out data only
        self._benchmarks = benchmarks
        self._sampling = dict(generate_kwargs)  # of evaluations
        for name in ("temperature", "top_p", "n_samples_per_prompt"):
            self._sampling[name] = getattr(self.args.eval, name)
        has_prompts = bool(self._held_out or benchmarks)
        self._evaluates = has_prompts and self.args.eval.steps != float("inf")
        self._checkpoint = checkpoint
        self._folder = Path(self.args.ckpt.path)
        self._best = BestModel(self._folder, run_uuid)
        data = self.prompts_dataloader.dataset
        keys = [prompt.key for prompt in prompts_of(data)]
        texts, labels = zip(*keys, strict=True)
        self._posteriors = Posteriors.resume(store_url, run_uuid, texts, labels, sources=sources)
        self._run = self._posteriors.run
        if self.tensorboard_logger:
            upstream.forget_logged(self.tensorboard_logger, self._run.record.last_step)
        self._probed = probed_prompts(keys, self.args.probe.fraction, self.args.train.seed)
        self._plan(len(data))
        self._make_generator(strategy)
        self._ahead: GenerationAhead | None = None
        models = groups[:4]  # policy, critic, reward and reference
        self.experience_maker = PosteriorExperienceMaker(
            *models,
            self.kl_ctl,
            strategy,
            self.tokenizer,
            posteriors=self._posteriors,
            progress=progress,
        )

    def _plan(self, prompts: int) -> None:
        """Set the number of steps, which the budget of rollouts decides if there is one."""
        train = self.args.train
        self._a_step = chosen.rollouts_of_a_step(self.args)
        self._budget = train.max_rollouts
        planned = self._budget
        if not planned:
            planned = prompts * train.num_episodes * self.args.rollout.n_samples_per_prompt
        self.progress.total = planned // self._a_step
        if self._record is not None:
            self.progress.total = min(self.progress.total, self._record.steps)
        if self._budget is not None:
            self.max_steps = self._budget // train.batch_size * train.max_epochs
            train.num_episodes = sys.maxsize  # the budget alone ends the training

    def _make_generator(self, strategy: Any) -> None:
        rollouts = chosen.strategy(self.args)
        facts = with_sources(rollouts, chosen.facts(self.args), self._posteriors.sources)
        self._sampler = rollouts.sampler(facts)
        kind: Any = RolloutGenerator
        if self._record is not None:
            kind = functools.partial(
                RecordedGenerator, record=self._record, last_step=self.progress.total
            )
        self._generator: RolloutGenerator = kind(
            strategy,
            self.prompts_dataloader,
            self._held_out,
            self.tokenizer,
            self.vllm_engines,
            sampler=self._sampler,
            judges=rollouts.needs_scores,
            predictive=self._posteriors.predictive if rollouts.draws else None,
            prompt_ids=self._posteriors.prompt_ids,
            max_rollouts=self._budget,
            send_weights=self._send_weights_again,
        )
        self.prompts_dataloader = self._generator
        self.samples_generator = self._generator

    def warnings(self) -> dict[str, str]:
        """Return what is wrong with the training so far, by kind; may be called while :meth:`fit` runs."""
        form = FORMS.get(self.args.algo.advantage.estimator)
        estimator = self._posteriors.estimator
        held_out_prompts = len(self._held_out.dataset) if self._held_out else 0
        lines: dict[str, str] = {}
        note = self._sampler.note
        if note:
            lines[note] = note
        unverified = self._posteriors.unverified
        if unverified:
            lines["unverified"] = (
                f"the last {SET_ASIDE} visits or more to {len(unverified)} prompts yielded no score, "
                f"such as {unverified[0][0]!r:.80}; the command prompts lists them: look at their "
                "labels and at the verifier"
            )
        return lines | self.progress.troubles(
            held_out_samples=held_out_prompts * self.args.eval.n_samples_per_prompt,
            max_new_tokens=self.args.rollout.max_new_tokens,
            punishes_failures=bool(estimator.state_fields)
            and not estimator.shared_fields
            and not form.sums_to_zero,
        )

    def fit(self, global_step: int = 0) -> None:
        """Train from ``global_step`` on, and evaluate the last step.

        With CUDA the longest micro-batch is tried first.

        Raises:
            RunError: the rollouts did not fill one batch, or the trial has failed.
        """
        if not cpu.active():  # before an evaluation takes an hour
            self.progress.enter("trying the longest micro-batch")
            self._on_policy("try_longest_micro_batch")
            self.broadcast_to_vllm()  # the engines have these weights already: this tries the way to them
        try:
            super().fit(global_step)
        except BudgetSpent:
            for tracker in self._trackers():
                tracker.close()
        finally:
            if self._ahead is not None:
                self._ahead.close()
        if not self.progress.step:
            raise RunError(
                f"{self._generator.filler.unused()} rollouts did not fill one batch of groups with different rewards; "
                "the data is too easy or too hard for the model: use other data, or --rollout.strategy plain"
            )
        # The trackers are closed by now. If the last step is not a multiple of eval.steps, it is evaluated here.
        self.wandb_logger = None
        self.tensorboard_logger = None
        if self._evaluates and self.progress.step not in self.progress.accuracy:
            self._evaluate(self.progress.step)

    def _on_policy(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the policy's actor on every rank; return what each one returns."""
        results = self.actor_model_group.async_run_method(method_name=method, **arguments)
        return list(ray.get(results))

    def _trackers(self) -> list[Any]:
        trackers = (self.wandb_logger, self.tensorboard_logger)
        return [tracker for tracker in trackers if tracker is not None]

    def finish(self) -> Progress:
        """Describe the saved model, mark the run as finished, and close its database."""
        card = model_card(self._posteriors.store, self._run.record, self.progress.step)
        self._on_policy("save_card", text=card)
        self._posteriors.finish(self._generator.filler.unused())
        self._best.settle(self.progress.step)
        self.progress.best = self._best.newest()
        self.progress.best_folder = self._best.link
        self.progress.warnings = list(self.warnings().values())
        self.progress.enter("finished")
        self._posteriors.close()
        return self.progress

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return the states of the loaded checkpoint, and take everything back to its step."""
        states = self._loaded_states()
        step = states["global_step"]
        self._posteriors.roll_back(step)
        if self._recorder is not None:
            self._recorder.roll_back(step)
        checkpoints.delete_after(self._folder, self._run.record.uuid, step)
        self._best.roll_back(step)
        self.progress.step = step
        mark = states.get(MARK)
        if mark:
            folder = checkpoints.actor_folder(self._folder, str(self._checkpoint))
            state = saved_generation.load(folder, mark)
            self._generator.load(state, states.pop("data_loader_state_dict"))
            self._load_replays(f"global_step{step}")
        self._snapshot = self._generator.snapshot()
        if self.args.train.async_enable:
            self._ahead = GenerationAhead(self._generator, self.args, states["episode"], step)
            self.samples_generator = self._ahead
        # Each episode gets its own shuffle, even if it starts from a fresh data loader.
        torch.manual_seed(self.args.train.seed + states["episode"])
        if self._evaluates:
            self._evaluate_at_start(step)
        self.progress.enter(GENERATING, self._a_step)
        self.progress.ends.append(time.monotonic())
        states["data_loader_state_dict"] = {}  # the generator has its place by now
        return states

    def _loaded_states(self) -> dict[str, Any]:
        """Return the states of the checkpoint, which every rank must have loaded, or of a start."""
        if self._checkpoint is None:
            return {"episode": 0, "global_step": 0, "total_consumed_prompts": 0}
        states = self._on_policy("get_checkpoint_states")
        loaded = [(state.get("global_step"), state.get(MARK, {}).get("run")) for state in states]
        checkpoints.check_loaded(self._folder, self._checkpoint, self._run.record.uuid, loaded)
        return dict(states[0])

    def _evaluate_at_start(self, step: int) -> None:
        """Evaluate before the first step, or at a checkpoint's step if that evaluation is missing."""
        measured = held_out(self._posteriors.store, self._run.record)
        if measured is not None:
            accuracy = zip(measured.step.tolist(), measured.accuracy.tolist(), strict=True)
            self.progress.accuracy = dict(accuracy)
        if step not in self.progress.accuracy and step % self.args.eval.steps == 0:
            if step:
                self.broadcast_to_vllm()
            self._evaluate(step)

    def train_step(
        self, rollout_samples: RolloutBatch, global_step: int
    ) -> tuple[dict[str, Any], int]:
        """Train on one rollout batch: probes, posteriors, advantages, optimizer steps, weight sync.

        The posteriors are written at the same time. The step is reported, and may be saved, once they are stored.
        """
        snapshot = rollout_samples.snapshot
        assert snapshot is not None
        if self._recorder is not None:
            self._write(self._recorder, rollout_samples, global_step + 1)
        probes = self._probe(rollout_samples) if self._probed else None
        began = time.monotonic()
        experiences, logged = self.experience_maker.make(rollout_samples, global_step + 1, probes)
        logged["timing/make_experience"] = time.monotonic() - began
        status, step = super().train_step(experiences, global_step)
        self._snapshot = snapshot
        status |= logged
        status |= snapshot.metrics
        status["rollout/generated"] = snapshot.generated
        began = time.monotonic()
        self.progress.enter("waiting for the store")  # visible only if it takes long
        self._posteriors.settle()
        status["timing/store_wait"] = time.monotonic() - began
        mean = _reward_mean(generation.rollouts_of(rollout_samples.trained))
        if mean is not None:  # upstream's mean counts a missing reward as 0
            status["rollout/reward_mean"] = mean
        self._report(rollout_samples, status, step)
        return status, step

    def _write(self, recorder: Recorder, batch: RolloutBatch, step: int) -> None:
        """Record the batch of a step."""
        try:
            recorder.write(step, as_recorded(batch))
        except OSError as error:
            raise RunError(f"step {step} cannot be recorded: {error}") from error

    def _report(self, batch: RolloutBatch, status: dict[str, Any], step: int) -> None:
        """Tell the progress line about a step that is trained and stored."""
        progress = self.progress
        # Later steps of an async training differ by their lag, those of a record by its policy.
        if not progress.outcomes and (self._record is None or step == 1):
            progress.difference = status.get(DIFFERENCE, 0.0)
        progress.step = step
        progress.reward = status["rollout/reward_mean"]
        progress.zero_variance = status.get("estimator/zero_variance")
        # Steps that discard rollouts are fewer
        if self._budget is not None and self._record is None:
            progress.total = max(step, self._budget * step // self._snapshot.generated)
        progress.outcomes.append(_outcome(generation.rollouts_of(batch.trained + batch.filtered)))
        progress.ends.append(time.monotonic())
        progress.enter(GENERATING, self._a_step)

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """Train on the step's rollouts; the progress shows it."""
        self.progress.enter(TRAINING)
        return dict(super().ppo_train(global_steps))

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines; generation ahead pauses, and the progress shows it."""
        if not self.vllm_engines:
            return
        self.progress.enter("sending weights")
        updating = contextlib.nullcontext() if self._ahead is None else self._ahead.updating()
        with updating:
            super().broadcast_to_vllm()
        self._generator.engines_have_weights = True

    def _send_weights_again(self) -> None:
        """Send the weights to engines that have given theirs up, in the midst of another phase of the progress."""
        phase = self.progress.phase
        size = self.progress.size
        self.broadcast_to_vllm()
        self.progress.enter(phase, size)

    def _probe(self, batch: RolloutBatch) -> Probes:
        prompts = [group.prompt for group in batch.trained + batch.filtered]
        probed = {prompt.key: prompt for prompt in prompts if prompt.key in self._probed}
        self.progress.enter("probing")
        samples = self.args.probe.samples
        scores_Q_M = self._generator.score_more(
            list(probed.values()), samples, **self.generate_kwargs
        )
        return Probes(list(probed), scores_Q_M)

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any], client_states: dict[str, Any]
    ) -> None:
        """Log the step, and save a checkpoint with our state if one is due."""
        client_states[MARK] = {"run": self._run.record.uuid}
        client_states["data_loader_state_dict"] = self._snapshot.place
        client_states["episode"] += self._snapshot.ends_pass
        logged = {**logs_dict, "plan/steps": self.progress.total}
        self._posteriors.record_metrics(global_step, logged)
        tag = f"global_step{global_step}"
        saves = global_step % self.args.ckpt.save_steps == 0
        evaluates = global_step % self.args.eval.steps == 0
        phase = self.progress.phase
        if saves:
            self.progress.enter("saving")
            # An earlier one's files must not count as files of the new one.
            checkpoints.delete(self._folder, tag)
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if self.wandb_logger and (evaluates or global_step == self.progress.total):
            self._log_rollouts(global_step)
        if saves and not self.args.ckpt.disable_ds:
            self._complete_checkpoint(global_step, tag)
        self.progress.enter(phase, self._a_step)
        if self._evaluates and evaluates:
            self._evaluate(global_step)

    def _log_rollouts(self, step: int) -> None:
        """Log a table of the step's stored rollouts to W&B; there are none with ``--rollouts.keep 0``."""
        rows = kept_rollouts(self._posteriors.store, self._run.record, step, limit=64)
        if rows:
            wandb = self.wandb_logger.handle
            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            wandb.log({"train/rollouts": table, "train/global_step": step})

    def _complete_checkpoint(self, step: int, tag: str) -> None:
        """Let a checkpoint count as whole, once the store is durable up to it."""
        listings = self._on_policy("checkpoint_files", tag=tag)
        listings += self._save_replays(tag)
        folder = checkpoints.actor_folder(self._folder, tag)
        listings.append(saved_generation.save(folder, self._snapshot.state))
        self._posteriors.checkpoint(step, tag)
        checkpoints.complete(self._folder, tag, self._run.record.uuid, listings)
        self._best.settle(step)

    def _save_replays(self, tag: str) -> list[dict[str, int]]:
        """Save what is replayed into a checkpoint; return its files as this host sees them."""
        replays = self.experience_maker.replays
        if replays is None:
            return []
        folder = checkpoints.actor_folder(self._folder, tag)
        # If the hosts do not share the folder, the writer of the manifest says so.
        folder.mkdir(parents=True, exist_ok=True)
        replays.save(folder)
        return [checkpoints.sizes(folder)]

    def _load_replays(self, tag: str) -> None:
        replays = self.experience_maker.replays
        if replays is None:
            return
        try:
            replays.load(checkpoints.actor_folder(self._folder, tag))
        except ValueError as error:
            raise RunError(str(error)) from error

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        """Evaluate the policy, and keep it if it is the best. An evaluation that is in the store is complete."""
        progress = self.progress
        phase = progress.phase
        began = time.monotonic()
        logs, results = evaluation.measure(
            self._generator, self._benchmarks, self._sampling, progress
        )
        config = {
            "dataset": self.args.eval.dataset,
            "benchmarks": {name: prompts.about() for name, prompts in self._benchmarks.items()},
            "seconds": time.monotonic() - began,
            **self._sampling,
        }
        if step:  # before the training the model is there anyway
            self._keep_if_best(step, logs, list(results))
        else:
            progress.before = progress.after
        store = self._posteriors.store
        self._run.record_evaluation(
            step,
            storage.TRAINING,
            [metrics.stored_rows(result, store) for result in results.values()],
            model=self.args.actor.model_name_or_path,
            config=config,
            generated_total=self._snapshot.generated,
        )
        best = self._best.newest()
        if best is not None and best.step == step:
            card = model_card(store, self._run.record, step, best.measure)
            (self._best.link / CARD).write_text(card, encoding="utf-8")
        for tracker in self._trackers():
            tracker.log_eval(step, logs)
        progress.accuracy[step] = logs[f"eval_mean@{self._sampling['n_samples_per_prompt']}"]
        progress.enter(phase, self._a_step)

    def _keep_if_best(self, step: int, logs: dict[str, float], evaluations: list[str]) -> None:
        measure = evaluation.best_measure(self.args.ckpt.best_metric_key, logs)
        if not measure:
            return
        candidate = Best(self._run.record.uuid, step, measure, logs[measure], evaluations)
        if self._best.wants(candidate):
            self.progress.enter("saving the best model")
            folder = str(self._best.begin())
            listings = self._on_policy("save_best", folder=folder)
            self._best.finish(candidate, listings)


def _reward_mean(rollouts: list[Any]) -> float | None:
    """Return the mean of the rewards that are not missing: NaN if all are, None if nothing is scored yet."""
    scored = [rollout for rollout in rollouts if rollout.scores is not None]
    if not scored:
        return None
    verified = [rollout.rewards for rollout in scored if not rollout.scores.isnan()]
    return torch.cat(verified).double().mean().item() if verified else math.nan


def _outcome(rollouts: list[Any]) -> StepOutcome:
    scores_R = generation.scores(rollouts)
    if scores_R is None:
        scores_R = np.array([])
    verified = scores_R[~np.isnan(scores_R)]
    is_graded = ((verified >= 0) & (verified <= 1)).all()
    cut = [bool(rollout.truncated) for rollout in rollouts if rollout.truncated is not None]
    return StepOutcome(
        rollouts=len(verified),
        right=float(verified.sum()) if is_graded else np.nan,
        cut=sum(cut),
        missing=len(scores_R) - len(verified),
    )
