"""The command plot: figures of the training dynamics of runs, or of groups of runs with different seeds."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import storage
from openrlhf_dbb import figures, options
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import results, training_curves
from openrlhf_dbb.evaluation.training_curves import TrainingCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTPUT = results.FOLDER / "plot"
X_LABELS = {"steps": "training step", "rollouts": "rollouts generated"}
_FEW = 20  # up to so many points of a line are marked one by one
_LINES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))


@dataclass(frozen=True)
class Panel:
    """One measure, for all lines.

    Attributes:
        title: what is drawn.
        curves: by line, the curves of those of its runs that have one.
        notes: why the other runs have none.
    """

    title: str
    curves: dict[str, list[TrainingCurve]]
    notes: list[str]


def add_command(commands: Any) -> None:
    """Add ``plot`` to the sub-parsers of the evaluate command."""
    text = "figures of training: validation accuracy, reward, response length, entropy"
    parser = commands.add_parser("plot", help=text, description=text)
    parser.set_defaults(command=plot)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="one line each: name, number or start of the uuid")
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=RUN,...",
        help="one line for several runs (seeds): their mean, with a band from lowest to highest; may be repeated",
    )
    parser.add_argument("--over", choices=X_LABELS, default="steps", help="the x-axis (default: steps)")
    parser.add_argument(
        "--events",
        metavar="DIR",
        type=Path,
        help="folder above the runs' TensorBoard folders (default: the one in each run's configuration)",
    )
    options.add_folder(parser, "for the figures", default=OUTPUT)
    options.add_store(parser)


def plot(arguments: argparse.Namespace) -> None:
    """Draw the figures ``training_dynamics`` and ``mean_and_best``, each as PNG and SVG.

    Raises:
        UsageError: no run is named, a --group cannot be read, or a folder does not exist or cannot be written.
        storage.StoreError: there is no such store, or no such run in it.
    """
    folder = figures.folder(arguments.output)
    if arguments.events is not None and not arguments.events.is_dir():
        raise UsageError(f"--events {arguments.events}: no such folder; name one that contains event files")
    with storage.open_store(arguments.store_url, create=False) as store:
        lines = find_lines(store, arguments.runs, arguments.group)
        dynamics, mean_and_best = panels(store, lines, arguments.over, arguments.events)
    names = {
        name: name if len(runs) == 1 else f"{name} (mean and range of {len(runs)} runs)" for name, runs in lines.items()
    }
    for name, drawn in (("training_dynamics", dynamics), ("mean_and_best", mean_and_best)):
        for path in draw(drawn, names, X_LABELS[arguments.over], folder, name):
            print(f"wrote {path}")
    for panel in dynamics:
        for note in panel.notes:
            print(f"note: {panel.title}: {note}")


def find_lines(
    store: storage.PosteriorStore, refs: Sequence[str], groups: Sequence[str]
) -> dict[str, list[storage.RunRecord]]:
    """The runs of each line, by its name: groups first, then single runs.

    Raises:
        UsageError: no run is named, something is named twice, or a group is not NAME=RUN,...
        storage.StoreError: there is no such run.
    """
    if not refs and not groups:
        raise UsageError("no run given; name one or more, or use --group NAME=RUN,...")
    lines: dict[str, list[storage.RunRecord]] = {}
    for group in groups:
        name, equals, members = group.partition("=")
        names = [member for member in members.split(",") if member]
        if not (name and equals and names):
            raise UsageError(f"--group {group!r} is not NAME=RUN,...; write for example --group dbb=seed-1,seed-2")
        _add(lines, name, [store.find_run(member) for member in names])
    for ref in refs:
        run = store.find_run(ref)
        _add(lines, run.name, [run])
    return lines


def _add(lines: dict[str, list[storage.RunRecord]], name: str, runs: list[storage.RunRecord]) -> None:
    twice = len({run.run_id for run in runs}) < len(runs)
    if name in lines or twice:
        raise UsageError(f"{name!r} {'has a run' if twice else 'is named'} twice; name each once")
    lines[name] = runs


def panels(
    store: storage.PosteriorStore, lines: Mapping[str, Sequence[storage.RunRecord]], over: str, events: Path | None
) -> tuple[list[Panel], list[Panel]]:
    """The panels of the two figures."""
    runs = {run.run_id: run for members in lines.values() for run in members}
    trained = {run_id: training_curves.training(store, run) for run_id, run in runs.items()}
    evaluated = {run_id: training_curves.validation(store, run) for run_id, run in runs.items()}
    entropies = {run_id: training_curves.entropy(run, events) for run_id, run in runs.items()}
    validated = [found for found in evaluated.values() if found is not None]
    shared = set.intersection(*(set(found.accuracy) for found in validated)) if validated else set()
    samples = {found.samples for found in validated}
    n = str(*samples) if len(samples) == 1 else "N"
    over_sets = f", mean of {len(shared)} sets" if len(shared) > 1 else ""

    def of_validation(measure: str) -> Callable[[int], TrainingCurve | str]:
        def find(run_id: int) -> TrainingCurve | str:
            found = evaluated[run_id]
            if found is None:
                return "no evaluation during training"
            by_benchmark: dict[str, TrainingCurve] = getattr(found, measure)
            if not shared:
                return "it shares no validation set with all other runs"
            return training_curves.average([by_benchmark[benchmark] for benchmark in sorted(shared)])

        return find

    def panel(title: str, find: Callable[[int], TrainingCurve | str]) -> Panel:
        by_line: dict[str, list[TrainingCurve]] = {}
        notes = []
        for name, members in lines.items():
            by_line[name] = []
            for run in members:
                found = find(run.run_id)
                if isinstance(found, str):
                    notes.append(f"{run.name}: {found}")
                elif len(found.x):
                    rollouts = trained[run.run_id].rollouts
                    by_line[name].append(
                        training_curves.over_rollouts(found, rollouts) if over == "rollouts" else found
                    )
        return Panel(title, by_line, list(dict.fromkeys(notes)))

    dynamics = [
        panel(f"validation Acc@{n}{over_sets}", of_validation("accuracy")),
        panel("training reward", lambda run_id: trained[run_id].reward),
        panel("response length (tokens)", lambda run_id: trained[run_id].length or "rollout usage not recorded"),
        panel("entropy (nats per token)", lambda run_id: entropies[run_id]),
    ]
    mean_and_best = [
        panel(f"validation {measure}@{n}{over_sets}", of_validation(name))
        for measure, name in (("Mean", "accuracy"), ("Best", "best"))
    ]
    return dynamics, mean_and_best


def draw(drawn: Sequence[Panel], names: Mapping[str, str], x_label: str, folder: Path, file_name: str) -> list[Path]:
    """Draw panels, two in a row, above one legend; returns the files written.

    Args:
        names: of the lines, as the legend shows them.
    """
    rows = -(-len(drawn) // 2)
    figure, axes = figures.new_figure(2, rows, width=7.5, height=2.7 * rows + 0.3 * -(-len(names) // 2))
    styles = _styles(list(names))
    handles: dict[str, Any] = {}
    for panel, ax in zip(drawn, axes.flat, strict=True):
        bands = {name: training_curves.band(found) for name, found in panel.curves.items() if found}
        marker = "o" if all(len(band.x) <= _FEW for band in bands.values()) else None
        for name, band in bands.items():
            if len(panel.curves[name]) > 1:
                ax.fill_between(band.x, band.low, band.high, color=styles[name]["color"], alpha=0.2, linewidth=0)
            line = ax.plot(band.x, band.mean, marker=marker, **styles[name])[0]
            handles.setdefault(name, line)
        ax.set_title(panel.title)
        ax.set_xlabel(x_label)
        if not bands:
            _say(ax, panel.notes)
    shown = [name for name in names if name in handles]
    labels = [names[name] for name in shown]
    figure.legend([handles[name] for name in shown], labels, loc="outside lower center", ncols=2)
    return figures.save(figure, folder, file_name)


def _say(ax: Axes, notes: Sequence[str]) -> None:
    """Write into an empty panel why it is empty: each reason once, without the names of the runs."""
    reasons = dict.fromkeys(note.partition(": ")[2] for note in notes)
    text = "\n".join(textwrap.fill(reason, 28) for reason in reasons) or "nothing yet"
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#595959")
    ax.set_xticks([])
    ax.set_yticks([])


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each line; when the colours run out, they repeat with another dash pattern."""
    colors = [style["color"] for style in figures.STYLE.values()]
    looks = [{"color": color, "linestyle": line} for line, color in itertools.product(_LINES, colors)]
    return dict(zip(names, itertools.cycle(looks), strict=False))
