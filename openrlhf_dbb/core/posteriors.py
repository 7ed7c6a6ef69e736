"""A run's posteriors: rewards in, advantages out, everything stored. For any trainer; needs numpy and the store.

Axes: R rollouts (rows) of a step, P distinct prompts among them, G rollouts of the largest group; Q of the prompts are
probed, with M samples each.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import estimators
import storage
from estimators import FORMS, Form, RewardEstimator, RewardSupportError, State
from estimators.text_features import text_features
from openrlhf_dbb.core import kept, probes
from openrlhf_dbb.core.rollouts import Floats, Groups, Key, Positions, Rollouts, dataset_digest
from openrlhf_dbb.core.scored import Scored, means, sample_std
from openrlhf_dbb.core.strategies import Predictive
from openrlhf_dbb.core.usage import usage


class Posteriors:
    """The posteriors of all prompts of a run: in memory to be read, in the store to stay.

    Open with :meth:`create` or :meth:`resume`; close after use, or use as a context manager. A step is written in
    the background while the trainer goes on, so that a slow or distant database does not hold it up; it counts as
    done only when :meth:`settle` has returned.

    Attributes:
        estimator: what the advantages are computed with.
        run: the stored run, owned by this process.
        store: its database.
        prompt_ids: the store's id of every prompt, by (text, label).
        warm_start: which prompts began with another run's posteriors; None without a warm start.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> url = f"sqlite:///{folder.name}/posteriors.db"
        >>> data = ["1 + 1 =", "2 + 2 ="], ["2", "4"]
        >>> with Posteriors.create(url, "demo", *data, estimator="dbb", parameters={"discount": 0.5}) as demo:
        ...     scored = demo.observe(1, ["1 + 1 ="] * 4, ["2"] * 4, [1, 1, None, 1])  # None: could not be verified
        >>> scored.mean.round(3), scored.advantages.round(3)
        (array([0.875, 0.875, 0.875, 0.875]), array([0.378, 0.378, 0.   , 0.378]))
        >>> with Posteriors.resume(url, "demo", *data) as demo:
        ...     demo.step
        1
        >>> folder.cleanup()
    """

    def __init__(
        self,
        estimator: RewardEstimator,
        store: storage.PosteriorStore,
        run: storage.Run,
        prompts: Sequence[str],
        labels: Sequence[str],
        *,
        warm_start: storage.WarmStart | None = None,
        close_store: bool = False,
    ) -> None:
        """Load the current posteriors of a run that this process owns; see :meth:`create` and :meth:`resume`."""
        self.estimator, self.store, self.run, self.warm_start = estimator, store, run, warm_start
        self._close_store = close_store
        self._ids, first = np.unique(store.register_prompts(prompts, labels), return_index=True)
        self._index = {(prompts[i], labels[i]): position for position, i in enumerate(first)}
        self.prompt_ids = {key: int(self._ids[position]) for key, position in self._index.items()}
        self._texts = [prompts[i] for i in first]
        self._first, self._given = first, len(prompts)
        self._features: State = {"features": text_features(self._texts)} if estimator.features == "text" else {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="posterior store")
        self._writing: Future[None] | None = None
        self._changing = threading.Lock()  # the state, which another thread may read
        self._last_step = 0
        self._last_ordinal: int | None = None
        self._load()

    @classmethod
    def create(
        cls,
        store: storage.PosteriorStore | str | None,
        run_name: str,
        prompts: Sequence[str],
        labels: Sequence[str],
        *,
        estimator: str | RewardEstimator = "dbb",
        parameters: Mapping[str, Any] | None = None,
        warm_start: str | None = None,
        warm_start_weight: float = 1.0,
        warm_start_store: storage.PosteriorStore | str | None = None,
        model: str = "",
        dataset: str = "",
        reward: str = "",
        method: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> Posteriors:
        """Start a new run.

        Args:
            store: an open store, or its URL (``sqlite:///FILE``, ``postgresql://...``); None for the default.
            run_name: unique in the store.
            prompts, labels: every prompt that will be trained on, as the model sees it, and its label. Equal pairs
                share one posterior.
            estimator: name, ``package.module:Class``, or the object.
            parameters: of an estimator given by name.
            warm_start: run (name, uuid or number) whose final posteriors this one begins with, matched by prompt and
                label.
            warm_start_weight: in (0, 1], multiplies the imported counts.
            warm_start_store: where that run is, if not in ``store``.
            model, dataset, reward, method, config: kept with the run and shown as given; must hold no secrets.

        Raises:
            ValueError: an unknown estimator, or parameters outside their range.
            storage.StoreError: the name is taken, the store cannot be opened, or the warm start does not fit.
        """
        if isinstance(estimator, str):
            name, parameters = estimator, dict(parameters or {})
            estimator = estimators.build(name, **parameters)
        elif parameters is None:
            name, parameters = _name(estimator), dataclasses.asdict(estimator)  # type: ignore[call-overload]
        else:
            raise ValueError(f"parameters {dict(parameters)} go with an estimator's name; the object has its own")
        with ExitStack() as sources, ExitStack() as undo:
            opened = _opened(store, undo)
            source = opened if warm_start_store is None else _opened(warm_start_store, sources)
            record = None if warm_start is None else source.find_run(warm_start)
            _check_features(record, name, estimator)
            run = opened.create_run(
                run_name,
                estimator=name,
                estimator_version=estimator.version,
                parameters=parameters,
                state_fields=estimator.state_fields,
                model=model,
                dataset=dataset,
                dataset_digest=dataset_digest(prompts, labels),
                reward=reward,
                config=config or {},
                method=method,
            )
            undo.callback(run.discard)  # or a resume would find a run that never began
            ids = opened.register_prompts(prompts, labels)
            begun = None if record is None else run.warm_start(source, record, ids, weight=warm_start_weight)
            posteriors = cls(estimator, opened, run, prompts, labels, warm_start=begun, close_store=opened is not store)
            undo.pop_all()
        return posteriors

    @classmethod
    def resume(
        cls,
        store: storage.PosteriorStore | str | None,
        run_name: str,
        prompts: Sequence[str],
        labels: Sequence[str],
        *,
        step: int | None = None,
        take_over: bool = False,
    ) -> Posteriors:
        """Continue a run, with the estimator and the parameters that it was started with.

        Args:
            store: as in :meth:`create`; it must exist.
            run_name: name, uuid or number of the run.
            prompts, labels: as in :meth:`create`; new ones begin with the prior.
            step: the step of the model checkpoint that is loaded: later steps are undone, bit for bit. None: none are.
            take_over: continue a run whose owner is on another machine and known to be dead.

        Raises:
            ValueError: the run's estimator is not installed, or its stored state is of another version.
            storage.StoreError: no such run, it is finished or owned by a living process, or it has not got to ``step``.
        """
        with ExitStack() as undo:
            opened = _opened(store, undo, create=False)
            record = opened.find_run(run_name)
            estimator = estimators.build(record.estimator, **record.parameters)
            if (record.estimator_version, record.state_fields) != (estimator.version, tuple(estimator.state_fields)):
                raise ValueError(
                    f"run {record.name!r} was written by version {record.estimator_version} of estimator "
                    f"{record.estimator!r} (state {', '.join(record.state_fields)}), installed is version "
                    f"{estimator.version} ({', '.join(estimator.state_fields)}); start a new run"
                )
            run = opened.claim_run(record.run_id, take_over=take_over)
            undo.callback(run.release)
            if step is not None:
                run.roll_back(step)
            posteriors = cls(estimator, opened, run, prompts, labels, close_store=opened is not store)
            undo.pop_all()
        return posteriors

    def __enter__(self) -> Posteriors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Posteriors({self.run.record.name!r}, {len(self._ids)} prompts, step {self.step})"

    @property
    def step(self) -> int:
        """The last step observed, 0 before the first; the next one to :meth:`observe` is one more."""
        return self._last_step

    def set_features(self, features: ArrayLike) -> None:
        """Give an estimator of "hidden" features those of all prompts, before the first step and whenever they change.

        They are not stored: after a resume give those again that were in use at the step.

        Args:
            features: (prompts, D), in the order of the prompts that the run was opened with; the first of equal ones
                counts. D is ``estimators.FEATURES["hidden"]``.

        Raises:
            ValueError: the estimator reads no such features, or they have another shape or are not finite.
        """
        values = np.array(features, dtype=np.float64)
        name, wanted = self.estimator.name, (self._given, estimators.FEATURES["hidden"])
        if self.estimator.features != "hidden":
            raise ValueError(f"estimator {name!r} reads features {self.estimator.features!r}; give none")
        if values.shape != wanted:
            raise ValueError(f"features have shape {values.shape}; estimator {name!r} needs {wanted}, a row per prompt")
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values).all(axis=1)))
            raise ValueError(f"features[{row}] has a value that is not finite; give numbers")
        self._features = {"features": values[self._first]}
        with self._changing:
            self._state |= self._features

    def observe(
        self,
        step: int,
        prompts: Sequence[str],
        labels: Sequence[str],
        rewards: ArrayLike,
        *,
        scores: ArrayLike | None = None,
        tokens: ArrayLike | None = None,
        trained: ArrayLike | None = None,
        replayed: Mapping[Key, tuple[int, int]] | None = None,
        skipped: Mapping[Key, int] | None = None,
        form: str = "group_norm",
        probed: probes.Probes | None = None,
        responses: kept.Responses = kept.NONE,
        policy_versions: ArrayLike | None = None,
        fates: Mapping[str, Sequence[int]] | None = None,
        inclusion: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> Scored:
        """Update the posteriors with one step's rollouts, begin to store them, and compute advantages.

        Rows of the same prompt and label form one group, wherever they stand, trained on or not. When this returns, the
        step before is stored; this one is once :meth:`settle` returns.

        Args:
            step: one more than the last one.
            prompts, labels: (R,) of each rollout; among those the run was opened with.
            rewards: (R,) what is optimized; None or NaN for a rollout that could not be verified, which is left out of
                its group and gets advantage 0.
            scores: (R,) the verifier's, before length penalties and the like; by default the rewards. Estimators of
                binary correctness see scores, estimators of real rewards see rewards.
            tokens: (R,) length of each response, >= 0, for the counts of tokens.
            trained: (R,) False for rollouts that are observed but not trained on; by default all are trained on.
            replayed: by (prompt, label), rollouts of earlier steps that are trained on again, and their tokens.
            skipped: by (prompt, label), how often it was drawn and nothing was generated for it.
            form: how rewards become advantages, see :mod:`estimators.forms`: "group_norm", "dr_grpo", "rloo" or
                "reinforce_baseline", whose whitening over tokens is left to the trainer.
            probed: probes of some of the step's prompts, to be stored with it; the estimator never sees them.
            responses: what the model wrote; some of it is stored with the step (view ``rollouts``), see
                :class:`openrlhf_dbb.core.kept.Responses`.
            policy_versions: (R,) in [0, step - 1], training steps that the policy had seen when it generated a rollout;
                by default ``step - 1``. A group is as late as its rollouts are on average.
            fates: groups of :meth:`open_groups` that this step settles, by what becomes of them: trained, filtered or
                stale.
            inclusion: (R,) in (0, 1], probability with which a strategy drew the rollout's prompt, to be stored.
            weights: (R,) > 0, factors on the advantages: importance weights of such a strategy.

        Raises:
            ValueError: columns of different lengths, a score the estimator is not defined for, an unknown prompt or
                form, a form that the estimator cannot serve, a policy version, probability or weight out of range, or
                no rollout that could be verified. Nothing has changed then.
            storage.StoreError: the step before cannot be stored.
        """
        self.settle()
        rollouts = Rollouts.of(
            prompts,
            labels,
            rewards,
            scores=scores,
            tokens=tokens,
            trained=trained,
            replayed=replayed,
            skipped=skipped,
        )
        if step != self._last_step + 1:
            raise ValueError(
                f"run {self.run.record.name!r} is at step {self._last_step}; the next step is {self._last_step + 1}, "
                f"not {step}; to do a step again, roll back first"
            )
        if self.estimator.features == "hidden" and not self._features:
            raise ValueError(
                f"estimator {self.estimator.name!r} reads features 'hidden', which only the trainer has; give them "
                "with set_features before the first step, or choose features='text'"
            )
        advantage = self._form(form)
        self._positions([*rollouts.replayed, *rollouts.skipped, *(probed.prompts if probed else ())])  # all known?
        groups = Groups.of(self._positions(rollouts.prompts))
        rewards_P_G, scores_P_G = groups.matrix(rollouts.rewards), groups.matrix(rollouts.scores)
        observed_P_G = rewards_P_G if self.estimator.support == "real" else scores_P_G
        kept_K, kept_rows = kept.rows(responses, step, rollouts, groups, self._ids[groups.prompts_P])
        seen_P: NDArray[np.bool_] = np.any(~np.isnan(observed_P_G), axis=1)
        if not seen_P.any():
            raise ValueError(
                f"none of the {len(rollouts.prompts)} rollouts of step {step} could be verified; fix the verifier"
            )

        versions_R, lag_P = self._lags(step, policy_versions, groups)
        weights_R = _factors("weights", weights, len(rollouts.prompts), np.inf)
        inclusion_R = _factors("inclusion", inclusion, len(rollouts.prompts), 1.0)
        at = groups.prompts_P[seen_P]
        before = self.estimator.state_at(self._state, at)
        try:
            with self._changing:
                estimate = self.estimator.observe_at(
                    self._state, at, observed_P_G[seen_P], lag_P[seen_P], leave_one_out=advantage.leave_one_out
                )
        except RewardSupportError as error:
            raise ValueError(self._explain(error, self._texts[at[error.row]])) from error

        advantages_P_G = np.zeros_like(rewards_P_G)
        advantages_P_G[seen_P] = advantage.advantages(rewards_P_G[seen_P], estimate)
        if weights_R is not None:
            advantages_P_G *= np.nan_to_num(groups.matrix(weights_R))
        zero_variance_P = np.zeros(len(seen_P), dtype=np.bool_)
        zero_variance_P[seen_P] = np.nanmin(rewards_P_G[seen_P], axis=1) == np.nanmax(rewards_P_G[seen_P], axis=1)
        advantages_R = groups.rows(advantages_P_G)

        rows = self._rows(at, before, estimate, scores_P_G[seen_P])
        rows.usage = usage(
            rollouts, self.prompt_ids, groups.group_R, self._ids[groups.prompts_P], zero_variance_P, advantages_R
        )
        probe_metrics = {} if probed is None else self._add_probes(rows, at, probed)
        if versions_R is not None:
            rows.policy_version, kept_rows.policy_version = step - 1 - lag_P[seen_P], versions_R[kept_K]
        if inclusion_R is not None:
            rows.inclusion = groups.matrix(inclusion_R)[seen_P, 0]
        rows.fates = {fate: np.array(ordinals, dtype=np.int64) for fate, ordinals in (fates or {}).items()} or None
        if len(kept_K):
            kept_rows.advantage, rows.kept = advantages_R[kept_K], kept_rows
        self._writing = self._writer.submit(self.run.record_step, step, rows)
        self._known[at], self._step[at], self._last_step = True, step, step

        per_group = np.zeros((5, len(seen_P)))
        per_group[0, seen_P], per_group[1, seen_P] = estimate.mean, estimate.variance
        per_group[2] = zero_variance_P
        per_group[3] = zero_variance_P & (np.abs(advantages_P_G).max(axis=1) > 0)
        per_group[4, seen_P] = sample_std(rewards_P_G[seen_P])
        scored = Scored(advantages_R, *per_group[:, groups.group_R], metrics={})
        scored.metrics.update(means(scored, rollouts, rewards_P_G.shape[1]) | self._run_wide() | probe_metrics)
        if versions_R is not None:
            scored.metrics.update(_lag_metrics(step - 1 - versions_R[rollouts.trained]))
        return scored

    def predictive(self) -> Predictive:
        """What the estimator expects of every prompt's next visit, of all prompts; may be called from another thread.

        Raises:
            ValueError: the estimator has no such distribution.
        """
        with self._changing:
            expected = self.estimator.predictive(self._state)
        if expected is None:
            raise ValueError(
                f"estimator {self.estimator.name!r} does not predict the next visit; use dbb, auto or predicted_prior"
            )
        return Predictive(self._ids, *expected)

    def open_groups(
        self, prompts: Sequence[Key], passes: Sequence[int], rollouts: int, policy_version: float
    ) -> list[int]:
        """Note groups that are about to be asked for, where generation runs ahead of the training (view ``groups``).

        A step settles them, see :meth:`observe`; what no step settles was abandoned. May be called from another thread
        than the rest, but from one only.

        Args:
            prompts: (prompt, label) of each group.
            passes: of each group, the pass over the data, from 0.
            rollouts: N of each group.
            policy_version: training steps that the policy has seen.

        Returns:
            Their numbers, ascending, never used before in this run.

        Raises:
            storage.StoreError: they cannot be stored.
        """
        if self._last_ordinal is None:
            self._last_ordinal = self._writer.submit(self.run.last_ordinal).result()
        ordinals = self._last_ordinal + 1 + np.arange(len(prompts))
        ids = np.array([self.prompt_ids[key] for key in prompts], dtype=np.int64)
        counts = np.full(len(prompts), rollouts)
        noted = storage.GroupRows(ordinals, np.array(passes, dtype=np.int64), ids, counts, policy_version)
        self._writer.submit(self.run.record_groups, noted).result()
        self._last_ordinal += len(prompts)
        return ordinals.tolist()

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Begin to store what the trainer logged of a step that was observed, in that step's row (view ``steps``).

        Args:
            metrics: numbers by name, such as losses and times; what is no number is left out. "plan/steps" is the last
                step that the run is meant to have: ``openrlhf-dbb serve`` shows the time left by it.

        Raises:
            storage.StoreError: the step cannot be stored.
        """
        self.settle()
        self._writing = self._writer.submit(self.run.record_metrics, step, metrics)

    def settle(self) -> None:
        """Wait until the last step is stored: all of it, in one transaction.

        Raises:
            storage.StoreError: it cannot be; the run must not go on.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable; call it before the model checkpoint ``tag`` counts as saved.

        Raises:
            storage.StoreError: the step is not recorded, or the run is no longer this process's.
        """
        self.settle()
        self.run.record_checkpoint(step, tag)

    def roll_back(self, step: int) -> None:
        """Undo every step after ``step``, bit for bit, to continue from a model checkpoint of that step.

        Raises:
            storage.StoreError: the run has not got that far, or is no longer this process's.
        """
        self.settle()
        self.run.roll_back(step)
        self._load()

    def finish(self, unused_rollouts: int = 0, unused_tokens: int = 0) -> None:
        """Mark the run as complete: it can be a warm start's source, but not be resumed.

        Args:
            unused_rollouts, unused_tokens: rollouts generated after the last step that no step holds.

        Raises:
            storage.StoreError: the last step cannot be stored, or the run is no longer this process's.
        """
        self.settle()
        self.run.finish(unused_rollouts, unused_tokens)

    def close(self) -> None:
        """Wait for the last step and close what :meth:`create` or :meth:`resume` opened. The run can be resumed.

        Raises:
            storage.StoreError: the last step cannot be stored.
        """
        try:
            self.settle()
        finally:
            self._writer.shutdown()
            if self._close_store:
                self.store.close()

    def _load(self) -> None:
        """Read the run's state from the store; prompts it does not have get the prior."""
        table = self.run.load(self._ids)
        initial = self.estimator.initial_state(len(self._ids))
        shared = initial | (self.run.load_shared() or {})
        known = table.step >= 0
        self._known, self._step = known, table.step.copy()
        self._last_step = self.run.record.last_step
        self._state: State = {
            field: np.where(known, table.state[:, i], initial[field])
            for i, field in enumerate(self.estimator.state_fields)
        } | {field: shared[field] for field in self.estimator.shared_fields}
        self._state |= self._features

    def _form(self, name: str) -> Form:
        """The advantage form of this name, if the estimator can serve it."""
        form = FORMS.build(name)
        if form.leave_one_out and not self.estimator.can_leave_one_out():
            raise ValueError(
                f"form {name!r} scores a rollout by the mean without it, which estimator {self.estimator.name!r} "
                "cannot tell (its group_weight is None); use dr_grpo"
            )
        return form

    def _positions(self, prompts: Sequence[Key]) -> Positions:
        try:
            return np.array([self._index[prompt] for prompt in prompts], dtype=np.int64)
        except KeyError as error:
            text, label = error.args[0]
            raise ValueError(
                f"prompt {text[:80]!r} with label {str(label)[:80]!r} is not in the data set this run was started with"
            ) from None

    def _lags(self, step: int, policy_versions: ArrayLike | None, groups: Groups) -> tuple[Floats | None, Floats]:
        """The versions (R,), if they are known, and each group's mean lag (P,)."""
        if policy_versions is None:
            return None, np.zeros(len(groups.prompts_P))
        versions_R: Floats = np.asarray(policy_versions, dtype=np.float64)
        if versions_R.shape != groups.group_R.shape:
            raise ValueError(
                f"policy_versions has shape {versions_R.shape}; one value for each of the {len(groups.group_R)} "
                "rollouts is needed"
            )
        wrong = ~((versions_R >= 0) & (versions_R <= step - 1))
        if wrong.any():
            raise ValueError(
                f"policy_versions[{int(wrong.argmax())}] = {versions_R[wrong][0]:g} is not in [0, {step - 1}], the "
                f"training steps before step {step}"
            )
        return versions_R, step - 1 - np.bincount(groups.group_R, versions_R) / np.bincount(groups.group_R)

    def _rows(
        self, at: Positions, before: State, estimate: estimators.Estimate, scores_P_G: Floats
    ) -> storage.StepRows:
        """What the step changed, to be stored; ``at`` are the positions of its prompts."""
        first_visit = ~self._known[at]
        previous = self._columns(before, len(at))
        previous[first_visit] = np.nan
        return storage.StepRows(
            prompt_ids=self._ids[at],
            rollouts=np.sum(~np.isnan(scores_P_G), axis=1),
            successes=np.nansum(scores_P_G, axis=1),
            mean=estimate.mean,
            variance=estimate.variance,
            state=self._columns(self.estimator.state_at(self._state, at), len(at)),
            previous_state=previous,
            previous_step=self._step[at],
            shared={field: self._state[field] for field in self.estimator.shared_fields},
        )

    def _columns(self, state: State, rows: int) -> NDArray[np.float64]:
        fields = self.estimator.state_fields
        return np.column_stack([state[field] for field in fields]) if fields else np.empty((rows, 0))

    def _add_probes(self, rows: storage.StepRows, at: Positions, probed: probes.Probes) -> dict[str, float]:
        """Put the probes of prompts that the step observed into its rows; what is logged of them."""
        positions = self._positions(probed.prompts)
        usable = np.isin(positions, at) & ~np.isnan(probed.scores_Q_M).all(axis=1)
        place, scores_Q_M = np.searchsorted(at, positions[usable]), probed.scores_Q_M[usable]
        rows.probes = probes.rows(rows.prompt_ids[place], scores_Q_M)
        return probes.metrics(rows.mean[place], (rows.successes / rows.rollouts)[place], rows.probes)

    def _run_wide(self) -> dict[str, float]:
        """The estimator's run-wide numbers, to be logged."""
        shared = {field: self._state[field] for field in self.estimator.shared_fields}
        return {f"estimator/{field}": float(values[0]) for field, values in shared.items() if len(values) == 1}

    def _explain(self, error: RewardSupportError, text: str) -> str:
        name = self.estimator.name
        hint = "use an estimator of real rewards"
        if hasattr(self.estimator, "partial_credit") and 0 <= error.value <= 1:
            hint = f"{name}'s partial_credit (--{name}.partial_credit) accepts scores in [0, 1]"
        return f"score {error.value:g} of prompt {text[:80]!r} is not {error.allowed}, as {name} needs; {hint}"


def _opened(store: storage.PosteriorStore | str | None, closing: ExitStack, *, create: bool = True) -> Any:
    """An open store; one that is opened here is closed by ``closing``."""
    if isinstance(store, storage.PosteriorStore):
        return store
    return closing.enter_context(storage.open_store(store, create=create))


def _factors(name: str, values: ArrayLike | None, size: int, most: float) -> Floats | None:
    """The column ``values`` (R,), each in (0, most]; None if not given."""
    if values is None:
        return None
    column: Floats = np.asarray(values, dtype=np.float64)
    if column.shape != (size,):
        raise ValueError(f"{name} has shape {column.shape}; one value for each of the {size} rollouts is needed")
    wrong = ~((column > 0) & (column <= most) & np.isfinite(column))
    if wrong.any():
        allowed = "a finite number above 0" if most == np.inf else f"in (0, {most:g}]"
        raise ValueError(f"{name}[{int(wrong.argmax())}] = {column[wrong][0]:g} is not {allowed}")
    return column


def _check_features(source: storage.RunRecord | None, name: str, estimator: RewardEstimator) -> None:
    """Refuse a warm start whose shared weights belong to other features."""
    if source is None or source.estimator != name or source.estimator_version != estimator.version:
        return
    theirs = estimators.build(name, **source.parameters).features
    if theirs != estimator.features:
        raise storage.StoreError(
            f"run {source.name!r} predicted from features {theirs!r}, this run would from {estimator.features!r}; give "
            f"--{estimator.name}.features {theirs}, or name another run"
        )


def _lag_metrics(lag_R: Floats) -> dict[str, float]:
    return {"async/lag": float(lag_R.mean()), "async/lag_max": float(lag_R.max())} if len(lag_R) else {}


def _name(estimator: RewardEstimator) -> str:
    """What :func:`estimators.build` finds the class of the object by."""
    cls = type(estimator)
    return cls.name if estimators.available().get(cls.name) is cls else f"{cls.__module__}:{cls.__qualname__}"
