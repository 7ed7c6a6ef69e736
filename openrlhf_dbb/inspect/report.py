"""The command report: gathers what the page shows of a run, and writes the page.

Axes: P prompts, V visits, S points of a curve over steps.
"""

from __future__ import annotations

import argparse
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect import page, rollout_usage
from openrlhf_dbb.inspect.intervals import beta_interval
from openrlhf_dbb.inspect.page import packed
from openrlhf_dbb.inspect.show import RUN_HELP, chosen, configuration, facts
from openrlhf_dbb.inspect.trajectories import (
    BINS,
    FORGOTTEN_BY,
    IMPOSSIBLE_TO,
    MASTERED_FROM,
    NO_VISITS,
    STATES,
    Trajectories,
    epochs,
    trajectories,
)
from openrlhf_dbb.terminal import readable, shown
from storage import PosteriorLog, PosteriorStore, RunRecord, UsageLog, read_posteriors, read_probes, read_usage
from storage.inspection import (
    Means,
    StepUsage,
    current_means,
    events,
    progress,
    prompt_texts,
    shared_numbers,
    usage_by_step,
)

LEVEL = 0.9
_MOST_PROMPTS = 50_000
_MOST_POINTS = 200
_TEXT_BUDGET = 24_000_000
_LONGEST_TEXT = 4_000
_LISTED = 10
_SHORTEST_PREFIX = 16

_Log = TypeVar("_Log", PosteriorLog, UsageLog, StepUsage)


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.posteriors``."""
    parser = add("report", report, "one HTML page about a run that opens offline")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"))


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    html = page.render(run.name, gather(store, run))
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    print(f"wrote {arguments.output}, {len(html.encode()) / 1e6:.1f} MB; open it in a browser")


def gather(store: PosteriorStore, run: RunRecord, *, most_prompts: int = _MOST_PROMPTS) -> dict[str, Any]:
    """Everything the page shows, ready for JSON; arrays are packed by ``page.packed``.

    Args:
        most_prompts: the table of prompts holds about this many, every k-th of more; totals are of all.
    """
    means = current_means(store, run)
    last_step = int(means.step.max(initial=0))
    edges = _edges(last_step)
    log = _until(last_step, read_posteriors(store, run))
    usage = _until(last_step, read_usage(store, run))
    by_step = _until(last_step, usage_by_step(store, run))
    totals = progress(store, run)
    kept = dict(zip(*(column.tolist() for column in np.unique(log.prompt_id, return_counts=True)), strict=True))
    visits = dict(zip(means.prompt_id.tolist(), means.visits.tolist(), strict=True))
    found = trajectories(log, {number: visits.get(number, 0) - count for number, count in kept.items()}, usage)
    by_epoch = epochs(found)
    improved, regressed = _movers(found)
    return {
        "method": shown(run.method, width=None),
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
        "level": LEVEL,
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
        **_prompts(store, found, means, np.concatenate([improved, regressed]), most_prompts, usage),
    }


def _until(step: int, log: _Log) -> _Log:
    """The log without what a live run added while the rest was read."""
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
    with np.errstate(invalid="ignore"):  # a span without a group is a gap in the curve
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
    """Mean squared error against the probes, less the probes' own noise: of the estimates and of S / N."""
    probes = read_probes(store, run)
    usable = (probes.samples > 1) & ~np.isnan(probes.mean) & (probes.step <= log.step.max(initial=0))
    if not usable.any():
        return None
    step, samples = probes.step[usable], probes.samples[usable]
    truth = probes.successes[usable] / samples
    noise = (probes.squares[usable] / samples - truth**2) / (samples - 1)
    # The log is ordered by step, then prompt, so one number of both finds a group.
    base = int(log.prompt_id.max()) + 1
    at = np.searchsorted(log.step * base + log.prompt_id, step * base + probes.prompt_id[usable])
    point = np.searchsorted(edges, step)
    used, where = np.unique(point, return_inverse=True)
    curves = {
        name: np.bincount(where, (estimate - truth) ** 2 - noise) / np.bincount(where)
        for name, estimate in (
            ("estimate", probes.mean[usable]),
            ("group", log.successes[at] / log.rollouts[at]),
        )
    }
    return {"step": packed(edges[used]), "groups": len(step), "samples": int(samples.sum())} | {
        name: packed(values) for name, values in curves.items()
    }


def _thinned(
    numbers: dict[str, list[tuple[int, float]]],
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """At most ``_MOST_POINTS`` of each series, its first and last among them."""
    thinned = {}
    for name, series in numbers.items():
        chosen_rows = np.unique(np.linspace(0, len(series) - 1, _MOST_POINTS).round().astype(np.int64))
        steps, values = zip(*(series[row] for row in chosen_rows), strict=True)
        thinned[name] = (np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
    return thinned


def _movers(found: Trajectories) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompts whose posterior mean rose most, and fell most, from their first visit to their last."""
    change = found.mean[found.last] - found.mean[found.first]
    order = np.lexsort((found.prompt_id, change))
    falling = [i for i in order[:_LISTED] if change[i] < 0]
    rising = [i for i in order[::-1][:_LISTED] if change[i] > 0]
    return found.prompt_id[rising], found.prompt_id[falling]


def _lineage(store: PosteriorStore, run: RunRecord) -> list[list[Any]]:
    """Runs this one descends from, oldest first, then itself, then those that began from it: relation, name, text."""
    by_uuid = {other.uuid: other for other in store.runs()}
    rows: list[list[Any]] = []
    parent = run.parent
    while parent is not None:
        here = by_uuid.get(parent["uuid"])
        place = "" if here else f", in {parent['database']}"
        rows.insert(0, ["ancestor", parent["name"], f"its step {parent['step']}, weight {parent['weight']:g}{place}"])
        parent = here.parent if here else None
    rows.append(["this run", run.name, f"{run.status}, step {run.last_step}"])
    rows += [
        ["descendant", other.name, f"from step {other.parent['step']}, weight {other.parent['weight']:g}"]
        for other in by_uuid.values()
        if other.parent is not None and other.parent["uuid"] == run.uuid
    ]
    return [[shown(cell, width=None) for cell in row] for row in rows]


def _prompts(
    store: PosteriorStore,
    found: Trajectories,
    means: Means,
    listed: NDArray[np.int64],
    most: int,
    usage: UsageLog,
) -> dict[str, Any]:
    """The table of prompts with the visits of each; ``listed`` are in it whatever their number."""
    every = -(-len(means.prompt_id) // most) or 1
    in_table = np.zeros(len(means.prompt_id), dtype=bool)
    in_table[::every] = True
    in_table |= np.isin(means.prompt_id, listed)
    ids = means.prompt_id[in_table]
    visited = np.isin(ids, found.prompt_id)
    row = np.minimum(np.searchsorted(found.prompt_id, ids), max(len(found.prompt_id) - 1, 0))
    first, last = np.zeros_like(ids), np.zeros_like(ids)
    first[visited], last[visited] = found.first[row[visited]], found.last[row[visited]]
    state, mean = np.full(len(ids), NO_VISITS), means.mean[in_table].copy()
    state[visited], mean[visited] = found.state[last[visited]], found.mean[last[visited]]
    change = np.full(len(ids), np.nan)
    change[visited] = found.mean[last[visited]] - found.mean[first[visited]]
    count = np.where(visited, last - first + 1, 0)
    final = found.state[found.last]
    numbers = [int((final == index).sum()) for index in range(NO_VISITS)]

    rows = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
    low, high = _intervals(found, rows)
    length = int(np.clip(_TEXT_BUDGET // max(len(ids), 1), 80, _LONGEST_TEXT))
    texts, labels, sizes = [], [], []
    for _, prompt, label, size in prompt_texts(store, ids, length=length):
        texts.append(readable(prompt))
        labels.append(readable(label))
        sizes.append(size if size > length else 0)
    return {
        "state_counts": [*numbers, len(means.prompt_id) - len(found.prompt_id)],
        "all_prompts": len(means.prompt_id),
        "prompts": {
            "id": packed(ids),
            "state": packed(state),
            "mean": packed(mean),
            "change": packed(change),
            "visits": packed(means.visits[in_table]),
            "count": packed(count),
            "cut": packed(np.array(sizes, dtype=np.int64)),
            "text": texts,
            "label": labels,
        }
        | rollout_usage.per_prompt(usage, ids),
        "common_prefix": _common_prefix(texts),
        "visits": {
            "step": packed(found.step[rows]),
            "rollouts": packed(found.rollouts[rows]),
            "successes": packed(_whole(found.successes[rows])),
            "mean": packed(found.mean[rows]),
            "low": packed(low),
            "high": packed(high),
            "alpha": packed(found.alpha[rows]),
            "beta": packed(found.beta[rows]),
        },
    }


def _common_prefix(texts: list[str]) -> str:
    """What at least half of the texts begin with, up to the end of a word; "" if that is short."""
    if not texts:
        return ""
    ordered = sorted(texts)  # strangers go to the ends
    pairs = zip(ordered[len(texts) // 4], ordered[3 * len(texts) // 4], strict=False)
    alike = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = re.sub(r"\w+\Z", "", alike)
    return shared if len(texts) > 1 and len(shared) >= _SHORTEST_PREFIX else ""


def _whole(values: NDArray[np.float64]) -> NDArray[Any]:
    whole = values.astype(np.int64)
    return whole if len(values) and (whole == values).all() and whole.min() >= 0 else values


def _intervals(found: Trajectories, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Credible interval of the mean after each visit; without alpha and beta, a normal one of the group's mean."""
    alpha, beta = found.alpha[rows], found.beta[rows]
    half = 1.645 * np.sqrt(found.variance[rows] / found.rollouts[rows])  # 90 %
    low, high = found.mean[rows] - half, found.mean[rows] + half
    known = ~np.isnan(alpha + beta)
    low[known], high[known] = beta_interval(alpha[known], beta[known], LEVEL)
    return low, high
