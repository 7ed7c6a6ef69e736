"""Replay (RePO): a prompt's earlier rollouts are trained on once more, beside those of the step.

A host takes the extra rows of a step before it gives the step's own rollouts::

    memory = Replay(samples=8).memory("group_norm")
    rows = memory.extra_rows(prompt_ids)  # each keeps the log-probs of the policy that generated it
    memory.remember(rollouts)

Source: RePO (Li et al. 2025, arXiv 2506.09340), with the settings of its published code.
docs/methods.md lists the differences.

Axes: T tokens of a rollout, prompt and response; A of them generated; P prompts with K replayed
rollouts each; R rollouts of the memory.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import estimators
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.forms import Form
from openrlhf_dbb.estimators.registry import Refusal, check, parameter

FILE = "replay.npz"
_ARRAYS = (
    "cache",
    "step",
    "steps",
    "prompt_ids",
    "rewards",
    "lengths",
    "tokens",
    "actions",
    "log_probs",
)


@dataclass(frozen=True, eq=False)
class TokenRollout:
    """A rollout as a policy trains on it.

    Attributes:
        prompt_id: of the rollout's prompt.
        tokens: int32 (T,), prompt and response without padding.
        actions: bool (T - 1,), True where the policy generated ``tokens[1:]``.
        log_probs: float32 (A,), in nats, of the generated tokens by the policy that generated them.
        reward: the optimized one, after penalties.
    """

    prompt_id: int
    tokens: NDArray[np.int32]
    actions: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    reward: float


class _Kept(NamedTuple):
    step: int  # in which it was remembered, from 1
    rollout: TokenRollout


class ExtraRow(NamedTuple):
    """A row to train on beside those of the step."""

    rollout: TokenRollout
    advantage: float


def what_no_cache_holds(replay: "Replay", plan: Plan) -> Refusal:
    """The cache holds tokens and the log-probs of the policy that generated them."""
    for what, setting in plan.rows_bring.items():
        return f"{replay.shown(plan)} with {setting}: no {what} are kept; leave one out"
    return None


def whitened_form(replay: "Replay", plan: Plan) -> Refusal:
    """Whitening is over the tokens of a step."""
    if plan.form is None or not FORMS.get(plan.form).whitened:
        return None
    both = f"{replay.shown(plan)} with {plan.shown('form', plan.form)}"
    return f"{both}: replayed rows are not whitened; leave one out"


@dataclass(frozen=True)
class Replay(Part):
    """A prompt's earlier rollouts are trained on once more, beside the new ones (RePO)."""

    samples: int = parameter(0, "earlier rollouts to train on; 0: off", within="[0, inf)")
    cache: int = parameter(16, "newest rollouts kept; when full, replayed from", within="[1, inf)")
    max_age: int = parameter(
        0, "steps after which a rollout leaves the cache; 0: never", within="[0, inf)"
    )

    name: ClassVar[str] = "replay"
    rules = (what_no_cache_holds, whitened_form)

    def __post_init__(self) -> None:
        check(self)
        for field in ("samples", "cache", "max_age"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"replay.{field} = {value!r} is not a whole number")
        if self.samples > self.cache:
            kept = f"the {self.cache} rollouts that replay.cache keeps"
            raise ValueError(f"replay.samples = {self.samples} is more than {kept}; lower it")

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities of a host that it needs."""
        return frozenset({Capability.EXTRA_ROWS})

    def shown(self, plan: Plan) -> str:
        """Return how the trainer's user has chosen it."""
        return plan.shown("replay", self.samples)

    def memory(self, form: str) -> "ReplayMemory":
        """Return an empty memory; ``form`` names the advantage form of the run.

        Raises:
            ValueError: there is no such form, or it is whitened over a step's tokens.
        """
        chosen = FORMS.get(form)
        if chosen.whitened:
            raise ValueError(
                f"replay does not go with advantage form {form}, which is whitened over a step's "
                "tokens: use group_norm, or replay.samples = 0"
            )
        return ReplayMemory(self, chosen())


class ReplayMemory:
    """The newest rollouts of every prompt, which a checkpoint holds (``core.host.SideState``).

    In main memory: 9 bytes a generated token, 5 a token of the prompt, about 500 a rollout.
    """

    def __init__(self, replay: Replay, form: Form) -> None:
        self._samples = replay.samples
        self._cache = replay.cache
        self._max_age = replay.max_age
        self._form = form
        self._step = 0  # steps that were remembered
        self._kept: dict[int, deque[_Kept]] = {}

    def extra_rows(self, prompt_ids: Sequence[int]) -> list[ExtraRow]:
        """Return the rows to train on beside a step's rollouts; then give these to :meth:`remember`.

        Of each prompt whose cache is full those of highest reward, once a prompt, oldest first.
        """
        if self._samples == 0:
            return []
        replayed: list[TokenRollout] = []
        for prompt_id in dict.fromkeys(prompt_ids):
            cached = self._young(prompt_id)
            if len(cached) == self._cache:
                replayed += highest(cached, self._samples)
        if not replayed:
            return []
        rewards_P_K = np.array([rollout.reward for rollout in replayed]).reshape(-1, self._samples)
        advantages_P_K = replay_advantages(rewards_P_K, self._form)
        return list(map(ExtraRow, replayed, advantages_P_K.ravel().tolist()))

    def remember(self, rollouts: Iterable[TokenRollout]) -> None:
        """Add a step's rollouts but those without a reward; the oldest of their prompts leave.

        Raises:
            ValueError: the arrays of a rollout do not fit each other, or a number is not finite.
                Nothing is added.
        """
        checked = [_checked_copy(rollout) for rollout in rollouts]
        self._step += 1
        for rollout in checked:
            self._add(_Kept(self._step, rollout))

    def _young(self, prompt_id: int) -> list[TokenRollout]:
        """Return what is kept of a prompt; what is too old leaves."""
        kept = self._kept.get(prompt_id, deque())
        while self._max_age and kept and kept[0].step <= self._step - self._max_age:
            kept.popleft()
        return [entry.rollout for entry in kept]

    def metrics(self, replayed: int) -> dict[str, float]:
        """Return what is logged of a step with so many extra rows."""
        cached = sum(len(rollouts) for rollouts in self._kept.values())
        return {"replay/replayed": float(replayed), "replay/cached": float(cached)}

    def save(self, folder: Path) -> None:
        """Write all rollouts into one file of a folder, which exists."""
        kept = [entry for cached in self._kept.values() for entry in cached]
        rollouts = [entry.rollout for entry in kept]
        np.savez(
            folder / FILE,
            cache=np.array([self._cache]),
            step=np.array([self._step]),
            steps=np.array([entry.step for entry in kept], dtype=np.int64),
            prompt_ids=np.array([rollout.prompt_id for rollout in rollouts], dtype=np.int64),
            rewards=np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
            lengths=np.array([len(rollout.tokens) for rollout in rollouts], dtype=np.int64),
            tokens=joined([rollout.tokens for rollout in rollouts], np.int32),
            actions=joined([rollout.actions for rollout in rollouts], np.bool_),
            log_probs=joined([rollout.log_probs for rollout in rollouts], np.float32),
        )

    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` has written, bit for bit.

        Raises:
            ValueError: there is no such file, it is damaged, or of another ``replay.cache``.
                Nothing has changed then.
        """
        path = folder / FILE
        if not path.exists():
            raise ValueError(
                f"{path} is missing: nothing was replayed; go on with replay.samples = 0"
            )
        try:
            with np.load(path) as file:  # refuses pickles, which could run code
                arrays = {name: file[name] for name in _ARRAYS}
            cache = int(arrays["cache"][0])
            step = int(arrays["step"][0])
            kept = [
                _Kept(*entry)
                for entry in zip(arrays["steps"].tolist(), _rollouts(arrays), strict=True)
            ]
        except Exception as error:  # of a damaged file numpy and zipfile raise ten kinds
            problem = f"{path} is damaged, or was not written by replay"
            raise ValueError(
                f"{problem}; delete {folder} to go on from an older checkpoint"
            ) from error
        if cache != self._cache:
            problem = f"{path} is of replay.cache = {cache}, not {self._cache}"
            raise ValueError(f"{problem}; go on with {cache}")
        self._step = step
        self._kept = {}
        for entry in kept:
            self._add(entry)

    def _add(self, entry: "_Kept") -> None:
        prompt_id = entry.rollout.prompt_id
        if prompt_id not in self._kept:
            self._kept[prompt_id] = deque(maxlen=self._cache)
        self._kept[prompt_id].append(entry)


def highest(rollouts: Iterable[TokenRollout], count: int) -> list[TokenRollout]:
    """Return the ``count`` rollouts of highest reward, in their order; of equal ones the first."""
    in_order = list(rollouts)
    rewards = np.array([rollout.reward for rollout in in_order])
    places = np.argsort(-rewards, kind="stable")[:count]
    return [in_order[place] for place in sorted(places)]


def replay_advantages(rewards_P_K: Floats, form: Form) -> Floats:
    """Return the advantages (P, K), by mean and N-1 variance of each prompt's own rewards.

    Exactly 0 where all rewards of a prompt are the same.
    """
    point = estimators.build("point")
    _, estimate = point.observe({}, rewards_P_K, leave_one_out=form.leave_one_out)
    advantages_P_K = form.advantages(rewards_P_K, estimate)
    return np.where(estimate.variance[:, None] > 0, advantages_P_K, 0.0)


def _checked_copy(rollout: TokenRollout) -> TokenRollout:
    """Return a rollout with arrays of its own: a view would keep a whole padded batch in memory."""
    copy = TokenRollout(
        prompt_id=int(rollout.prompt_id),
        tokens=np.array(rollout.tokens, dtype=np.int32),
        actions=np.array(rollout.actions, dtype=np.bool_),
        log_probs=np.array(rollout.log_probs, dtype=np.float32),
        reward=float(rollout.reward),
    )
    subject = f"a rollout of prompt {copy.prompt_id} has"
    tokens = copy.tokens.size
    if copy.actions.shape != (tokens - 1,):
        found = f"{tokens} tokens and {copy.actions.size} actions"
        raise ValueError(f"{subject} {found}; give an action for each token but the first")
    generated = int(copy.actions.sum())
    if copy.log_probs.shape != (generated,):
        found = f"{generated} generated tokens and {copy.log_probs.size} log_probs"
        raise ValueError(f"{subject} {found}; give one for each")
    if not np.isfinite(copy.log_probs).all():
        raise ValueError(f"{subject} log_probs that are not finite; leave it out")
    if not np.isfinite(copy.reward):
        raise ValueError(f"{subject} the reward {copy.reward}; leave out rollouts without a reward")
    return copy


def joined(arrays: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Return the arrays one behind the other; without any, an empty one of that type."""
    return np.concatenate([np.empty(0, dtype), *arrays])


def _rollouts(arrays: Mapping[str, NDArray[Any]]) -> list[TokenRollout]:
    """Return the rollouts of a file's arrays. Raises ValueError if they do not fit each other."""
    lengths_R = arrays["lengths"]
    tokens_R = split(arrays["tokens"], lengths_R)
    actions_R = split(arrays["actions"], lengths_R - 1)
    log_probs_R = split(arrays["log_probs"], [actions.sum() for actions in actions_R])
    columns = (arrays["prompt_ids"], tokens_R, actions_R, log_probs_R, arrays["rewards"])
    return [_checked_copy(TokenRollout(*row)) for row in zip(*columns, strict=True)]


def split(values: NDArray[Any], sizes: Sequence[int] | NDArray[np.int64]) -> list[NDArray[Any]]:
    """Return consecutive parts of these sizes, which :func:`joined` puts together again.

    Raises:
        ValueError: the sizes do not sum to the number of values.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    *parts, rest = np.split(values, ends)
    if rest.size:
        raise ValueError(f"{len(values)} values are not {ends[-1:]}")
    return parts
