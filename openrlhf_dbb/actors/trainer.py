"""OpenRLHF's trainer with a posterior store behind it: start, resume, step, checkpoint, evaluation."""

import contextlib
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
from openrlhf_dbb.actors.generation import BudgetSpent, Prompt, RolloutBatch, RolloutGenerator
from openrlhf_dbb.actors.generation_ahead import GenerationAhead
from openrlhf_dbb.actors.model_card import model_card
from openrlhf_dbb.actors.progress import DIFFERENCE, GENERATING, TRAINING, Progress, StepOutcome
from openrlhf_dbb.core import SET_ASIDE
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.probes import probed_prompts
from openrlhf_dbb.core.step import Probes
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
        **generate_kwargs: Any,
    ) -> None:
        # Upstream never seeds this process: the order of the prompts would differ between runs.
        torch.manual_seed(strategy.args.train.seed)
        train_on(rows, strategy.args)
        # Upstream never lets vLLM end a response at once, although the trained policy may. A response that is never
        # sampled is never corrected: where advantages do not sum to zero, all-wrong groups push probability to it.
        generate_kwargs["min_new_tokens"] = 0
        upstream.mask_trackers()
        os.environ.setdefault("WANDB_RUN_ID", run_uuid)  # so that a resume continues the run at W&B
        os.environ.setdefault("WANDB_RESUME", "allow")
        super().__init__(pretrain, strategy, *groups, **generate_kwargs)
        self._held_out = self.eval_dataloader
        self.eval_dataloader = None  # upstream's loop would evaluate held-out data only
        self._evaluates = bool(self._held_out or benchmarks) and self.args.eval.steps != float("inf")
        self._checkpoint, self._folder = checkpoint, Path(self.args.ckpt.path)
        self._best = BestModel(self._folder, run_uuid)
        data = self.prompts_dataloader.dataset
        keys = [prompt.key for prompt in map(Prompt, data.prompts, data.labels, data.images)]
        self._posteriors = Posteriors.resume(store_url, run_uuid, *map(list, zip(*keys, strict=True)), sources=sources)
        self._run = self._posteriors.run
        if self.tensorboard_logger:
            upstream.forget_logged(self.tensorboard_logger, self._run.record.last_step)
        self._probed = probed_prompts(keys, self.args.probe.fraction, self.args.train.seed)
        self._a_step = chosen.rollouts_of_a_step(self.args)
        self._budget = self.args.train.max_rollouts
        planned = self._budget or len(data) * self.args.train.num_episodes * self.args.rollout.n_samples_per_prompt
        self.progress, progress.total = progress, planned // self._a_step
        if self._budget is not None:
            self.max_steps = self._budget // self.args.train.batch_size * self.args.train.max_epochs
            self.args.train.num_episodes = sys.maxsize  # the budget alone ends the training
        rollouts = chosen.strategy(self.args)
        self._sampler = rollouts.sampler(chosen.facts(self.args))
        self._generator = RolloutGenerator(
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
        )
        self.samples_generator = self.prompts_dataloader = self._generator
        sampling = {name: getattr(self.args.eval, name) for name in ("temperature", "top_p", "n_samples_per_prompt")}
        self._benchmarks, self._sampling = benchmarks, generate_kwargs | sampling  # of evaluations
        self._ahead: GenerationAhead | None = None
        models = groups[:4]  # policy, critic, reward and reference
        self.experience_maker = PosteriorExperienceMaker(
            *models, self.kl_ctl, strategy, self.tokenizer, posteriors=self._posteriors, progress=progress
        )

    def warnings(self) -> dict[str, str]:
        """Return what is wrong with the training so far, by kind; may be called while :meth:`fit` runs."""
        form, estimator = FORMS.get(self.args.algo.advantage.estimator), self._posteriors.estimator
        prompts_asked = len(self._held_out.dataset) if self._held_out else 0
        lines: dict[str, str] = {}
        note, unverified = self._sampler.note, self._posteriors.unverified
        if note:
            lines[note] = note
        if unverified:
            lines["unverified"] = (
                f"the last {SET_ASIDE} visits or more to {len(unverified)} prompts yielded no score, "
                f"such as {unverified[0][0]!r:.80}; the command prompts lists them: look at their "
                "labels and at the verifier"
            )
        return lines | self.progress.troubles(
            held_out_samples=prompts_asked * self.args.eval.n_samples_per_prompt,
            max_new_tokens=self.args.rollout.max_new_tokens,
            punishes_failures=bool(estimator.state_fields) and not estimator.shared_fields and not form.sums_to_zero,
        )

    def fit(self, global_step: int = 0) -> None:
        if not cpu.active():  # before an evaluation takes an hour
            self.progress.enter("trying the longest micro-batch")
            ray.get(self.actor_model_group.async_run_method(method_name="try_longest_micro_batch"))
            self.broadcast_to_vllm()  # the engines have these weights already: this tries the way to them
        try:
            super().fit(global_step)
        except BudgetSpent:
            for tracker in filter(None, (self.wandb_logger, self.tensorboard_logger)):
                tracker.close()
        finally:
            if self._ahead is not None:
                self._ahead.close()
        if not self.progress.step:
            raise RunError(
                f"{self._generator.unused()} rollouts did not fill one batch of groups with different rewards; "
                "the data is too easy or too hard for the model: use other data, or --rollout.strategy plain"
            )
        # The trackers are closed by now. If the last step is not a multiple of eval.steps, it is evaluated here.
        self.wandb_logger = self.tensorboard_logger = None
        if self._evaluates and self.progress.step not in self.progress.accuracy:
            self._evaluate(self.progress.step)

    def finish(self) -> Progress:
        """Describe the saved model, mark the run as finished, and close its database."""
        card = model_card(self._posteriors.store, self._run.record, self.progress.step)
        ray.get(self.actor_model_group.async_run_method(method_name="save_card", text=card))
        self._posteriors.finish(self._generator.unused())
        self._best.settle(self.progress.step)
        self.progress.best, self.progress.best_folder = self._best.newest(), self._best.link
        self.progress.warnings = list(self.warnings().values())
        self.progress.enter("finished")
        self._posteriors.close()
        return self.progress

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return the states of the loaded checkpoint, and take everything back to its step."""
        states: dict[str, Any] = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0}
        if self._checkpoint is not None:
            everywhere = ray.get(self.actor_model_group.async_run_method(method_name="get_checkpoint_states"))
            loaded = [(each.get("global_step"), each.get(MARK, {}).get("run")) for each in everywhere]
            checkpoints.check_loaded(self._folder, self._checkpoint, self._run.record.uuid, loaded)
            states = dict(everywhere[0])
        step, mark = states["global_step"], states.get(MARK)
        self._posteriors.roll_back(step)
        checkpoints.delete_after(self._folder, self._run.record.uuid, step)
        self._best.roll_back(step)
        self.progress.step = step
        if mark:
            folder = checkpoints.actor_folder(self._folder, str(self._checkpoint))
            state = saved_generation.load(folder, mark)
            self._generator.load(state, states.pop("data_loader_state_dict"))
            self._load_replays(f"global_step{step}")
        self._snapshot = self._generator.snapshot()
        if self.args.train.async_enable:
            self.samples_generator = self._ahead = GenerationAhead(self._generator, self.args, states["episode"], step)
        # Each episode gets its own shuffle, even if it starts from a fresh data loader.
        torch.manual_seed(self.args.train.seed + states["episode"])
        if self._evaluates:
            measured = held_out(self._posteriors.store, self._run.record)
            if measured is not None:
                self.progress.accuracy = dict(zip(measured.step.tolist(), measured.accuracy.tolist(), strict=True))
            # Before training, or to make up for the evaluation that should have followed the checkpoint.
            if step not in self.progress.accuracy and step % self.args.eval.steps == 0:
                if step:
                    self.broadcast_to_vllm()
                self._evaluate(step)
        self.progress.enter(GENERATING, self._a_step)
        self.progress.ends.append(time.monotonic())
        return states | {"data_loader_state_dict": {}}  # the generator has its place by now

    def train_step(self, rollout_samples: RolloutBatch, global_step: int) -> tuple[dict[str, Any], int]:
        """Train on one rollout batch: probes, posteriors, advantages, optimizer steps, weight sync.

        The posteriors are written at the same time. The step is reported, and may be saved, once they are stored.
        """
        batch, snapshot = rollout_samples, rollout_samples.snapshot
        assert snapshot is not None
        probes = self._probe(batch) if self._probed else None
        began = time.monotonic()
        experiences, logged = self.experience_maker.make(batch, global_step + 1, probes)
        logged["timing/make_experience"] = time.monotonic() - began
        status, step = super().train_step(experiences, global_step)
        self._snapshot = snapshot
        status |= logged | snapshot.metrics | {"rollout/generated": snapshot.generated}
        began = time.monotonic()
        self.progress.enter("waiting for the store")  # visible only if it takes long
        self._posteriors.settle()
        status["timing/store_wait"] = time.monotonic() - began
        judged = [r for r in generation.rollouts_of(batch.trained) if r.scores is not None]
        if judged:  # upstream's mean counts a missing reward as 0
            known = [r.rewards for r in judged if not r.scores.isnan()]
            mean = torch.cat(known).double().mean().item() if known else math.nan
            status["rollout/reward_mean"] = mean
        progress = self.progress
        if not progress.outcomes:  # later steps of an async training differ by their lag
            progress.difference = status.get(DIFFERENCE, 0.0)
        progress.step, progress.reward = step, status["rollout/reward_mean"]
        progress.zero_variance = status.get("estimator/zero_variance")
        if self._budget is not None:  # steps that discard rollouts are fewer
            progress.total = max(step, self._budget * step // snapshot.generated)
        progress.outcomes.append(_outcome(generation.rollouts_of(batch.trained + batch.filtered)))
        progress.ends.append(time.monotonic())
        progress.enter(GENERATING, self._a_step)
        return status, step

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        self.progress.enter(TRAINING)
        return dict(super().ppo_train(global_steps))

    def broadcast_to_vllm(self) -> None:
        self.progress.enter("sending weights")
        with contextlib.nullcontext() if self._ahead is None else self._ahead.updating():
            super().broadcast_to_vllm()

    def _probe(self, batch: RolloutBatch) -> Probes:
        prompts = (group.prompt for group in batch.trained + batch.filtered)
        probed = {prompt.key: prompt for prompt in prompts if prompt.key in self._probed}
        self.progress.enter("probing")
        scores_Q_M = self._generator.score_more([*probed.values()], self.args.probe.samples, **self.generate_kwargs)
        return Probes([*probed], scores_Q_M)

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        """Log the step, and save a checkpoint with our state if one is due."""
        states = client_states if client_states is not None else {}
        states[MARK] = {"run": self._run.record.uuid}
        states["data_loader_state_dict"] = self._snapshot.place
        states["episode"] += self._snapshot.ends_pass
        self._posteriors.record_metrics(global_step, {**(logs_dict or {}), "plan/steps": self.progress.total})
        tag, saves = f"global_step{global_step}", global_step % self.args.ckpt.save_steps == 0
        phase = self.progress.phase
        if saves:
            self.progress.enter("saving")
            checkpoints.delete(self._folder, tag)  # an earlier one's files must not count as files of the new one
        super().save_logs_and_checkpoints(global_step, logs_dict, states)
        if self.wandb_logger and (global_step % self.args.eval.steps == 0 or global_step == self.progress.total):
            rows = kept_rollouts(self._posteriors.store, self._run.record, global_step, limit=64)
            if rows:  # not with --rollouts.keep 0
                wandb = self.wandb_logger.handle
                table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                wandb.log({"train/rollouts": table, "train/global_step": global_step})
        if saves and not self.args.ckpt.disable_ds:
            # The checkpoint counts as whole only once the store is durable up to it.
            listings = ray.get(self.actor_model_group.async_run_method(method_name="checkpoint_files", tag=tag))
            listings += self._save_replays(tag)
            folder = checkpoints.actor_folder(self._folder, tag)
            listings.append(saved_generation.save(folder, self._snapshot.state))
            self._posteriors.checkpoint(global_step, tag)
            checkpoints.complete(self._folder, tag, self._run.record.uuid, listings)
            self._best.settle(global_step)
        self.progress.enter(phase, self._a_step)
        if self._evaluates and global_step % self.args.eval.steps == 0:
            self._evaluate(global_step)

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
        phase, began, progress, args = self.progress.phase, time.monotonic(), self.progress, self.args
        logs, results = evaluation.measure(self._generator, self._benchmarks, self._sampling, progress)
        about = {"dataset": args.eval.dataset, "benchmarks": {n: each.about() for n, each in self._benchmarks.items()}}
        config = {**about, "seconds": time.monotonic() - began, **self._sampling}
        if not step:
            progress.before = progress.after
        measure = evaluation.best_measure(args.ckpt.best_metric_key, logs)
        if measure and step:  # as it was before the training, the model is there anyway
            candidate = Best(self._run.record.uuid, step, measure, logs[measure], list(results))
            if self._best.wants(candidate):
                progress.enter("saving the best model")
                folder = str(self._best.begin())
                listings = ray.get(self.actor_model_group.async_run_method(method_name="save_best", folder=folder))
                self._best.finish(candidate, listings)
        rows = [metrics.stored_rows(each, self._posteriors.store) for each in results.values()]
        model, generated = args.actor.model_name_or_path, self._snapshot.generated
        self._run.record_evaluation(step, storage.TRAINING, rows, model=model, config=config, generated_total=generated)
        if (best := self._best.newest()) is not None and best.step == step:
            card = model_card(self._posteriors.store, self._run.record, step, best.measure)
            (self._best.link / CARD).write_text(card, encoding="utf-8")
        for tracker in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            tracker.log_eval(step, logs)
        progress.accuracy[step] = logs[f"eval_mean@{self._sampling['n_samples_per_prompt']}"]
        progress.enter(phase, self._a_step)


def _outcome(rollouts: list[Any]) -> StepOutcome:
    scores_R = np.array([]) if (given := generation.scores(rollouts)) is None else given
    known = scores_R[~np.isnan(scores_R)]
    graded = ((known >= 0) & (known <= 1)).all()
    cut = sum(bool(rollout.truncated) for rollout in rollouts if rollout.truncated is not None)
    return StepOutcome(len(known), float(known.sum()) if graded else np.nan, cut, len(scores_R) - len(known))
