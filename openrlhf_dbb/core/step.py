"""The rollouts of one training step: checked columns, groups, advantages, and the rows that are stored and logged.

What is stored with its text or probed is chosen by a hash, so that a resume and another database choose the same.

Axes: R rollouts (rows) of the step; P distinct prompts among them; V of these prompts that have a verified rollout; G
rollouts of the largest group; Q probed prompts with M samples each; K rollouts that are stored with their texts.
"""

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openrlhf_dbb import storage
from openrlhf_dbb.core import KEEP, NO_ANSWER
from openrlhf_dbb.core.texts import is_missing
from openrlhf_dbb.estimators import Estimate, Form
from openrlhf_dbb.estimators.probe_error import squared_errors
from openrlhf_dbb.estimators.simple import PointEstimator

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

Key = tuple[str, str]
"""A prompt's text and its label."""

Column = Any
"""A value for each rollout, as numpy takes them; an array (R,) once it is checked. None where nothing is known."""


@dataclass(frozen=True)
class Responses:
    """The texts that the model generated in a step. A sample of the texts is stored.

    Attributes:
        texts: (R,) responses, or a function that decodes the response of a row; only stored rows are decoded.
        truncated: (R,) whether a response was cut at the length limit; None if unknown.
        log_probs: (R,) sum of the response tokens' log-probabilities at sampling time; NaN or None where unknown.
        keep: how many rollouts are stored, >= 0; None stores all.
    """

    texts: Sequence[str] | Callable[[int], str]
    truncated: ArrayLike | None = None
    log_probs: ArrayLike | None = None
    keep: int | None = KEEP


@dataclass(frozen=True)
class Probes:
    """Extra rollouts of some prompts. They measure the estimates; no model and no posterior learns from them.

    Attributes:
        prompts: Q different prompts.
        scores_Q_M: the verifier's scores, shape (Q, M); NaN where missing.
    """

    prompts: Sequence[Key]
    scores_Q_M: Floats


@dataclass(frozen=True)
class StepExtras:
    """Holds the optional facts about a step; prompts, labels and rewards are passed beside it.

    Attributes:
        tokens: (R,) length of each response, >= 0, for the token counts.
        trained: (R,) False for a rollout that updates the posterior but is not trained on; None: all are trained on.
        skipped: how often a prompt was drawn without generating for it; only counted.
        probes: probes of the step's prompts.
        responses: the generated texts; None stores no texts.
        policy_versions: (R,) in [0, step - 1], training steps that the policy had seen when it generated the rollout;
            None: ``step - 1``. The lag of a group is the mean over its rollouts.
        inclusion: (R,) in (0, 1], probability with which a rollout strategy drew the rollout's prompt; only stored.
        weights: (R,) > 0, importance weights that multiply the advantages.
        read: (R,) what the verifier read as the answer, or "no answer" and why; None where it does not tell.
    """

    tokens: Column = None
    trained: Column = None
    skipped: int = 0
    probes: Probes | None = None
    responses: Responses | None = None
    policy_versions: Column = None
    inclusion: Column = None
    weights: Column = None
    read: Iterable[str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step as checked arrays; fields without a comment are of the extras."""

    prompts: list[Key]
    rewards: Floats  # (R,) the optimized values; NaN where missing
    scores: Floats  # (R,) the verifier's before penalties; NaN where missing
    tokens: Positions  # (R,)
    trained: NDArray[np.bool_]  # (R,)
    skipped: int
    probes: Probes | None
    responses: Responses | None
    policy_versions: Floats | None
    inclusion: Floats | None
    weights: Floats | None
    read: list[str | None] | None

    @classmethod
    def checked(
        cls,
        step: int,
        prompts: Iterable[str],
        labels: Iterable[str],
        rewards: Column,
        scores: Column,
        extras: StepExtras,
    ) -> "Rollouts":
        """Return the arguments of :meth:`openrlhf_dbb.Posteriors.observe` as arrays; raise its ValueError."""
        keys = keys_of(prompts, labels)
        size = len(keys)
        rewards_R = column("rewards", rewards, size)
        scores_R = rewards_R if scores is None else column("scores", scores, size)
        # Without a reward a rollout gets no advantage, and without a score no posterior can learn from it.
        missing_R = np.isnan(rewards_R) | np.isnan(scores_R)
        return cls(
            prompts=keys,
            rewards=np.where(missing_R, np.nan, rewards_R),
            scores=np.where(missing_R, np.nan, scores_R),
            tokens=_token_counts(extras.tokens, size),
            trained=_flags("trained", extras.trained, size),
            skipped=whole("skipped", extras.skipped),
            probes=extras.probes,
            responses=_checked_responses(extras.responses, size),
            policy_versions=_within("policy_versions", extras.policy_versions, size, 0, step - 1),
            inclusion=_within("inclusion", extras.inclusion, size, 0, 1, above=True),
            weights=_within("weights", extras.weights, size, 0, np.inf, above=True),
            read=_checked_read(extras.read, size),
        )


_NO_LISTS = str, bytes, Mapping, set, frozenset  # a set has no order


def keys_of(prompts: Iterable[str], labels: Iterable[str]) -> list[Key]:
    """Return prompts with their labels; raise ValueError if their numbers differ, or are 0, or one is not a str."""
    prompts = texts_of("prompts", prompts)
    labels = texts_of("labels", labels)
    _same_number("labels", len(labels), len(prompts))
    if not prompts:
        raise ValueError("there are no prompts; pass all that will be trained on, with their labels")
    return list(zip(prompts, labels, strict=True))


def texts_of(name: str, values: Iterable[str]) -> list[str]:
    """Return the texts of a list, a column, a view or a generator; ValueError if one is no str."""
    if isinstance(values, _NO_LISTS) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} = {values!r:.80} is not a list; pass a list of str")
    texts = list(values)
    for row, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"row {row} of {name} is {text!r:.80}, which is not a str; pass texts")
    return texts


def _same_number(name: str, number: int, prompts: int) -> None:
    if number != prompts:
        counts = f"{prompts} prompts and {number} {name}"
        raise ValueError(f"there are {counts}; pass one for each prompt")


def numbers(name: str, values: Any) -> Floats:
    """Return finite numbers as an array, NaN for None and NaN; raise ValueError for anything else.

    Lists, tensors of torch on any device, columns of pandas, and iterators of numbers are read.
    """
    if type(values) is np.ndarray and values.dtype.kind in "biuf":
        array = values.astype(np.float64)
    else:
        listed = _as_floats(name, values, "")
        try:
            array = np.array(listed, dtype=np.float64)
        except ValueError:
            problem = f"the rows of {name} have different lengths"
            raise ValueError(f"{problem}; give rows of one length") from None
    infinite = np.argwhere(np.isinf(array))
    if len(infinite):
        _as_floats(name, array.tolist(), "")  # raises
    return array


def _as_floats(name: str, values: Any, place: str) -> Any:
    """Return a number as a float, NaN for a missing one, and other values as lists of these."""
    if hasattr(values, "tolist"):  # numpy, torch, pandas
        values = values.tolist()
    elif hasattr(values, "to_numpy"):  # a table of pandas
        values = values.to_numpy().tolist()
    if isinstance(values, Iterable) and not isinstance(values, _NO_LISTS):
        rows = enumerate(values, 1)
        return [_as_floats(name, value, place or f"row {row} of ") for row, value in rows]
    if is_missing(values):
        return np.nan
    try:
        number = float(values) if isinstance(values, (Real, Decimal)) else np.inf
    except OverflowError:
        number = np.inf
    if np.isinf(number):
        allowed = "finite numbers, and None or NaN where one is missing"
        raise ValueError(f"{place}{name} is {values!r:.80}; give {allowed}")
    return number


def whole(name: str, value: Any) -> int:
    """Return a whole number from 0 to 2**62 as an int; raise ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= 2**62:
        raise ValueError(f"{name} is {value!r:.80}; give a whole number from 0 to 2**62")
    return number


def column(name: str, values: Any, size: int) -> Floats:
    """Return a column of finite numbers (size,), NaN where missing; ValueError for another one."""
    values_R = numbers(name, values)
    if values_R.shape != (size,):
        raise ValueError(f"{name} has shape {values_R.shape}; pass one value for each of the {size} rollouts")
    return values_R


def _within(
    name: str,
    values: Any,
    size: int,
    lowest: float,
    highest: float,
    *,
    above: bool = False,
) -> Floats | None:
    """Return a column of numbers from ``lowest`` to ``highest``; above ``lowest`` if ``above``."""
    if values is None:
        return None
    values_R = column(name, values, size)
    good_R = (values_R > lowest) if above else (values_R >= lowest)
    good_R &= values_R <= highest
    start = "(" if above else "["
    end = ")" if highest == np.inf else "]"
    _refuse_rows(name, values_R, ~good_R, f"numbers in {start}{lowest:g}, {highest:g}{end}")
    return values_R


def _token_counts(values: Any, size: int) -> Positions:
    values_R = _within("tokens", values, size, 0, 2**62)
    if values_R is None:
        return np.zeros(size, dtype=np.int64)
    _refuse_rows("tokens", values_R, values_R != np.floor(values_R), "whole numbers")
    return values_R.astype(np.int64)


def _flags(name: str, values: Any, size: int) -> NDArray[np.bool_]:
    """Return a column of True and False; all are True without one."""
    if values is None:
        return np.ones(size, dtype=np.bool_)
    values_R = column(name, values, size)
    _refuse_rows(name, values_R, (values_R != 0) & (values_R != 1), "True or False")
    return values_R.astype(np.bool_)


def _refuse_rows(name: str, values_R: Floats, wrong_R: NDArray[np.bool_], allowed: str) -> None:
    """Raise ValueError that names the first wrong row, its value and what is allowed."""
    if wrong_R.any():
        row = int(wrong_R.argmax())
        raise ValueError(f"row {row + 1} of {name} is {values_R[row]:.10g}; give {allowed}")


def _checked_responses(responses: Responses | None, size: int) -> Responses | None:
    if responses is None or callable(responses.texts):
        return responses
    texts = texts_of("response texts", responses.texts)
    _same_number("response texts", len(texts), size)
    return replace(responses, texts=texts)


def _checked_read(read: Iterable[str | None] | None, size: int) -> list[str | None] | None:
    if read is None:
        return None
    listed = list(read)
    texts_of("texts that were read", [text or "" for text in listed])
    _same_number("texts that were read", len(listed), size)
    return listed


@dataclass(frozen=True)
class Groups:
    """The groups of a step: all rollouts of a prompt form one group, wherever they stand."""

    prompts_P: Positions  # in the run's prompts, ascending
    verified_P: NDArray[np.bool_]  # whether any rollout of the group was verified
    group_R: Positions  # of each rollout
    slot_R: Positions  # its place in the group

    @classmethod
    def by_prompt(cls, prompts_R: Positions, verified_R: NDArray[np.bool_]) -> "Groups":
        """Group rollouts by the positions of their prompts."""
        prompts_P, group_R = np.unique(prompts_R, return_inverse=True)
        return cls(prompts_P, np.bincount(group_R, verified_R) > 0, group_R, earlier_visits(group_R))

    @property
    def prompts_V(self) -> Positions:
        """The positions of the prompts that have a verified rollout."""
        return self.prompts_P[self.verified_P]

    def matrix(self, values_R: Floats) -> Floats:
        """Return the rollouts' values by group with a verified rollout, (V, G); NaN fills the smaller groups."""
        values_P_G = np.full((len(self.prompts_P), int(self.slot_R.max()) + 1), np.nan)
        values_P_G[self.group_R, self.slot_R] = values_R
        return values_P_G[self.verified_P]

    def rows(self, values_V: NDArray[Any]) -> Floats:
        """Return each rollout's value (R,) of values by group (V,) or by rollout of a group (V, G); 0 elsewhere."""
        values_P = np.zeros((len(self.prompts_P), *values_V.shape[1:]))
        values_P[self.verified_P] = values_V
        return values_P[self.group_R] if values_P.ndim == 1 else values_P[self.group_R, self.slot_R]


def earlier_visits(prompt_R: Positions) -> Positions:
    """Return for each entry the number of earlier entries with the same value, (R,)."""
    order = np.argsort(prompt_R, kind="stable")
    ascending, earlier = prompt_R[order], np.empty(len(prompt_R), dtype=np.int64)
    earlier[order] = np.arange(len(prompt_R)) - np.searchsorted(ascending, ascending)
    return earlier


@dataclass(frozen=True)
class Scored:
    """The advantages of a step's R rollouts; all arrays have shape (R,).

    Attributes:
        advantages: 0 for a missing or filtered rollout; NaN if only the trainer knows them.
        mean, variance: the estimate of one reward that the rollout was scored with.
        zero_variance: 1.0 if all rewards of the rollout's group are equal.
        rescued: 1.0 if the group has zero variance and still yields an advantage.
        group_std: N-1 standard deviation of the group's rewards.
        baseline, scale, weight: ``advantage = weight * (reward - baseline) / scale``, and 0 where the scale is 0; NaN
            for a missing or filtered rollout.
        metrics: numbers to log by name, see docs/training.md.
    """

    advantages: Floats
    mean: Floats
    variance: Floats
    zero_variance: Floats
    rescued: Floats
    group_std: Floats
    baseline: Floats
    scale: Floats
    weight: Floats
    metrics: dict[str, float] = field(default_factory=dict)


def score(rollouts: Rollouts, groups: Groups, estimate: Estimate, form: Form) -> Scored:
    """Compute the advantages of a step from the estimates of its V prompts."""
    rewards_V_G = groups.matrix(rollouts.rewards)
    # A filtered rollout is missing for the form, which may compare the rollouts of a step with each other.
    trained_V_G = groups.matrix(np.where(rollouts.trained, rollouts.rewards, np.nan))
    advantages_V_G = form.advantages(trained_V_G, estimate)
    weights_V_G = np.ones_like(trained_V_G)
    if rollouts.weights is not None:
        weights_V_G = np.where(np.isnan(trained_V_G), 0.0, groups.matrix(rollouts.weights))
        if form.sums_to_zero:  # the mean over the step is weighted too, so that they still sum to 0
            mean = (weights_V_G * advantages_V_G).sum() / (weights_V_G.sum() or 1.0)
            advantages_V_G = advantages_V_G - (mean if abs(mean) > 1e-12 else 0.0)  # as the form: no rounding errors
    scale_R, trained_R = groups.rows(form.scale(estimate)), rollouts.trained & ~np.isnan(rollouts.rewards)
    baseline_R = rollouts.rewards - groups.rows(advantages_V_G) * scale_R
    advantages_V_G = weights_V_G * advantages_V_G
    zero_variance_V = np.nanmin(rewards_V_G, axis=1) == np.nanmax(rewards_V_G, axis=1)
    return Scored(
        advantages=groups.rows(advantages_V_G),
        mean=groups.rows(estimate.mean),
        variance=groups.rows(estimate.variance),
        zero_variance=groups.rows(zero_variance_V),
        rescued=groups.rows(zero_variance_V & (np.abs(advantages_V_G).max(axis=1) > 0)),
        group_std=groups.rows(np.sqrt(PointEstimator().estimate({}, rewards_V_G).variance)),
        baseline=np.where(trained_R, baseline_R, np.nan),
        scale=np.where(trained_R, scale_R, np.nan),
        weight=np.where(trained_R, groups.rows(weights_V_G), np.nan),
    )


# In float32 the mean of eight times 1.2 is not 1.2. TRL divides the difference, up to 2e-7 of the reward, by 1e-4.
_ROUNDING = 4e-3


def as_trained(scored: Scored, groups: Groups, rewards_R: Floats, advantages: Column) -> Scored:
    """Return a step with the trainer's own advantages (R,); NaN for each rollout if it is None.

    Where all rewards of a group are equal, an advantage below 0.004 (times the reward, if that is
    above 1) is rounding, and becomes 0.

    Raises:
        ValueError: there is not one finite advantage for each rollout.
    """
    size = len(scored.advantages)
    unknown_R = np.full(size, np.nan)
    if advantages is None:
        return replace(
            scored, advantages=unknown_R, rescued=unknown_R, baseline=unknown_R, scale=unknown_R, weight=unknown_R
        )
    advantages_R = column("advantages", advantages, size)
    if np.isnan(advantages_R).any():
        raise ValueError("a rollout has no advantage; pass one for each rollout, or advantages=None")
    rounding_R = _ROUNDING * np.maximum(1.0, np.abs(np.nan_to_num(rewards_R)))
    is_rounding_R = (scored.zero_variance > 0) & (np.abs(advantages_R) < rounding_R)
    advantages_R = np.where(is_rounding_R, 0.0, advantages_R)
    given_P = np.bincount(groups.group_R, advantages_R != 0) > 0
    return replace(
        scored,
        advantages=advantages_R,
        rescued=scored.zero_variance * given_P[groups.group_R],
        baseline=unknown_R,
        scale=unknown_R,
        weight=np.ones(size),
    )


def metrics(step: int, rollouts: Rollouts, groups: Groups, scored: Scored) -> dict[str, float]:
    """Return what is logged of a step's rollouts, by name; see :class:`Scored`."""
    means = {"mean": scored.mean, "variance": scored.variance, "missing": np.isnan(rollouts.scores)}
    means["abs_advantage"] = abs(scored.advantages)
    if groups.slot_R.any():  # a single rollout always has zero variance
        means |= {"zero_variance": scored.zero_variance, "rescued": scored.rescued}
    if np.isnan(scored.advantages).any():
        means.pop("abs_advantage")
        means.pop("rescued", None)
    trained_R = rollouts.trained
    none = not trained_R.any()
    found = {f"estimator/{name}": 0.0 if none else float(each_R[trained_R].mean()) for name, each_R in means.items()}
    found |= {"rollout/filtered": float((~trained_R).mean()), "rollout/skipped": float(rollouts.skipped)}
    if told := [text for text in rollouts.read or () if text is not None]:
        found["rollout/unreadable"] = sum(text.startswith(NO_ANSWER) for text in told) / len(told)
    if rollouts.policy_versions is not None and not none:
        lag_R = step - 1 - rollouts.policy_versions[trained_R]
        found |= {"async/lag": float(lag_R.mean()), "async/lag_max": float(lag_R.max())}
    return found


def usage(rollouts: Rollouts, groups: Groups, scored: Scored) -> storage.Usage:
    """Count where the rollouts of a step went; without advantages nobody knows what was trained on."""
    trained_R, zero_variance_R = rollouts.trained, scored.zero_variance > 0
    informative_P = np.bincount(groups.group_R, trained_R & (scored.advantages != 0)) > 0
    informative_R = trained_R & informative_P[groups.group_R]
    counted = storage.Usage(
        generated=len(trained_R),
        generated_tokens=int(rollouts.tokens.sum()),
        trained=int(trained_R.sum()),
        zero_variance=int(zero_variance_R.sum()),
        informative=int(informative_R.sum()),
        rescued=int((informative_R & zero_variance_R).sum()),
        skipped=rollouts.skipped,
        groups=len(groups.prompts_P),
    )
    if np.isnan(scored.advantages).any():
        return replace(counted, trained=None, informative=None, rescued=None)
    return counted


def rows_to_keep(prompts: Sequence[Key], step: int, keep: int | None) -> Positions:
    """Choose the rollouts that are stored with their texts, (K,) rows, ascending.

    Half of the rows belong to the prompts with the lowest hash, which are the same in every epoch. The other half
    belongs to the prompts with the lowest hash of prompt and step, so that every prompt is stored at some time. Groups
    are stored whole, except for the last one of either half. ``keep`` is their number; None keeps all.
    """
    if keep is None or whole("keep", keep) >= len(prompts):
        return np.arange(len(prompts))
    rows_of: dict[Key, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    hashes = {prompt: storage.prompt_hash(*prompt) for prompt in rows_of}
    followed = sorted(rows_of, key=lambda prompt: hashes[prompt])
    drawn = sorted(rows_of, key=lambda prompt: hashlib.blake2b(hashes[prompt], key=str(step).encode()).digest())
    chosen = [row for prompt in followed for row in rows_of[prompt]][: (keep + 1) // 2]
    others = set(chosen)
    chosen += [row for prompt in drawn for row in rows_of[prompt] if row not in others][: keep - len(chosen)]
    return np.array(sorted(chosen), dtype=np.int64)


def kept_rows(
    step: int, rollouts: Rollouts, groups: Groups, ids_P: Positions, scored: Scored
) -> storage.RolloutRows | None:
    """Return the rollouts of a step that are stored with their texts; None if there are none.

    ``ids_P`` has the store's id of each group's prompt.
    """
    responses = rollouts.responses
    rows_K = np.arange(0) if responses is None else rows_to_keep(rollouts.prompts, step, responses.keep)
    if responses is None or not len(rows_K):
        return None
    size, versions_R = len(rollouts.prompts), rollouts.policy_versions
    text_of = responses.texts if callable(responses.texts) else responses.texts.__getitem__
    unknown_R = np.full(size, np.nan)
    truncated_R = column("truncated", unknown_R if responses.truncated is None else responses.truncated, size)
    log_probs_R = column("log_probs", unknown_R if responses.log_probs is None else responses.log_probs, size)
    return storage.RolloutRows(
        prompt_ids=ids_P[groups.group_R[rows_K]],
        sample=groups.slot_R[rows_K],
        reward=rollouts.rewards[rows_K],
        score=rollouts.scores[rows_K],
        advantage=np.nan_to_num(scored.advantages[rows_K]),  # the column is never NULL
        baseline=scored.baseline[rows_K],
        scale=scored.scale[rows_K],
        weight=scored.weight[rows_K],
        length=rollouts.tokens[rows_K],
        truncated=truncated_R[rows_K],
        log_prob=log_probs_R[rows_K],
        policy_version=None if versions_R is None else versions_R[rows_K],
        text=[text_of(row) for row in rows_K.tolist()],
        read=None if rollouts.read is None else [rollouts.read[row] for row in rows_K.tolist()],
    )


def check_probes(fraction: Any, samples: Any) -> None:
    """Raise ValueError for what is no share, or no number of rollouts that tells its own noise."""
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not is_number or not 0 <= fraction <= 1:
        raise ValueError(f"probe_fraction = {fraction!r:.80}; give a share from 0, which is off, to 1")
    if whole("probe_samples", samples) < 2:
        raise ValueError(f"probe_samples = {samples}; give 2 or more, or probe_fraction=0 for no probes")


def probed_prompts(prompts: Iterable[Key], fraction: float, seed: int) -> set[Key]:
    """Choose about ``fraction`` of the prompts to be probed. A larger fraction chooses the same prompts and more.

    Source: paper, section 5.3, probes a tenth of the prompts with M = 128.
    """

    def draw(prompt: Key) -> float:
        digest = hashlib.blake2b(storage.prompt_hash(*prompt), digest_size=6, key=str(seed).encode()).digest()
        return int.from_bytes(digest, "big") / 2**48

    return {prompt for prompt in prompts if draw(prompt) < fraction}


def measure(
    probes: Probes, positions_Q: Positions, groups: Groups, rows: storage.StepRows
) -> tuple[storage.ProbeRows, dict[str, float]]:
    """Compare a step's estimates and group means with its probes, whose prompts are at ``positions_Q``.

    Return the probes to store, those with a score and an estimate, and the mean squared errors for the log.
    """
    scores_Q_M = numbers("the probes' scores", probes.scores_Q_M)
    if scores_Q_M.ndim != 2 or len(scores_Q_M) != len(positions_Q):
        raise ValueError(f"the probes' scores have shape {scores_Q_M.shape}; pass a row for each probed prompt")
    usable_Q = np.isin(positions_Q, groups.prompts_V) & ~np.isnan(scores_Q_M).all(axis=1)
    at_Q, scores_Q_M = np.searchsorted(groups.prompts_V, positions_Q[usable_Q]), scores_Q_M[usable_Q]
    measured = storage.ProbeRows(
        prompt_ids=rows.prompt_ids[at_Q],
        samples=np.sum(~np.isnan(scores_Q_M), axis=1),
        successes=np.nansum(scores_Q_M, axis=1),
        squares=np.nansum(np.square(scores_Q_M), axis=1),
    )
    errors = {"probe/groups": float(len(at_Q))}
    if (measured.samples >= 2).any():  # the noise of a single sample is unknown
        for name, estimates_V in (("probe/mse", rows.mean), ("probe/mse_point", rows.successes / rows.rollouts)):
            errors_Q = squared_errors(estimates_V[at_Q], measured.samples, measured.successes, measured.squares)
            errors[name] = float(np.nanmean(errors_Q))
    return measured, errors


def by_source(
    sources_V: NDArray[np.str_], successes_V: Floats, rollouts_V: Positions, scores_V_G: Floats
) -> dict[str, float]:
    """Return of each source the groups of a step, the share of rollouts right, and of groups mixed.

    The share right is the mean score, if scores are others than 0 and 1. The scores of a mixed group
    differ.
    """
    found: dict[str, float] = {}
    mixed_V = np.nanmin(scores_V_G, axis=1) < np.nanmax(scores_V_G, axis=1)
    for source in np.unique(sources_V):
        among = sources_V == source
        right, mixed = successes_V[among].sum() / rollouts_V[among].sum(), mixed_V[among].mean()
        values = {"groups": among.sum(), "right": right, "mixed": mixed}
        found |= {f"source/{source}/{name}": float(value) for name, value in values.items()}
    return found


def of_hardest(expected_P: Floats, at_V: Positions, successes_V: Floats, rollouts_V: Positions) -> dict[str, float]:
    """Return the share right of a step's rollouts whose prompts are among the hardest 10, 25 and 50 % of all.

    Hard is what was expected before the step: chosen by its outcome, the hardest would always do worst. Prompts of
    equal expectation share their mean rank. A share of no rollouts is left out.
    """
    ordered_P, expected_V = np.sort(expected_P), expected_P[at_V]
    ranks_V = ordered_P.searchsorted(expected_V) + ordered_P.searchsorted(expected_V, side="right") + 1
    share_V = ranks_V / (2 * len(expected_P))
    hardest = {percent: share_V <= percent / 100 for percent in (10, 25, 50)}
    return {
        f"hardest/{percent}": float(successes_V[among].sum() / rollouts_V[among].sum())
        for percent, among in hardest.items()
        if among.any()
    }
