"""The laboratory: ``lab replay`` measures other estimators on a run's recorded successes and recommends one of them.

Axes: V visits (a prompt in a step) ordered by step, P prompts, G rollouts of the largest group, C candidates,
B bootstrap draws.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import estimators, options
from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.posteriors import rewards_of
from openrlhf_dbb.core.scale import own_estimator as own_estimator
from openrlhf_dbb.core.step import earlier_visits
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import Estimate, RewardEstimator, standardized
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.probe_error import mean_variance, squared_errors
from openrlhf_dbb.estimators.registry import parameter_fields
from openrlhf_dbb.storage import RunRecord, open_store
from openrlhf_dbb.storage.decode import naming_damage
from openrlhf_dbb.storage.read import ProbeLog, StepLog, kept_scores, read_log, read_probes
from openrlhf_dbb.storage.records import Integers
from openrlhf_dbb.terminal import json_text, print_table, safe

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes", "auto")  # the paper's, and auto

# Losses that rank estimators; the first that a log allows is used. The log alone needs groups of two.
CRITERIA = {"probes": "mean squared error against the probes", "mse": "mean squared error estimated from the log"}
DISCOUNTS = (0.02, *(round(0.05 * step, 2) for step in range(1, 21)))  # tried by default

# On pretrained models no estimator was shown better than GRPO's group mean (docs/history.md).
_TELLS = "a replay tells which estimator is nearest to the success rates, not which one trains better"
_WITH_PROBES = f"{_TELLS}: only trainings tell that"
_WITHOUT_PROBES = f"{_TELLS}; to name one to try, it needs a training with --probe.fraction 0.1"

_KNOBS = ("discount", "smoothing")


def add_commands(add: Any) -> None:
    lab: argparse.ArgumentParser = add("lab", lambda _: lab.print_help(), opens_store=False)
    text = "how other estimators would have done on the recorded successes of a run, and which one to use"
    commands = lab.add_subparsers(metavar="COMMAND", title="commands")
    parser = commands.add_parser("replay", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    text = "candidates; NAME:discount=0.4,... for a single one (default: the paper's, auto, and the run's own)"
    parser.add_argument("--estimators", nargs="+", metavar="NAME", help=text)
    options.add_json(parser)
    parser.set_defaults(command=_command)


@naming_damage("the run to replay")
def _command(arguments: argparse.Namespace) -> None:
    run, visits = read(arguments.store_url, arguments.run)
    candidates = sweep(arguments.estimators or ESTIMATORS)
    own = own_estimator(run)
    if own is not None and not arguments.estimators:
        candidates = list({label(candidate): candidate for candidate in (*candidates, own)}.values())
    outcomes = [evaluate(candidate, visits) for candidate in candidates]
    ranking = rank(outcomes, visits)
    advice = recommendation(ranking, visits)
    if arguments.json:
        about = {"criterion": ranking.criterion}
        rows = [{"estimator": o.label, "flags": flags(o.estimator)} | about | _measures(o) for o in outcomes]
        print(json_text({"run": run.name, "candidates": rows, "recommendation": advice}))
        return
    trained = "an estimator unknown here" if own is None else label(own)
    if run.method == IMPORTED:
        trained = "an estimator that its log does not tell"
    heading = (
        f"run {run.name}: {len(visits.step)} visits of {visits.prompts} prompts, {visits.rollouts.mean():.3g} rollouts "
        f"a visit, {np.sum(~np.isnan(visits.probes_3_V[0]))} visits with probes; trained with {trained}"
    )
    print(safe(heading))
    shown = [ranking.candidates[at] for at in ranking.best_of_each()]
    shown += [outcome for outcome in outcomes if outcome.mean(ranking.criterion) is None]  # those that cannot be ranked
    print()
    print_table(("best of each", *_measures(shown[0])), [(each.label, *_measures(each).values()) for each in shown])
    print(f"{len(outcomes)} candidates; --json prints them all\n")
    print("\n".join(map(safe, advice)))


@dataclass(frozen=True)
class Visits(StepLog):
    """The groups that a run recorded, one a visit: S successes of N rollouts."""

    prompt: Integers  # (V,) its position, 0 to P - 1
    earlier: Integers  # (V,) number of earlier visits of its prompt
    rewards_V_G: Floats  # S ones, then N - S zeros, then NaN
    prompts: int  # P
    probes_3_V: Floats  # samples, successes and squares of each visit's probe; NaN without one of 2 or more samples


def read(store_url: str | None, ref: str | None) -> tuple[RunRecord, Visits]:
    """Return a run, by default the latest with a step, and its visits; refuse one without rollouts."""
    with open_store(store_url, create=False) as store:
        record = options.chosen(store, ref)
        log, probes = read_log(store, record), read_probes(store, record)
        kept = kept_scores(store, record)
    if not set(kept.ends) <= {0, 1}:
        raise UsageError(
            f"scores of run {record.name!r} go from {kept.ends[0]:g} to {kept.ends[1]:g}; only rewards "
            "0 and 1 can be replayed; choose another run"
        )
    if not len(log.step):
        raise UsageError(f"run {record.name!r} has recorded no rollouts yet; train it first, or name another run")
    return record, visits(log, probes)


def unreplayable(log: StepLog) -> NDArray[np.bool_]:
    """Return where successes are not a whole number from 0 to N, (V,)."""
    return (log.successes != np.round(log.successes)) | (log.successes < 0) | (log.successes > log.rollouts)


def visits(log: StepLog, probes: ProbeLog | None = None) -> Visits:
    """Return visits from a run's log; raise UsageError if a sum is not of rewards 0 and 1."""
    rollouts, successes, wrong = log.rollouts, log.successes, unreplayable(log)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"step {log.step[at]}, prompt {log.prompt_id[at]}: {successes[at]:g} successes of {rollouts[at]} rollouts; "
            "only rewards 0 and 1 can be replayed, since the store keeps a group's sum; choose another run"
        )
    probes_3_V = np.full((3, len(log.step)), np.nan)
    if probes is not None:
        width = max(log.prompt_id.max(), probes.prompt_id.max(initial=0)) + 1
        logged, probed = (of.step * width + of.prompt_id for of in (log, probes))
        # A group without a single verified rollout is probed but not logged.
        _, visit, probe = np.intersect1d(logged, probed, assume_unique=True, return_indices=True)
        probes_3_V[:, visit] = np.array([probes.samples, probes.successes, probes.squares])[:, probe]
        probes_3_V[:, probes_3_V[0] < 2] = np.nan
    # Ids of a store may have gaps; the estimators want prompts numbered from 0.
    ids, prompt = np.unique(log.prompt_id, return_inverse=True)
    return Visits(
        **vars(log),
        prompt=prompt,
        earlier=earlier_visits(prompt),
        rewards_V_G=rewards_of(rollouts, successes),
        prompts=len(ids),
        probes_3_V=probes_3_V,
    )


def rerun(estimator: RewardEstimator, visits: Visits) -> Floats:
    """Feed the visits to ``estimator``, from its prior, in recorded order.

    Return (2, V): the mean that the visit's rollouts would have been scored with; the share of it that is S/N, NaN
    where there is none. No texts of prompts are needed: only forecasts read them.
    """
    # Prompts that share no state may be taken visit by visit instead of step by step: same result, fewer calls.
    when = visits.step if estimator.shared_fields else visits.earlier
    order = np.argsort(when, kind="stable")
    state = estimator.initial_state(visits.prompts)
    found_2_V = np.full((2, len(when)), np.nan)
    for rows in np.split(order, np.flatnonzero(np.diff(when[order])) + 1):
        members, rewards_P_G = visits.prompt[rows], visits.rewards_V_G[rows]
        found_2_V[0, rows] = estimator.observe_at(state, members, rewards_P_G).mean
        share = estimator.group_weight(estimator.state_at(state, members), rewards_P_G)
        found_2_V[1, rows] = np.nan if share is None else share
    return found_2_V


@dataclass(frozen=True)
class Outcome:
    """The losses of one estimator at the visits."""

    estimator: RewardEstimator
    losses: dict[str, Floats]  # (V,) by criterion; NaN where a visit does not count, or the criterion does not apply
    thinned: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.estimator)

    def mean(self, criterion: str) -> float | None:
        """Return the mean loss over visits; None if the criterion does not apply."""
        loss = self.losses[criterion]
        return None if np.isnan(loss).all() else float(np.nanmean(loss))


def evaluate(estimator: RewardEstimator, visits: Visits) -> Outcome:
    """Replay the visits with ``estimator``, and measure it by every criterion."""
    mean, group_weight = rerun(estimator, visits)
    errors = squared_errors(mean, *visits.probes_3_V), error_from_log(visits, mean, group_weight)
    return Outcome(estimator, dict(zip(CRITERIA, errors, strict=True)), thinned(mean, visits))


def thinned(mean: Floats, visits: Visits) -> dict[str, float | None]:
    """Return the share of the rollouts that ``--train.thin 1`` keeps, and the factor on the advantages' mean square.

    The advantages are ``(X - p) / sqrt(p (1 - p))``; if all are 0 there is no factor.
    """
    size_V_G = np.abs(standardized(visits.rewards_V_G, Estimate(mean, mean * (1 - mean))))
    parts = np.minimum(size_V_G, 1), size_V_G**2, np.maximum(size_V_G, size_V_G**2)
    kept, square, raised = (float(part.sum()) for part in parts)
    return {"thin: kept": kept / float(visits.rollouts.sum()), "thin: A^2": raised / square if square else None}


def error_from_log(visits: Visits, mean: Floats, group_weight: Floats) -> Floats:
    """Return an unbiased estimate of ``(mean - p)^2`` from the recorded successes alone, (V,); NaN where N < 2.

    With x = S/N and w the group weight::

        (mean - x)^2 - (1 - 2 w) S (N - S) / (N^2 (N - 1))

    It is slightly too low for an estimator that fits run-wide numbers to the step's own groups, such as ``auto``.
    """
    noise = mean_variance(visits.rollouts, visits.successes, visits.successes)
    return (mean - visits.successes / visits.rollouts) ** 2 - (1 - 2 * group_weight) * noise


@dataclass(frozen=True)
class Ranking:
    """The candidates that a criterion can judge, best first."""

    criterion: str
    candidates: list[Outcome]
    mean_C: Floats  # mean loss over visits
    draws_B_C: Floats  # the same over prompts resampled with replacement, alike for all candidates

    def best_of_each(self) -> list[int]:
        """Return the position of the best candidate of every registered name, best first."""
        best: dict[str, int] = {}
        for at, outcome in enumerate(self.candidates):
            best.setdefault(outcome.estimator.name, at)
        return list(best.values())

    def excess(self, at: int) -> tuple[float, float, float]:
        """Return a candidate's loss beyond the best one's, and its 95 % interval."""
        low, high = np.percentile(self.draws_B_C[:, at] - self.draws_B_C[:, 0], [2.5, 97.5])
        return self.mean_C[at] - self.mean_C[0], low, high


def rank(outcomes: Sequence[Outcome], visits: Visits) -> Ranking:
    """Rank by the first criterion that judges a candidate, with a bootstrap over prompts."""
    judged = {name: [outcome for outcome in outcomes if outcome.mean(name) is not None] for name in CRITERIA}
    criterion = next((name for name, able in judged.items() if able), None)
    if criterion is None:
        raise UsageError(
            "this run has no probes and no group of two rollouts, so no candidate can be judged; train with "
            "--probe.fraction, or with more rollouts a prompt"
        )
    able = judged[criterion]
    # All candidates miss the same visits, so the first one tells which visits count.
    losses = [outcome.losses[criterion] for outcome in able]
    counted = ~np.isnan(losses[0])
    _, row = np.unique(visits.prompt[counted], return_inverse=True)
    visits_P = np.bincount(row)
    sums_P_C = np.stack([np.bincount(row, loss[counted]) for loss in losses], axis=1)
    rng = np.random.default_rng(0)
    prompts = len(visits_P)
    draws = []
    # Visits of one prompt depend on each other, so prompts are resampled, not visits.
    for _ in range(1000):
        times_P = np.bincount(rng.integers(prompts, size=prompts), minlength=prompts)
        # Not by @, whose threads wait for each other where other processes have the cores.
        sums_C = np.einsum("p,pc->c", times_P.astype(np.float64), sums_P_C)
        draws.append(sums_C / (times_P @ visits_P))
    mean_C = sums_P_C.sum(axis=0) / visits_P.sum()
    order = np.argsort(mean_C, kind="stable")
    return Ranking(criterion, [able[at] for at in order], mean_C[order], np.stack(draws)[:, order])


def recommendation(ranking: Ranking, visits: Visits) -> list[str]:
    """Return lines with the best candidate and how sure that is; what to use next only with probes."""
    if not visits.earlier.any():
        return [
            "Every prompt was visited once, so discounts cannot be compared: on a first visit a discount only weakens",
            "the prior; replay again after the second pass.",
        ]
    best = ranking.candidates[0]
    lines = [f"criterion: {CRITERIA[ranking.criterion]}", f"best: {best.label}"]
    _, *others = ranking.best_of_each()
    if others:
        second = ranking.candidates[others[0]].label
        excess, low, high = ranking.excess(others[0])
        lines.append(f"second: {second}; worse by {excess:.2g} (95 %: {low:.2g} to {high:.2g})")
        if low <= 0:
            lines.append(f"this log cannot tell {best.label} from {second}: there may be no difference")
    if ranking.criterion != "probes":
        return [*lines, _WITHOUT_PROBES]
    return [*lines, _WITH_PROBES, f"use next: {flags(best.estimator)}"]


def _measures(outcome: Outcome) -> dict[str, Any]:
    return {"mse (probes)": outcome.mean("probes"), "mse (log)": outcome.mean("mse")} | outcome.thinned


# ---- estimators as text


def parse(text: str) -> RewardEstimator:
    """Return the estimator that ``NAME`` or ``NAME:PARAMETER=VALUE,...`` names; NAME may be ``module:Class``."""
    # A class as module:Class has a colon too; parameters have an equals sign.
    name, _, last = text.rpartition(":") if "=" in text else (text, "", "")
    try:
        kinds = {field.name: type(field.default) for field in parameter_fields(estimators.get(name))}
        given = (item.partition("=")[::2] for item in last.split(",") if last)
        # An unknown parameter stays text: build() refuses it and names the known ones.
        values = {key: msgspec.convert(value, kinds.get(key, str), strict=False) for key, value in given}
        return estimators.build(name, **values)
    except ValueError as error:
        raise UsageError(str(error) if repr(text) in str(error) else f"estimator {text!r}: {error}") from error


def label(estimator: RewardEstimator) -> str:
    """Return a short name as "dbb 0.25 prior_alpha=2": discount or smoothing, then what is not the default."""
    value = knob_value(estimator)
    others = family(estimator).removeprefix(estimator.name)
    return f"{estimator.name}{'' if value is None else f' {value:g}'}{others}"


def family(estimator: RewardEstimator) -> str:
    """Return the label without the discount or smoothing; it names a curve over them."""
    text = estimator.name
    for field in parameter_fields(type(estimator)):
        value = getattr(estimator, field.name)
        if field.name not in _KNOBS and value != field.default:
            text += f" {field.name}={value:g}" if isinstance(value, float) else f" {field.name}={value}"
    return text


def knob(estimator: RewardEstimator) -> str | None:
    """Return ``discount`` or ``smoothing``, whichever is a parameter; None if neither is."""
    return next((field.name for field in parameter_fields(type(estimator)) if field.name in _KNOBS), None)


def knob_value(estimator: RewardEstimator) -> float | None:
    """Return the estimator's discount or smoothing; None if it has neither."""
    name = knob(estimator)
    return None if name is None else float(getattr(estimator, name))


def swept(estimator: RewardEstimator, values: Iterable[float]) -> list[RewardEstimator]:
    """Return the estimator with each of the discounts (or smoothings) that it allows, else itself."""
    name = knob(estimator)
    if name is None:
        return [estimator]
    variants = []
    for value in values:
        with contextlib.suppress(ValueError):  # outside its range, such as 1 for ema
            variants.append(dataclasses.replace(estimator, **{name: value}))  # type: ignore[type-var]
    return variants


def sweep(texts: Sequence[str], discounts: Sequence[float] = DISCOUNTS) -> list[RewardEstimator]:
    """Return the candidates that texts name; one without a discount stands for all."""
    candidates: dict[str, RewardEstimator] = {}
    for text in texts:
        estimator = parse(text)
        variants = [estimator] if f"{knob(estimator)}=" in text else swept(estimator, discounts)
        candidates |= {label(variant): variant for variant in variants}
    return list(candidates.values())


def flags(estimator: RewardEstimator) -> str:
    """Return the training command's flags for an estimator, as "--estimator dbb --dbb.discount 0.4"."""
    cls = type(estimator)
    known = estimators.available().get(estimator.name) is cls
    parts = [f"--estimator {estimator.name if known else f'{cls.__module__}:{cls.__qualname__}'}"]
    for field in parameter_fields(cls):
        value = getattr(estimator, field.name)
        flag = f"{estimator.name}.{field.name}"
        if isinstance(value, bool) and value != field.default:
            parts.append(f"--{'' if value else 'no-'}{flag}")
        elif value != field.default or field.name in _KNOBS:
            parts.append(f"--{flag} {value}")
    return " ".join(parts)
