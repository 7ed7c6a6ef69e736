"""What the evaluate command shows: a progress bar while it works, a table at the end.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from openrlhf_dbb.evaluation.formats import mean_and_std, runs_in_words
from openrlhf_dbb.evaluation.journal import Row
from openrlhf_dbb.evaluation.metrics import Summary, macro_average, summarize
from openrlhf_dbb.evaluation.results import read_evaluation
from openrlhf_dbb.terminal import table

_LOG_S = 15.0  # seconds between lines in a log file


class ProgressBar:
    """One bar over all responses: current benchmark, tokens per second, time left."""

    def __init__(self, total: int, done: int) -> None:
        """total, done: responses; all of them, and those of earlier calls."""
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self._bar: Any = tqdm(
            desc="starting engines",
            total=total,
            initial=done,
            unit="response",
            dynamic_ncols=terminal,
            mininterval=0.1 if terminal else _LOG_S,
        )
        self._began = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def begin(self) -> None:
        """The engines have started: the clock starts."""
        done = self._bar.n
        self._bar.reset()
        self._bar.initial = self._bar.n = self._bar.last_print_n = done
        self._bar.set_description("generating", refresh=True)
        self._began = time.monotonic()

    def add(self, row: Row) -> None:
        """A row is done."""
        self._tokens += sum(row.tokens)
        self._bar.set_description(row.key.benchmark, refresh=False)
        speed = self._tokens / (time.monotonic() - self._began)
        self._bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self._bar.update(len(row.tokens))


def summary(folder: Path) -> str:
    """The table of a finished evaluation, and the next command."""
    evaluation = read_evaluation(folder)
    about = evaluation.manifest["benchmarks"]
    found = {name: summarize(results) for name, results in evaluation.results.items()}
    n, runs = evaluation.manifest["n"], evaluation.manifest["runs"]
    rows = [_row(str(about[name]["title"]), each) for name, each in found.items()]
    groups: dict[str, list[Summary]] = {}
    for name, each in found.items():
        groups.setdefault(about[name]["group"], []).append(each)
    averages = [(f"average {group}".strip(), members) for group, members in groups.items() if len(members) > 1]
    if len(groups) > 1:
        averages.append(("average of all", list(found.values())))
    rows += [_average(title, members) for title, members in averages]
    header = ("", "prompts", f"Acc@{n} %", f"Best@{n} %", f"maj@{n} %", "tokens", "truncated", "missing")
    return "\n".join(
        [
            f"evaluation {evaluation.name}: {evaluation.manifest['model']}, {n} samples per prompt, "
            f"{runs_in_words([runs])}",
            table(header, rows),
            f"  files        {folder}",
            f"  compare      openrlhf-dbb evaluate compare {folder} OTHER",
        ]
    )


def _row(title: str, found: Summary) -> tuple[Any, ...]:
    return (
        title,
        found.prompts,
        *(mean_and_std(measure) for measure in (found.accuracy, found.best, found.majority)),
        f"{found.length.mean:.0f}",
        *(f"{100 * share.mean:.1f}%" for share in (found.truncated, found.missing)),
    )


def _average(title: str, members: list[Summary]) -> tuple[Any, ...]:
    """Every benchmark has the same weight."""
    measures = ([getattr(member, name) for member in members] for name in ("accuracy", "best", "majority"))
    return (
        title,
        sum(member.prompts for member in members),
        *(mean_and_std(macro_average(each)) for each in measures),
        "",
        "",
        "",
    )
