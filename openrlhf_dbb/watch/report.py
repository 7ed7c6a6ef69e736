"""The command report: the page about some runs in one file that opens offline."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import details, page
from openrlhf_dbb.watch.answers import Answers
from openrlhf_dbb.watch.runs import Followed
from storage import PosteriorStore, RunRecord
from storage.engine import chunks
from storage.inspection import prompt_texts

_POINTS = "1000"
_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_BYTES_OF_VISIT, _BYTES_OF_PROMPT, _BYTES_OF_ROLLOUT = 75, 300, 220  # about, in the file, without texts

_VISITS = f"""
    SELECT prompt_id, {", ".join(details.VISIT)} FROM posterior_history WHERE run_id = :run ORDER BY step, prompt_id"""
_USAGE = f"""
    SELECT prompt_id, {", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in details.USAGE)}
    FROM dbb_usage WHERE run_id = :run GROUP BY prompt_id"""
_KEPT = "SELECT prompt_id, step, count(*) AS kept FROM dbb_rollout WHERE run_id = :run GROUP BY prompt_id, step"
_KEPT_STEPS = f"""
    SELECT step, count(*) AS kept, CAST(sum(length(text) + {_BYTES_OF_ROLLOUT}) AS BIGINT) AS size
    FROM dbb_rollout WHERE run_id = :run GROUP BY step ORDER BY step DESC"""


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("report", report)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="- is standard output (default: report.html)",
    )
    parser.add_argument(
        "--size",
        metavar="MB",
        type=float,
        default=_SIZE_MB,
        help=f"about how much the visits of prompts and the kept rollouts may take together (default: {_SIZE_MB:g})",
    )


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    if not arguments.size >= 0:
        raise UsageError(f"--size: {arguments.size:g} is below 0; give megabytes, such as 20")
    wanted = [chosen(store, ref) for ref in arguments.runs or [None]]
    runs = list({run.run_id: run for run in wanted}.values())
    gathered = Gathered(store, runs, int(arguments.size * _MEGABYTE))
    html = page.render(runs[0].name, {"answers": gathered.answers})
    if str(arguments.output) == "-":
        print(html, end="")
        return
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    size = len(html.encode()) / _MEGABYTE
    held = gathered.told(f"{arguments.size:g} MB")
    print(f"wrote {shown(arguments.output, None)}, {size:.1f} MB: {held}; open it in a browser")


class Gathered:
    """The answers about some runs, with as many details as fit.

    Attributes:
        answers: by path.
    """

    def __init__(self, store: PosteriorStore, runs: list[RunRecord], size: int) -> None:
        """Gather them.

        Args:
            size: about how many bytes the details of all runs may take together: at least half of them for rollouts,
                the newest first, if there are so many; the rest for the visits of prompts, those that moved most first.
        """
        self._store, self._source = store, Answers(store, live=False)
        while not self._source.runs.poll():
            pass
        self.answers: dict[str, Any] = {}
        self._runs = len(runs)
        self._prompts, self._rollouts = np.zeros(2, dtype=int), np.zeros(2, dtype=int)  # in the file, and of how many
        numbers = {run.run_id for run in runs}
        state = self._source.answer("state", {})
        self.answers["state"] = state | {"runs": [run for run in state["runs"] if run["id"] in numbers]}
        for place, run in enumerate(runs):
            followed = self._source.runs.find(run.run_id)
            assert followed is not None, f"run {run.name!r} has vanished"
            size -= self._add(followed, size // (len(runs) - place))

    def told(self, size: str) -> str:
        """What is in the file, and what was left out."""
        found = [(self._runs, self._runs, "run"), (*self._prompts, "prompt"), (*self._rollouts, "kept rollout")]
        left_out = f" (--size {size})" if any(there < of for there, of, _ in found) else ""
        return ", ".join(_counted(*each) for each in found if each[1] or each[2] != "kept rollout") + left_out

    def _add(self, run: Followed, size: int) -> int:
        """The answers about one run; about how many bytes its details take."""
        while not self._source.read_history(run, 60.0) or not self._source.read_probes(run, 60.0):
            pass
        number = run.record.run_id
        for name, query in (("series", {"points": _POINTS}), ("posteriors", {}), ("prompts", {}), ("about", {})):
            path = f"runs/{number}/{name}"
            self.answers[path] = self._source.answer(path, query)
        steps = self._store.query(_KEPT_STEPS, run=number)
        ids, sizes = self._most_moved(run)
        for_rollouts = min(sum(row.size for row in steps), max(size // 2, size - int(sizes.sum())))
        used = self._add_prompts(run, ids, np.cumsum(sizes), size - for_rollouts)
        return used + self._add_rollouts(run, steps, size - used)

    def _most_moved(self, run: Followed) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(P,) ids of the prompts, those that moved most first, and about how many bytes the details of each take."""
        visits = run.visits
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        order = np.lexsort((visits.prompt_id, -moved))
        ids = visits.prompt_id[order]
        texts = {each: length for each, _, _, length in prompt_texts(self._store, ids, length=0)}
        lengths = np.array([min(texts[each], details.LONGEST_TEXT) for each in ids.tolist()], dtype=np.int64)
        return ids, visits.seen[order] * _BYTES_OF_VISIT + _BYTES_OF_PROMPT + lengths

    def _add_prompts(self, run: Followed, ids: NDArray[np.int64], sizes: NDArray[np.int64], size: int) -> int:
        """The first prompts, as many as fit.

        Args:
            sizes: (P,) about how many bytes each takes together with those before it.
        """
        fits = int(np.searchsorted(sizes, size, side="right"))
        self._prompts += (fits, len(ids))
        for found in self._details(run, np.sort(ids[:fits])):
            self.answers[f"runs/{run.record.run_id}/prompts/{found['id']}"] = found
        return int(sizes[fits - 1]) if fits else 0

    def _details(self, run: Followed, ids: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """The answers about these prompts, ascending: in bulk, since one by one takes too long."""
        if not len(ids):
            return
        key = {"run": run.record.run_id}
        usage = {row.prompt_id: row._asdict() for row in self._store.query(_USAGE, **key)}
        kept: dict[int, dict[int, int]] = {}
        for row in self._store.query(_KEPT, **key):
            kept.setdefault(row.prompt_id, {})[row.step] = row.kept
        table = self._visits_of(key, ids)
        ends = np.searchsorted(table[:, 0], ids, side="right")
        texts = prompt_texts(self._store, ids, length=details.LONGEST_TEXT)
        for (prompt_id, text, label, _), end, start in zip(texts, ends, np.append(0, ends[:-1]), strict=True):
            at = int(np.searchsorted(run.visits.prompt_id, prompt_id))
            yield details.described(
                prompt_id,
                text,
                label,
                int(run.visits.visits[at]),
                float(run.visits.current[at]),
                usage.get(prompt_id, dict.fromkeys(details.USAGE)),
                dict(zip(details.VISIT, table[start:end, 1:].T.copy(), strict=True)),
                kept.get(prompt_id, {}),
            )

    def _visits_of(self, key: dict[str, int], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Prompt id and ``VISIT`` of each visit of these prompts, ordered by prompt, then step."""
        parts = [np.empty((0, 1 + len(details.VISIT)))]
        with self._store.database.transaction() as connection:
            for rows in chunks(connection, _VISITS, key):
                part = np.array(rows, dtype=np.float64)
                parts.append(part[np.isin(part[:, 0].astype(np.int64), ids)])
        table = np.concatenate(parts)
        return table[np.argsort(table[:, 0], kind="stable")]

    def _add_rollouts(self, run: Followed, steps: Any, size: int) -> int:
        """The kept rollouts of the last steps, as many whole steps as fit."""
        used = 0
        self._rollouts[1] += sum(row.kept for row in steps)
        first = None
        for row in steps:
            if used + row.size > size:
                break
            used, first = used + row.size, row.step
            path = f"runs/{run.record.run_id}/rollouts/{row.step}"
            self.answers[path] = self._source.answer(path, {})
            self._rollouts[0] += row.kept
        latest = f"runs/{run.record.run_id}/rollouts/latest"
        held = None if first is None else [first, steps[0].step]
        for row in steps:
            path = f"runs/{run.record.run_id}/rollouts/{row.step}"
            if path in self.answers:
                self.answers[path]["steps"] = held
        if held is None:
            self.answers[latest] = {"step": None, "steps": None, "rollouts": [], "prompts": {}}
        else:
            self.answers[latest] = self.answers[f"runs/{run.record.run_id}/rollouts/{held[1]}"]
        return used


def _counted(there: int, of: int, name: str) -> str:
    if there == of:
        return f"{of:,} {name}{'' if of == 1 else 's'}"
    return f"{there:,} of {of:,} {name}s"
