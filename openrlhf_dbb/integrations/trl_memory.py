"""The run that follows a training of TRL: what its trainer's hooks call. The first process owns it.

A *step* is one generation batch, on which several optimizer steps may train (``global_step``).

Axes: R rollouts of a generation batch on all processes, B on this process, F reward functions; in
evaluations P prompts and N samples of a prompt.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Floats, Key
from openrlhf_dbb.core.filling import Batch, BudgetSpent
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.probes import probed_prompts
from openrlhf_dbb.core.replay import ReplayMemory
from openrlhf_dbb.core.step import Probes, Responses, StepExtras
from openrlhf_dbb.core.strategies import RunFacts
from openrlhf_dbb.core.texts import in_type, response_text
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.results import Results
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.hosts import TRL, TRL_NAMES
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.integrations.trl_filling import Generation, Rollout
from openrlhf_dbb.integrations.trl_probes import probe
from openrlhf_dbb.integrations.trl_processes import gathered, on_first
from openrlhf_dbb.integrations.trl_replay import StepMemory, with_replay
from openrlhf_dbb.integrations.trl_settings import (
    Settings,
    check_column,
    check_strategy,
    verifier_of,
)
from openrlhf_dbb.secrets import own_log
from openrlhf_dbb.storage import TRAINING

_log = own_log(__name__)

READ = "read"
"""The column of TRL's table of completions in which a reward function tells what it read, by TRL's ``log_extra``."""


class Response(NamedTuple):
    """What TRL has generated for a row of its batch.

    Attributes:
        truncated: whether it was cut at the limit of tokens.
        trained: TRL has not masked it.
        advantage: TRL's own.
        read: what the verifier read, where a reward function tells it.
    """

    key: Key
    tokens: int
    truncated: bool
    trained: bool
    advantage: float
    text: str
    read: str | None


class Filled(NamedTuple):
    """A batch that was filled and scored, by the serial numbers of its rollouts.

    Attributes:
        trained: serial numbers of the rollouts to train on, in the order of the batch.
        advantages, means: of each rollout that was generated; 0 and NaN where it was not used.
        metrics: of the step.
    """

    trained: list[int]
    advantages: list[float]
    means: list[float]
    metrics: dict[str, float]


Combined = tuple[Floats, Floats, float]
"""Rewards and scores (R,), and a factor, of :func:`combine`."""


class Memory:
    """The run that follows the training of one trainer, which the first of several processes owns.

    The trainer has no attributes of ours but this one, since a subclass may have any others.

    Attributes:
        form: of the advantages that replace TRL's; None if these stay.
        strategy: draws the prompts.
        fills: the strategy judges groups, so that a batch is filled by :meth:`fill`.
        replays: earlier rollouts to train on; None: none.
        step_memory: of the last step, on the first process; None without replay.
        lengths_B: tokens of each completion of the last batch to train on, on this process.
        scored: what TRL has just scored: rewards (R, F), and this process's B responses, as ids and
            as texts or messages.
        template_end: what the chat template adds behind the prompts, as "<think>"; "" for prompts of text.
        reads: (B,) what the verifier read of these, where a reward function has logged it; else empty.
        probed: the prompts that are probed, each with a row of the data set.
        is_spent: the limit of rollouts allows no further batch.
        generation: of the batch that is being filled; None: TRL's own.
        samples: of a held-out prompt's responses the verifier's score (NaN where missing), the length, whether it
            was cut.
        evaluated: the step of the last evaluation, and its results by benchmark.
    """

    def __init__(self, trainer: Any, settings: Settings, form: str | None) -> None:
        """Note the settings; ValueError for those that do not fit the trainer."""
        group = trainer.num_generations
        rows_bring = {}
        if trainer.beta != 0:
            rows_bring["log-probs of the reference model"] = f"beta={trainer.beta:g}"
        settings = settings.check(TRL, TRL_NAMES, group, rows_bring=rows_bring)
        estimator, strategy = settings.built
        check_strategy(settings, trainer.args)
        column = settings.label_column
        check_column(column, trainer.train_dataset)
        if column is not None and trainer.args.remove_unused_columns:
            raise ValueError(
                f"label_column={column!r} would be removed; use remove_unused_columns=False"
            )
        features = getattr(trainer.train_dataset, "features", None) or {}
        self._label_type = str(getattr(features.get(column), "dtype", ""))
        names = trainer.reward_func_names
        weights = trainer.reward_weights.tolist()
        self._verifier = verifier_of(settings.verifier, estimator, names, weights)
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
        self.replays = settings.replays
        if self.replays is not None:
            self.new_replays()  # refuses a form
        self.step_memory: StepMemory | None = None
        self.lengths_B: list[int] = []
        self.strategy = strategy
        self.fills = Capability.GENERATE_MORE in strategy.needs
        self.generation: Generation | None = None
        self.is_spent = False
        self._logged: tuple[int, dict[str, float]] = (0, {})
        self._opened: shared.Steps | None = None
        self.scored: tuple[torch.Tensor, Any, Any] | None = None
        self.template_end = ""
        self.reads: list[Any] = []
        self.probed: dict[Key, int] = {}
        self.samples: dict[Key, list[tuple[float, int, bool]]] = {}
        self.evaluated: tuple[int, dict[str, storage.EvaluationRows]] = (-1, {})
        model = getattr(trainer.model, "config", None)
        self._model_name = str(getattr(model, "_name_or_path", ""))
        groups = trainer.args.generation_batch_size // group
        self._facts = RunFacts(groups, group, trainer.args.seed)
        self._run_name = (
            settings.run_name or trainer.args.run_name or Path(trainer.args.output_dir).name
        )

    def attempt(self, what: str, work: Callable[..., Any], *given: Any) -> None:
        """Do ``work``, which ``what`` names, with what is given; on all processes together."""
        work(*given)

    def read_template(self, prompts: Any) -> None:
        """Note what the chat template, applied as TRL does, adds behind the prompts of a batch."""
        self.template_end = ""
        if not prompts or isinstance(prompts[0], str):
            return
        rendered = []
        for is_added in (False, True):
            text = self.trainer.processing_class.apply_chat_template(
                prompts[0],
                tools=self.trainer.tools or None,
                chat_template=self.trainer.chat_template,
                add_generation_prompt=is_added,
                tokenize=False,
                **self.trainer.chat_template_kwargs,
            )
            rendered.append(text)
        without, with_it = rendered
        self.template_end = with_it.removeprefix(without)

    def read_prompts(self) -> None:
        """Note text and label of every row, and which are probed; refuse what would go wrong unnoticed."""
        if not isinstance(self.trainer.train_dataset, Dataset):
            problem = f"train_dataset is a {type(self.trainer.train_dataset).__name__}"
            raise ValueError(f"{problem}; pass a datasets.Dataset, whose prompts are all known")
        column = self.settings.label_column
        columns = ["prompt"] if column is None else ["prompt", column]
        self._keys = [self._key(row) for row in self.trainer.train_dataset.select_columns(columns)]
        rows_of: dict[Key, int] = {}
        for place, key in enumerate(self._keys):
            rows_of.setdefault(key, place)
        chosen = probed_prompts(rows_of, self.settings.probe_fraction, self.trainer.args.seed)
        self.probed = {key: rows_of[key] for key in chosen}
        self._check_images()
        if len(set(self._keys)) < len(self._keys) and self._has_images():
            raise ValueError(
                "prompts and labels repeat, and their images may differ: give a label_column"
            )
        differ = (
            [] if column is not None else _differing_columns(self.trainer.train_dataset, self._keys)
        )
        if differ:
            self.say(
                f"rows of one prompt share a posterior, though they differ in {', '.join(differ)}; "
                "if these are other tasks, give what tells them apart as label_column="
            )

    def _check_images(self) -> None:
        if not self._has_images():
            return
        if self.replays is not None:
            raise ValueError("replay does not go with images; train without it")
        if self.fills:
            name = self.strategy.name
            raise ValueError(f"strategy {name!r} does not go with images; train without it")

    def new_replays(self) -> ReplayMemory:
        """Return an empty replay memory; ValueError if it does not go with the advantage form."""
        if self.replays is None or self.form is None:
            raise ValueError("nothing is replayed")
        return self.replays.memory(self.form)

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
            shared.refuse_taken(
                store, self._run_name, "give another run_name=, or resume='auto' to continue it"
            )
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
            generate=self._generate if self.fills else None,
            max_rollouts=settings.max_rollouts,
            new_replays=None if self.replays is None else self.new_replays,
            rows=self.trainer.train_dataset,
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
        """The steps of the open run, on the first process.

        Raises:
            RuntimeError: this is another process, or the memory has ended.
        """
        if self._opened is None:  # not the first process, or the memory has ended
            raise RuntimeError("no run is open in this process")
        return self._opened

    @property
    def run(self) -> Posteriors:
        """The posteriors of the open run, on the first process; raises as :attr:`steps`."""
        return self.steps.posteriors

    def say(self, line: str) -> None:
        """Log a warning, on the first process."""
        if self.trainer.accelerator.is_main_process:
            _log.warning("%s", line)

    def record_log(self, logs: dict[str, float]) -> None:
        """Store numbers, on the first process alone: users may call ``log`` there alone."""
        step = self.run.step
        # Else another optimizer step on the same rollouts, or the summary at the end
        if self._logged[0] != step:
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
        if self.is_spent or self.trainer.state.global_step >= self.trainer.state.max_steps:
            self.run.finish()
        else:
            self.run.settle()

    def just_scored(self) -> tuple[Floats, list[Any], list[Any]]:
        """Return what TRL has just scored: rewards (R, F), ids and texts of B responses.

        Raises:
            ValueError: the trainer scores by a method of its own.
        """
        if self.scored is None:
            raise ValueError("this trainer does not score completions by TRL's _calculate_rewards")
        rewards_R_F, ids_B, completions_B = self.scored
        return _numpy(rewards_R_F), ids_B, completions_B

    def responses(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> list[Response]:
        """Return what TRL has just generated on all processes, (R,); on all of them."""

        def mine() -> list[Response]:
            _, ids_B, completions_B = self.just_scored()
            # TRL may have masked a response
            trained_B = output["completion_mask"].any(dim=1).tolist()
            advantages_B = output["advantages"].tolist()
            texts_B = [response_text(completion) for completion in completions_B]
            reads_B = self._reads(len(texts_B))
            rows_B = zip(inputs, ids_B, trained_B, advantages_B, texts_B, reads_B, strict=True)
            return [
                Response(
                    self._key(row), len(ids), self._is_cut(ids), trained, advantage, text, read
                )
                for row, ids, trained, advantage, text, read in rows_B
            ]

        return gathered(mine)

    def _reads(self, responses: int) -> list[str | None]:
        """Return what the verifier read of each response of this process; None where nobody tells.

        Raises:
            ValueError: several reward functions tell it.
        """
        if not self.reads:
            return [None] * responses
        if len(self.reads) != responses:
            problem = (
                f'log_extra("{READ}", ...) got {len(self.reads)} values for {responses} completions'
            )
            raise ValueError(f"{problem}; log it from one reward function, one text for each")
        return [str(read) if read else None for read in self.reads]

    def observe(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> None:
        """Do one more step of the posteriors, with what TRL has generated and scored."""
        responses_R = self.responses(inputs, output)
        group = self.trainer.num_generations
        first = self.trainer.accelerator.process_index * len(inputs)
        self.lengths_B = [response.tokens for response in responses_R[first : first + len(inputs)]]

        combined = self._combined(self.just_scored()[0], group)  # before probes are scored
        keys_R = [response.key for response in responses_R]
        extras = StepExtras(probes=probe(self, keys_R, list(inputs[0]), len(keys_R)))

        def score() -> tuple[list[float], list[float], dict[str, float]]:
            return self._score(responses_R, combined, extras, len(responses_R))

        advantages_R, mean_R, metrics = on_first(score)
        self.fill_table(mean_R)
        self._add_metrics(metrics)
        if self.form is not None:
            self._use(advantages_R, output)
            self._log_advantages(advantages_R)

    def replay(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the batch that was observed last with replayed rows."""
        output, metrics = with_replay(self.trainer, output, self.lengths_B, self.step_memory)
        self._add_metrics(metrics)
        return output

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _use(self, advantages_R: list[float], output: dict[str, Any]) -> None:
        """Put this process's advantages in place of TRL's."""
        theirs_B = output["advantages"]
        first = self.trainer.accelerator.process_index * len(theirs_B)
        mine = advantages_R[first : first + len(theirs_B)]
        output["advantages"] = torch.tensor(mine, dtype=torch.float32, device=theirs_B.device)

    def _log_advantages(self, advantages_R: list[float]) -> None:
        """Put advantages in place of TRL's own of this batch, the last ones of its log."""
        logged = self.trainer._logs["advantages"]
        for _ in range(min(len(advantages_R), len(logged))):
            logged.pop()
        logged.extend(advantages_R)

    def _combined(self, rewards_R_F: Floats, group: int) -> Combined:
        weights_F = _numpy(self.trainer.reward_weights)
        estimator, _ = self.settings.built
        if self._verifier is None and estimator.support != "real":
            scores_R = by_task(rewards_R_F, self.trainer.reward_func_names)
            return scores_R, scores_R, float(weights_F[0])
        return combine(rewards_R_F, weights_F, self._verifier, group)

    def _score(
        self, responses_R: Sequence[Response], combined: Combined, extras: StepExtras, batch: int
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Return advantages, unless TRL's stay, the means of the prompts, and metrics; on the first process.

        The first ``batch`` rollouts are those of the generation batch; others are observed only.
        """
        rewards_R, scores_R, scale = combined
        keys_R = [response.key for response in responses_R]
        extras = self._with_responses(extras, responses_R, batch)
        if self.form is None:
            estimator, _ = self.settings.built
            if self._verifier is not None and estimator.belief.support == "real":
                # Such a memory sees the rewards, and the user has named the verifier
                rewards_R = scores_R
            theirs_R = [response.advantage for response in responses_R]
            scored = self.steps.observe(keys_R, rewards_R, scores_R, None, extras, theirs_R)
            return [], scored.mean.tolist(), scored.metrics
        scored = self.steps.observe(keys_R, rewards_R, scores_R, self.form, extras)
        factor = self._factor(rewards_R[:batch], scale)
        if self.steps.replays is not None:
            prompt_ids = [self.run.prompt_ids[key] for key in keys_R[:batch]]
            self.step_memory = StepMemory(self.steps.replays, prompt_ids, rewards_R[:batch], factor)
        return (scored.advantages * factor).tolist(), scored.mean.tolist(), scored.metrics

    def _with_responses(
        self, extras: StepExtras, responses_R: Sequence[Response], batch: int
    ) -> StepExtras:
        trained_R = np.array([response.trained for response in responses_R])
        texts = Responses(
            [response.text for response in responses_R],
            truncated=[response.truncated for response in responses_R],
            keep=self.settings.keep_rollouts,
        )
        return replace(
            extras,
            tokens=[response.tokens for response in responses_R],
            read=[response.read for response in responses_R],
            trained=trained_R & (np.arange(len(responses_R)) < batch),
            responses=texts,
        )

    def _factor(self, rewards_R: Floats, scale: float) -> float:
        """Return what brings advantages to TRL's scale; ``scale`` is that of the rewards."""
        if self.trainer.scale_rewards == "none":
            return scale
        if self.trainer.scale_rewards == "batch":
            known = rewards_R[~np.isnan(rewards_R)]
            spread = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
            return 1 / spread if spread > 0 else 0.0
        return 1.0

    def fill(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and observe a batch as the strategy decides; return TRL's batch to train on.

        On all processes: the first one's filler decides, and all generate together.

        Raises:
            BudgetSpent: the limit of rollouts does not allow a whole batch.
        """
        generation = Generation(self, inputs)
        self.generation = generation
        batch: Batch[int, Rollout] | None = None
        failed: Exception | None = None
        if self.trainer.accelerator.is_main_process:
            try:
                batch = self.steps.fill()
            except Exception as error:
                if generation.is_running:
                    raise  # the others wait within TRL, and fail as there
                failed = error
            generation.end()
        else:
            generation.follow()
        probes = None
        if self.probed:
            keys = on_first(lambda: self._keys_of(batch))
            probes = probe(self, keys, list(inputs[0]), self.trainer.args.generation_batch_size)
        filled = on_first(lambda: self._score_batch(batch, failed, generation.generated, probes))
        if filled is None:
            self.is_spent = True
            self.fill_table([math.nan] * generation.generated)
            raise BudgetSpent
        self.fill_table(filled.means)
        self._log_advantages(filled.advantages)
        self._add_metrics(filled.metrics)
        output, self.lengths_B = generation.batch(filled.trained)
        self._use([filled.advantages[serial] for serial in filled.trained], output)
        self.scored = None
        self.generation = None
        return output

    def _keys_of(self, batch: Batch[int, Rollout] | None) -> list[Key]:
        """Return prompt and label of each group of a batch."""
        if batch is None:
            return []
        return [self._keys[group.prompt] for group in batch.trained + batch.filtered]

    def _score_batch(
        self,
        batch: Batch[int, Rollout] | None,
        failed: Exception | None,
        generated: int,
        probes: Probes | None,
    ) -> Filled | None:
        """Do a step with what was generated, on the first process. None: the budget is spent.

        Raises ``failed``, if there is no batch for another reason.
        """
        if isinstance(failed, BudgetSpent):
            return None
        if batch is None:
            raise failed or RuntimeError("no batch was filled")
        rollouts_R: list[Rollout] = []
        rewards: list[Floats] = []
        scores: list[Floats] = []
        scale = 1.0
        for group in batch.trained + batch.filtered:
            rewards_N_F = np.array([rollout.rewards for rollout in group.rollouts])
            rewards_N, scores_N, scale = self._combined(rewards_N_F, len(group.rollouts))
            rollouts_R += group.rollouts
            rewards.append(rewards_N)
            scores.append(scores_N)
        combined = (np.concatenate(rewards), np.concatenate(scores), scale)
        trained = sum(len(group.rollouts) for group in batch.trained)
        responses_R = [rollout.response for rollout in rollouts_R]
        extras = replace(batch.extras(batch.groups_of_each()), probes=probes)
        advantages_R, means_R, metrics = self._score(responses_R, combined, extras, trained)
        filled = Filled([], [0.0] * generated, [math.nan] * generated, metrics)
        for rollout, advantage, mean in zip(rollouts_R, advantages_R, means_R, strict=True):
            filled.advantages[rollout.serial] = advantage
            filled.means[rollout.serial] = mean
        filled.trained.extend(rollout.serial for rollout in rollouts_R[:trained])
        return filled

    def scores_now(self, group: int) -> Floats:
        """Return the scores (R,) of what TRL has just generated, groups side by side; NaN where missing."""
        return self._combined(self.just_scored()[0], group)[1]

    def scores(self, rollouts_R: Sequence[Rollout], group: int) -> Floats:
        """Return the scores (R,) of groups side by side; NaN where missing."""
        rewards_R_F = np.array([rollout.rewards for rollout in rollouts_R])
        return self._combined(rewards_R_F, group)[1]

    def _generate(self, requests: Sequence[shared.RowRequest]) -> list[shared.RowAnswer]:
        """Answer the filler, on the first process."""
        if self.generation is None:
            raise RuntimeError("no batch is being filled")
        return self.generation.generate(requests)

    def sample(self, inputs: list[dict[str, Any]]) -> None:
        """Note the responses of an evaluation's batch, of all processes."""
        _, scores_R, _ = self._combined(self.just_scored()[0], group=1)

        def mine() -> list[tuple[Key, int, bool]]:
            _, ids_B, _ = self.just_scored()
            rows_B = zip(inputs, ids_B, strict=True)
            return [(self._key(row), len(ids), self._is_cut(ids)) for row, ids in rows_B]

        for (prompt, tokens, cut), value in zip(gathered(mine), scores_R.tolist(), strict=True):
            self.samples.setdefault(prompt, []).append((value, tokens, cut))
        self.fill_table([math.nan] * len(scores_R))

    def fill_table(self, mean_R: list[float]) -> None:
        """Add to our column of the table that TRL logs on the first process; it needs columns of one length."""
        if self._opened is not None:
            self.trainer._logs["extra"]["posterior_mean"].extend(mean_R)

    def _is_cut(self, ids: Sequence[int]) -> bool:
        return len(ids) > 0 and ids[-1] not in self.trainer.eos_token_ids

    def record_held_out(
        self, prefix: str, samples: dict[Key, list[tuple[float, int, bool]]]
    ) -> None:
        """Store an evaluation's samples, on the first process.

        Those of several benchmarks after one step become one evaluation.
        """
        self.run.settle()
        step = self.run.step
        if step != self.evaluated[0]:
            self.evaluated = (step, {})
        texts, labels = map(list, zip(*samples, strict=True))
        # TRL fills up its last batch with further samples of some prompts.
        kept_P_N = [
            samples_N[: self.trainer.num_generations_eval] for samples_N in samples.values()
        ]
        scores, tokens, truncated = np.moveaxis(np.array([kept_P_N]), 3, 0)
        none = np.array([None])  # the trainer extracts no answers
        benchmark = prefix.removeprefix("eval_")
        results = Results(
            benchmark, [], scores, none, labels, tokens.astype(np.int64), truncated > 0, texts
        )
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


def combine(
    rewards_R_F: Floats, weights_F: Floats, verifier: int | None, group: int
) -> tuple[Floats, Floats, float]:
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
    return (
        scores_R + (others - others.mean(axis=1, keepdims=True)).reshape(-1) / weight,
        scores_R,
        weight,
    )


def by_task(rewards_R_F: Floats, names: Sequence[str]) -> Floats:
    """Return the score (R,) of the function that scores each response; NaN where none does.

    Raises:
        ValueError: two of the functions, whose ``names`` are given, score the same response.
    """
    is_scored_R_F = ~np.isnan(rewards_R_F)
    count_R = is_scored_R_F.sum(axis=1)
    if (count_R > 1).any():
        scoring_F = is_scored_R_F[int(count_R.argmax())]
        both = [name for name, scores in zip(names, scoring_F, strict=True) if scores]
        raise ValueError(
            f"{', '.join(both)} score the same response, and the estimator needs one score, 0 or 1: "
            f"give verifier, one of {', '.join(names)}, or let each return None outside its task"
        )
    return np.where(count_R == 1, np.nansum(rewards_R_F, axis=1), np.nan)


def _numpy(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()
