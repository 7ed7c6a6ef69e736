"""Serves both integrations: allowed releases, settings, runs and their checkpoints, draws."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core import KEEP, exact_json, prompt_columns, replay, rules
from openrlhf_dbb.core.advantages import Thinning, check_thin, thinned, whitened
from openrlhf_dbb.core.arrays import Floats, Key, whole
from openrlhf_dbb.core.filling import Answer, AtOnce, Batch, Filler, Group, Request, ShuffledPrompts
from openrlhf_dbb.core.host import Capability, Host, SideState
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.core.posteriors import Posteriors, as_estimator, dataset_digest
from openrlhf_dbb.core.probes import check_probes
from openrlhf_dbb.core.probing import Probing
from openrlhf_dbb.core.replay import ReplayMemory
from openrlhf_dbb.core.step import Scored, StepExtras
from openrlhf_dbb.core.strategies import STRATEGIES, RolloutStrategy, RunFacts, with_sources
from openrlhf_dbb.core.texts import contradictions, refuse_contradictions
from openrlhf_dbb.core.texts import label_text as label_of
from openrlhf_dbb.core.texts import prompt_text as text_of
from openrlhf_dbb.estimators import FORMS, RewardEstimator
from openrlhf_dbb.estimators.registry import differing
from openrlhf_dbb.secrets import own_log

__all__ = ["SAVED", "Settings", "Steps", "check_release", "label_of", "text_of"]

# The integrations override methods that another release may change. The extras in setup.py allow the same releases.
ALLOWED = {"trl": ">=1.16,<1.17", "verl": ">=0.9.1,<0.10"}

_log = own_log(__name__)
own_log(storage.__name__)  # which knows no mask

ASKING = {  # settings that ask a trainer for more, where they are given
    "pass_rate_column": Capability.PASS_RATES,
    "source_column": Capability.SOURCES,
}

SAVED = "posteriors.json"  # in a checkpoint; no pickle, which could run code
DRAWS = "draws.json"  # likewise

_Settings = TypeVar("_Settings", bound="Settings")

RowRequest = Request[int]
RowAnswer = Answer[Any]
Generate = Callable[[Sequence[RowRequest]], Sequence[RowAnswer]]
"""Generates rollouts of rows of the data set."""


def check_release(distribution: str) -> None:
    """Refuse a release of a trainer that its integration was not written for."""
    # The command import uses this module without the extras
    from packaging.specifiers import SpecifierSet

    allowed, installed = ALLOWED[distribution], importlib.metadata.version(distribution)
    if installed not in SpecifierSet(allowed):
        raise ImportError(
            f"{distribution} {installed} is installed; pip install '{distribution}{allowed}'"
        )


@dataclass(frozen=True)
class Settings:
    """What an integration adds to its trainer's own settings, by the same names everywhere; see docs/trl.md."""

    estimator: str | RewardEstimator = "point"
    parameters: Mapping[str, Any] | None = None
    form: str | None = None
    strategy: str = "plain"
    strategy_parameters: Mapping[str, Any] = field(default_factory=dict)
    store: storage.PosteriorStore | str | None = None
    run_name: str | None = None
    warm_start: str | None = None
    warm_start_weight: float = 1.0
    warm_start_store: storage.PosteriorStore | str | None = None
    take_over: bool = False
    keep_rollouts: int | None = KEEP
    thin: float = 0.0
    pass_rate_column: str | None = None
    pass_rate_attempts: int | None = None
    source_column: str | None = None
    probe_fraction: float = 0.0
    probe_samples: int = 128

    def __post_init__(self) -> None:
        """Raise ValueError for a value of another kind, or out of its range."""
        for name in ("form", "run_name", "warm_start", "pass_rate_column", "source_column"):
            check_text(name, getattr(self, name))
        for name in ("store", "warm_start_store"):
            _check_store(name, getattr(self, name))
        for name in ("parameters", "strategy_parameters"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{name} = {value!r:.80} is no dictionary; give names with values")
        if not isinstance(self.strategy, str):
            names = ", ".join(STRATEGIES.available())
            raise ValueError(f"strategy = {self.strategy!r:.80} is no name; give one of {names}")
        if not isinstance(self.take_over, bool):
            raise ValueError(f"take_over = {self.take_over!r:.80}; give True or False")
        if self.keep_rollouts is not None:
            whole("keep_rollouts", self.keep_rollouts)
        _check_weight(self.warm_start_weight)
        check_thin(self.thin)
        check_probes(self.probe_fraction, self.probe_samples)
        if (
            self.pass_rate_attempts is not None
            and whole("pass_rate_attempts", self.pass_rate_attempts) == 0
        ):
            raise ValueError("pass_rate_attempts = 0; give 1 or more")
        if self.pass_rate_column is not None and self.warm_start is not None:
            raise ValueError(
                "pass_rate_column and warm_start both say what the posteriors begin with; give one of them"
            )

    @property
    def parts(self) -> Sequence[Part]:
        """Further parts of a training, of the settings of one trainer alone."""
        return ()

    @cached_property
    def built(self) -> tuple[RewardEstimator, RolloutStrategy]:
        """The estimator and the strategy; ValueError if a name or a parameter is wrong."""
        estimator = as_estimator(self.estimator, self.parameters)
        strategy = STRATEGIES.build(self.strategy, **self.strategy_parameters)
        FORMS.get(self.form or "group_norm")
        return estimator, strategy

    def known_of(
        self, rows: Iterable[Mapping[str, Any]], keys: Sequence[Key]
    ) -> prompt_columns.Known:
        """Return what the columns that are named tell of the distinct prompts; arguments and errors as of Steps."""
        if self.pass_rate_column is None and self.source_column is None:
            return prompt_columns.Known(None, None)
        return prompt_columns.of_prompts(
            rows,
            keys,
            pass_rate_column=self.pass_rate_column,
            pass_rate_attempts=self.pass_rate_attempts,
            source_column=self.source_column,
        )

    def check(
        self: _Settings,
        host: Host,
        names: Mapping[str, str],
        group: int | None = None,
        **more: Any,
    ) -> _Settings:
        """Return the settings with the parameters that follow from the training.

        Args:
            names: how the trainer's user writes a setting.
            group: rollouts of a prompt in a step; None: not known yet.
            more: of :class:`openrlhf_dbb.core.plan.Plan`.

        Raises:
            ValueError: something does not go together, or the trainer cannot do it.
        """
        plan = self._plan(host=host, names=names, group=group, **more)
        settings = self if group is None else self._derived(plan)
        line = rules.refusal(settings._plan(host=host, names=names, group=group, **more))
        if line is not None:
            raise ValueError(line)
        for name, capability in ASKING.items():
            line = host.refusal(name, frozenset({capability}))
            if line is not None and getattr(self, name):
                raise ValueError(f"{line}; leave it out")
        return settings

    def _plan(self, **more: Any) -> Plan:
        estimator, strategy = self.built
        others = list(self.parts)
        if self.thin:
            others.append(Thinning(self.thin))
        if self.probe_fraction:
            others.append(Probing(self.probe_fraction, self.probe_samples))
        return Plan(
            estimator,
            form=self.form,
            strategy=strategy,
            others=others,
            estimator_name=self.estimator if isinstance(self.estimator, str) else "",
            strategy_name=self.strategy,
            **more,
        )

    def _derived(self: _Settings, plan: Plan) -> _Settings:
        """Return settings whose estimator and strategy have set what follows from the plan."""
        estimator, strategy = self.built
        of_strategy = differing(strategy, strategy.derived(plan))
        of_estimator = differing(estimator, estimator.derived(plan))
        settings = self
        if of_strategy:
            known = {**self.strategy_parameters, **of_strategy}
            settings = dataclasses.replace(settings, strategy_parameters=known)
        if of_estimator and isinstance(self.estimator, str):
            known = {**(self.parameters or {}), **of_estimator}
            settings = dataclasses.replace(settings, parameters=known)
        elif of_estimator:
            settings = dataclasses.replace(settings, estimator=estimator.derived(plan))
        return settings


class Steps:
    """The steps of a run in a trainer: prompts, scores, checkpoints."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        resume: bool,
        keys: Sequence[Key],
        facts: RunFacts,
        *,
        generate: Generate | None = None,
        max_rollouts: int | None = None,
        new_replays: Callable[[], ReplayMemory] | None = None,
        rows: Iterable[Mapping[str, Any]] = (),
        passive: bool = False,
        many_labels: bool = False,
        **about: Any,
    ) -> None:
        """Create the run, or resume it with its estimator; refuse another one.

        Args:
            keys: text and label of each row of the data set.
            generate: of a trainer that generates more within a step; None: it only draws.
            max_rollouts: most rollouts to generate; None: no limit.
            new_replays: makes an empty replay memory; None: nothing is replayed.
            rows: these rows, if the settings name columns of them.
            passive: a name that is taken gets a number; several labels of a prompt, and other data
                than the run's, are a warning.
            many_labels, about: of :meth:`Posteriors.create`.
        """
        estimator, strategy = settings.built
        if passive and settings.thin:
            raise ValueError(
                f"thin = {settings.thin} changes a training, and remembering changes none; leave it out"
            )
        self._strategy = strategy
        self._keys = keys
        self._facts = facts
        self._generate = generate
        self._max_rollouts = max_rollouts
        self._new_replays = new_replays
        self._thin = settings.thin
        self._state_name = f"the state of strategy {strategy.name!r}"
        if passive and not many_labels:
            many_labels = True
            _warn_of_two_labels(keys)
        if not resume and not many_labels:
            # Here, as messages count all rows, and below are the distinct ones.
            refuse_contradictions(*_columns(keys))
        prompts, labels = _columns(dict.fromkeys(keys))
        known = settings.known_of(rows, keys)
        sources = None if known.sources is None else dict(enumerate(known.sources))
        sampler = strategy.sampler(with_sources(strategy, facts, sources))
        # Refused now rather than at a checkpoint.
        exact_json.dumps(sampler.state(), self._state_name)
        if resume:
            self.posteriors = Posteriors.resume(
                settings.store,
                name,
                prompts,
                labels,
                take_over=settings.take_over,
                sources=known.sources,
            )
            try:
                self._check_resumed(estimator, prompts, labels, passive=passive)
            except ValueError:
                self.posteriors.run.release()
                self.posteriors.close()
                raise
        else:
            self.posteriors = Posteriors.create(
                settings.store,
                name,
                prompts,
                labels,
                estimator=estimator,
                if_exists="new" if passive else "error",
                warm_start=settings.warm_start,
                warm_start_weight=settings.warm_start_weight,
                warm_start_store=settings.warm_start_store,
                pass_rates=known.pass_rates,
                sources=known.sources,
                many_labels=many_labels,
                **about,
            )
        self._start_over()

    def _check_resumed(
        self,
        estimator: RewardEstimator,
        prompts: Sequence[str],
        labels: Sequence[str],
        *,
        passive: bool,
    ) -> None:
        record = self.posteriors.run.record
        begun = self.posteriors.estimator
        if begun != estimator:
            raise ValueError(
                f"run {record.name!r} was begun with {begun}, not {estimator}: use that, or warm_start={record.name!r}"
            )
        if record.dataset_digest != dataset_digest(prompts, labels):
            problem = (
                f"run {record.name!r} was begun with other prompts and labels, or with these in another order; give "
                f"the data set that it was begun with, or begin another run with warm_start={record.name!r}"
            )
            if not passive:
                raise ValueError(problem)
            _log.warning("%s; prompts that are new begin with the prior", problem)

    def _start_over(self) -> None:
        facts = with_sources(self._strategy, self._facts, self.posteriors.sources)
        prompt_ids = [self.posteriors.prompt_ids[key] for key in self._keys]
        self._filler: Filler[int, Any] = Filler(
            ShuffledPrompts(prompt_ids, self._facts.seed),
            AtOnce(self._generate or _unscored),
            self._strategy.sampler(facts),
            predictive=self.posteriors.predictive if self._strategy.draws else None,
            max_rollouts=self._max_rollouts,
            scores_later=self._generate is None,
        )
        self._drawn: tuple[Group[int, Any], ...] = ()  # of the step
        self.replays = None if self._new_replays is None else self._new_replays()
        self._side: list[SideState] = [_DrawsFile(self._filler, len(prompt_ids), self._state_name)]
        if self.replays is not None:
            self._side.append(self.replays)

    def fill(self) -> Batch[int, Any]:
        """Return the next step's groups, of rows of the data set.

        Raises:
            BudgetSpent: ``max_rollouts`` does not allow another batch.
            RunError: the strategy keeps no group, or gives up.
        """
        note = self._filler.sampler.note
        batch = self._filler.fill_over_passes(self._strategy.name)
        self._drawn = batch.trained + batch.filtered
        if self._filler.sampler.note != note:
            _log.warning("%s", self._filler.sampler.note)
        return batch

    def draw(self) -> list[int]:
        """Draw the next step's prompts; return their rows in the data set.

        Their scores come by :meth:`observe`.
        """
        return [group.prompt for group in self.fill().trained]

    def observe(
        self,
        keys_R: Sequence[Key],
        rewards_R: Floats,
        scores_R: Floats,
        form: str | None,
        extras: StepExtras,
        advantages_R: Sequence[float] | None = None,
    ) -> Scored:
        """Do the next step; return it with the advantages that are trained with: weighted, and thinned or whitened.

        Without a ``form`` these are ``advantages_R``, the trainer's own.
        """
        prompts, labels = zip(*keys_R, strict=True)
        drawn_of = {
            self._keys[group.prompt]: group.drawn
            for group in self._drawn
            if group.drawn is not None
        }
        if drawn_of:
            extras = dataclasses.replace(
                extras,
                inclusion=[drawn_of[key].inclusion for key in keys_R],
                weights=[drawn_of[key].weight for key in keys_R],
            )
        step = self.posteriors.step + 1
        scored = self.posteriors.observe(
            step,
            prompts,
            labels,
            rewards_R,
            scores=scores_R,
            form=form,
            advantages=advantages_R,
            extras=extras,
        )
        if self._generate is None:
            self._filler.tell([self._with_scores(group, keys_R, scores_R) for group in self._drawn])
        scored.metrics.update(self._filler.sampler.metrics())
        if form is None:
            return scored
        if not FORMS.get(form).whitened:
            return thinned(scored, self._thin, self._facts.seed, step)
        return whitened(
            scored, np.where(np.isnan(rewards_R), 0, extras.tokens) * np.asarray(extras.trained)
        )

    def _with_scores(
        self, group: Group[int, Any], keys_R: Sequence[Key], scores_R: Floats
    ) -> Group[int, Any]:
        of_group_R = [key == self._keys[group.prompt] for key in keys_R]
        return dataclasses.replace(group, scores=scores_R[of_group_R])

    def save(self, folder: Path) -> None:
        """Write what a resume needs into a checkpoint's folder, once every step up to here is durable."""
        folder.mkdir(parents=True, exist_ok=True)
        self.posteriors.checkpoint(self.posteriors.step, folder.name)
        saved = {
            "run": self.posteriors.run.record.uuid,
            "step": self.posteriors.step,
            "tag": folder.name,
        }
        for state in self._side:
            state.save(folder)
        (folder / SAVED).write_text(json.dumps(saved), encoding="utf-8")

    def saved_in(self, folder: Path) -> dict[str, Any]:
        """Return what :meth:`save` has written; refuse a checkpoint of another run, or of steps that were undone."""
        record = self.posteriors.run.record
        begin = f"begin another run with the checkpoint as its model and warm_start={record.name!r}"
        try:
            saved: dict[str, Any] = exact_json.loads((folder / SAVED).read_text(encoding="utf-8"))
            run = str(saved["run"])
            step = int(saved["step"])
            tag = str(saved["tag"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"checkpoint {folder} was not saved with posteriors ({error}): {begin}"
            ) from None
        if run != record.uuid:
            raise ValueError(
                f"checkpoint {folder} belongs to run {run}, not to {record.name!r}: {begin}"
            )
        # The store forgets a checkpoint when the run goes back behind it.
        if (step, tag) not in self.posteriors.store.checkpoints(record):
            raise ValueError(
                f"checkpoint {folder} is of steps that run {record.name!r} has undone; use an older one"
            )
        return saved

    def go_back(self, checkpoint: Path | None, folder: Path) -> None:
        """Go back to a checkpoint, bit for bit; without one start over.

        Raises:
            ValueError: the checkpoint does not fit the run; or there is none, and the run has
                recorded some that are not whole in ``folder``.
        """
        record = self.posteriors.run.record
        recorded = self.posteriors.store.checkpoints(record)
        if checkpoint is None and len(recorded) > 1:  # a kill may have cut the only one short
            tags = ", ".join(tag for _, tag in recorded)
            raise ValueError(
                f"run {record.name!r} has recorded {tags}, and no checkpoint in {folder} is whole: name one"
            )
        self._start_over()
        if checkpoint is None:
            self.posteriors.roll_back(0)
            return
        saved = self.saved_in(checkpoint)
        if self.replays is None and (checkpoint / replay.FILE).exists():
            problem = f"checkpoint {checkpoint} is of a run with replay"
            raise ValueError(f"{problem}; go on with its replay=")
        for state in self._side:
            state.load(checkpoint)
        self.posteriors.roll_back(int(saved["step"]))


class _DrawsFile:
    """The draws of a run in a checkpoint (``core.host.SideState``)."""

    def __init__(self, filler: Filler[int, Any], rows: int, name: str) -> None:
        self._filler = filler
        self._rows = rows
        self._name = name

    def save(self, folder: Path) -> None:
        text = exact_json.dumps(self._filler.state(), self._name)
        (folder / DRAWS).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from :meth:`save`, also from what earlier releases have saved.

        Raises:
            ValueError: there is no such state, or it is of another strategy.
        """
        mine = self._filler.state()
        try:
            if (folder / DRAWS).exists():
                state = exact_json.loads((folder / DRAWS).read_text(encoding="utf-8"))
            else:
                state = self._of_earlier_release(folder)
            names = state["sampling"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"checkpoint {folder} has no state of its draws ({error})"
            raise ValueError(f"{problem}; use an older one") from None
        if names != mine["sampling"].keys() or state.keys() != mine.keys():
            raise ValueError(f"checkpoint {folder} is of another strategy; resume it with its own")
        self._filler.load(state)

    def _of_earlier_release(self, folder: Path) -> dict[str, Any]:
        """Return the state of a release without filler: the sampler's, and the draws left of a pass."""
        saved = exact_json.loads((folder / SAVED).read_text(encoding="utf-8"))
        state = {**self._filler.state(), "sampling": saved["strategy"]}
        if state["place"]:  # else the strategy does not draw
            state["place"] = {"place": self._rows - int(saved["left"])}
        return state


def _columns(keys: Iterable[Key]) -> tuple[list[str], list[str]]:
    """Return the texts and the labels of rows."""
    rows = list(keys)
    return [prompt for prompt, _ in rows], [label for _, label in rows]


def _warn_of_two_labels(keys: Sequence[Key]) -> None:
    bad = contradictions(*_columns(keys))
    if bad:
        place, reason = next(iter(bad.items()))
        _log.warning("a prompt with two labels has two posteriors; %s: %s", place, reason)


def _unscored(requests: Sequence[RowRequest]) -> list[RowAnswer]:
    """Answer with rollouts that the trainer generates later."""
    return [Answer([None] * request.rollouts, None) for request in requests]


def stored_run(
    store: storage.PosteriorStore | str | None, name: str, *, create: bool
) -> storage.RunRecord | None:
    """Return the run of this name, None if there is none; without ``create`` the store must exist."""
    with _open(store, create=create) as opened:
        for run in opened.runs():
            if run.name == name:
                return run
    return None


def refuse_taken(store: storage.PosteriorStore | str | None, name: str, way_out: str) -> None:
    """Raise StoreError if a run has this name; ``way_out`` names the trainer's arguments."""
    with _open(store, create=True) as opened:
        if opened.is_taken(name):
            raise storage.StoreError(
                f"there is a run named {name!r} in {opened.location}; {way_out}"
            )


def _open(store: storage.PosteriorStore | str | None, *, create: bool) -> Any:
    if isinstance(store, storage.PosteriorStore):
        return nullcontext(store)
    return storage.open_store(store, create=create)


def _check_store(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (str, storage.PosteriorStore)):
        forms = "sqlite:///FILE, postgresql://..., or an open store"
        raise ValueError(f"{name} = {value!r:.80} is no store; give {forms}")


def _check_weight(weight: Any) -> None:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1:
        raise ValueError(
            f"warm_start_weight = {weight!r:.80} is not in (0, 1]; 1 takes the other run's counts whole"
        )


def check_text(name: str, value: Any) -> None:
    """Raise ValueError for a setting that is neither a text nor None."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} = {value!r:.80} is not a text; give a name")
