"""The posteriors of a run: rewards go in, advantages come out, and every step is stored. For any trainer.

Axes: R rollouts (rows) of a step; V distinct prompts among them that have a verified rollout; G rollouts of the largest
group; Q probed prompts.
"""

import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from openrlhf_dbb import estimators, storage
from openrlhf_dbb.core import SET_ASIDE, rules
from openrlhf_dbb.core import step as steps
from openrlhf_dbb.core.memory import MemorySupportError as MemorySupportError
from openrlhf_dbb.core.memory import refusal
from openrlhf_dbb.core.scale import supports_run
from openrlhf_dbb.core.step import Floats, Groups, Key, Positions, Rollouts, Scored, StepExtras, keys_of, numbers, whole
from openrlhf_dbb.core.strategies import Predictive
from openrlhf_dbb.core.texts import as_json, refuse_contradictions
from openrlhf_dbb.estimators import FORMS, Form, RewardEstimator, RewardSupportError, State
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.storage.read import read_log, unverified_visits, whole_prompts
from openrlhf_dbb.storage.records import UNVERIFIED

_NO_EXTRAS = StepExtras()


class Posteriors(AbstractContextManager["Posteriors"]):
    """The posteriors of all prompts of a run, in memory and in the store.

    A method that writes or waits for the writing raises :class:`openrlhf_dbb.storage.StoreError` if the database
    fails, or if another process owns the run now. The training must not go on then.

    Attributes:
        run: the stored run; this process owns it.
        prompt_ids: the store's id of every prompt, by (text, label).
        warm_start: how many prompts began with another run's posteriors; None without a warm start.
        step: the last observed step; 0 before the first.
    """

    def __init__(
        self,
        estimator: RewardEstimator,
        store: storage.PosteriorStore,
        run: storage.Run,
        prompts: Sequence[str],
        labels: Sequence[str],
        ids: Positions,
        *,
        warm_start: storage.WarmStart | None = None,
        sources: Sequence[str] | None = None,
        close_store: bool = False,
    ) -> None:
        """Users call :meth:`create` or :meth:`resume`. ``ids`` has the store's id of each prompt."""
        self.estimator, self.store, self.run, self.warm_start = estimator, store, run, warm_start
        self._belief = estimator.belief
        self._close_store = close_store
        # Equal pairs of text and label have one id, and so share one posterior.
        self._ids, first_row = np.unique(ids, return_index=True)
        self.prompt_ids = {(prompts[row], labels[row]): int(at) for at, row in zip(self._ids, first_row, strict=True)}
        self._texts = [prompts[row] for row in first_row]
        self._sources = None if sources is None else np.array(sources)[first_row]
        self._features: State = {"features": text_features(self._texts)} if self._belief.reads_texts else {}
        # A slow or distant database must not hold up the training.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="posterior store")
        self._writing: Future[None] | None = None
        self._state_lock = threading.Lock()  # generation ahead of the training reads the state in another thread
        self._state: State = {}
        self._load()

    @classmethod
    def create(
        cls,
        store: storage.PosteriorStore | str | None,
        run_name: str,
        prompts: Iterable[str],
        labels: Iterable[str],
        *,
        estimator: str | RewardEstimator = "point",
        parameters: Mapping[str, Any] | None = None,
        if_exists: Literal["error", "new"] = "error",
        warm_start: str | None = None,
        warm_start_weight: float = 1.0,
        warm_start_store: storage.PosteriorStore | str | None = None,
        pass_rates: ArrayLike | None = None,
        sources: Sequence[str] | None = None,
        many_labels: bool = False,
        model: str = "",
        dataset: str = "",
        reward: str = "",
        method: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> "Posteriors":
        """Start a new run.

        Args:
            store: URL (``sqlite:///FILE``, ``postgresql://...``), an open store, or None: the default.
            run_name: name of the run, which no other run of the store may have.
            prompts: (P,) texts of all prompts that will be trained on.
            labels: (P,) their right answers as texts; equal pairs of both share one posterior.
            estimator: what turns rewards into posteriors: name, ``package.module:Class``, or object.
            parameters: values of the estimator's parameters by name; only with a name.
            if_exists: "error" refuses a taken ``run_name``; "new" takes the next free one: ``my-run-2``.
            warm_start: name, uuid or number of a run, whose posteriors this run begins with. If it
                has another estimator, its stored visits are replayed through this run's.
            warm_start_weight: in (0, 1], multiplies the imported counts.
            warm_start_store: the store of that run, as ``store``; None: the same store.
            pass_rates: (P, 2) successes and attempts (1 or more) of each prompt, measured before the training; NaN
                where unknown. The posteriors begin with them as with a visit; not with ``warm_start``.
            sources: (P,) where each prompt comes from, for metrics by source; not stored: give them to
                :meth:`resume` again.
            many_labels: whether a prompt may have several labels, by which equal texts with
                different images are told apart.
            model: name of the trained model, stored with the run for people.
            dataset: name of the data set, stored likewise.
            reward: name of the reward or verifier, stored likewise.
            method: name of the training method, stored likewise.
            config: the trainer's settings, stored likewise. In it and in the names, passwords,
                queries of URLs and entries that are named as a key, token or password are masked.
                What JSON cannot hold is stored as text.

        Raises:
            ValueError: the estimator is unknown, a parameter is out of range, or a prompt has two labels.
            storage.StoreError: the name is taken, the store cannot be opened, or the warm start does not fit.
        """
        prompts, labels = _columns(prompts, labels)
        if not many_labels:
            refuse_contradictions(prompts, labels)
        if if_exists not in ("error", "new"):
            raise ValueError(f"if_exists = {if_exists!r:.80} is none of error, new")
        sources = _checked_sources(sources, len(prompts))
        known_P_2 = None if pass_rates is None else known_pass_rates(pass_rates, len(prompts))
        if known_P_2 is not None and warm_start is not None:
            raise ValueError("pass_rates and warm_start both say what the posteriors begin with; give one of them")
        built = as_estimator(estimator, parameters)
        name = estimator if isinstance(estimator, str) else _stored_name(type(built))
        with ExitStack() as others, ExitStack() as undo:
            opened = _opened(store, undo)
            source = opened if warm_start_store is None else _opened(warm_start_store, others)
            source_run = None if warm_start is None else source.find_run(warm_start)
            run = opened.create_run(
                run_name if if_exists == "error" else _free_name(opened, run_name),
                estimator=name,
                estimator_version=built.belief.version,
                parameters=dataclasses.asdict(built),  # type: ignore[call-overload]
                state_fields=built.belief.state_fields,
                model=without_secrets(model),
                dataset=without_secrets(dataset),
                dataset_digest=dataset_digest(prompts, labels),
                reward=without_secrets(reward),
                config=_stored_config({} if config is None else config),
                method=method,
            )
            undo.callback(opened.delete_run, run.record)  # a later resume must not find a run that never began
            ids = opened.register_prompts(prompts, labels)
            started = None
            if source_run is not None:
                replayed = None if can_copy(source_run, run.record) else replay(source, source_run, built.belief)
                started = run.warm_start(source, source_run, ids, weight=warm_start_weight, replayed=replayed)
            elif known_P_2 is not None:
                run.begin_with(of_pass_rates(built.belief, ids, prompts, known_P_2))
            close_store = opened is not store
            posteriors = cls(
                built,
                opened,
                run,
                prompts,
                labels,
                ids,
                warm_start=started,
                sources=sources,
                close_store=close_store,
            )
            undo.pop_all()
        return posteriors

    @classmethod
    def resume(
        cls,
        store: storage.PosteriorStore | str | None,
        run_name: str,
        prompts: Iterable[str],
        labels: Iterable[str],
        *,
        step: int | None = None,
        take_over: bool = False,
        sources: Sequence[str] | None = None,
    ) -> "Posteriors":
        """Continue a run with the estimator and parameters that it was started with; new prompts begin with the prior.

        Args:
            run_name: name, uuid or number of the run, in a store that exists.
            step: the step of the model checkpoint that is loaded. Later steps are undone, bit for bit. None undoes
                nothing.
            take_over: continue a run whose owner is on another machine and known to be dead.
            sources: (P,) where each prompt comes from, for metrics by source.

        Raises:
            ValueError: the run's estimator is not installed or not imported, or its state is of another version.
            storage.StoreError: the run does not exist, has finished, has an owner, or has not reached ``step``.
        """
        prompts, labels = _columns(prompts, labels)
        sources = _checked_sources(sources, len(prompts))
        with ExitStack() as undo:
            opened = _opened(store, undo, create=False)
            record = opened.find_run(run_name)
            estimators.check_stored(record.estimator)
            estimator = estimators.build(record.estimator, **record.parameters)
            belief = estimator.belief
            if (record.estimator_version, record.state_fields) != (belief.version, tuple(belief.state_fields)):
                raise ValueError(
                    f"run {record.name!r} was written by version {record.estimator_version} of estimator "
                    f"{record.estimator!r}, installed is version {belief.version}; start a new run"
                )
            run = opened.claim_run(record.run_id, take_over=take_over)
            undo.callback(run.release)
            if step is not None:
                run.roll_back(whole("step", step))
            ids = opened.register_prompts(prompts, labels)
            closes = opened is not store
            posteriors = cls(estimator, opened, run, prompts, labels, ids, sources=sources, close_store=closes)
            undo.pop_all()
        return posteriors

    def __exit__(self, *exception: object) -> None:
        self.close()

    @np.errstate(over="ignore", invalid="ignore")  # refused at the end
    def observe(
        self,
        step: int,
        prompts: Iterable[str],
        labels: Iterable[str],
        rewards: ArrayLike,
        *,
        scores: ArrayLike | None = None,
        form: str | None = "group_norm",
        advantages: ArrayLike | None = None,
        extras: StepExtras = _NO_EXTRAS,
    ) -> Scored:
        """Update the posteriors with a step's rollouts, begin to store the step, and return the advantages.

        The step before is stored when this method returns. This step is stored once :meth:`settle` returns.

        Args:
            prompts, labels: (R,) of each rollout; the run must have been opened with them.
            rewards: (R,) the optimized values. None or NaN marks a rollout that could not be verified; it is left out
                of its group and gets advantage 0. A prompt without any score in a step keeps its
                posterior; after three such visits in a row it is one of :attr:`unverified`.
            scores: (R,) the verifier's scores before length penalties and the like; by default the rewards. Estimators
                of binary correctness see the scores, estimators of real rewards see the rewards.
            form: of :mod:`openrlhf_dbb.estimators.forms`, by name. None: the trainer had advantages of its own, and
                this estimator only remembers.
            advantages: (R,) these advantages, which are stored; only where ``form`` is None. None: nobody knows them.

        Raises:
            MemorySupportError: the memory does not take a score, such as 0.5. Nothing has changed.
            ValueError: the step is not the next one, a column has another length or a value of another kind, a sum is
                not finite, a prompt or the form is unknown, or the estimator cannot serve the form
                or has too few rollouts of every prompt. Nothing has changed then.
        """
        self.settle()
        step = whole("step", step)
        if step != self.step + 1:
            following = f"step {step} of run {self.run.record.name!r} is not the next one, {self.step + 1}"
            raise ValueError(f"{following}; to do a step again, roll back first")
        rollouts = Rollouts.checked(step, prompts, labels, rewards, scores, extras)
        groups = Groups.by_prompt(self._positions(rollouts.prompts), ~np.isnan(rollouts.rewards))
        if form is not None and advantages is not None:
            raise ValueError(f"form {form!r} makes advantages, and others are given; pass form=None with these")
        # The trainer's own advantages are of whatever size of groups.
        advantage_form = Form() if form is None else self._form_for(form, groups)
        probed_Q = self._positions(rollouts.probes.prompts if rollouts.probes else [])

        # The estimator changes a copy, since whatever is refused below must change nothing.
        state = self._state | {field: self._state[field].copy() for field in self._belief.state_fields}
        expected = self._belief.predictive(state)
        estimate, changed = self._update(state, step, rollouts, groups, advantage_form)
        scored = steps.score(rollouts, groups, estimate, advantage_form)
        if form is None:
            scored = steps.as_trained(scored, groups, rollouts.rewards, advantages)
        usage, metrics = steps.usage(rollouts, groups, scored), steps.metrics(step, rollouts, groups, scored)
        missed = self._ids[groups.prompts_P[~groups.verified_P]]
        unverified = self._without_score(missed, groups)
        metrics |= self._estimator_metrics(rollouts, groups, changed, expected, unverified)
        if len(missed):
            changed.shared[UNVERIFIED] = missed.astype(np.float64)
        probes = None
        if rollouts.probes is not None:
            probes, errors = steps.measure(rollouts.probes, probed_Q, groups, changed)
            metrics |= errors
        kept = steps.kept_rows(step, rollouts, groups, self._ids[groups.prompts_P], scored)
        rows = dataclasses.replace(changed, form=form, usage=usage, probes=probes, kept=kept)
        try:
            rows = rows.checked()
        except storage.StoreError as error:
            raise ValueError(f"step {step} is refused: {error}") from None
        if form is not None and not np.isfinite(scored.advantages).all():
            raise ValueError(f"step {step} is refused: an advantage is not finite; use smaller rewards and weights")
        with self._state_lock:
            self._state = state
            self._unverified = unverified
        self._visited_at[groups.prompts_V] = step
        self.step: int = step
        self._writing = self._writer.submit(self.run.record_step, step, rows)
        return dataclasses.replace(scored, metrics=metrics)

    def predictive(self) -> Predictive:
        """Return what the estimator expects of every prompt's next visit. Another thread may call this method."""
        with self._state_lock:
            expected = self._belief.predictive(self._state)
            unverified = _set_aside(self._unverified)
        if expected is None:
            raise ValueError(f"estimator {self.estimator.name!r} predicts no visit; use auto or dbb")
        return Predictive(self._ids, *expected, np.isin(self._ids, unverified))

    @property
    def unverified(self) -> list[Key]:
        """Text and label of the prompts whose last three visits, or more, yielded no score."""
        with self._state_lock:
            unverified = set(_set_aside(self._unverified))
        if not unverified:
            return []
        return [key for key, prompt_id in self.prompt_ids.items() if prompt_id in unverified]

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Begin to store the numbers of what the trainer logged of an observed step, by name (view ``steps``)."""
        self.settle()
        self._writing = self._writer.submit(self.run.record_metrics, whole("step", step), dict(metrics))

    def settle(self) -> None:
        """Wait until the last step is stored. One transaction stores all of a step."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable. Call it before the model checkpoint ``tag`` counts as saved."""
        self.settle()
        self.run.record_checkpoint(whole("step", step), tag)

    def roll_back(self, step: int) -> None:
        """Undo every step after ``step``, bit for bit, to continue from a model checkpoint of that step."""
        self.settle()
        self.run.roll_back(whole("step", step))
        self._load()

    def finish(self, unused_rollouts: int = 0) -> None:
        """Mark the run as complete: it cannot be resumed. ``unused_rollouts`` were generated after the last step."""
        self.settle()
        self.run.finish(whole("unused_rollouts", unused_rollouts))

    def close(self) -> None:
        """Wait for the last step and close the store if this object opened it. The run can be resumed."""
        try:
            self.settle()
        finally:
            self._writer.shutdown()
            if self._close_store:
                self.store.close()

    def _load(self) -> None:
        """Read the run's state from the store; prompts without a stored posterior get the prior."""
        table = self.run.load(self._ids)
        initial = self._belief.initial_state(len(self._ids))
        shared = initial | self.run.load_shared()
        self._visited_at = table.step
        self._unverified = unverified_visits(self.store, self.run.record)
        self.step = self.run.record.last_step
        self._state = {
            field: np.where(table.step >= 0, table.state[:, i], initial[field])
            for i, field in enumerate(self._belief.state_fields)
        } | {field: shared[field] for field in self._belief.shared_fields}
        self._state |= self._features

    def _positions(self, prompts: Sequence[Key]) -> Positions:
        try:
            return np.searchsorted(self._ids, [self.prompt_ids[prompt] for prompt in prompts])
        except KeyError as error:
            text, label = error.args[0]
            raise ValueError(f"prompt {text!r:.80} with label {label!r:.80} is not in the data set") from None

    def _without_score(self, missed: Positions, groups: Groups) -> dict[int, int]:
        """Return by prompt id how many visits in a row, up to this step's, yielded no score."""
        visits = dict(self._unverified)
        for prompt_id in self._ids[groups.prompts_V].tolist():
            visits.pop(prompt_id, None)
        for prompt_id in missed.tolist():
            visits[prompt_id] = visits.get(prompt_id, 0) + 1
        return visits

    def _estimator_metrics(
        self,
        rollouts: Rollouts,
        groups: Groups,
        changed: storage.StepRows,
        expected: tuple[Floats, Floats] | None,
        unverified: Mapping[int, int],
    ) -> dict[str, float]:
        """Return the metrics of a step that the estimator or the sources of the prompts tell.

        Args:
            expected: alpha and beta of every prompt before the step; None if the estimator has none.
            unverified: by prompt id how many visits in a row yielded no score.
        """
        metrics = {f"estimator/{name}": float(part[0]) for name, part in changed.shared.items() if len(part) == 1}
        shares_V = changed.successes, changed.rollouts
        if self._sources is not None:
            scores_V_G = groups.matrix(rollouts.scores)
            metrics |= steps.by_source(self._sources[groups.prompts_V], *shares_V, scores_V_G)
        if unverified:
            metrics["estimator/unverified"] = float(len(_set_aside(unverified)))
        if expected is not None:
            alpha, beta = expected
            metrics |= steps.of_hardest(alpha / (alpha + beta), groups.prompts_V, *shares_V)
        return metrics

    def _form_for(self, name: str, groups: Groups) -> Form:
        """Return a form by name; ValueError if the estimator, or every group's size, cannot serve it."""
        form = FORMS.build(str(name))
        plan = rules.Plan(
            self.estimator,
            form=form.name,
            group=int(groups.slot_R.max()) + 1,
            names={"group": "a largest group of {} in the step"},
        )
        line = rules.refusal(plan)
        if line is not None:
            raise ValueError(line)
        return form

    def _update(
        self, state: State, step: int, rollouts: Rollouts, groups: Groups, form: Form
    ) -> tuple[estimators.Estimate, storage.StepRows]:
        """Update a state; return the estimates of the step's V prompts and the rows that store the change."""

        def seen_by(estimator: RewardEstimator) -> Floats:
            return groups.matrix(rollouts.rewards if estimator.support == "real" else rollouts.scores)

        at_V, belief = groups.prompts_V, self._belief
        previous_state, previous_step = belief.columns(state, at_V), self._visited_at[at_V]
        previous_state[previous_step < 0] = np.nan  # undoing a first visit deletes the posterior
        scores_V_G = groups.matrix(rollouts.scores)
        versions_R = rollouts.policy_versions
        scored_by = self.estimator
        own_state = state if belief is scored_by else {}
        try:
            estimate = scored_by.observe_at(own_state, at_V, seen_by(scored_by), leave_one_out=form.leave_one_out)
            if belief is not scored_by:
                # All of a group or nothing: the scores that it takes are no sample of the others.
                belief.observe_at(state, at_V, seen_by(belief))
        except RewardSupportError as error:
            prompt = self._texts[at_V[error.row]]
            raise refusal(scored_by, error, f"prompt {prompt!r:.80}") from error
        rows = storage.StepRows(
            prompt_ids=self._ids[at_V],
            rollouts=np.sum(~np.isnan(scores_V_G), axis=1),
            successes=np.nansum(scores_V_G, axis=1),
            mean=estimate.mean,
            variance=estimate.variance,
            state=belief.columns(state, at_V),
            previous_state=previous_state,
            previous_step=previous_step,
            shared={field: state[field] for field in belief.shared_fields},
            policy_version=None if versions_R is None else np.nanmean(groups.matrix(versions_R), axis=1),
            inclusion=None if rollouts.inclusion is None else groups.matrix(rollouts.inclusion)[:, 0],
        )
        return estimate, rows


def _opened(store: storage.PosteriorStore | str | None, closing: ExitStack, *, create: bool = True) -> Any:
    """Return an open store; ``closing`` closes a store that this function opened."""
    if isinstance(store, storage.PosteriorStore):
        return store
    return closing.enter_context(storage.open_store(store, create=create))


def _columns(prompts: Iterable[str], labels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return texts and labels of prompts, checked."""
    keys = keys_of(prompts, labels)
    return [prompt for prompt, _ in keys], [label for _, label in keys]


def _checked_sources(sources: Sequence[str] | None, prompts: int) -> list[str] | None:
    """Return the source of each prompt, if they are given; ValueError if one is missing or no text."""
    if sources is None:
        return None
    texts = steps.texts_of("sources", sources)
    if len(texts) != prompts:
        raise ValueError(f"there are {prompts} prompts and {len(texts)} sources; pass one for each prompt")
    return texts


def _free_name(store: storage.PosteriorStore, name: str) -> str:
    """Return the name, with a number behind it if it is taken."""
    free = name
    number = 1
    while store.is_taken(free):
        number += 1
        free = f"{name}-{number}"
    return free


def _stored_name(kind: type[RewardEstimator]) -> str:
    """Return the name by which :func:`estimators.build` finds an estimator's class."""
    if estimators.available().get(kind.name) is kind:
        return kind.name
    return f"{kind.__module__}:{kind.__qualname__}"


def _stored_config(config: Mapping[str, Any]) -> Any:
    """Return a configuration as JSON can hold it, without secrets."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config = {config!r:.80} is no dictionary; give names with values")
    try:
        return without_secrets(as_json(config))
    except RecursionError:
        problem = "config holds itself, or is nested too deeply"
        raise ValueError(f"{problem}; leave that entry out") from None


def _set_aside(visits: Mapping[int, int]) -> list[int]:
    """Return the ids of the prompts that strategies set aside, by their visits without a score."""
    return [prompt_id for prompt_id, number in visits.items() if number >= SET_ASIDE]


def dataset_digest(prompts: Sequence[str], labels: Sequence[str]) -> str:
    """Return a hash of all prompts and labels in order, 32 hex digits."""
    return hashlib.blake2b(b"".join(map(storage.prompt_hash, prompts, labels)), digest_size=16).hexdigest()


def known_pass_rates(values: Any, prompts: int) -> Floats:
    """Return successes and attempts of each prompt, (P, 2), if there is a rate in [0, 1], of 1 attempt or more."""
    known_P_2 = numbers("pass_rates", values)
    if known_P_2.shape != (prompts, 2):
        raise ValueError(f"pass_rates have shape {known_P_2.shape}; pass successes and attempts of {prompts} prompts")
    successes, attempts = known_P_2[~np.isnan(known_P_2).any(axis=1)].T
    if not len(attempts) or not ((attempts >= 1) & (successes >= 0) & (successes <= attempts)).all():
        raise ValueError("pass_rates need 0 <= successes <= attempts and 1 attempt or more, for one prompt at least")
    return known_P_2


def as_estimator(estimator: str | RewardEstimator, parameters: Mapping[str, Any] | None) -> RewardEstimator:
    """Return an estimator that is given by name and parameters, or as an object."""
    if isinstance(estimator, str):
        return estimators.build(estimator, **(parameters or {}))
    if not isinstance(estimator, RewardEstimator):
        raise ValueError(f"estimator {estimator!r} is no estimator; give a name, or an object of an estimator's class")
    if parameters is not None:
        raise ValueError(f"parameters {dict(parameters)} belong to an estimator's name; the object has its own")
    return estimator


def rewards_of(rollouts_V: Positions, successes_V: Floats) -> Floats:
    """Return rewards (V, G) of groups from their number N and sum S: S ones, N - S zeros; NaN fills up.

    If S is not a whole number from 0 to N, every reward of the group is S / N.
    """
    slot = np.arange(rollouts_V.max(initial=0))
    ones_V_G = np.where(slot < successes_V[:, None], 1.0, 0.0)
    whole_V = (successes_V == np.round(successes_V)) & (successes_V >= 0) & (successes_V <= rollouts_V)
    rewards_V_G = np.where(whole_V[:, None], ones_V_G, (successes_V / rollouts_V)[:, None])
    return np.where(slot < rollouts_V[:, None], rewards_V_G, np.nan)


def can_copy(source: storage.RunRecord, own: storage.RunRecord) -> bool:
    """Return whether the state of ``source`` means the same to run ``own``."""
    kept_by, kept_by_own = (run.parameters.get("memory", run.estimator) for run in (source, own))
    same_version = kept_by != kept_by_own or source.estimator_version == own.estimator_version
    return source.state_fields == own.state_fields and same_version


def of_pass_rates(
    belief: RewardEstimator, ids_P: Positions, texts: Sequence[str], known_P_2: Floats
) -> storage.Replayed:
    """Return what ``belief`` knows of prompts with successes and attempts measured before, NaN where unknown."""
    known = np.flatnonzero(~np.isnan(known_P_2).any(axis=1))
    prompt_ids, first = np.unique(ids_P[known], return_index=True)  # a prompt may be there twice
    rows = known[first]
    state = belief.initial_state(len(rows))
    if belief.reads_texts:
        state["features"] = text_features([texts[row] for row in rows])
    successes_P, attempts_P = known_P_2[rows].T[:, :, None]
    attempt_G = np.arange(known_P_2[rows, 1].max())
    # 2.4 successes of 8 are 1, 1, 0.4, 0, 0, 0, 0, 0.
    rewards_P_G = np.where(attempt_G < attempts_P, np.clip(successes_P - attempt_G, 0, 1), np.nan)
    return _of_state(belief, belief.known(state, rewards_P_G), prompt_ids, np.arange(len(prompt_ids)))


def _of_state(belief: RewardEstimator, state: State, prompt_ids: Positions, seen: Positions) -> storage.Replayed:
    shared = {field: state[field] for field in belief.shared_fields}
    return storage.Replayed(prompt_ids[seen], belief.columns(state, seen), shared)


def replay(store: storage.PosteriorStore, run: storage.RunRecord, belief: RewardEstimator) -> storage.Replayed:
    """Return what ``belief`` would know after all visits of a run.

    Raise MemorySupportError if the run has scores that ``belief`` does not take.
    """
    log = read_log(store, run)
    if not supports_run(store, run, belief):
        raise MemorySupportError(
            f"run {run.name!r} has scores that memory {belief.name!r} does not take, so that its "
            "visits cannot be replayed; begin without a warm start, or remember real rewards: "
            'estimator "gaussian", or "point" with parameters={"memory": "gaussian"} '
            "(--point.memory gaussian)"
        )
    prompt_ids, prompt_V = np.unique(log.prompt_id, return_inverse=True)
    state = belief.initial_state(len(prompt_ids))
    if belief.reads_texts:
        state["features"] = text_features([text for text, _ in whole_prompts(store, prompt_ids)])
    rewards_V_G = rewards_of(log.rollouts, log.successes)
    for rows in np.split(np.arange(len(log.step)), np.flatnonzero(np.diff(log.step)) + 1):
        belief.observe_at(state, prompt_V[rows], rewards_V_G[rows])
    return _of_state(belief, state, prompt_ids, np.arange(len(prompt_ids)))
