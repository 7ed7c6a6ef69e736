"""Defines the records that a store writes and reads, as numpy arrays, and checks them.

Axes: P prompts of a step, Q probed prompts, K kept rollouts, F state fields of the run's estimator; of an evaluation R
repeats (seeds) and P prompts of a benchmark.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.storage import decode
from openrlhf_dbb.storage.errors import StoreError
from openrlhf_dbb.storage.owner import Owner

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SharedState = dict[str, Floats]
"""Run-wide vectors of an estimator, by name."""

UNVERIFIED = "unverified"
"""Name beside a step's run-wide vectors, for the ids of its prompts without any verified rollout."""

_KINDS: dict[Any, Any] = {Integers: np.int64, Floats: np.float64, Floats | None: np.float64}

_COLUMN_FIELDS = ("alpha", "beta")


@dataclass(frozen=True)
class RunRecord:
    """One training run, as stored in the columns of these names of ``dbb_run``."""

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
    # The run it was warm-started from: name, uuid, step, weight, database
    parent: dict[str, Any] | None
    # Last write of its owner, as of when this was read; UTC, ISO 8601
    heartbeat_at: str = field(compare=False)
    owner: Owner = field(compare=False)
    damage: str = ""  # why a column of its row, which has a stand-in here, cannot be read; one line

    def checked(self) -> "RunRecord":
        """Return it; raise StoreError if a column of its row cannot be read."""
        if self.damage:
            raise StoreError(self.damage)
        return self


@dataclass(frozen=True)
class WarmStart:
    """The outcome of a warm start: how many prompts had a posterior in ``source``, and how many had none."""

    matched: int
    unmatched: int
    source: RunRecord


@dataclass(frozen=True)
class Replayed:
    """Posteriors that another estimator would have after the stored visits of a run."""

    prompt_ids: Integers  # (P,) ascending, in the database of the run
    state: Floats  # (P, F)
    shared: SharedState  # the run-wide vectors


@dataclass(frozen=True)
class PosteriorTable:
    """Current posteriors, one row per requested prompt."""

    state: Floats  # (P, F); a row of NaN where the run has no posterior of the prompt
    step: Integers  # (P,) the last step of this run that trained on it; 0: warm start only; -1: no posterior


@dataclass(frozen=True)
class Usage:
    """Counts the rollouts of one training step; the comments are those of the columns of ``dbb_step``.

    ``trained``, ``informative`` and ``rescued`` are None if nobody knows the advantages that were trained with.
    """

    generated: int = field(metadata={"comment": "rollouts generated"})
    generated_tokens: int = field(metadata={"comment": "their response tokens"})
    trained: int | None = field(
        metadata={"comment": "of these, rollouts trained on; the rest was filtered out"}
    )
    zero_variance: int = field(metadata={"comment": "generated rollouts in zero-variance groups"})
    informative: int | None = field(
        metadata={"comment": "trained rollouts of groups in which some advantage is not 0"}
    )
    rescued: int | None = field(metadata={"comment": "of these, rollouts in zero-variance groups"})
    skipped: int = field(
        metadata={"comment": "times a prompt was drawn and skipped before generation"}
    )
    groups: int = field(metadata={"comment": "prompts with generated rollouts"})


TOTALS = {count.name: str(count.metadata["comment"]) for count in fields(Usage)}
"""The counts of a step, with the comments of their columns."""


@dataclass
class ProbeRows:
    """Extra rollouts of some prompts under the policy of one training step, never trained on."""

    prompt_ids: Integers  # (Q,) unique; a probed prompt need not be one that the step trained on
    samples: Integers  # (Q,) >= 1, number of scores
    successes: Floats  # (Q,) sum of the scores
    squares: Floats  # (Q,) sum of the squared scores; equals successes for scores 0 and 1


@dataclass
class RolloutRows:
    """Some rollouts of one training step, with their texts; each value has shape (K,).

    ``advantage = weight * (reward - baseline) / scale``, and 0 where the scale is 0.
    """

    prompt_ids: Integers
    sample: Integers  # >= 0, place among the rollouts of the prompt in this step
    reward: Floats  # the optimized value; NaN where it could not be verified
    score: Floats  # the verifier's before penalties; NaN where it could not be verified
    advantage: Floats  # finite
    length: Integers  # >= 0, response tokens
    truncated: Floats  # 1 if the response was cut at the length limit, else 0; NaN if not known
    log_prob: (
        Floats  # sum of the response tokens' log-probabilities at sampling time; NaN if not known
    )
    text: Sequence[str]
    # Training steps that the policy had seen that wrote the response; NaN or None: step - 1, the step's own policy.
    policy_version: Floats | None = None
    # This and the next two: NaN where not trained on, None: not known
    baseline: Floats | None = None
    scale: Floats | None = None
    weight: Floats | None = None
    # The verifier's answer, or why it could read none; None: not told
    read: Sequence[str | None] | None = None

    def checked(self) -> "RolloutRows":
        """Return a copy with exact types, sorted by prompt id and sample."""
        order = np.lexsort((self.sample, self.prompt_ids))
        texts = [storable(self.text[at]) for at in order.tolist()]
        told = self.read and [self.read[at] for at in order.tolist()]
        read = told and [None if each is None else storable(each) for each in told]
        return RolloutRows(**_typed(self, order), text=texts, read=read)


@dataclass
class StepRows:
    """The posteriors that one training step changed, and the posteriors before it."""

    prompt_ids: Integers  # (P,) unique
    rollouts: Integers  # (P,) >= 1, rewards seen in this step
    successes: Floats  # (P,) their sum
    mean: Floats  # (P,) mean and variance: the estimate of one reward that the step was scored with
    variance: Floats  # (P,)
    state: Floats  # (P, F) the posterior after the step
    previous_state: Floats  # (P, F) the posterior before it; rows of NaN where there was none
    previous_step: Integers  # (P,) as PosteriorTable.step
    # After the step, finite; empty: none, or unchanged. UNVERIFIED is of this step alone.
    shared: SharedState = field(default_factory=dict)
    probes: ProbeRows | None = None
    usage: Usage | None = None  # None if not counted
    kept: RolloutRows | None = None
    # (P,) mean of RolloutRows.policy_version over the prompt's rollouts; NaN or None: step - 1, the step's own policy.
    policy_version: Floats | None = None
    # (P,) in (0, 1], probability of the draw; None: the strategy does not choose
    inclusion: Floats | None = None
    form: str | None = None  # name of the advantage form; None if not known

    def checked(self) -> "StepRows":
        """Return a copy with exact types, sorted by prompt id.

        Raise StoreError if a value that an estimate needs is not finite: NaN would be stored as NULL.
        """
        columns = _typed(self, np.argsort(self.prompt_ids))
        probes = None
        _check_finite("", columns, ("successes", "mean", "variance", "state"))
        if self.probes is not None:
            sums = _typed(self.probes, np.argsort(self.probes.prompt_ids))
            _check_finite("probes.", sums, ("successes", "squares"))
            probes = ProbeRows(**sums)
        shared = {
            name: np.array(self.shared[name], dtype=np.float64) for name in sorted(self.shared)
        }
        for name, vector in shared.items():
            if not np.isfinite(vector).all():
                raise StoreError(
                    f"the run-wide state {name!r} is {vector.tolist()}; it must be finite"
                )
        return replace(
            self, **columns, shared=shared, probes=probes, kept=self.kept and self.kept.checked()
        )

    def digest(self, step: int) -> bytes:
        """Return 16 bytes that identify the content of a step; only of checked rows."""
        content = msgspec.msgpack.encode(
            (step, self), enc_hook=lambda array: (array.dtype.str, array.tobytes())
        )
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class EvaluationRows:
    """Results of a model on one benchmark, summed over the responses to each prompt; (R, P) but for the first two."""

    benchmark: str
    prompt_ids: Integers  # (P,) in the benchmark's order; a prompt may occur twice
    samples: Integers  # >= 1, responses (N)
    verified: Integers  # of these, responses with a score; the others are missing
    successes: Floats  # sum of the scores
    best: Floats  # the highest score; NaN if no response is verified
    majority: Floats  # score of the most frequent answer; NaN if no response is verified or no answer was extracted
    tokens: Integers  # >= 0, tokens of all responses
    truncated: Integers  # responses cut at the length limit


@dataclass(frozen=True)
class StateLayout:
    """Places an estimator's state fields in a row: ``alpha`` and ``beta`` in columns, the others in ``state``.

    ``state`` is a JSON list with a place for each of ``fields``, null for ``alpha`` and ``beta``. Its decimals are the
    shortest that read back as the same float64.
    """

    fields: tuple[str, ...]

    @property
    def others(self) -> list[int]:
        """Indices of the fields without a column of their own."""
        return [i for i, name in enumerate(self.fields) if name not in _COLUMN_FIELDS]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns that the estimator needs, each with its numpy type."""
        used = [(name, "<f8") for name in _COLUMN_FIELDS if name in self.fields]
        return used + ([("state", "O")] if self.others else [])

    def to_columns(self, state: Floats, prefix: str = "") -> dict[str, NDArray[Any]]:
        """Return the columns of a (P, F) state; NaN becomes NULL."""
        columns = {
            prefix + name: state[:, self.fields.index(name)]
            for name, kind in self.columns
            if kind != "O"
        }
        if self.others:
            known_P = ~np.isnan(state[:, self.others[0]])
            values = np.full((known_P.sum(), len(self.fields)), np.nan)  # which becomes null
            values[:, self.others] = state[known_P][:, self.others]
            texts = np.full(len(state), None, dtype=object)
            # All rows by one call, then cut apart: a call for each row takes twice as long.
            texts[known_P] = (
                msgspec.json.encode(values.tolist())[1:-1].decode().replace("],[", "] [").split()
            )
            columns[prefix + "state"] = texts
        return columns

    def from_columns(self, rows: NDArray[np.void], run: str) -> Floats:
        """Return the (P, F) state of records of a run with its columns and prompt_id, none of them NULL.

        Raise StoreError if a state cannot be read, or a value of it is not finite.
        """
        state = np.empty((len(rows), len(self.fields)))
        for row, stored in enumerate(rows["state"] if self.others else ()):
            what = f"state of prompt {rows['prompt_id'][row]} in run {run!r}"
            state[row] = decode.state(stored, len(self.fields), what)
        for name, kind in self.columns:
            if kind != "O":
                state[:, self.fields.index(name)] = rows[name]
        for row, place in np.argwhere(~np.isfinite(state)):
            what = f"{self.fields[place]} of prompt {rows['prompt_id'][row]} in run {run!r}"
            raise decode.refusal(what, state[row, place].item(), "a finite number")
        return state


def shared_to_text(shared: SharedState | None) -> str | None:
    """Return JSON with the shortest decimals that read back as the same float64; None without run-wide state."""
    return (
        json.dumps({name: values.tolist() for name, values in shared.items()}) if shared else None
    )


def storable(string: str) -> str:
    """Return the text with U+FFFD in place of what PostgreSQL cannot store: U+0000 and unpaired surrogates."""
    if string.isascii() and "\0" not in string:
        return string
    return (
        string.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def _typed(rows: Any, order: Integers) -> dict[str, Any]:
    """Return the arrays of some rows in this order, with the types of their fields; one that is None is left out."""
    given = [(each.name, _KINDS.get(each.type), getattr(rows, each.name)) for each in fields(rows)]
    return {
        name: np.asarray(values).astype(kind, casting="safe")[order]
        for name, kind, values in given
        if kind is not None and values is not None
    }


def _check_finite(where: str, columns: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        for at, *_ in np.argwhere(~np.isfinite(columns[name])):
            prompt = columns["prompt_ids"][at]
            value = columns[name][at].tolist()
            raise StoreError(f"{where}{name} of prompt {prompt} is {value}; it must be finite")
