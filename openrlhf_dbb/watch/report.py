"""Put the page together; the command report writes it with its answers into one file."""

import argparse
import base64
import hashlib
import html
import re
from collections.abc import Iterable
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.storage import PosteriorStore
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch.api import Api, encoded

_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_STEPS = "SELECT DISTINCT step FROM dbb_rollout WHERE run_id = :run ORDER BY step DESC"
_SCRIPTS = ("base.js", "charts.js", "curves.js", "pool.js", "run.js", "rollouts.js", "prompts.js", "js")


def add_commands(add: Any) -> None:
    parser = add("report", report)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    text = "file to write (default: report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=text)
    text = f"most megabytes for the visits of prompts and the kept rollouts (default: {_SIZE_MB:g})"
    parser.add_argument("--size", metavar="MB", type=float, default=_SIZE_MB, help=text)


def report(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    chosen_runs = [chosen(store, ref) for ref in arguments.runs or [None]]
    ids = sorted({run.run_id for run in chosen_runs})
    api = Api(store)
    api.refresh()
    api.runs = [run for run in api.runs if run.record.run_id in ids]
    paths = ["state", *(f"runs/{first}/compare/{second}" for first, second in combinations(ids, 2))]
    paths += [f"runs/{number}/{name}" for number in ids for name in ("series", "pool", "prompts", "about")]
    answers = {path: api.answer(path) for path in paths}
    written, known = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)  # steps with rollouts, prompts
    for run in api.runs:
        base = f"runs/{run.record.run_id}"
        kept = [row.step for row in store.query(_STEPS, run=run.record.run_id)]
        visits, _ = api.visits(run)
        # The prompts that moved most come first.
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        moving = visits.prompt_id[np.lexsort((visits.prompt_id, -moved))].tolist()
        # Half of the bytes is for rollouts, newest first, and the rest for prompts.
        half = arguments.size * _MEGABYTE / len(api.runs) / 2
        steps, left = _that_fit(api, f"{base}/rollouts", kept, half)
        prompts, _ = _that_fit(api, f"{base}/prompts", moving, half + left)
        answers |= steps | prompts
        written += len(steps), len(prompts)
        known += len(kept), len(moving)
    page = render(chosen_runs[0].name, {"answers": answers})
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    size = len(page.encode()) / _MEGABYTE
    left_out = f"; --size {arguments.size:g} left out the rest" if (written < known).any() else ""
    contents = f"{written[1]:,} prompts with their visits, {written[0]:,} steps with rollouts{left_out}"
    print(f"wrote {shown(arguments.output, None)}, {size:.1f} MB: {contents}; open it in a browser")


def _that_fit(api: Api, base: str, names: Iterable[int], room: float) -> tuple[dict[str, Any], float]:
    """Return answers by path until one exceeds ``room`` bytes, and the bytes left."""
    answers: dict[str, Any] = {}
    for name in names:
        answer = api.answer(f"{base}/{name}")
        size = len(encoded(answer))
        if size > room:
            break
        room -= size
        answers[f"{base}/{name}"] = answer
    return answers, room


def render(title: str, data: dict[str, Any]) -> str:
    """Return the page; ``data``: ``{"live": True}``, or ``{"answers": {path: answer}}`` for a file without a server."""
    style, script = _asset("css"), "\n".join(map(_asset, _SCRIPTS))
    # This style, this script; a live page may also ask its own server.
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    server = "; connect-src 'self'" * ("live" in data)
    parts = {
        "TITLE": html.escape(shown(title)),
        "POLICY": f"{policy}; base-uri 'none'; form-action 'none'{server}",
        "STYLE": style,
        "SCRIPT": script,
        # No text can close the script element: within it only "<" has a meaning.
        "DATA": encoded(data).decode().replace("<", "\\u003c"),
    }
    # In one pass: a text that is filled in may contain such marks.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("html"))


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.watch") / f"page.{name}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
