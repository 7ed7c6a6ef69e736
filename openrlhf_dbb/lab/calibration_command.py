"""``lab calibration``: were the forecasts of a run's next visits right?

A forecast is made before the visit's rollouts are seen; the estimate that scores a group is none, as it includes them.
Axes: V visits with history, S possible numbers of successes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb import figures, options
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.figures import small_multiples
from openrlhf_dbb.lab import criteria, error_curves, forecast, recorded, specs
from openrlhf_dbb.lab.forecast import Reliability
from openrlhf_dbb.lab.recorded import RecordedRun
from openrlhf_dbb.lab.visits import Integers, Visits, rerun
from openrlhf_dbb.terminal import print_json, records, table

LEVELS = (0.5, 0.8, 0.95)
PIT_BINS = 20
_BAND = 1.96  # standard deviations on either side of 95 %
_BY_CHANCE = np.sqrt(2 / np.pi)  # mean size of a normal deviation, in standard deviations
_LEGEND = """\
interval: share of visits inside the central interval (share expected of right forecasts)
calibration error: mean over visits of |mean S/N - mean forecast| in their bin (by chance alone)
PIT off: mean over bins of |density - 1| (by chance alone)"""


@dataclass(frozen=True)
class Calibration:
    """How good an estimator's forecasts were.

    Attributes:
        reliability: of the forecast means.
        log_score: mean log-probability of S, nats per visit.
        coverage: for each of ``LEVELS`` the share of visits inside the central interval, and the share expected.
        density: (PIT_BINS,) of the randomized PIT; 1 everywhere if the forecasts are right.
        The last three are None for an estimator without a predictive distribution, whose mean at the previous
        visit is taken as its forecast.
    """

    label: str
    name: str
    reliability: Reliability
    log_score: float | None
    coverage: list[tuple[float, float]] | None
    density: Floats | None


def calibrate(estimator: RewardEstimator, visits: Visits, *, seed: int = 0) -> Calibration:
    """Replay the visits with ``estimator`` and compare its forecasts with the outcomes.

    Raises:
        UsageError: no prompt was visited twice, or the estimator cannot be used on these rewards.
    """
    past = np.flatnonzero(visits.earlier > 0)
    if not len(past):
        raise UsageError("every prompt was visited once, so no visit can be forecast; try again after the second pass")
    again = rerun(estimator, visits)
    label, name = specs.label(estimator), estimator.name
    share = (visits.successes / visits.rollouts)[past]
    if again.predictive is None:
        expected = again.estimate.mean[_previous(visits)[past]]
        return Calibration(label, name, forecast.reliability(expected, share), None, None, None)
    alpha, beta = (values[past] for values in again.predictive)
    log_mass_V_S = criteria.beta_binomial(alpha, beta, visits.rollouts[past])
    successes = visits.successes[past].astype(np.int64)
    # The same draws for every estimator.
    uniform = np.random.default_rng(seed).random(len(past))
    transformed = forecast.pit(log_mass_V_S, successes, uniform)
    return Calibration(
        label,
        name,
        forecast.reliability(alpha / (alpha + beta), share),
        float(log_mass_V_S[np.arange(len(past)), successes].mean()),
        [forecast.coverage(log_mass_V_S, successes, level) for level in LEVELS],
        np.histogram(transformed, PIT_BINS, (0, 1))[0] * PIT_BINS / len(past),
    )


def pit_band(visits: int) -> tuple[float, float]:
    """95 % interval of each bin of the density, if the PIT of this many visits is uniform."""
    deviation = np.sqrt((PIT_BINS - 1) / visits)
    return 1 - _BAND * deviation, 1 + _BAND * deviation


def add_command(commands: Any) -> None:
    """Add ``calibration`` to the sub-parsers of the laboratory's command."""
    text = "were an estimator's forecasts of a run's next visits right"
    parser = commands.add_parser("calibration", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    parser.add_argument(
        "--estimators",
        nargs="+",
        metavar="NAME",
        help="as dbb:discount=0.4 (default: the run's own, dbb at the discount that forecasts best, auto)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the randomized PIT (default: 0)")
    options.add_folder(parser, "for the files", default=Path("lab/calibration"))
    options.add_json(parser)
    parser.set_defaults(command=calibration)


def calibration(arguments: argparse.Namespace) -> None:
    """Run ``lab calibration``.

    Raises:
        UsageError, storage.StoreError: the run or a flag cannot be used.
    """
    run = recorded.read(arguments)
    folder = figures.folder(arguments.output)
    named = [specs.parse(text) for text in arguments.estimators or ()]
    chosen = {specs.label(estimator): estimator for estimator in named or _usual(run)}
    results = [calibrate(estimator, run.visits, seed=arguments.seed) for estimator in chosen.values()]
    count = int((run.visits.earlier > 0).sum())
    if not arguments.json:
        _print(run, results, count, chosen_here=not named)
    paths = _write(folder, results, count)
    if arguments.json:
        found = {
            "run": run.record.name,
            "visits": count,
            "calibration": records(*_scores(results)),
            "files": list(map(str, paths)),
        }
        print_json(found)
    else:
        print(*paths, sep="\n")


def _print(run: RecordedRun, results: Sequence[Calibration], count: int, *, chosen_here: bool) -> None:
    print(f"run {run.record.name}: {count} visits forecast, of prompts seen before")
    if run.record.parent is not None:
        print(f"warm-started from {run.record.parent['name']}: replayed from the estimators' own priors instead")
    if chosen_here:
        print("dbb is shown at the discount with the best log score")
    print(f"\n{_table(results)}\n")
    print(f"{_LEGEND}\n")


def _usual(run: RecordedRun) -> list[RewardEstimator]:
    own = recorded.own_estimator(run.record)
    dbb = recorded.sweep(["dbb"], error_curves.DISCOUNTS)
    scores = [calibrate(candidate, run.visits).log_score or 0.0 for candidate in dbb]
    best = dbb[int(np.argmax(scores))]
    return [*([own] if own is not None and own.features != "hidden" else []), best, specs.parse("auto")]


def _previous(visits: Visits) -> Integers:
    """(V,) position of the same prompt's previous visit; arbitrary for first visits."""
    order = np.lexsort((visits.earlier, visits.prompt))
    previous = np.empty_like(order)
    previous[order] = np.roll(order, 1)
    return previous


def _table(results: Sequence[Calibration]) -> str:
    intervals = [f"{level:.0%} interval" for level in LEVELS]
    header = ["forecasts of", "log score", *intervals, "calibration error", "PIT off"]
    return table(header, [_row(result) for result in results])


def _row(result: Calibration) -> list[Any]:
    intervals: list[Any] = [None] * len(LEVELS)
    if result.coverage is not None:
        intervals = [f"{share:.1%} ({expected:.1%})" for share, expected in result.coverage]
    off = None
    if result.density is not None:
        by_chance = _BY_CHANCE * np.sqrt((PIT_BINS - 1) / result.reliability.visits.sum())
        off = f"{np.abs(result.density - 1).mean():.3f} ({by_chance:.3f})"
    error = f"{result.reliability.calibration_error:.4f} ({result.reliability.by_chance:.4f})"
    return [result.label, result.log_score, *intervals, error, off]


def _scores(results: Sequence[Calibration]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of ``calibration.csv``."""
    header = ["estimator", "log score"]
    for level in LEVELS:
        header += [f"inside {level:.0%}", f"expected inside {level:.0%}"]
    header += ["calibration error", "calibration error by chance"]
    rows = []
    for result in results:
        inside = [None] * (2 * len(LEVELS)) if result.coverage is None else np.ravel(result.coverage).tolist()
        bins = result.reliability
        rows.append([result.label, result.log_score, *inside, bins.calibration_error, bins.by_chance])
    return header, rows


def _write(folder: Path, results: Sequence[Calibration], count: int) -> list[Path]:
    paths = [write_csv(folder / "calibration.csv", *_scores(results))]
    reliable = [
        (result.label, *values)
        for result in results
        for values in zip(*(getattr(result.reliability, name) for name in _BIN_FIELDS), strict=True)
    ]
    paths.append(write_csv(folder / "calibration_reliability.csv", ("estimator", *_BIN_FIELDS), reliable))
    predictive = [result for result in results if result.density is not None]
    if predictive:
        starts = [f"density from {place / PIT_BINS:g}" for place in range(PIT_BINS)]
        densities = [(result.label, *result.density) for result in predictive if result.density is not None]
        paths.append(write_csv(folder / "calibration_pit.csv", ("estimator", *starts), densities))
        paths += _draw_pit(folder, predictive, count)
    return paths + _draw_reliability(folder, results)


_BIN_FIELDS = ("forecast", "observed", "error", "visits")


def _draw_pit(folder: Path, results: Sequence[Calibration], count: int) -> list[Path]:
    figure, panels = small_multiples(len(results))
    centres = (np.arange(PIT_BINS) + 0.5) / PIT_BINS
    for axes, result in zip(panels, results, strict=True):
        assert result.density is not None
        axes.bar(centres, result.density, width=1 / PIT_BINS, color=figures.style(result.name)["color"])
        axes.axhspan(*pit_band(count), color="#7F7F7F", alpha=0.5, linewidth=0)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(result.label)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supxlabel("PIT of the next visit's successes (grey: 95 % if right)", fontsize="medium")
    figure.supylabel("density", fontsize="medium")
    return figures.save(figure, folder, "calibration_pit")


def _draw_reliability(folder: Path, results: Sequence[Calibration]) -> list[Path]:
    figure, panels = small_multiples(len(results))
    for axes, result in zip(panels, results, strict=True):
        bins = result.reliability
        axes.plot([0, 1], [0, 1], color="#7F7F7F", linewidth=1)
        look = figures.style(result.name) | {"linestyle": "-"}
        axes.errorbar(bins.forecast, bins.observed, yerr=_BAND * bins.error, capsize=2, **look)
        axes.set_title(result.label)
        axes.text(0.05, 0.95, f"error {bins.calibration_error:.3f}", ha="left", va="top", transform=axes.transAxes)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supxlabel("forecast success rate", fontsize="medium")
    figure.supylabel("observed S/N", fontsize="medium")
    return figures.save(figure, folder, "calibration_reliability")
