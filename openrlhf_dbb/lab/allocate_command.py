"""``lab allocate``: what each rollout strategy would have drawn in a recorded run, and what that may save."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb import figures, options
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.strategies import RolloutStrategy
from openrlhf_dbb.core.strategies.posterior import PosteriorSampling
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import allocation, recorded, specs
from openrlhf_dbb.lab.allocation import Allocation, Ratio
from openrlhf_dbb.lab.recorded import RecordedRun
from openrlhf_dbb.lab.visits import rerun
from openrlhf_dbb.terminal import print_json, records, table

_LEGEND = """\
p (1 - p): of the prompts that a rollout went to, over plain's; how much more its reward varies, and so can teach
rollouts: for the same noise of the gradient, over plain's; only where the objective is kept
all wrong, all right: share of rollouts that went to prompts whose recorded group was so
Both ratios are proxies. They leave out lengths, differences between prompts, clipping, the optimizer, and that another
choice of prompts would have trained another policy. They are no accuracy: only a training is."""


@dataclass(frozen=True)
class Row:
    """A strategy's row.

    Attributes:
        taught: mean p (1 - p) of a rollout, over plain's.
        rollouts: for the same noise, over plain's; None where another objective is trained.
    """

    label: str
    found: Allocation
    taught: Ratio
    rollouts: Ratio | None


def add_command(commands: Any) -> None:
    """Add ``allocate`` to the sub-parsers of the laboratory's command."""
    text = "what each rollout strategy would have drawn in a run, and what that may save"
    parser = commands.add_parser("allocate", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    parser.add_argument(
        "--estimator",
        metavar="NAME",
        help="whose forecasts strategies read, as dbb:discount=0.4 (default: the run's own, or auto if it has none)",
    )
    parser.add_argument("--floor", type=float, default=0.25, help="of the strategy posterior (%(default)s)")
    options.add_folder(parser, "for the files", default=Path("lab/allocate"))
    options.add_json(parser)
    parser.set_defaults(command=allocate)


def allocate(arguments: argparse.Namespace) -> None:
    """Run ``lab allocate``.

    Raises:
        UsageError, storage.StoreError: the run or a flag cannot be used.
    """
    try:
        candidates = _strategies(arguments.floor)
    except ValueError as error:
        raise UsageError(str(error)) from error
    run = recorded.read(arguments)
    if run.visits.usual_rollouts < 2:
        raise UsageError(
            f"run {run.record.name!r} has groups of one rollout, which do not show how much a prompt's rewards vary; "
            "name a run with --rollout.n_samples_per_prompt 2 or more"
        )
    estimator = specs.parse(arguments.estimator) if arguments.estimator else recorded.own_estimator(run.record)
    again = None if estimator is None else rerun(estimator, run.visits)
    if again is None or (again.predictive is None and not arguments.estimator):
        estimator = specs.parse("auto")
        again = rerun(estimator, run.visits)
    if again.predictive is None:
        raise UsageError(f"--estimator {arguments.estimator} forecasts no visit; use dbb or auto")
    passes = list(allocation.passes(run.visits, again.predictive))
    if not passes:
        raise UsageError(f"run {run.record.name!r} has no pass of two batches or more; let it go on, or name another")
    folder = figures.folder(arguments.output)
    assert estimator is not None
    rows = _rows(run, candidates, passes)
    header, cells = _cells(rows)
    paths = [write_csv(folder / "allocate.csv", header, cells), *_draw(folder, rows)]
    if arguments.json:
        found = {"run": run.record.name, "estimator": specs.label(estimator), "passes": len(passes)}
        print_json(found | {"strategies": records(header, cells), "files": list(map(str, paths))})
        return
    visits, whose = sum(len(each.at) for each in passes), specs.label(estimator)
    print(f"run {run.record.name}: {visits} visits in {len(passes)} passes, with the forecasts of {whose}")
    print(f"\n{table(_HEADER, [_shown(row) for row in rows])}\n\n{_LEGEND}\n")
    print(*paths, sep="\n")


def _strategies(floor: float) -> dict[str, RolloutStrategy]:
    """By label: all that are registered, with their defaults, and further forms of posterior; plain first."""
    known = {name: cls() for name, cls in strategies.available().items() if name not in ("plain", "posterior")}
    return {
        "plain": strategies.get("plain")(),
        **known,
        "posterior": PosteriorSampling(floor=floor),
        "posterior, neyman": PosteriorSampling(floor=floor, allocation="neyman"),
        "posterior, power 1, no weights": PosteriorSampling(floor=floor, power=1.0, weight_power=0.0),
    }


def _rows(run: RecordedRun, candidates: dict[str, RolloutStrategy], passes: list[allocation.Pass]) -> list[Row]:
    plain = allocation.allocate(candidates["plain"], run.visits, passes)
    rows = []
    for label, strategy in candidates.items():
        found = plain if label == "plain" else allocation.allocate(strategy, run.visits, passes)
        keeps = label == "plain" or (strategy.draws and getattr(strategy, "weight_power", 0.0) == 1)
        noise = allocation.compare(found, plain, noise=True) if keeps else None
        rows.append(Row(label, found, allocation.compare(found, plain, noise=False), noise))
    return rows


_HEADER = ("strategy", "p (1 - p)", "rollouts", "trained on", "all wrong", "all right")


def _shares(found: Allocation) -> list[float]:
    """Of the rollouts generated: trained on, of groups all wrong, of groups all right."""
    return [float(part.sum() / found.generated.sum()) for part in (found.trained, found.none, found.all)]


def _shown(row: Row) -> list[str]:
    ratios = ["another objective" if each is None else _interval(each) for each in (row.taught, row.rollouts)]
    return [row.label, *ratios, *(f"{share:.1%}" for share in _shares(row.found))]


def _interval(ratio: Ratio) -> str:
    return (
        f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low < ratio.high else f"{ratio.value:.2f}"
    )


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of ``allocate.csv``."""
    header = ["strategy"]
    for name in ("variance ratio", "rollouts ratio"):
        header += [name, f"{name} low", f"{name} high"]
    header += ["trained share", "all wrong share", "all right share"]
    cells: list[list[Any]] = []
    for row in rows:
        numbers: list[float | None] = []
        for ratio in (row.taught, row.rollouts):
            numbers += [None] * 3 if ratio is None else [ratio.value, ratio.low, ratio.high]
        cells.append([row.label, *numbers, *_shares(row.found)])
    return header, cells


def _draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    figure, grid = figures.new_figure(2, 1, width=8.4, height=3.4, sharey=True)
    places = np.arange(len(rows))[::-1]
    for panel, name, title in zip(
        np.ravel(grid),
        ("taught", "rollouts"),
        ("p (1 - p), over plain's", "rollouts, over plain's"),
        strict=True,
    ):
        panel.axvline(1, color="black", linewidth=0.8)
        for place, row in zip(places, rows, strict=True):
            ratio = getattr(row, name)
            if ratio is not None:
                error = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
                panel.errorbar(ratio.value, place, xerr=np.maximum(error, 0), fmt="o", capsize=3, color="#0072B2")
        panel.set_title(title)
        panel.set_yticks(places, [row.label for row in rows])
    return figures.save(figure, folder, "allocate")
