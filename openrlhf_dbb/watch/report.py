import argparse
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import RUN_HELP, chosen
from openrlhf_dbb.storage import PosteriorStore
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import page
from openrlhf_dbb.watch.api import Api

_MEGABYTE = 1_000_000
_SIZE_MB = 20.0
_STEPS = "SELECT DISTINCT step FROM dbb_rollout WHERE run_id = :run ORDER BY step DESC"


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
    runs = [run for run in api.runs if run.record.run_id in ids]
    answers: dict[str, Any] = {"state": api.answer("state") | {"runs": [run.numbers for run in runs]}}
    pairs = [f"runs/{first}/compare/{second}" for first, second in combinations(ids, 2)]
    answers |= {path: api.answer(path) for path in pairs}
    written, known = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)  # steps with rollouts, prompts
    for run in runs:
        base = f"runs/{run.record.run_id}"
        paths = [f"{base}/{name}" for name in ("series", "pool", "prompts", "about")]
        kept = [row.step for row in store.query(_STEPS, run=run.record.run_id)]
        visits = api.visits(run)
        # The prompts that moved most come first.
        moved = np.abs(np.nan_to_num(visits.mean - visits.first))
        moving = visits.prompt_id[np.lexsort((visits.prompt_id, -moved))].tolist()
        # Half of the bytes is for rollouts, newest first, and the rest for prompts.
        half = arguments.size * _MEGABYTE / len(runs) / 2
        steps, left = _that_fit(api, f"{base}/rollouts", kept, half)
        prompts, _ = _that_fit(api, f"{base}/prompts", moving, half + left)
        in_file = [answer["step"] for answer in steps.values()]
        for answer in steps.values():
            answer["steps"] = [min(in_file), max(in_file)]
        none: dict[str, Any] = {"step": None, "steps": None, "rollouts": [], "prompts": {}}
        latest = next(iter(steps.values()), none)
        answers |= {path: api.answer(path) for path in paths} | steps | prompts | {f"{base}/rollouts/latest": latest}
        written += len(steps), len(prompts)
        known += len(kept), len(moving)
    html = page.render(chosen_runs[0].name, {"answers": answers})
    try:
        arguments.output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}; name a file that can be written") from None
    size = len(html.encode()) / _MEGABYTE
    left_out = f"; --size {arguments.size:g} left out the rest" if (written < known).any() else ""
    contents = f"{written[1]:,} prompts with their visits, {written[0]:,} steps with rollouts{left_out}"
    print(f"wrote {shown(arguments.output, None)}, {size:.1f} MB: {contents}; open it in a browser")


def _that_fit(api: Api, base: str, names: Iterable[int], room: float) -> tuple[dict[str, Any], float]:
    """Return answers by path until one exceeds ``room`` bytes, and the bytes left."""
    answers: dict[str, Any] = {}
    for name in names:
        answer = api.answer(f"{base}/{name}")
        size = len(page.encoded(answer))
        if size > room:
            break
        room -= size
        answers[f"{base}/{name}"] = answer
    return answers, room
