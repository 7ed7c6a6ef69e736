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
from openrlhf_dbb.core import SET_ASIDE, beginnings, rules, step_metrics
from openrlhf_dbb.core.arrays import Floats, Key, Positions, keys_of, texts_of, whole
from openrlhf_dbb.core.groups import Groups
from openrlhf_dbb.core.kept import kept_rows
from openrlhf_dbb.core.memory import MemorySupportError as MemorySupportError
from openrlhf_dbb.core.memory import refusal
from openrlhf_dbb.core.probes import measure
from openrlhf_dbb.core.step import Rollouts, Scored, StepExtras, as_trained, score
from openrlhf_dbb.core.strategies import Predictive
from openrlhf_dbb.core.texts import as_json, refuse_contradictions
from openrlhf_dbb.estimators import FORMS, Form, RewardEstimator, RewardSupportError, State
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.secrets import without_passwords, without_secrets
from openrlhf_dbb.storage import decode
from openrlhf_dbb.storage.read import unverified_visits
from openrlhf_dbb.storage.records import UNVERIFIED

_NO_EXTRAS = StepExtras()


@dataclasses.dataclass(frozen=True)
class _Update:
    """What a step changes. Nothing has changed before it is taken over."""

    state: State  # after the step
    # Alpha, beta of every prompt before the step, if the estimator has them
    predicted: tuple[Floats, Floats] | None
    estimate: estimators.Estimate  # of the step's V prompts
    rows: storage.StepRows  # which store the change


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
        self.estimator = estimator
        self.store = store
        self.run = run
        self.warm_start = warm_start
        self._belief = estimator.belief
        self._close_store = close_store
        # Equal pairs of text and label have one id, and so share one posterior.
        self._ids, first_row = np.unique(ids, return_index=True)
        keys = [(prompts[row], labels[row]) for row in first_row]
        self.prompt_ids = dict(zip(keys, self._ids.tolist(), strict=True))
        self._texts = [prompts[row] for row in first_row]
        self._sources = None if sources is None else np.array(sources)[first_row]
        self._features: State = {}
        if self._belief.reads_texts:
            self._features["features"] = text_features(self._texts)
        # A slow or distant database must not hold up the training.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="posterior store")
        self._writing: Future[None] | None = None
        # Generation ahead of the training reads the state in another thread
        self._state_lock = threading.Lock()
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
            ValueError: the estimator is unknown, a parameter is out of range, a prompt has two labels, or the name
                of the run holds a secret.
            storage.StoreError: the name is taken, the store cannot be opened, or the warm start does not fit.
        """
        prompts, labels = _columns(prompts, labels)
        if not many_labels:
            refuse_contradictions(prompts, labels)
        _refuse_name(run_name, if_exists)
        sources = _checked_sources(sources, len(prompts))
        rates_P_2 = None
        if pass_rates is not None:
            rates_P_2 = beginnings.checked_pass_rates(pass_rates, len(prompts))
            if warm_start is not None:
                problem = "pass_rates and warm_start both say what the posteriors begin with"
                raise ValueError(f"{problem}; give one of them")
        built = as_estimator(estimator, parameters)
        with ExitStack() as others, ExitStack() as undo:
            opened = _opened(store, undo)
            source = _source(warm_start_store, opened, others)
            source_run = None if warm_start is None else source.find_run(warm_start)
            run = opened.create_run(
                _free_name(opened, run_name) if if_exists == "new" else run_name,
                estimator=estimator if isinstance(estimator, str) else _stored_name(type(built)),
                estimator_version=built.belief.version,
                parameters=dataclasses.asdict(built),  # type: ignore[call-overload]
                state_fields=built.belief.state_fields,
                model=without_secrets(model),
                dataset=without_secrets(dataset),
                dataset_digest=dataset_digest(prompts, labels),
                reward=without_secrets(reward),
                config=_stored_config(config),
                method=method,
            )
            # A later resume must not find a run that never began
            undo.callback(opened.delete_run, run.record)
            ids = opened.register_prompts(prompts, labels)
            started = None
            if source_run is not None:
                started = beginnings.warm_start(
                    run, ids, built.belief, source, source_run, warm_start_weight
                )
            elif rates_P_2 is not None:
                run.begin_with(beginnings.of_pass_rates(built.belief, ids, prompts, rates_P_2))
            closes = opened is not store
            posteriors = cls(
                built,
                opened,
                run,
                prompts,
                labels,
                ids,
                warm_start=started,
                sources=sources,
                close_store=closes,
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
        """Continue a run with the estimator and parameters that it was started with.

        New prompts begin with the prior.

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
            _refuse_other_version(record, estimator.belief)
            run = opened.claim_run(record.run_id, take_over=take_over)
            undo.callback(run.release)
            if step is not None:
                run.roll_back(whole("step", step))
            ids = opened.register_prompts(prompts, labels)
            closes = opened is not store
            posteriors = cls(
                estimator, opened, run, prompts, labels, ids, sources=sources, close_store=closes
            )
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
        step = self._next_step(step)
        rollouts = Rollouts.checked(step, prompts, labels, rewards, scores, extras)
        groups = Groups.by_prompt(self._positions(rollouts.prompts), ~np.isnan(rollouts.rewards))
        if form is not None and advantages is not None:
            problem = f"form {form!r} makes advantages, and others are given"
            raise ValueError(f"{problem}; pass form=None with these")
        # The trainer's own advantages are of whatever size of groups.
        advantage_form = Form() if form is None else self._form_for(form, groups)
        update = self._update(rollouts, groups, advantage_form)
        scored = score(rollouts, groups, update.estimate, advantage_form)
        if form is None:
            scored = as_trained(scored, groups, rollouts.rewards, advantages)
        rows, metrics = self._recorded(step, form, rollouts, groups, update, scored)
        with self._state_lock:
            self._state = update.state
            self._unverified = self._without_score(groups)
        self._visited_at[groups.prompts_V] = step
        self.step: int = step
        self._writing = self._writer.submit(self.run.record_step, step, rows)
        return dataclasses.replace(scored, metrics=metrics)

    def predictive(self) -> Predictive:
        """Return what the estimator expects of every prompt's next visit.

        Another thread may call this method.

        Raises:
            ValueError: the estimator makes no forecast.
        """
        with self._state_lock:
            expected = self._belief.predictive(self._state)
            unverified = _set_aside(self._unverified)
        if expected is None:
            raise ValueError(
                f"estimator {self.estimator.name!r} predicts no visit; use auto or dbb"
            )
        alpha, beta = expected
        return Predictive(self._ids, alpha, beta, np.isin(self._ids, unverified))

    @property
    def sources(self) -> dict[int, str] | None:
        """Where each prompt comes from, by the store's id; None if that is not known."""
        if self._sources is None:
            return None
        return dict(zip(self._ids.tolist(), self._sources.tolist(), strict=True))

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
        # A name may quote the address of what it measures.
        masked = {without_passwords(str(name)): value for name, value in metrics.items()}
        self._writing = self._writer.submit(self.run.record_metrics, whole("step", step), masked)

    def settle(self) -> None:
        """Wait until the last step is stored. One transaction stores all of a step."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable. Call it before the model checkpoint ``tag`` counts as saved.

        The tag is stored without passwords: it may be an address. It is shown, no checkpoint is found by it.
        """
        self.settle()
        self.run.record_checkpoint(whole("step", step), without_passwords(tag))

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
        shared = initial | self._shared(initial)
        self._visited_at = table.step
        self._unverified = unverified_visits(self.store, self.run.record)
        self.step = self.run.record.last_step
        state = dict(self._features)
        for i, field in enumerate(self._belief.state_fields):
            state[field] = np.where(table.step >= 0, table.state[:, i], initial[field])
        for field in self._belief.shared_fields:
            state[field] = shared[field]
        self._refuse_impossible(state)
        self._state = state

    def _refuse_impossible(self, state: State) -> None:
        """Raise StoreError for alpha or beta of 0 or less, from which no beta distribution follows."""
        if not {"alpha", "beta"} <= set(self._belief.state_fields):
            return
        for field in ("alpha", "beta"):
            for place in np.flatnonzero(state[field] <= 0):
                what = f"{field} of prompt {self._ids[place]} in run {self.run.record.name!r}"
                raise decode.refusal(what, state[field][place].item(), "a number above 0")

    def _shared(self, initial: State) -> State:
        """Return the stored run-wide vectors; StoreError for others than the estimator's."""
        stored = self.run.load_shared()
        expected = {field: initial[field].shape for field in self._belief.shared_fields}
        found = {field: vector.shape for field, vector in stored.items()}
        if found != expected and (stored or self.run.record.last_step):
            what = (
                f"run-wide state of run {self.run.record.name!r} (the last shared, or shared_start)"
            )
            raise decode.refusal(what, found, f"vectors of the shapes {expected}")
        return stored

    def _next_step(self, step: int) -> int:
        """Return the number of the next step; ValueError for another one."""
        step = whole("step", step)
        if step != self.step + 1:
            run = self.run.record.name
            problem = f"step {step} of run {run!r} is not the next one, {self.step + 1}"
            raise ValueError(f"{problem}; to do a step again, roll back first")
        return step

    def _positions(self, prompts: Sequence[Key]) -> Positions:
        try:
            return np.searchsorted(self._ids, [self.prompt_ids[prompt] for prompt in prompts])
        except KeyError as error:
            text, label = error.args[0]
            raise ValueError(
                f"prompt {text!r:.80} with label {label!r:.80} is not in the data set"
            ) from None

    def _without_score(self, groups: Groups) -> dict[int, int]:
        """Return by prompt id how many visits in a row, this step's included, yielded no score."""
        visits = dict(self._unverified)
        for prompt_id in self._ids[groups.prompts_V].tolist():
            visits.pop(prompt_id, None)
        for prompt_id in self._ids[groups.prompts_P[~groups.verified_P]].tolist():
            visits[prompt_id] = visits.get(prompt_id, 0) + 1
        return visits

    def _recorded(
        self,
        step: int,
        form: str | None,
        rollouts: Rollouts,
        groups: Groups,
        update: _Update,
        scored: Scored,
    ) -> tuple[storage.StepRows, dict[str, float]]:
        """Return what is stored of a step, checked, and its metrics; ValueError if a value is not finite."""
        metrics = step_metrics.metrics(step, rollouts, groups, scored)
        metrics |= self._estimator_metrics(rollouts, groups, update)
        probes = None
        if rollouts.probes is not None:
            probed_Q = self._positions(rollouts.probes.prompts)
            probes, errors = measure(rollouts.probes, probed_Q, groups, update.rows)
            metrics |= errors
        missed = self._ids[groups.prompts_P[~groups.verified_P]]
        if len(missed):
            update.rows.shared[UNVERIFIED] = missed.astype(np.float64)
        rows = dataclasses.replace(
            update.rows,
            form=form,
            usage=step_metrics.usage(rollouts, groups, scored),
            probes=probes,
            kept=kept_rows(step, rollouts, groups, self._ids[groups.prompts_P], scored),
        )
        try:
            rows = rows.checked()
        except storage.StoreError as error:
            raise ValueError(f"step {step} is refused: {error}") from None
        if form is not None and not np.isfinite(scored.advantages).all():
            problem = f"step {step} is refused: an advantage is not finite"
            raise ValueError(f"{problem}; use smaller rewards and weights")
        return rows, metrics

    def _estimator_metrics(
        self, rollouts: Rollouts, groups: Groups, update: _Update
    ) -> dict[str, float]:
        """Return the metrics of a step that the estimator or the sources of the prompts tell."""
        metrics = {}
        for name, values in update.rows.shared.items():
            if len(values) == 1:
                metrics[f"estimator/{name}"] = float(values[0])
        at_V = groups.prompts_V
        successes_V = update.rows.successes
        rollouts_V = update.rows.rollouts
        if self._sources is not None:
            scores_V_G = groups.matrix(rollouts.scores)
            metrics |= step_metrics.by_source(
                self._sources[at_V], successes_V, rollouts_V, scores_V_G
            )
        unverified = self._without_score(groups)
        if unverified:
            metrics["estimator/unverified"] = float(len(_set_aside(unverified)))
        if update.predicted is not None:
            alpha, beta = update.predicted
            metrics |= step_metrics.of_hardest(
                alpha / (alpha + beta), at_V, successes_V, rollouts_V
            )
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

    def _update(self, rollouts: Rollouts, groups: Groups, form: Form) -> _Update:
        """Return what the rollouts of a step change."""
        at_V = groups.prompts_V
        belief = self._belief
        # A copy, since a step that is refused must change nothing.
        state = dict(self._state)
        for field in belief.state_fields:
            state[field] = state[field].copy()
        predicted = belief.predictive(state)
        previous_state = belief.columns(state, at_V)
        previous_step = self._visited_at[at_V]
        previous_state[previous_step < 0] = np.nan  # undoing a first visit deletes the posterior
        estimate = self._observe(state, rollouts, groups, form)
        scores_V_G = groups.matrix(rollouts.scores)
        versions_V = None
        if rollouts.policy_versions is not None:
            versions_V = np.nanmean(groups.matrix(rollouts.policy_versions), axis=1)
        inclusion_V = None
        if rollouts.inclusion is not None:
            inclusion_V = groups.matrix(rollouts.inclusion)[:, 0]
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
            policy_version=versions_V,
            inclusion=inclusion_V,
        )
        return _Update(state, predicted, estimate, rows)

    def _observe(
        self, state: State, rollouts: Rollouts, groups: Groups, form: Form
    ) -> estimators.Estimate:
        """Update a state in place with a step; return the estimates of its V prompts.

        Raises:
            MemorySupportError: an estimator does not take a score.
        """
        belief = self._belief
        scored_by = self.estimator
        at_V = groups.prompts_V

        def seen_by(estimator: RewardEstimator) -> Floats:
            return groups.matrix(
                rollouts.rewards if estimator.support == "real" else rollouts.scores
            )

        own_state = state if belief is scored_by else {}
        rewards_V_G = seen_by(scored_by)
        try:
            estimate = scored_by.observe_at(
                own_state, at_V, rewards_V_G, leave_one_out=form.leave_one_out
            )
            if belief is not scored_by:
                # All of a group or nothing: the scores that it takes are no sample of the others.
                belief.observe_at(state, at_V, seen_by(belief))
        except RewardSupportError as error:
            prompt = self._texts[at_V[error.row]]
            raise refusal(scored_by, error, f"prompt {prompt!r:.80}") from error
        return estimate


def _opened(
    store: storage.PosteriorStore | str | None, closing: ExitStack, *, create: bool = True
) -> Any:
    """Return an open store; ``closing`` closes a store that this function opened."""
    if isinstance(store, storage.PosteriorStore):
        return store
    return closing.enter_context(storage.open_store(store, create=create))


def _source(
    store: storage.PosteriorStore | str | None,
    own: storage.PosteriorStore,
    closing: ExitStack,
) -> storage.PosteriorStore:
    """Return the open store of a warm start, from which a run only reads.

    Args:
        store: of the warm start; None: the run's own. A URL is opened again, even if it is the run's own.
        own: the run's store.
        closing: closes a store that this function opened.

    Raises:
        storage.StoreError: there is no such store, or it cannot be read.
    """
    if store is None:
        return own
    if isinstance(store, storage.PosteriorStore):
        return store
    return closing.enter_context(storage.open_store(store, create=False, read_only=True))


def _columns(prompts: Iterable[str], labels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return texts and labels of prompts, checked."""
    keys = keys_of(prompts, labels)
    return [prompt for prompt, _ in keys], [label for _, label in keys]


def _checked_sources(sources: Sequence[str] | None, prompts: int) -> list[str] | None:
    """Return the source of each prompt, if they are given; ValueError if one is missing or no text."""
    if sources is None:
        return None
    texts = texts_of("sources", sources)
    if len(texts) != prompts:
        raise ValueError(
            f"there are {prompts} prompts and {len(texts)} sources; pass one for each prompt"
        )
    return texts


def _free_name(store: storage.PosteriorStore, name: str) -> str:
    """Return the name, with a number behind it if it is taken."""
    free = name
    number = 1
    while store.is_taken(free):
        number += 1
        free = f"{name}-{number}"
    return free


def _refuse_name(run_name: str, if_exists: str) -> None:
    """Raise ValueError if a run's name holds a secret, or it is not clear what to do if it is taken."""
    masked = without_secrets(run_name)
    if masked != run_name:
        raise ValueError(f"the run's name {masked!r} holds a password or key; choose another")
    if if_exists not in ("error", "new"):
        raise ValueError(f"if_exists = {if_exists!r:.80} is none of error, new")


def _refuse_other_version(record: storage.RunRecord, belief: RewardEstimator) -> None:
    """Raise ValueError if the installed estimator reads another state than the run's."""
    same_fields = record.state_fields == tuple(belief.state_fields)
    if record.estimator_version != belief.version or not same_fields:
        raise ValueError(
            f"run {record.name!r} was written by version {record.estimator_version} of "
            f"estimator {record.estimator!r}, installed is version {belief.version}; "
            "start a new run"
        )


def _stored_name(kind: type[RewardEstimator]) -> str:
    """Return the name by which :func:`estimators.build` finds an estimator's class."""
    if estimators.available().get(kind.name) is kind:
        return kind.name
    return f"{kind.__module__}:{kind.__qualname__}"


def _stored_config(config: Mapping[str, Any] | None) -> Any:
    """Return a configuration as JSON can hold it, without secrets; None is an empty one."""
    if config is None:
        return {}
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
    hashes = b"".join(map(storage.prompt_hash, prompts, labels))
    return hashlib.blake2b(hashes, digest_size=16).hexdigest()


def as_estimator(
    estimator: str | RewardEstimator, parameters: Mapping[str, Any] | None
) -> RewardEstimator:
    """Return an estimator that is given by name and parameters, or as an object.

    Raises:
        ValueError: the name or a parameter is unknown, a parameter is out of range, the object is
            no estimator, or parameters come with an object.
    """
    if isinstance(estimator, str):
        return estimators.build(estimator, **(parameters or {}))
    if not isinstance(estimator, RewardEstimator):
        allowed = "give a name, or an object of an estimator's class"
        raise ValueError(f"estimator {estimator!r} is no estimator; {allowed}")
    if parameters is not None:
        problem = f"parameters {dict(parameters)} belong to an estimator's name"
        raise ValueError(f"{problem}; the object has its own")
    return estimator
