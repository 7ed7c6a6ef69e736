"""Rollouts of one step -> posteriors, stored -> advantages. Knows neither torch nor OpenRLHF.

Axes: R rollouts (rows) of the step, P distinct prompts in it, G rollouts of the largest group; Q of the prompts are
probed, with M samples each.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import storage
from estimators import Estimate, RewardEstimator, RewardSupportError, State, centered, standardized
from openrlhf_dbb import probes

Form = Literal["group_norm", "dr_grpo"]
FORMS = {"group_norm": standardized, "dr_grpo": centered}


@dataclass(frozen=True)
class Scored:
    """What became of the R rollouts of a step; all arrays have shape (R,).

    Attributes:
        advantages: 0 for a missing rollout.
        mean, variance: the estimate the rollout was scored with.
        zero_variance: 1.0 if all rewards of its group agree.
        rescued: 1.0 if its group has zero variance and still yields an advantage.
        group_std: N-1 standard deviation of the group's rewards.
        metrics: by name: the run-wide numbers after the step, and the probes'.
    """

    advantages: NDArray[np.float64]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    zero_variance: NDArray[np.float64]
    rescued: NDArray[np.float64]
    group_std: NDArray[np.float64]
    _: KW_ONLY
    metrics: dict[str, float]


class Posteriors:
    """A run's posteriors of all its prompts, and its run-wide state: in memory to be read, in the store to stay.

    A step is written beside the training on it, so that a slow or distant database does not hold it up; it
    counts as done only when :meth:`settle` has returned.
    """

    def __init__(
        self,
        estimator: RewardEstimator,
        run: storage.Run,
        prompt_ids: NDArray[np.int64],
        texts: Sequence[str],
        labels: Sequence[str],
    ) -> None:
        """Load the run's current posteriors.

        Args:
            estimator: its parameters must be those of the run.
            run: owned by this process.
            prompt_ids: shape (prompts,), the store's ids of ``texts`` and ``labels``.
        """
        self.estimator = estimator
        self.run = run
        self._ids, first = np.unique(prompt_ids, return_index=True)
        self._index = {(texts[i], labels[i]): position for position, i in enumerate(first)}
        self._texts = [texts[i] for i in first]
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="posterior store")
        self._writing: Future[None] | None = None
        self.load()

    def load(self) -> None:
        """Read the run's state from the store; prompts it does not have get the prior."""
        table = self.run.load(self._ids)
        initial = self.estimator.initial_state(len(self._ids))
        known = table.step >= 0
        self._known, self._step = known, table.step.copy()
        self._state = {
            field: np.where(known, table.state[:, i], initial[field])
            for i, field in enumerate(self.estimator.state_fields)
        }
        shared = initial | (self.run.load_shared() or {})
        self._shared = {field: shared[field] for field in self.estimator.shared_fields}

    def observe(
        self,
        step: int,
        prompts: Sequence[tuple[str, str]],
        rewards: NDArray[np.float64],
        scores: NDArray[np.float64],
        form: Form,
        probed: probes.Probes | None = None,
    ) -> Scored:
        """Update the posteriors with one step's rollouts, begin to store them, and compute advantages.

        Rows of the same prompt and label form one group, wherever they stand. The step before is stored when
        this returns, this one when :meth:`settle` does.

        Args:
            step: global step, 1 for the first.
            prompts: (prompt, label) of each of the R rows.
            rewards: shape (R,), what is optimised (after length penalties); NaN where missing.
            scores: shape (R,), the verifier's score before penalties; NaN where missing. Estimators of
                binary correctness see these, estimators of real rewards see ``rewards``.
            form: "group_norm" for (X - mean) / sqrt(variance), "dr_grpo" for X - mean; X is ``rewards``.
            probed: probes of some of the step's prompts, to be stored with it; the estimator never sees them.

        Raises:
            ValueError: a score the estimator is not defined for, a prompt the run does not know.
            storage.StoreError: the step before cannot be stored.
        """
        self.settle()
        members, group, slot = self._groups(prompts)
        rewards_P_G = _matrix(rewards, group, slot, len(members))
        scores_P_G = _matrix(scores, group, slot, len(members))
        observed_P_G = rewards_P_G if self.estimator.support == "real" else scores_P_G
        seen = ~np.isnan(observed_P_G).all(axis=1)
        if not seen.any():
            raise ValueError(f"none of the {len(scores)} rollouts of step {step} could be verified; mend the verifier")

        members_seen = members[seen]
        state = {field: values[members_seen] for field, values in self._state.items()}
        try:
            new_state, estimate = self.estimator.observe(state | self._shared, observed_P_G[seen])
        except RewardSupportError as error:
            raise ValueError(self._explain(error, self._texts[members_seen[error.row]])) from error
        rows = self._rows(members_seen, state, new_state, estimate, scores_P_G[seen])
        metrics = {f"estimator/{field}": float(values[0]) for field, values in rows.shared.items() if len(values) == 1}
        if probed is not None:
            at, scores_Q_M = self._probed_among(members_seen, probed)
            rows.probes = _probe_rows(rows.prompt_ids[at], scores_Q_M)
            metrics |= probes.metrics(rows.mean[at], (rows.successes / rows.rollouts)[at], scores_Q_M)
        self._writing = self._writer.submit(self.run.record_step, step, rows)
        for field, values in self._state.items():
            values[members_seen] = new_state[field]
        self._shared = rows.shared
        self._known[members_seen] = True
        self._step[members_seen] = step

        advantages_P_G = np.zeros_like(rewards_P_G)
        advantages_P_G[seen] = FORMS[form](rewards_P_G[seen], estimate)
        per_group = np.zeros((5, len(members)))
        per_group[0, seen], per_group[1, seen] = estimate.mean, estimate.variance
        per_group[2, seen] = np.nanmin(rewards_P_G[seen], axis=1) == np.nanmax(rewards_P_G[seen], axis=1)
        per_group[3] = (per_group[2] > 0) & (np.abs(advantages_P_G).max(axis=1) > 0)
        per_group[4, seen] = _sample_std(rewards_P_G[seen])
        return Scored(advantages_P_G[group, slot], *per_group[:, group], metrics=metrics)

    def settle(self) -> None:
        """Wait until the last step is stored: all of it, in one transaction.

        Raises:
            storage.StoreError: it cannot be; the run must not go on.
        """
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _groups(
        self, prompts: Sequence[tuple[str, str]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Positions of the P distinct prompts in our arrays, and each row's group and place in it."""
        try:
            positions = np.array([self._index[prompt] for prompt in prompts])
        except KeyError as error:
            raise ValueError(
                f"prompt {error.args[0][0][:80]!r} is not in the data set this run was started with"
            ) from None
        members, group, sizes = np.unique(positions, return_inverse=True, return_counts=True)
        order = np.argsort(group, kind="stable")
        slot = np.empty(len(group), dtype=np.int64)
        slot[order] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return members, group, slot

    def _probed_among(
        self, members: NDArray[np.int64], probed: probes.Probes
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places in ``members`` of the probed prompts that are among them and have a score, and their scores."""
        positions = np.array([self._index[prompt] for prompt in probed.prompts], dtype=np.int64)
        usable = np.isin(positions, members) & ~np.isnan(probed.scores_Q_M).all(axis=1)
        return np.searchsorted(members, positions[usable]), probed.scores_Q_M[usable]

    def _rows(
        self,
        members: NDArray[np.int64],
        state: State,
        new_state: State,
        estimate: Estimate,
        scores_P_G: NDArray[np.float64],
    ) -> storage.StepRows:
        """What the step changed, to be stored."""
        known = self._known[members]
        before = {field: np.where(known, values, np.nan) for field, values in state.items()}
        return storage.StepRows(
            prompt_ids=self._ids[members],
            rollouts=np.sum(~np.isnan(scores_P_G), axis=1),
            successes=np.nansum(scores_P_G, axis=1),
            mean=estimate.mean,
            variance=estimate.variance,
            state=self._columns(new_state, len(members)),
            previous_state=self._columns(before, len(members)),
            previous_step=self._step[members],
            shared={field: new_state[field] for field in self.estimator.shared_fields},
        )

    def _columns(self, state: State, rows: int) -> NDArray[np.float64]:
        fields = self.estimator.state_fields
        return np.column_stack([state[field] for field in fields]) if fields else np.empty((rows, 0))

    def _explain(self, error: RewardSupportError, text: str) -> str:
        hint = "use an estimator of real rewards"
        if hasattr(self.estimator, "partial_credit") and 0 <= error.value <= 1:
            hint = f"--{self.estimator.name}.partial_credit accepts scores in [0, 1]"
        name = self.estimator.name
        return f"score {error.value:g} of prompt {text[:80]!r} is not {error.allowed}, as {name} needs; {hint}"


def _probe_rows(ids: NDArray[np.int64], scores_Q_M: NDArray[np.float64]) -> storage.ProbeRows:
    return storage.ProbeRows(
        prompt_ids=ids,
        samples=np.sum(~np.isnan(scores_Q_M), axis=1),
        successes=np.nansum(scores_Q_M, axis=1),
        squares=np.nansum(scores_Q_M**2, axis=1),
    )


def _matrix(
    values: NDArray[np.float64], group: NDArray[np.int64], slot: NDArray[np.int64], groups: int
) -> NDArray[np.float64]:
    matrix = np.full((groups, int(slot.max()) + 1), np.nan)
    matrix[group, slot] = values
    return matrix


def _sample_std(rewards_P_G: NDArray[np.float64]) -> NDArray[np.float64]:
    rollouts = np.sum(~np.isnan(rewards_P_G), axis=1)
    mean = np.nansum(rewards_P_G, axis=1) / rollouts
    return np.sqrt(np.nansum((rewards_P_G - mean[:, None]) ** 2, axis=1) / np.maximum(rollouts - 1, 1))
