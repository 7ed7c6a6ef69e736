"""verl's trainers with advantages and draws from stored posteriors.

verl imports this module in each of its processes. The module registers the advantage estimator ``posterior`` and
replaces verl's three trainers by subclasses, which with another estimator do what verl's trainers do. The trainer runs
in one process, which owns the run.

A *step* is one call of verl's ``_compute_advantage``. ``separate_async`` makes several in each of its global steps.

Axes: R rows (trajectories) of a batch, T tokens of the longest response, S rollouts (verl's sessions) among the rows. A
rollout may have several trajectories. Rows that verl appends as padding belong to no rollout.
"""

import functools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_dbb.core.arrays import Floats, Key, Positions
from openrlhf_dbb.core.filling import Answer, Group, Request
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.probes import probed_prompts
from openrlhf_dbb.core.step import Probes, Responses, StepExtras
from openrlhf_dbb.core.strategies import RunFacts
from openrlhf_dbb.core.texts import content_text, contradictions, label_text, prompt_text
from openrlhf_dbb.evaluation import held_out
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.hosts import VERL, VERL_NAMES
from openrlhf_dbb.integrations.shared import Settings

shared.check_release("verl")

import transfer_queue as tq  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.core_algos import register_adv_est  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.dataset.rl_dataset import collate_fn  # noqa: E402

NAME = "posterior"
"""Value of ``algorithm.adv_estimator``, and the key of our settings beside it."""
SOURCE = "data_source"
"""verl's column of what its reward function is chosen by."""


def read(config: DictConfig) -> Settings:
    """Return our settings, ``algorithm.posterior``.

    Raises:
        ValueError: settings are out of range, or do not go together with verl's.
    """
    given: Any = config.algorithm.get(NAME) or {}
    settings = Settings(
        **(OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else given)
    )
    trains = not config.trainer.get("val_only", False)
    group = config.actor_rollout_ref.rollout.n if trains else None
    settings = settings.check(VERL, VERL_NAMES, group)
    _check_whole_batches(config, settings)
    _check_dropped_groups(config)
    return settings


def _filters(config: DictConfig) -> bool:
    filtering = config.algorithm.get("filter_groups")
    return filtering is not None and bool(filtering.get("enable", False))


def _check_whole_batches(config: DictConfig, settings: Settings) -> None:
    """Refuse what needs whole batches where verl makes up for groups, or scores them later."""
    _, strategy = settings.built
    is_sync = config.trainer.v1.trainer_mode == "sync"
    refills = config.trainer.v1.sampler.get("sync_refill_failed_groups")
    # A group that verl asks for later would be drawn by a memory that has not seen its batch.
    replaces = _filters(config) or refills or not is_sync
    way = "use trainer.v1.trainer_mode=sync without algorithm.filter_groups, sync_refill_failed_groups and"
    if strategy.draws and (replaces or config.data.get("gen_batch_size")):
        problem = f"strategy {settings.strategy!r} draws whole batches"
        raise ValueError(f"{problem}: {way} data.gen_batch_size")
    model = config.reward.reward_model
    if not replaces and (not model.enable or model.enable_resource_pool):
        return
    way = f"{way} a reward model in the trainer's own resource pool"
    if settings.probe_fraction:
        problem = "probe_fraction needs whole batches whose rewards come with them"
        raise ValueError(f"{problem}: {way}")
    if Capability.GENERATE_MORE in strategy.needs:
        problem = f"strategy {settings.strategy!r} fills whole batches and judges their rewards"
        raise ValueError(f"{problem}: {way}")


def _check_dropped_groups(config: DictConfig) -> None:
    """Refuse a sampler of somebody else that drops groups which the posteriors never see."""
    custom = config.trainer.v1.sampler.get("custom_sampler")
    if _filters(config) and custom is not None and custom.get("path"):
        problem = f"trainer.v1.sampler.custom_sampler.path={custom.path} drops groups"
        raise ValueError(
            f"{problem} that posteriors cannot observe; use algorithm.filter_groups.enable=False"
        )


def with_sources(settings: Settings, dataset: Any) -> Settings:
    """Return settings that tell the prompts apart by verl's own column, if it has several values and none is named."""
    if settings.source_column is not None or len({row.get(SOURCE) for row in rows_of(dataset)}) < 2:
        return settings
    return replace(settings, source_column=SOURCE)


@dataclass(frozen=True)
class Batch:
    """The S rollouts of a batch."""

    rollout_R: Positions  # each row's rollout; -1 for padding
    uids_S: list[str]  # verl's id of each rollout's group
    last_S: Positions  # row of each rollout's last trajectory, which carries its reward
    keys_S: list[Key]  # prompt and label of each rollout, as in the data set
    scores_S: Floats  # values of the reward function without any KL penalty; NaN where missing
    tokens_S: Positions  # generated tokens of all trajectories
    reads_S: list[str | None]  # what the verifier read, where the reward function returns "read"
    responses: list[torch.Tensor]  # token ids of each rollout's last trajectory

    @classmethod
    def read(cls, batch: KVBatchMeta, *, scored: bool = True) -> "Batch":
        """Read the rollouts from TransferQueue, where verl keeps the contents of a batch.

        ``scored``: whether a batch has rewards yet; without, all scores are missing.
        """
        rollout_R = np.full(len(batch), -1)
        last: dict[str, tuple[int, int]] = {}  # by rollout: number and row of its last trajectory
        place: dict[str, int] = {}
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding", False):
                continue
            rollout, number = key.rsplit("_", 1)  # {uid}_{session}_{number of the trajectory}
            rollout_R[row] = place.setdefault(rollout, len(place))
            last[rollout] = max(last.get(rollout, (-1, -1)), (int(number), row))
        last_S = np.array([row for _, row in last.values()])
        names = ["raw_prompt", "reward_model", "response_mask", "responses", "extra_fields"]
        if scored:
            names.append("rm_scores")
        data = tq.kv_batch_get(
            keys=list(batch.keys), partition_id=batch.partition_id, select_fields=names
        )
        tokens_R = _row_sums(data["response_mask"]).astype(np.int64)
        is_rollout_R = rollout_R >= 0
        messages = _objects(data, "raw_prompt")
        columns = set(data.keys())
        rewarding: list[Any] = [None] * len(batch)
        if "reward_model" in columns:
            rewarding = _objects(data, "reward_model")
        told: list[Any] = [None] * len(batch)
        if "extra_fields" in columns:
            told = _objects(data, "extra_fields")
        scores_S = _row_sums(data["rm_scores"])[last_S] if scored else np.full(len(last_S), np.nan)
        return cls(
            rollout_R=rollout_R,
            uids_S=[rollout.rsplit("_", 1)[0] for rollout in last],
            last_S=last_S,
            keys_S=[_key(messages[row], rewarding[row]) for row in last_S],
            scores_S=scores_S,
            tokens_S=np.bincount(rollout_R[is_rollout_R], weights=tokens_R[is_rollout_R]).astype(
                np.int64
            ),
            reads_S=[_read(told[row]) for row in last_S],
            responses=[data["responses"][int(row)] for row in last_S],
        )


def held_out_samples(
    batches: Sequence[Batch],
    sources: Sequence[Any],
    uids: Sequence[str],
    scores: Sequence[Any],
    longest: int,
) -> dict[str, dict[Key, list[held_out.Sample]]]:
    """Return the samples of a validation by data source and prompt; of a prompt that is there twice, the first ones.

    ``sources``, ``uids`` and ``scores`` are of verl's samples; a response of ``longest`` tokens was cut.
    """
    key_of: dict[str, Key] = {}
    lengths: dict[str, list[tuple[int, bool]]] = {}
    for batch in batches:
        rollouts = zip(
            batch.uids_S, batch.keys_S, batch.tokens_S.tolist(), batch.responses, strict=True
        )
        for uid, key, tokens, response in rollouts:
            key_of[uid] = key
            lengths.setdefault(uid, []).append((tokens, len(response) >= longest))
    samples: dict[str, dict[Key, list[held_out.Sample]]] = {}
    first_uid: dict[tuple[str, Key], str] = {}
    for source, uid, score in zip(map(str, sources), uids, scores, strict=True):
        key = key_of[uid]
        if first_uid.setdefault((source, key), uid) == uid:
            tokens, is_cut = lengths[uid].pop(0)
            value = float("nan") if score is None else float(score)
            samples.setdefault(source, {}).setdefault(key, []).append(
                held_out.Sample(value, tokens, is_cut)
            )
    return samples


Row = tuple[str, dict[str, Any]]
"""Key and tag of a row in TransferQueue."""


def _joined(groups: Sequence[Group[int, list[Row]]]) -> KVBatchMeta:
    """Return the rows of groups as a batch of verl."""
    rows = [row for group in groups for rollout in group.rollouts for row in rollout]
    return KVBatchMeta(
        partition_id="train", keys=[key for key, _ in rows], tags=[tag for _, tag in rows]
    )


# verl calls the advantage estimator as a plain function, so the trainer leaves its method here during a step.
_ANSWER: ContextVar[Callable[[torch.Tensor, torch.Tensor], Floats]] = ContextVar("answer")


@register_adv_est(NAME)
def advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (R, T) of the present batch, the same at each token of a response.

    ``token_level_rewards`` (R, T) have the KL penalty, if there is one; ``response_mask`` (R, T) is 1 where a token was
    generated and is trained on. ValueError if the trainer is not one of ours.
    """
    answer = _ANSWER.get(None)
    if answer is None:
        problem = f"algorithm.adv_estimator={NAME} has a trainer that knows no prompts"
        modes = ", ".join(TRAINERS)
        raise ValueError(f"{problem}; use trainer.use_v1=True and trainer.v1.trainer_mode {modes}")
    values = torch.as_tensor(answer(token_level_rewards, response_mask), dtype=torch.float32)
    result = values.to(response_mask.device).unsqueeze(-1) * response_mask
    return result, result


class WithPosteriors(PPOTrainer):
    """The base of our subclasses of verl's trainers.

    ``posteriors`` is None with another estimator, with ``trainer.val_only`` and before verl has loaded its checkpoint.
    """

    def __init__(self, config: DictConfig) -> None:
        self.posteriors: Posteriors | None = None
        self._settings = read(config) if config.algorithm.adv_estimator == NAME else None
        self._dropped: list[Batch] = []  # groups that verl has filtered since the last step
        self._validated: list[Batch] = []  # of the validation that is going on
        self._probed: dict[Key, int] = {}  # the prompts that are probed, with their rows
        self._probes: Probes | None = None  # of the step
        self._fills = False  # whether the strategy fills the batches
        self._skipped = 0  # prompts that it has drawn for the step without generating for them
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        """Keep the batches of a validation and, with ``algorithm.filter_groups``, dropped groups; probe a batch."""
        buffer: Any = super()._build_replay_buffer()
        if self._settings is None:
            return buffer
        sample = buffer.sample

        def sample_and_keep(*args: Any, **options: Any) -> Any:
            if self._fills and options["partition_id"] == "train":
                batch, metrics = self._filled(), {}
            else:
                batch, metrics = sample(*args, **options)
            if batch.partition_id == "val" and self.posteriors is not None:
                # A reward model may score it later
                self._validated.append(Batch.read(batch, scored=False))
            elif self._probed:
                self._probes = self._probe(batch)
            return batch, metrics

        self._sample = sample
        buffer.sample = sample_and_keep
        if getattr(buffer, "filter_groups_metric", None) is None:
            return buffer
        clear = buffer._clear_groups

        def keep_and_clear(partition: str, uids: set[str]) -> None:
            rows = {
                key: tag
                for key, tag in buffer.partitions[partition].items()
                if key.split("_")[0] in uids
            }
            if rows:  # a group whose rollouts all failed has none
                group = KVBatchMeta(
                    partition_id=partition, keys=list(rows), tags=list(rows.values())
                )
                self._dropped.append(Batch.read(group))
            clear(partition, uids)

        buffer._clear_groups = keep_and_clear
        return buffer

    def prepare_step(self) -> dict[str, Any]:
        """Ask for the rollouts of a step as verl does, unless the strategy does so."""
        return {} if self._fills else super().prepare_step()

    def _filled(self) -> KVBatchMeta:
        """Return a batch that the strategy has filled; what it has set aside is observed with the step."""
        batch = self._steps.fill()
        self._skipped = batch.skipped
        aside = _joined(batch.filtered)
        if aside.keys:
            self._dropped.append(Batch.read(aside))
            tq.kv_clear(keys=aside.keys, partition_id=aside.partition_id)
        return _joined(batch.trained)

    def _generated(self, prompts: Sequence[tuple[int, int]]) -> tuple[list[str], KVBatchMeta]:
        """Generate for rows of the data set, each with a number of rollouts; return verl's ids, and all rows."""
        rows = [{**self.train_dataset[row], "__rollout_n__": rollouts} for row, rollouts in prompts]
        uids = [str(uuid.uuid4()) for _ in rows]
        for row, uid in zip(rows, uids, strict=True):
            row["uid"] = uid
        request = tu.get_tensordict(collate_fn(rows))
        tu.assign_non_tensor_data(request, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(request)
        generated, _ = self._sample(
            global_steps=self.global_steps, partition_id="train", batch_size=len(rows)
        )
        return uids, generated

    def _answers(self, requests: Sequence[Request[int]]) -> list[Answer[list[Row]]]:
        """Answer the strategy. A rollout is its rows in verl; one that has failed has none, and no score."""
        uids, generated = self._generated(
            [(request.prompt, request.rollouts) for request in requests]
        )
        read = Batch.read(generated)
        rows_S: list[list[Row]] = [[] for _ in read.uids_S]
        for row, rollout in enumerate(read.rollout_R.tolist()):
            if rollout >= 0:
                rows_S[rollout].append((generated.keys[row], generated.tags[row]))
        answers = []
        for request, uid in zip(requests, uids, strict=True):
            mine = [place for place, of in enumerate(read.uids_S) if of == uid]
            failed = request.rollouts - len(mine)
            rollouts = [rows_S[place] for place in mine] + [[] for _ in range(failed)]
            scores = np.append(read.scores_S[mine], np.full(failed, np.nan))
            answers.append(Answer(rollouts, scores))
        return answers

    def _probe(self, batch: KVBatchMeta) -> Probes | None:
        """Generate further rollouts of the chosen prompts of a batch; they leave no trace in verl."""
        asked = [
            key
            for key in dict.fromkeys(Batch.read(batch, scored=False).keys_S)
            if key in self._probed
        ]
        if not asked:
            return None
        assert self._settings is not None
        samples = self._settings.probe_samples
        _, generated = self._generated([(self._probed[key], samples) for key in asked])
        read = Batch.read(generated)
        scores_Q_M = np.full((len(asked), samples), np.nan)
        for place, key in enumerate(asked):
            scores = [
                score for of, score in zip(read.keys_S, read.scores_S, strict=True) if of == key
            ]
            scores_Q_M[place, : len(scores)] = scores
        tq.kv_clear(keys=generated.keys, partition_id=generated.partition_id)
        return Probes(asked, scores_Q_M)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self._settings is not None and not self.config.trainer.get("val_only", False):
            self.posteriors = self._open(self._settings)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.posteriors is None:
            return super()._compute_advantage(batch, metrics)
        token = _ANSWER.set(functools.partial(self._observe, Batch.read(batch), metrics))
        try:
            return super()._compute_advantage(batch, metrics)
        finally:
            _ANSWER.reset(token)

    def _observe(
        self,
        rollouts: Batch,
        metrics: dict[str, Any],
        rewards_R_T: torch.Tensor,
        mask_R_T: torch.Tensor,
    ) -> Floats:
        """Observe a step and what verl has dropped; add metrics; return the advantages (R,), 0 for padding."""
        assert self.posteriors is not None and self._settings is not None
        # Rollout correction may have masked a whole response
        has_tokens_R = mask_R_T.any(dim=-1).cpu().numpy()
        trained_S = np.zeros(len(rollouts.last_S), dtype=np.bool_)
        trained_S[rollouts.rollout_R[has_tokens_R & (rollouts.rollout_R >= 0)]] = True

        dropped, self._dropped = self._dropped, []
        batches, count = [rollouts, *dropped], len(trained_S)
        texts = [response for each in batches for response in each.responses]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        tokens = np.concatenate([each.tokens_S for each in batches])
        divides = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        form = self._settings.form or ("group_norm" if divides else "batch_centered")
        extras = StepExtras(
            tokens=tokens,
            trained=np.pad(trained_S, (0, len(tokens) - count)),
            skipped=self._skipped,
            read=[read for each in batches for read in each.reads_S],
            probes=self._probes,
            responses=Responses(lambda row: decode(texts[row]), keep=self._settings.keep_rollouts),
        )
        rewards = np.concatenate(
            [_row_sums(rewards_R_T)[rollouts.last_S], *(each.scores_S for each in dropped)]
        )
        scores = np.concatenate([each.scores_S for each in batches])
        keys = [key for each in batches for key in each.keys_S]
        self._probes = None
        scored = self._steps.observe(keys, rewards, scores, form, extras)
        metrics.update(scored.metrics)
        return np.where(rollouts.rollout_R >= 0, scored.advantages[:count][rollouts.rollout_R], 0.0)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, *args, **options)
        if self.posteriors is not None and self.posteriors.step:
            planned = self.total_training_steps * self.posteriors.step / max(self.global_steps, 1)
            self.posteriors.record_metrics(
                self.posteriors.step, {**metrics, "plan/steps": round(planned)}
            )

    def _val_metrics_update(
        self,
        data_sources: list[Any],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        *args: Any,
        **options: Any,
    ) -> dict[str, float]:
        """Return verl's means of a validation, and store its samples by prompt, scored by ``acc``, else by reward."""
        validated = self._validated
        self._validated = []
        if self.posteriors is not None:
            scores = reward_extra_infos_dict.get("acc") or reward_extra_infos_dict["reward"]
            samples = held_out_samples(
                validated, data_sources, sample_uids, scores, self.config.data.max_response_length
            )
            model = str(self.config.actor_rollout_ref.model.path)
            how = OmegaConf.to_container(
                self.config.actor_rollout_ref.rollout.val_kwargs, resolve=True
            )
            if samples:
                held_out.record(self.posteriors, samples, model=model, config={"val_kwargs": how})
        means: dict[str, float] = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, *args, **options
        )
        return means

    def _save_checkpoint(self) -> None:
        if self.posteriors is not None:
            # verl's name
            folder = (
                Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            )
            self._steps.save(folder)
        super()._save_checkpoint()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train as verl does, and finish the run at the end. An interrupted run can be resumed."""
        try:
            super().fit(agent_loop_manager)
            if self.posteriors is not None:
                self.posteriors.finish()
        finally:
            if self.posteriors is not None:
                self.posteriors.close()

    def _open(self, settings: Settings) -> Posteriors:
        trainer = self.config.trainer
        data = self.config.data
        seed = data.get("seed") or 0
        name = settings.run_name or str(trainer.experiment_name)
        resumes = self._resumes(settings, name)
        keys = keys_of(self.train_dataset)
        prompts = [prompt for prompt, _ in keys]
        labels = [label for _, label in keys]
        repeats = len(contradictions(prompts, labels)) > 0
        _, strategy = settings.built
        self._fills = Capability.GENERATE_MORE in strategy.needs
        files = data.train_files
        if isinstance(files, str):
            files = [files]
        self._steps = shared.Steps(
            with_sources(settings, self.train_dataset),
            name,
            resumes,
            keys,
            RunFacts(data.train_batch_size, self.config.actor_rollout_ref.rollout.n, seed),
            generate=self._answers if self._fills else None,
            rows=rows_of(self.train_dataset),
            model=str(self.config.actor_rollout_ref.model.path),
            dataset=", ".join(Path(file).name for file in files),
            many_labels=repeats and has_images(self.train_dataset),
            method=f"verl {trainer.v1.trainer_mode}",
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        probed = probed_prompts(dict.fromkeys(keys), settings.probe_fraction, seed)
        self._probed = {key: keys.index(key) for key in probed}
        if strategy.draws and not self._fills:
            # In place of verl's data loader, when verl asks for the next batch
            self.train_dataloader_it = self._drawn_batches()
        if resumes:
            self._steps.go_back(self._loaded(), Path(trainer.default_local_dir))
        return self._steps.posteriors

    def _resumes(self, settings: Settings, name: str) -> bool:
        """Return whether a run of this name goes on; refuse a taken name where none may."""
        if self.config.trainer.resume_mode != "disable":
            return shared.stored_run(settings.store, name, create=True) is not None
        way_out = (
            f"give another algorithm.{NAME}.run_name, or trainer.resume_mode=auto to continue it"
        )
        shared.refuse_taken(settings.store, name, way_out)
        return False

    def _drawn_batches(self) -> Iterator[Any]:
        """Yield the batches that the strategy draws, without end."""
        while True:
            yield collate_fn([self.train_dataset[row] for row in self._steps.draw()])

    def _loaded(self) -> Path | None:
        """Return the folder of the checkpoint that verl has loaded, if there is one."""
        trainer = self.config.trainer
        if not self.global_steps:
            return None
        if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
            return Path(trainer.resume_from_path)
        # As verl names it
        return Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"


TRAINERS = {  # our subclasses of verl's trainers, by trainer.v1.trainer_mode
    mode: type(f"Posterior_{mode}", (WithPosteriors, TRAINER_REGISTRY[mode]), {})
    for mode in ("sync", "colocate_async", "separate_async")
}

TRAINER_REGISTRY.update(TRAINERS)  # register_trainer refuses a name that is taken


def rows_of(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of verl's training data set, in its order."""
    return map(dataset.__getitem__, range(len(dataset)))


def keys_of(dataset: Any) -> list[Key]:
    """Return text and label of the rows of verl's training data set, in its order."""
    return [_key(row["raw_prompt"], row.get("reward_model")) for row in rows_of(dataset)]


def has_images(dataset: Any) -> bool:
    """Return whether a message has a part that is no text, by which equal texts may differ."""
    for row in rows_of(dataset):
        messages = [] if isinstance(row["raw_prompt"], str) else row["raw_prompt"]
        if any(isinstance(content_text(message["content"]), list) for message in messages):
            return True
    return False


def _key(raw_prompt: Any, reward_model: Mapping[str, Any] | None) -> Key:
    return prompt_text(raw_prompt), label_text((reward_model or {}).get("ground_truth"))


def _read(extra_fields: Any) -> str | None:
    """Return the text that a reward function has returned as "read" beside its score; None without one."""
    if not isinstance(extra_fields, Mapping):
        return None
    read = (extra_fields.get("reward_extra_info") or {}).get("read")
    return str(read) if read else None


def _objects(data: Any, name: str) -> list[Any]:
    """Return a column of TransferQueue that holds no tensors; TransferQueue wraps values that are not lists."""
    return [getattr(value, "data", value) for value in data[name]]


def _row_sums(rows: torch.Tensor) -> Floats:
    """Return the sums (R,) of a padded or a jagged tensor's rows, in float64."""
    return np.array([row.double().sum().item() for row in rows.unbind(0)])
