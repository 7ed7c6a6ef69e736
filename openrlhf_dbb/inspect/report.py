"""The command report: gathers what the page shows about a run, and writes the page.

Axes: P prompts, V visits, S points of a curve over steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from estimators.probe_error import squared_errors
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect import page, prompt_table, rollout_usage
from openrlhf_dbb.inspect.overview import status
from openrlhf_dbb.inspect.page import packed
from openrlhf_dbb.inspect.show import configuration, facts
from openrlhf_dbb.inspect.trajectories import (
    BINS,
    FORGOTTEN_BY,
    IMPOSSIBLE_TO,
    MASTERED_FROM,
    STATES,
    Trajectories,
    epochs,
    same_groups,
    trajectories,
)
from openrlhf_dbb.options import add_run, chosen
from openrlhf_dbb.terminal import shown
from storage import (
    PosteriorLog,
    PosteriorStore,
    ProbeLog,
    RunRecord,
    UsageLog,
    read_posteriors,
    read_probes,
    read_usage,
)
from storage.held_out import held_out
from storage.inspection import (
    StepUsage,
    current_means,
    events,
    progress,
    shared_numbers,
    usage_by_step,
)

_MOST_PROMPTS = 50_000
_MOST_POINTS = 200
_LISTED = 10

_Log = TypeVar("_Log", PosteriorLog, UsageLog, StepUsage)


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("report", report)
    add_run(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="- is standard output (default: report.html)",
    )


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    html = page.render(run.name, gather(store, run))
    if str(arguments.output) == "-":
        print(html, end="")
        return
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    print(f"wrote {arguments.output}, {len(html.encode()) / 1e6:.1f} MB; open it in a browser")


def gather(store: PosteriorStore, run: RunRecord, *, most_prompts: int = _MOST_PROMPTS) -> dict[str, Any]:
    """Everything the page shows, ready for JSON; arrays are packed by ``page.packed``.

    Args:
        most_prompts: the table of prompts holds about this many, every k-th if there are more; totals are over all.
    """
    means = current_means(store, run)
    last_step = int(means.step.max(initial=0))
    edges = _edges(last_step)
    log = _until(last_step, read_posteriors(store, run))
    usage = _until(last_step, read_usage(store, run))
    by_step = _until(last_step, usage_by_step(store, run))
    totals = progress(store, run)
    found = trajectories(log, dict(zip(means.prompt_id.tolist(), means.visits.tolist(), strict=True)), usage)
    by_epoch = epochs(found)
    improved, regressed = _movers(found)
    return {
        "method": shown(run.method, width=None),
        "held_out": _held_out(store, run, last_step),
        "facts": list(facts(store, run, totals).items()),
        "config": list(configuration(run)),
        "lineage": _lineage(store, run),
        "events": [[row["created_at"], row["kind"], row["from_step"], row["to_step"]] for row in events(store, run)],
        "states": {
            "names": STATES,
            "mastered": MASTERED_FROM,
            "forgotten": FORGOTTEN_BY,
            "impossible": IMPOSSIBLE_TO,
        },
        "level": prompt_table.LEVEL,
        "beta": not np.isnan(found.alpha).any(),
        "unit": bool(((found.successes >= 0) & (found.successes <= found.rollouts)).all()),
        "steps": _by_step(log, found, edges),
        "epochs": {name: packed(values) for name, values in vars(by_epoch).items()} | {"bins": BINS},
        "usage": rollout_usage.section(by_step, totals, edges),
        "generated_total": rollout_usage.generated_total(by_step, last_step),
        "probes": _probe_errors(store, run, log, edges),
        "shared": [
            {"name": shown(name), "step": packed(steps), "value": packed(values)}
            for name, (steps, values) in _thinned(shared_numbers(store, run)).items()
        ],
        "improved": improved.tolist(),
        "regressed": regressed.tolist(),
        **prompt_table.section(store, found, means, np.concatenate([improved, regressed]), most_prompts, usage),
    }


def _held_out(store: PosteriorStore, run: RunRecord, last_step: int) -> dict[str, Any] | None:
    """Held-out accuracy over the steps until ``last_step``, the first, the last and the best among the points."""
    found = held_out(store, run)
    if found is None or found.step[0] > last_step:
        return None
    chosen_rows = np.unique([*_evenly(len(found.step)), found.best])
    chosen_rows = chosen_rows[found.step[chosen_rows] <= last_step]
    return {
        "step": packed(found.step[chosen_rows]),
        "accuracy": packed(found.accuracy[chosen_rows]),
        "prompts": found.prompts,
        "samples": found.samples,
    }


def _until(step: int, log: _Log) -> _Log:
    """The log without the steps that a live run added while the rest was read."""
    return type(log)(*(column[log.step <= step] for column in vars(log).values()))


def _edges(last: int) -> NDArray[np.int64]:
    """Last step of each point of a curve over at most ``_MOST_POINTS`` equal spans of the steps 1 to ``last``."""
    width = -(-last // _MOST_POINTS)
    return np.minimum(np.arange(1, -(-last // max(width, 1)) + 1) * width, last)


def _by_step(log: PosteriorLog, found: Trajectories, edges: NDArray[np.int64]) -> dict[str, Any]:
    def total(step: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
        at_V = np.searchsorted(edges, step)
        return np.asarray(np.bincount(at_V, values.astype(np.float64), minlength=len(edges)), dtype=np.float64)

    groups = total(log.step, np.ones(len(log.step)))
    with np.errstate(invalid="ignore"):  # a span without groups is a gap in the curve
        curves = {
            "success_rate": total(log.step, log.successes) / total(log.step, log.rollouts),
            "mean": total(log.step, log.mean) / groups,
            "zero_variance": total(found.step, found.zero_variance) / groups,
            "rescued": total(found.step, found.rescued) / groups,
        }
    return {
        "step": packed(edges),
        "span": int(edges[0]) if len(edges) else 0,
        "first": int(log.step[0]) if len(log.step) else 0,
        "groups": len(log.step),
        "zero_variance_groups": int(found.zero_variance.sum()),
        "rescued_groups": int(found.rescued.sum()),
    } | {name: packed(values) for name, values in curves.items()}


def _probe_errors(
    store: PosteriorStore, run: RunRecord, log: PosteriorLog, edges: NDArray[np.int64]
) -> dict[str, Any] | None:
    """Mean squared error against the probes, their own noise subtracted: of the estimates and of S / N."""
    probes = read_probes(store, run)
    usable = (probes.samples > 1) & ~np.isnan(probes.mean) & (probes.step <= log.step.max(initial=0))
    if not usable.any():
        return None
    probes = ProbeLog(*(column[usable] for column in vars(probes).values()))
    at, _ = same_groups(log, probes)  # a probe with an estimate is of a group in the log
    used, point = np.unique(np.searchsorted(edges, probes.step), return_inverse=True)
    curves = {}
    for name, estimates in (("estimate", probes.mean), ("group", log.successes[at] / log.rollouts[at])):
        errors = squared_errors(estimates, probes.samples.astype(np.float64), probes.successes, probes.squares)
        curves[name] = packed(np.bincount(point, errors) / np.bincount(point))
    return {"step": packed(edges[used]), "groups": len(at), "samples": int(probes.samples.sum())} | curves


def _thinned(
    numbers: dict[str, list[tuple[int, float]]],
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """At most ``_MOST_POINTS`` of each series, its first and last among them."""
    thinned = {}
    for name, series in numbers.items():
        chosen_rows = _evenly(len(series))
        steps, values = zip(*(series[row] for row in chosen_rows), strict=True)
        thinned[name] = (np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
    return thinned


def _evenly(size: int) -> NDArray[np.int64]:
    """At most ``_MOST_POINTS`` of the rows 0 ... size - 1, with the first and the last."""
    return np.unique(np.linspace(0, size - 1, _MOST_POINTS).round().astype(np.int64))


def _movers(found: Trajectories) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of the prompts whose posterior mean rose most, and fell most, from first visit to last."""
    change = found.mean[found.last] - found.mean[found.first]
    order = np.lexsort((found.prompt_id, change))
    falling = [i for i in order[:_LISTED] if change[i] < 0]
    rising = [i for i in order[::-1][:_LISTED] if change[i] > 0]
    return found.prompt_id[rising], found.prompt_id[falling]


def _lineage(store: PosteriorStore, run: RunRecord) -> list[list[Any]]:
    """Ancestors of the run, oldest first, then itself, then its descendants: relation, name and text of each."""
    by_uuid = {other.uuid: other for other in store.runs()}
    rows: list[list[Any]] = []
    parent = run.parent
    while parent is not None:
        here = by_uuid.get(parent["uuid"])
        place = "" if here else f", in {parent['database']}"
        rows.insert(0, ["ancestor", parent["name"], f"its step {parent['step']}, weight {parent['weight']:g}{place}"])
        parent = here.parent if here else None
    rows.append(["this run", run.name, f"{status(run)}, step {run.last_step}"])
    rows += [
        ["descendant", other.name, f"from step {other.parent['step']}, weight {other.parent['weight']:g}"]
        for other in by_uuid.values()
        if other.parent is not None and other.parent["uuid"] == run.uuid
    ]
    return [[shown(cell, width=None) for cell in row] for row in rows]
