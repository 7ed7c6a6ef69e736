"""One's own training loop as a host, which needs a generation function alone.

It gets every strategy, replay, probes and exact resume.

    with Posteriors.create("sqlite:///runs.db", "my-run", prompts, labels) as posteriors:
        loop = Loop(posteriors, prompts, labels, generate, groups=64, rollouts=8, strategy="two_stage")
        for step in loop:
            train(step.rollouts, step.advantages)  # yours
            loop.save(folder)  # beside the model

Axes: R rollouts to train on in a step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np

from openrlhf_dbb.core import exact_json
from openrlhf_dbb.core.advantages import Thinning, check_thin, thinned, whitened
from openrlhf_dbb.core.arrays import Floats, Key
from openrlhf_dbb.core.filling import (
    Answer,
    AtOnce,
    Batch,
    BudgetSpent,
    Filler,
    Group,
    Request,
    RolloutT,
    ShuffledPrompts,
)
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.core.posteriors import Posteriors, dataset_digest
from openrlhf_dbb.core.probes import check_probes, probed_prompts
from openrlhf_dbb.core.recorded import (
    DATA_SET,
    Record,
    RecordedBatch,
    RecordedRollout,
    Recorder,
    changed,
)
from openrlhf_dbb.core.replay import ExtraRow, Replay, TokenRollout
from openrlhf_dbb.core.rules import refusal
from openrlhf_dbb.core.step import Probes, Responses, StepExtras
from openrlhf_dbb.core.strategies import STRATEGIES, RunFacts, with_sources
from openrlhf_dbb.estimators import FORMS, RewardEstimator
from openrlhf_dbb.estimators.registry import differing

SAVED = "posteriors.json"


@dataclass(frozen=True, eq=False)
class Step(Generic[RolloutT]):
    """A step that is observed and begun to be stored; train on it next.

    Attributes:
        number: from 1.
        rollouts: (R,) to train on, group by group, as ``generate`` returned them.
        advantages: (R,).
        extra_rows: earlier rollouts to train on as well, with advantages and log-probs of their own.
        groups: of the rollouts to train on.
        prompt_ids: (R,) the store's ids of their prompts, which :class:`TokenRollout` takes.
        metrics: numbers to log, by name.
    """

    number: int
    rollouts: Sequence[RolloutT]
    advantages: Floats
    extra_rows: Sequence[ExtraRow]
    groups: Sequence[Group[int, RolloutT]]
    prompt_ids: Sequence[int]
    metrics: Mapping[str, float]


class Loop(Generic[RolloutT]):
    """Iterates over the steps of a training, until a limit of rollouts is reached or for ever."""

    def __init__(
        self,
        posteriors: Posteriors,
        prompts: Sequence[str],
        labels: Sequence[str],
        generate: Callable[[Sequence[Request[int]]], Sequence[Answer[RolloutT]]],
        *,
        groups: int,
        rollouts: int,
        strategy: str = "plain",
        strategy_parameters: Mapping[str, Any] | None = None,
        form: str = "group_norm",
        seed: int = 0,
        max_rollouts: int | None = None,
        replay: Replay | None = None,
        thin: float = 0.0,
        probe_fraction: float = 0.0,
        probe_samples: int = 128,
        text_of: Callable[[RolloutT], str] | None = None,
        tokens_of: Callable[[RolloutT], int] | None = None,
        record: str | Path | None = None,
        rollouts_of: str | Path | None = None,
    ) -> None:
        """Begin behind the last step of a run.

        Args:
            prompts, labels: (P,) the rows of the data, with which the run was opened.
            generate: generates and verifies ``rollouts`` of row ``prompt`` for each request, and
                returns an answer to each, in their order.
            groups: prompts that a step trains on, >= 1.
            rollouts: of a prompt in a step, N >= 1.
            strategy: name of a rollout strategy, with its parameters beside it.
            form: of the advantages, by name.
            seed: of the order of the prompts and the strategy's draws.
            max_rollouts: after which the iteration ends; None: it never does.
            replay: what is replayed; after each step call :meth:`remember`.
            thin: c in [0, 100]: |A| < c is kept as c with probability |A| / c, else 0. The store keeps A. 0: off.
            probe_fraction: share of the prompts that get further rollouts whenever they are in a step, which are
                stored as probes and not trained on, nor counted in ``max_rollouts``.
            probe_samples: how many, >= 2.
            text_of, tokens_of: text and length in tokens of a rollout, to be stored. Whitening needs the length.
            record: folder in which the batches are recorded; rollouts must then be
                :class:`openrlhf_dbb.core.recorded.RecordedRollout`.
            rollouts_of: folder with the record of another run. Its batches are trained on in their order, ``generate``
                is not called, and the iteration ends with the record.

        Raises:
            ValueError: a name is unknown, a parameter is out of range, they do not fit together, another parameter
                of the estimator follows from them, or the record is damaged or of other prompts or sizes.
        """
        check_thin(thin)
        check_probes(probe_fraction, probe_samples)
        if replay is not None and not replay.samples:
            replay = None
        chosen = STRATEGIES.build(strategy, **(strategy_parameters or {}))
        plan = Plan(
            posteriors.estimator,
            form=form,
            strategy=chosen,
            group=rollouts,
            others=_others(replay, thin),
        )
        _refuse_other_parameters(posteriors.estimator, plan)
        chosen = chosen.derived(plan)
        line = refusal(replace(plan, strategy=chosen))
        if line is not None:
            raise ValueError(line)
        if FORMS.get(form).whitened and tokens_of is None:
            raise ValueError(f"form {form!r} is whitened over the tokens of a step; pass tokens_of")
        self.posteriors = posteriors
        self._keys: list[Key] = list(zip(prompts, labels, strict=True))
        self._generate = generate
        self._probed = probed_prompts(self._keys, probe_fraction, seed)
        self._probe_samples = probe_samples
        self._form = form
        self._strategy = strategy
        self._text_of = text_of
        self._tokens_of = tokens_of
        self._thin = thin
        self._seed = seed
        self._replays = None if replay is None else replay.memory(form)
        facts = with_sources(chosen, RunFacts(groups, rollouts, seed), posteriors.sources)
        self._data = dataset_digest(prompts, labels)
        same = {
            DATA_SET: self._data,
            "groups": groups,
            "rollouts": rollouts,
        }
        generates = record is not None or strategy != "plain" or probe_fraction > 0
        self._record = _opened_record(rollouts_of, same, generates=generates)
        self._recorder = _recorder(record, same, posteriors)
        row_ids = [posteriors.prompt_ids[key] for key in self._keys]
        self._filler: Filler[int, RolloutT] = Filler(
            ShuffledPrompts(row_ids, seed),
            AtOnce(generate),
            chosen.sampler(facts),
            predictive=posteriors.predictive if chosen.draws else None,
            max_rollouts=max_rollouts,
        )

    @property
    def generated(self) -> int:
        """Rollouts so far."""
        return self._filler.generated

    def __iter__(self) -> Iterator[Step[RolloutT]]:
        while True:
            try:
                yield self.step()
            except BudgetSpent:
                return

    def step(self) -> Step[RolloutT]:
        """Generate, observe and score the next step.

        Raises:
            BudgetSpent: the limit of rollouts does not allow another step, or the record is at its end.
            RunError: no group of three batches has a score, or the strategy keeps no group.
            MemorySupportError, ValueError, StoreError: as :meth:`Posteriors.observe`.
        """
        number = self.posteriors.step + 1
        batch = self._batch(number)
        rows = batch.groups_of_each()
        rollouts = [
            rollout for group in batch.trained + batch.filtered for rollout in group.rollouts
        ]
        keys = [self._keys[group.prompt] for group, _ in rows]
        scores = [_checked(group.scores) for group in batch.trained + batch.filtered]
        extras = self._described(batch.extras(rows), rollouts)
        extras = replace(extras, probes=self._probes({group.prompt for group, _ in rows}))
        scored = self.posteriors.observe(
            number,
            [prompt for prompt, _ in keys],
            [label for _, label in keys],
            np.concatenate(scores),
            form=self._form,
            extras=extras,
        )
        scored = thinned(scored, self._thin, self._seed, number)
        if FORMS.get(self._form).whitened:
            scored = whitened(scored, np.asarray(extras.tokens) * np.asarray(extras.trained))
        count = sum(len(group.rollouts) for group in batch.trained)
        prompt_ids = [group.prompt_id for group, _ in rows[:count]]
        extra_rows: list[ExtraRow] = []
        metrics = scored.metrics | self._filler.sampler.metrics()
        if self._replays is not None:
            extra_rows = self._replays.extra_rows(prompt_ids)
            metrics |= self._replays.metrics(len(extra_rows))
        return Step(
            number,
            rollouts[:count],
            scored.advantages[:count],
            extra_rows,
            batch.trained,
            prompt_ids,
            metrics,
        )

    def _batch(self, number: int) -> Batch[int, RolloutT]:
        """Return the batch of a step, generated or of the record."""
        if self._record is not None:
            if number > self._record.steps:
                raise BudgetSpent
            return self._of_record(self._record.batch(number))
        batch = self._filler.fill_over_passes(self._strategy)
        if self._recorder is not None:
            self._recorder.write(number, self._as_recorded(batch))
        return batch

    def _of_record(self, batch: RecordedBatch) -> Any:
        """Return a batch of a record with rows of this loop's data as its prompts."""
        row_of: dict[Key, int] = {}
        for row, key in enumerate(self._keys):
            row_of.setdefault(key, row)

        def with_row(group: Any) -> Any:
            key = group.prompt
            return replace(group, prompt=row_of[key], prompt_id=self.posteriors.prompt_ids[key])

        return changed(batch, with_row)

    def _as_recorded(self, batch: Batch[int, RolloutT]) -> RecordedBatch:
        """Return a batch with texts and labels as its prompts."""

        def with_key(group: Any) -> Any:
            for rollout in group.rollouts:
                if not isinstance(rollout, RecordedRollout):
                    problem = f"generate returned a {type(rollout).__name__}"
                    raise ValueError(f"record: {problem}; return RecordedRollout objects")
            return replace(group, prompt=self._keys[group.prompt])

        return changed(batch, with_key)

    def _probes(self, prompts: set[int]) -> Probes | None:
        """Generate further rollouts of the chosen prompts among those of a step; None if there are none."""
        row_of: dict[Key, int] = {}
        for row in sorted(prompts):
            if self._keys[row] in self._probed:
                row_of.setdefault(self._keys[row], row)
        if not row_of:
            return None
        requests = [
            Request(ticket, row, self._probe_samples) for ticket, row in enumerate(row_of.values())
        ]
        scores = [_checked(answer.scores) for answer in self._generate(requests)]
        return Probes(list(row_of), np.array(scores))

    def _described(self, extras: StepExtras, rollouts: Sequence[RolloutT]) -> StepExtras:
        """Add texts and lengths."""
        if self._tokens_of is not None:
            extras = replace(extras, tokens=[self._tokens_of(rollout) for rollout in rollouts])
        if self._text_of is not None:
            texts = [self._text_of(rollout) for rollout in rollouts]
            extras = replace(extras, responses=Responses(texts))
        return extras

    def remember(self, rollouts: Iterable[TokenRollout]) -> None:
        """Give the step's rollouts to the replay, each with the log-probs of the policy that generated it."""
        if self._replays is not None:
            self._replays.remember(rollouts)

    def save(self, folder: str | Path) -> None:
        """Write what a resume needs beside a model checkpoint, once every step up to here is durable.

        Save the model into ``folder`` first. A checkpoint counts once this method has returned.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.posteriors.checkpoint(self.posteriors.step, folder.name)
        if self._replays is not None:
            self._replays.save(folder)
        saved = {
            "run": self.posteriors.run.record.uuid,
            "step": self.posteriors.step,
            DATA_SET: self._data,
            "filler": self._filler.state(),
        }
        (folder / SAVED).write_text(
            exact_json.dumps(saved, "the state of the loop"), encoding="utf-8"
        )

    def load(self, folder: str | Path) -> None:
        """Go back to a checkpoint: later steps are undone, bit for bit, and the same prompts follow.

        Raises:
            ValueError: :meth:`save` has not written the folder, or for another run or other data.
        """
        folder = Path(folder)
        record = self.posteriors.run.record
        try:
            saved = exact_json.loads((folder / SAVED).read_text(encoding="utf-8"))
            run = saved["run"]
            step = int(saved["step"])
            data = saved.get(DATA_SET, self._data)  # earlier releases saved none
            state = saved["filler"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{folder} was not saved by a loop ({error}); name a folder that save() wrote"
            ) from None
        if run != record.uuid:
            raise ValueError(
                f"{folder} belongs to run {run}, not to {record.name!r}; resume that run"
            )
        if data != self._data:
            raise ValueError(
                f"{folder} was saved with other prompts and labels, or with these in another order; "
                "give the data that the run was begun with, or begin another run with "
                f"warm_start={record.name!r}"
            )
        self._filler.load(state)  # may refuse it; nothing is undone then
        self.posteriors.roll_back(step)
        if self._recorder is not None:
            self._recorder.roll_back(step)
        if self._replays is not None:
            self._replays.load(folder)


def _checked(scores: Floats | None) -> Floats:
    """Return the scores of an answer (N,); ValueError without any."""
    if scores is None:
        raise ValueError(
            "generate returned an answer without scores; pass one for each rollout, NaN where missing"
        )
    return scores


def _refuse_other_parameters(estimator: RewardEstimator, plan: Plan) -> None:
    """Raise ValueError if parameters of the estimator, which the run has stored, would follow from the training."""
    other = differing(estimator, estimator.derived(plan))
    if other:
        problem = f"estimator {estimator.name!r}: from this training follows {other}"
        raise ValueError(f"{problem}; pass parameters={other} to Posteriors.create")


def _others(replay: Replay | None, thin: float) -> list[Part]:
    """Return the parts of a training beside estimator, form and strategy."""
    others: list[Part] = []
    if replay is not None:
        others.append(replay)
    if thin:
        others.append(Thinning(thin))
    return others


def _opened_record(
    folder: str | Path | None, same: Mapping[str, Any], *, generates: bool
) -> Record | None:
    """Return the record that is trained on, if there is one.

    Raises:
        ValueError: it does not fit, or the loop ``generates`` by its other arguments.
    """
    if folder is None:
        return None
    if generates:
        advice = "leave out record, strategy and probe_fraction"
        raise ValueError(f"rollouts_of={str(folder)!r} generates nothing; {advice}")
    record = Record(Path(folder))
    record.check(same)
    return record


def _recorder(
    folder: str | Path | None, same: Mapping[str, Any], posteriors: Posteriors
) -> Recorder | None:
    """Return what writes the batches behind the last step of the run, if they are recorded."""
    if folder is None:
        return None
    run = posteriors.run.record
    recorder = Recorder(Path(folder), {"run": run.name, "model": run.model, "same": same})
    recorder.roll_back(posteriors.step)
    return recorder
