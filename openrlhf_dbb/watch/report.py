"""The command report: writes the page with its answers into one file."""

import argparse
import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.storage import PosteriorStore
from openrlhf_dbb.storage.decode import naming_damage
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import queries
from openrlhf_dbb.watch.api import Api, Listed, encoded, record_of
from openrlhf_dbb.watch.prompts import every_prompt, rollouts_of_steps

_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_SCRIPTS = (
    "base.js",
    "charts.js",
    "curves.js",
    "pool.js",
    "run.js",
    "rollouts.js",
    "prompts.js",
    "js",
)


def add_commands(add: Any) -> None:
    """Declare the command by ``cli.main``'s function."""
    parser = add("report", report)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="file to write (default: report.html)",
    )
    text = f"most megabytes for the visits of prompts and the kept rollouts (default: {_SIZE_MB:g})"
    parser.add_argument("--size", metavar="MB", type=float, default=_SIZE_MB, help=text)


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Write a page about some runs.

    Raises:
        StoreError: there is no such run, or a value of one cannot be read.
        UsageError: the file cannot be written.
    """
    chosen_runs = [chosen(store, ref) for ref in arguments.runs or [None]]
    ids = sorted({run.run_id for run in chosen_runs})
    api = Api(store, only=ids)
    api.refresh()
    file = _File({path: encoded(api.answer(path)) for path in _paths(ids)})
    for run in api.runs:
        file.add_rest(store, api, run, arguments.size * _MEGABYTE / len(api.runs))
    page = render(chosen_runs[0].name, file.answers)
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{arguments.output}: {error.strerror}; name a file that can be written"
        ) from None
    size = len(page.encode()) / _MEGABYTE
    rest = f"; --size {arguments.size:g} left out the rest" if file.is_cut else ""
    print(
        f"wrote {shown(arguments.output, None)}, {size:.1f} MB: "
        f"{file.prompts:,} prompts with their visits, {file.steps:,} steps with rollouts{rest}; "
        "open it in a browser"
    )


def _paths(ids: list[int]) -> Iterator[str]:
    """Yield the paths of the answers that are in the file however large they are."""
    yield "state"
    for first, second in combinations(ids, 2):
        yield f"runs/{first}/compare/{second}"
    for number in ids:
        for name in ("series", "pool", "prompts", "about"):
            yield f"runs/{number}/{name}"


class _File:
    """The answers of a file by path, as JSON, with what was counted of them."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers = answers
        self.prompts = 0
        self.steps = 0
        self.is_cut = False

    def add_rest(self, store: PosteriorStore, api: Api, run: Listed, room: float) -> None:
        """Add kept rollouts and prompts with their visits, as many as fit into ``room`` bytes.

        Half of it is for rollouts, newest first, the rest for prompts, those that moved most first.
        """
        record = record_of(run)
        base = f"runs/{run.run_id}"
        steps = queries.kept_steps(store, record)
        rollouts = rollouts_of_steps(store, record, steps)
        visits, _ = api.visits(run)
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        order = np.lexsort((visits.prompt_id, -moved))
        prompts = every_prompt(store, record, visits, order)
        with naming_damage(f"run {run.name!r}"):
            count, left = self._add_fitting(f"{base}/rollouts", rollouts, room / 2)
            self.steps += count
            count, _ = self._add_fitting(f"{base}/prompts", prompts, room / 2 + left)
            self.prompts += count

    def _add_fitting(
        self,
        base: str,
        answers: Iterable[tuple[int, dict[str, Any]]],
        room: float,
    ) -> tuple[int, float]:
        """Add answers until one exceeds ``room`` bytes; return their number, and the bytes left."""
        count = 0
        for number, answer in answers:
            content = encoded(answer)
            if len(content) > room:
                self.is_cut = True
                break
            room -= len(content)
            self.answers[f"{base}/{number}"] = content
            count += 1
        return count, room


def render(title: str, answers: Mapping[str, bytes] | None) -> str:
    """Return the page.

    Args:
        answers: JSON by path, for a file without a server; None: the page asks its server.
    """
    style = _asset("css")
    script = "\n".join(map(_asset, _SCRIPTS))
    # This style, this script; a live page may also ask its own server.
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    policy += "; base-uri 'none'; form-action 'none'"
    if answers is None:
        policy += "; connect-src 'self'"
        data = '{"live":true}'
    else:
        members = [f"{json.dumps(path)}:{answer.decode()}" for path, answer in answers.items()]
        data = f'{{"answers":{{{",".join(members)}}}}}'
    parts = {
        "TITLE": html.escape(shown(title)),
        "POLICY": policy,
        "STYLE": style,
        "SCRIPT": script,
        # No text can close the script element: within it only "<" has a meaning.
        "DATA": data.replace("<", "\\u003c"),
    }
    # In one pass: a text that is filled in may contain such marks.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("html"))


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.watch") / f"page.{name}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
