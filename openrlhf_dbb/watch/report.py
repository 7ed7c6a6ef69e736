"""The command report writes the page about some runs into one file that opens offline."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import page
from openrlhf_dbb.watch.api import Api
from openrlhf_dbb.watch.run_list import Listed
from storage import PosteriorStore

_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_STEPS = "SELECT DISTINCT step FROM dbb_rollout WHERE run_id = :run ORDER BY step DESC"


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is the function of ``cli.main``."""
    parser = add("report", report)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    text = "file to write (default: report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=text)
    text = f"most megabytes for the visits of prompts and the kept rollouts (default: {_SIZE_MB:g})"
    parser.add_argument("--size", metavar="MB", type=float, default=_SIZE_MB, help=text)


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = [chosen(store, ref) for ref in arguments.runs or [None]]
    collected = Collected(store, list(dict.fromkeys(run.run_id for run in runs)), arguments.size * _MEGABYTE)
    html = page.render(runs[0].name, {"answers": collected.answers})
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    size = len(html.encode()) / _MEGABYTE
    left_out = f"; --size {arguments.size:g} left out the rest" if collected.is_cut else ""
    contents = f"{collected.prompts:,} prompts with their visits, {collected.steps:,} steps with rollouts{left_out}"
    print(f"wrote {shown(arguments.output, None)}, {size:.1f} MB: {contents}; open it in a browser")


class Collected:
    """The answers about some runs, with as many details as fit.

    Attributes:
        answers: by path.
        prompts, steps: how many have their details in the file; ``is_cut``: whether any were left out.
    """

    def __init__(self, store: PosteriorStore, run_ids: Sequence[int], size: float) -> None:
        """Collect the answers; their details may take ``size`` bytes together."""
        self.prompts = self.steps = 0
        self.is_cut = False
        self._store, self._api = store, Api(store, live=False)
        self._api.refresh()
        runs = [run for run in self._api.runs if run.record.run_id in run_ids]
        self.answers: dict[str, Any] = {
            "state": self._api.answer("state") | {"runs": [run.numbers for run in runs]},
        }
        for first, second in combinations(sorted(run_ids), 2):
            self._add(f"runs/{first}/compare/{second}")
        for run in runs:
            self._add_run(run, size / len(runs))

    def _add(self, path: str) -> None:
        self.answers[path] = self._api.answer(path)

    def _add_that_fit(self, base: str, names: Iterable[int], room: float) -> tuple[list[int], float]:
        """Add answers until one does not fit into ``room`` bytes; return the names added, and the bytes left."""
        added = []
        for name in names:
            answer = self._api.answer(f"{base}/{name}")
            size = len(page.encoded(answer))
            if size > room:
                self.is_cut = True
                break
            room -= size
            self.answers[f"{base}/{name}"] = answer
            added.append(name)
        return added, room

    def _add_run(self, run: Listed, size: float) -> None:
        """Add the answers about one run: half of ``size`` for rollouts, newest first, and the rest for prompts."""
        base = f"runs/{run.record.run_id}"
        for name in ("series", "posteriors", "prompts", "about"):
            self._add(f"{base}/{name}")
        kept = (row.step for row in self._store.query(_STEPS, run=run.record.run_id))
        steps, left = self._add_that_fit(f"{base}/rollouts", kept, size / 2)
        for step in steps:
            self.answers[f"{base}/rollouts/{step}"]["steps"] = [steps[-1], steps[0]]  # of those in the file
        latest: dict[str, Any] = {"step": None, "steps": None, "rollouts": [], "prompts": {}}
        self.answers[f"{base}/rollouts/latest"] = self.answers[f"{base}/rollouts/{steps[0]}"] if steps else latest
        visits = self._api.visits(run)
        # The prompts that moved most come first.
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        ids = visits.prompt_id[np.lexsort((visits.prompt_id, -moved))].tolist()
        prompts, _ = self._add_that_fit(f"{base}/prompts", ids, size / 2 + left)
        self.steps += len(steps)
        self.prompts += len(prompts)
