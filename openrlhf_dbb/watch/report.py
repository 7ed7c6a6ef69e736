"""The command report: the page about some runs in one file that opens offline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import details, page
from openrlhf_dbb.watch.answers import Answers
from openrlhf_dbb.watch.runs import Listed
from openrlhf_dbb.watch.visits import Visits
from storage import PosteriorStore
from storage.inspection import prompt_texts

_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_BYTES_OF_VISIT, _BYTES_OF_PROMPT, _BYTES_OF_ROLLOUT = 75, 300, 220  # about, in the file, without texts

_KEPT_STEPS = f"""
    SELECT step, count(*) AS kept, CAST(sum(length(text) + {_BYTES_OF_ROLLOUT}) AS BIGINT) AS size
    FROM dbb_rollout WHERE run_id = :run GROUP BY step ORDER BY step DESC"""


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("report", report)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    file_help = "- is standard output (default: report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=file_help)
    size_help = f"about how much the visits of prompts and the kept rollouts may take together (default: {_SIZE_MB:g})"
    parser.add_argument("--size", metavar="MB", type=float, default=_SIZE_MB, help=size_help)


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    if not arguments.size >= 0:
        raise UsageError(f"--size: {arguments.size:g} is below 0; give megabytes, such as 20")
    runs = [chosen(store, ref) for ref in arguments.runs or [None]]
    ids = list(dict.fromkeys(run.run_id for run in runs))
    collected = Collected(store, ids, int(arguments.size * _MEGABYTE))
    html = page.render(runs[0].name, {"answers": collected.answers})
    if str(arguments.output) == "-":
        print(html, end="")
        return
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    size = len(html.encode()) / _MEGABYTE
    contents = collected.contents(f"{arguments.size:g} MB")
    print(f"wrote {shown(arguments.output, None)}, {size:.1f} MB: {contents}; open it in a browser")


class Collected:
    """The answers about some runs, with as many details as fit.

    Attributes:
        answers: by path.
    """

    def __init__(self, store: PosteriorStore, run_ids: Sequence[int], size: int) -> None:
        """Collect them.

        Args:
            size: about how many bytes the details of all runs may take together. At least half of them are for
                rollouts, the newest first; the rest is for the visits of prompts, those that moved most first.
        """
        self._store, self._source = store, Answers(store, live=False)
        self._source.refresh()
        self._prompts, self._rollouts = np.zeros(2, dtype=int), np.zeros(2, dtype=int)  # in the file, and of how many
        state = self._source.answer("state", {})
        runs = {run.record.run_id: run for run in self._source.listed}
        self.answers: dict[str, Any] = {
            "state": state | {"runs": [run for run in state["runs"] if run["id"] in run_ids]}
        }
        self._runs = len(run_ids)
        for first, second in combinations(sorted(run_ids), 2):
            self._add_answer(f"runs/{first}/compare/{second}")
        for place, run_id in enumerate(run_ids):
            size -= self._add(runs[run_id], size // (len(run_ids) - place))

    def contents(self, size: str) -> str:
        """Return what is in the file, and what was left out."""
        counts = [(self._runs, self._runs, "run"), (*self._prompts, "prompt"), (*self._rollouts, "kept rollout")]
        left_out = f" (--size {size})" if any(there < total for there, total, _ in counts) else ""
        return ", ".join(_counted(*row) for row in counts if row[1] or row[2] != "kept rollout") + left_out

    def _add_answer(self, path: str) -> None:
        self.answers[path] = self._source.answer(path, {})

    def _add(self, run: Listed, size: int) -> int:
        """Add the answers about one run; return about how many bytes its details take."""
        run_id = run.record.run_id
        for name in ("series", "posteriors", "prompts", "about"):
            self._add_answer(f"runs/{run_id}/{name}")
        steps, visits = self._store.query(_KEPT_STEPS, run=run_id), self._source.visits(run)
        rows, sizes = self._most_moved(visits)
        for_rollouts = min(sum(step.size for step in steps), max(size // 2, size - int(sizes.sum())))
        fits = int(np.searchsorted(np.cumsum(sizes), size - for_rollouts, side="right"))
        self._prompts += (fits, len(rows))
        for prompt_id in np.sort(visits.prompt_id[rows[:fits]]):
            self._add_answer(f"runs/{run_id}/prompts/{prompt_id}")
        used = int(sizes[:fits].sum())
        return used + self._add_rollouts(run_id, steps, size - used)

    def _most_moved(self, visits: Visits) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (P,) rows of the prompts, those that moved most first, and about how many bytes each takes."""
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        order = np.lexsort((visits.prompt_id, -moved))
        texts = prompt_texts(self._store, visits.prompt_id, length=0)
        lengths = np.array([min(length, details.LONGEST_TEXT) for *_, length in texts], dtype=np.int64)
        return order, (visits.visits * _BYTES_OF_VISIT + _BYTES_OF_PROMPT + lengths)[order]

    def _add_rollouts(self, run_id: int, steps: Sequence[Any], size: int) -> int:
        """Add the kept rollouts of the last steps, as many whole steps as fit; return about how many bytes."""
        used, added = 0, []
        for step in steps:
            if used + step.size > size:
                break
            used += step.size
            added.append(step)
            self._add_answer(f"runs/{run_id}/rollouts/{step.step}")
        self._rollouts += (sum(step.kept for step in added), sum(step.kept for step in steps))
        latest: dict[str, Any] = {"step": None, "steps": None, "rollouts": [], "prompts": {}}
        for step in added:
            answer = self.answers[f"runs/{run_id}/rollouts/{step.step}"]
            answer["steps"] = [added[-1].step, added[0].step]  # of those in the file
            latest = answer if step is added[0] else latest
        self.answers[f"runs/{run_id}/rollouts/latest"] = latest
        return used


def _counted(there: int, total: int, name: str) -> str:
    if there == total:
        return f"{total:,} {name}{'' if total == 1 else 's'}"
    return f"{there:,} of {total:,} {name}s"
