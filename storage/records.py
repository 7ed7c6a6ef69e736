"""What goes into a store and what comes out: plain records of numpy arrays.

Axes in comments: P prompts, Q probed prompts, F state fields of the run's estimator.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.bulk import Columns
from storage.checks import check_finite, counts, inclusions, policy_versions, reals, sorted_ids
from storage.errors import StoreError
from storage.owner import Owner
from storage.rollouts import RolloutRows
from storage.shared import SharedState, checked_shared, to_text
from storage.usage import Usage

_COLUMN_FIELDS = ("alpha", "beta")


@dataclass(frozen=True)
class RunRecord:
    """One training run, as stored.

    Attributes:
        run_id: id in its database; uuid: 32 hex digits, unique everywhere; name: unique in its database.
        status: "running" or "finished".
        last_step: the last recorded step, 0 before the first.
        estimator, estimator_version, parameters, state_fields: what computes the posteriors.
        model, dataset, dataset_digest, reward, config: what is trained, as given by the trainer.
        method: training method (grpo, dapo, ...); "" if not given.
        created_at: UTC, ISO 8601.
        parent: what the run was warm-started from: name, uuid, step, weight, database; None if nothing.
        heartbeat_at: last write of its owner, as of when this was read; UTC, ISO 8601.
        owner: the process that may write it.
    """

    run_id: int
    uuid: str
    name: str
    status: str
    last_step: int
    estimator: str
    estimator_version: int
    parameters: dict[str, Any]
    state_fields: tuple[str, ...]
    model: str
    dataset: str
    dataset_digest: str
    reward: str
    config: dict[str, Any]
    method: str
    created_at: str
    parent: dict[str, Any] | None
    heartbeat_at: str = field(compare=False)
    owner: Owner = field(compare=False)


@dataclass(frozen=True)
class WarmStart:
    """Outcome of a warm start: how many prompts had a posterior in ``source``, as it was then, and how many had not."""

    matched: int
    unmatched: int
    source: RunRecord


@dataclass(frozen=True)
class PosteriorTable:
    """Current posteriors, one row per requested prompt.

    Attributes:
        state: (P, F) float64; a row of NaN where the run has no posterior of the prompt.
        visits: (P,) int64, steps of this run that trained on the prompt.
        step: (P,) int64, the last such step; 0: warm start only; -1: no posterior.
    """

    state: NDArray[np.float64]
    visits: NDArray[np.int64]
    step: NDArray[np.int64]


@dataclass
class ProbeRows:
    """Extra rollouts of some prompts under the policy of one training step, never trained on.

    Attributes:
        prompt_ids: (Q,) int, unique; a probed prompt need not be one the step trained on.
        samples: (Q,) int, >= 1, number of scores.
        successes: (Q,) float, sum of the scores.
        squares: (Q,) float, sum of the squared scores; for scores 0 and 1 the same as ``successes``.
    """

    prompt_ids: NDArray[np.int64]
    samples: NDArray[np.int64]
    successes: NDArray[np.float64]
    squares: NDArray[np.float64]

    def checked(self, step: int) -> ProbeRows:
        """A copy with exact types, sorted by prompt id; raises StoreError as :meth:`StepRows.checked`."""
        ids, order = sorted_ids(step, "probes.prompt_ids", self.prompt_ids)
        size = len(ids)
        rows = ProbeRows(
            prompt_ids=ids,
            samples=counts(step, "probes.samples", self.samples, size, 1)[order],
            successes=reals(step, "probes.successes", self.successes, (size,))[order],
            squares=reals(step, "probes.squares", self.squares, (size,))[order],
        )
        check_finite(step, "probes.successes", ids, rows.successes)
        check_finite(step, "probes.squares", ids, rows.squares)
        return rows


@dataclass
class StepRows:
    """The posteriors that one training step changed, with what they were before.

    Attributes:
        prompt_ids: (P,) int, unique.
        rollouts: (P,) int, >= 1, rewards seen in this step.
        successes: (P,) float, their sum.
        mean, variance: (P,) float, the estimate of one reward that the step was scored with.
        state: (P, F) float, the posterior after the step.
        previous_state: (P, F) float, the posterior before it; rows of NaN where there was none.
        previous_step: (P,) int, as ``PosteriorTable.step``.
        shared: the estimator's run-wide vectors after the step, finite; empty: none, or unchanged.
        probes: None if no prompt was probed.
        usage: where the step's rollouts went; None if not counted.
        kept: some of its rollouts with their texts; None if none are kept.
        policy_version: (P,) float, in [0, step - 1], training steps that the policy of the prompt's rollouts had seen,
            their mean; NaN: step - 1, the step's own policy; None: of that policy all.
        inclusion: (P,) float, in (0, 1], probability with which a strategy that chooses its prompts drew this one for
            the batch; None: the strategy does not choose.
    """

    prompt_ids: NDArray[np.int64]
    rollouts: NDArray[np.int64]
    successes: NDArray[np.float64]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    state: NDArray[np.float64]
    previous_state: NDArray[np.float64]
    previous_step: NDArray[np.int64]
    shared: SharedState = field(default_factory=dict)
    probes: ProbeRows | None = None
    usage: Usage | None = None
    kept: RolloutRows | None = None
    policy_version: NDArray[np.float64] | None = None
    inclusion: NDArray[np.float64] | None = None

    def checked(self, step: int, num_fields: int) -> StepRows:
        """A copy with exact types, sorted by prompt id.

        Raises:
            StoreError: a wrong shape or type, a value that is not finite, a duplicate prompt, or a policy version or an
                inclusion probability out of range.
        """
        ids, order = sorted_ids(step, "prompt_ids", self.prompt_ids)
        size = len(ids)
        rows = StepRows(
            prompt_ids=ids,
            rollouts=counts(step, "rollouts", self.rollouts, size, 1)[order],
            successes=reals(step, "successes", self.successes, (size,))[order],
            mean=reals(step, "mean", self.mean, (size,))[order],
            variance=reals(step, "variance", self.variance, (size,))[order],
            state=reals(step, "state", self.state, (size, num_fields))[order],
            previous_state=reals(step, "previous_state", self.previous_state, (size, num_fields))[order],
            previous_step=counts(step, "previous_step", self.previous_step, size, -1)[order],
            shared=checked_shared(step, self.shared),
            probes=None if self.probes is None else self.probes.checked(step),
            usage=self.usage,
            kept=None if self.kept is None else self.kept.checked(step),
            policy_version=policy_versions(step, "policy_version", self.policy_version, ids, order),
            inclusion=None if self.inclusion is None else inclusions(step, self.inclusion, ids, order),
        )
        for name in ("successes", "mean", "variance", "state"):
            check_finite(step, name, ids, getattr(rows, name))
        # A new prompt may have its prior or NaN here; one with a posterior must have that posterior.
        known = (rows.previous_step >= 0) | ~np.isnan(rows.previous_state).all(axis=1)
        check_finite(step, "previous_state", ids, rows.previous_state, known)
        late = rows.previous_step >= step
        if late.any():
            prompt, previous = ids[late][0], rows.previous_step[late][0]
            raise StoreError(
                f"step {step}: previous_step of prompt {prompt} is {previous}; it must be less than {step}"
            )
        return rows

    def digest(self, step: int) -> bytes:
        """16 bytes that identify the content of a step; only of checked rows (sorted, exact types)."""
        contents = vars(self).copy()
        shared, probes, usage = to_text(contents.pop("shared")), contents.pop("probes"), contents.pop("usage")
        kept, versions = contents.pop("kept"), contents.pop("policy_version")
        inclusion = contents.pop("inclusion")
        probed = 0 if probes is None else len(probes.prompt_ids)
        used = None if usage is None else usage.columns()
        arrays = [*contents.values(), *([] if probes is None else vars(probes).values())]
        header = f"step rows 1:{step}:{self.state.shape}:{probed}:{used}:{shared}"
        digest = hashlib.blake2b(header.encode(), digest_size=16)
        for values in arrays:
            digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes())
        if kept is not None:
            kept.add_to(digest)
        if versions is not None:
            digest.update(b"policy versions" + np.ascontiguousarray(versions, dtype="<f8").tobytes())
        if inclusion is not None:
            digest.update(b"inclusion" + np.ascontiguousarray(inclusion, dtype="<f8").tobytes())
        return digest.digest()


@dataclass(frozen=True)
class StateLayout:
    """Where an estimator's state fields are stored: ``alpha`` and ``beta`` in columns, the rest packed in ``state``.

    Packed is little-endian float64, in the order of ``fields``.
    """

    fields: tuple[str, ...]

    @property
    def packed(self) -> list[int]:
        """Indices of the packed fields."""
        return [i for i, name in enumerate(self.fields) if name not in _COLUMN_FIELDS]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns that the estimator needs, each with its numpy type."""
        used = [(name, "<f8") for name in _COLUMN_FIELDS if name in self.fields]
        return used + ([("state", f"V{8 * len(self.packed)}")] if self.packed else [])

    def to_columns(self, state: NDArray[np.float64], prefix: str = "") -> dict[str, NDArray[np.float64]]:
        """(P, F) state -> its columns, for :mod:`storage.bulk`; a row of NaN becomes NULL."""
        return {
            prefix + name: state[:, self.packed if name == "state" else self.fields.index(name)]
            for name, _ in self.columns
        }

    def from_columns(self, rows: NDArray[np.void]) -> NDArray[np.float64]:
        """Records with its columns, none of them NULL -> (P, F) state."""
        state = np.empty((len(rows), len(self.fields)))
        for name, _ in self.columns:
            if name == "state":
                packed = np.ascontiguousarray(rows[name]).view("<f8")
                state[:, self.packed] = packed.reshape(len(rows), len(self.packed))
            else:
                state[:, self.fields.index(name)] = rows[name]
        return state


def history_columns(run_id: int, step: int, rows: StepRows, layout: StateLayout) -> Columns:
    """The columns of ``dbb_history``."""
    optional = {"policy_version": rows.policy_version, "inclusion": rows.inclusion}
    return {
        "run_id": run_id,
        "step": step,
        "prompt_id": rows.prompt_ids,
        "rollouts": rows.rollouts,
        "successes": rows.successes,
        **layout.to_columns(rows.state),
        "mean": rows.mean,
        "variance": rows.variance,
        **layout.to_columns(rows.previous_state, "prev_"),
        "prev_step": rows.previous_step,
        **{name: values for name, values in optional.items() if values is not None},
    }


def probe_columns(run_id: int, step: int, probes: ProbeRows) -> Columns:
    """The columns of ``dbb_probe``."""
    return {
        "run_id": run_id,
        "step": step,
        "prompt_id": probes.prompt_ids,
        "samples": probes.samples,
        "successes": probes.successes,
        "squares": probes.squares,
    }
