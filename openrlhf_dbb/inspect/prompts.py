"""The command prompts: which rows of the data look wrong, or teach nothing, as a run has seen.

Axes: P prompts that the run has visited.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from openrlhf_dbb.core import SET_ASIDE
from openrlhf_dbb.core.scale import verdicts
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.inspect.show import print_prompts
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.read import (
    Rows,
    prompt_rates,
    prompt_texts,
    unverified_visits,
)
from openrlhf_dbb.terminal import json_text, print_facts

CLASSES = {
    "never": """\
no rollout right, though the most similar prompts are solved more often: \
is label or verifier wrong?""",
    "always": "every rollout right, 8 or more",
    "flipping": "from all right to all wrong or back, twice or more",
    "lost": "once all right, now wrong beyond chance",
}
UNVERIFIED = "unverified"
LEFT_OUT = ("never", "always", UNVERIFIED)
_OPEN = "its scores are not known to be two, such as 0 and 1: which prompts are solved is open"
_COLUMNS = (
    "prompt_id",
    "visits",
    "rollouts",
    "rate",
    "low",
    "high",
    "similar",
    "last",
)
_SIMILAR = 20  # prompts
_FEW = 8  # rollouts
_EXAMPLES = 5
_BLOCK = 256  # prompts whose distances to all others are in memory at once


def add_commands(add: Any) -> None:
    """Declare the command by ``cli.main``'s function."""
    parser = add("prompts", prompts)
    add_run(parser)
    text = (
        "write the prompts never or always solved, or without a score, "
        "for train --data.leave_out FILE"
    )
    parser.add_argument("--leave_out", metavar="FILE", type=Path, help=text)
    add_json(parser)


def prompts(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print the prompts of each class, and write those that teach nothing.

    Raises:
        StoreError: there is no such run, its scores are not two, or the file cannot be written.
    """
    run = chosen(store, arguments.run)
    scores = verdicts(store, run)
    if scores is None and arguments.leave_out is not None:
        raise StoreError(f"--leave_out: run {run.name!r}: {_OPEN}; nothing was written")
    rows = unverified(store, run)
    if scores is not None:
        rows = judged(store, run, *scores) + rows
    if arguments.leave_out is not None:
        write_list(arguments.leave_out, rows)
    if arguments.json:
        print(json_text({"run": run.name, "scores": scores, "prompts": rows}))
    else:
        show_classes(run, rows, judged=scores is not None)


def write_list(file: Path, rows: Rows) -> None:
    """Write the prompts that teach nothing.

    Raises:
        StoreError: the file cannot be written.
    """
    lines = ""
    for row in rows:
        if row["why"] in LEFT_OUT:
            line = {name: row[name] for name in ("prompt", "label", "why")}
            lines += json.dumps(line) + "\n"
    try:
        file.write_text(lines)
    except OSError as error:
        raise StoreError(f"--leave_out {file} cannot be written: {error.strerror}") from None


def show_classes(run: RunRecord, rows: Rows, *, judged: bool) -> None:
    """Print how many prompts each class has, and examples; not ``judged``: those unverified."""
    rows_of: dict[str, Rows] = {name: [] for name in (*CLASSES, UNVERIFIED)}
    for row in rows:
        rows_of[row["why"]].append(row)
    facts = [("run", f"{run.name}, step {run.last_step}")]
    if judged:
        for name, text in CLASSES.items():
            facts.append((name, f"{len(rows_of[name])}: {text}"))
    else:
        facts.append(("not judged", _OPEN))
    silent = f"no score at the last {SET_ASIDE} visits or more: look at label and verifier"
    facts.append((UNVERIFIED, f"{len(rows_of[UNVERIFIED])}: {silent}"))
    print_facts(facts)
    examples = {name: rows_of[name][:_EXAMPLES] for name in CLASSES}
    print_prompts(examples, _COLUMNS)
    print_prompts({UNVERIFIED: rows_of[UNVERIFIED][:_EXAMPLES]}, ("prompt_id", "visits"))


def unverified(store: PosteriorStore, run: RunRecord) -> Rows:
    """Return the prompts whose last visits, counted by ``visits``, had no score; most first."""
    visits = unverified_visits(store, run)
    ids = [prompt_id for prompt_id, number in visits.items() if number >= SET_ASIDE]
    ids.sort(key=lambda prompt_id: -visits[prompt_id])
    texts = prompt_texts(store, np.array(ids, dtype=np.int64))
    return [
        {
            "prompt": text,
            "label": label,
            "why": UNVERIFIED,
            "prompt_id": prompt_id,
            "visits": visits[prompt_id],
        }
        for prompt_id, (text, label) in zip(ids, texts, strict=True)
    ]


def judged(store: PosteriorStore, run: RunRecord, wrong: float, right: float) -> Rows:
    """Return the prompts of a class, class by class, the clearest first; ``why`` is the class.

    ``rate`` is successes / rollouts over all visits, ``low`` to ``high`` its 95 % interval (Clopper
    and Pearson), ``similar`` the mean rate of the 20 prompts with the nearest texts, ``last`` the
    rate of the last visit.

    Args:
        wrong, right: the two scores of a rollout.
    """
    columns = prompt_rates(store, run, wrong, right)
    rollouts = columns["rollouts"]
    successes = columns["successes"]
    flips = columns["flips"]
    last = columns["last"]
    texts = prompt_texts(store, columns["prompt_id"])
    rate = successes / np.maximum(rollouts, 1)
    low, high = interval(successes, rollouts)
    similar = similar_rates([text for text, _ in texts], rate, successes == 0)
    columns.update(rate=rate, low=low, high=high, similar=similar)
    group = rollouts / np.maximum(columns["visits"], 1)
    _, high_of_last = interval(last * group, group)
    low_of_all_right, _ = interval(group, group)
    # Whether each prompt is of a class, and how clearly; of two classes it is of the first.
    classes = {
        "never": ((successes == 0) & (high < similar), similar - high),
        "always": ((successes == rollouts) & (rollouts >= _FEW), rollouts),
        "flipping": (flips >= 2, flips),
        "lost": ((columns["best"] == 1) & (high_of_last < low_of_all_right), -last),
    }
    is_free = np.full(len(rate), True)
    rows = []
    for name, (is_member, clearness) in classes.items():
        places = np.flatnonzero(is_member & is_free)
        is_free[places] = False
        for place in places[np.argsort(-clearness[places], kind="stable")].tolist():
            text, label = texts[place]
            row = {"prompt": text, "label": label, "why": name}
            for column, values in columns.items():
                row[column] = values[place].item()
            rows.append(row)
    return rows


def interval(successes: NDArray[Any], rollouts: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the ends of the 95 % interval of success rates, (P,) each.

    Source: Clopper and Pearson 1934.
    """
    failures = rollouts - successes
    low = special.betaincinv(np.maximum(successes, 1e-9), failures + 1, 0.025)
    high = special.betaincinv(successes + 1, np.maximum(failures, 1e-9), 0.975)
    return np.where(successes > 0, low, 0.0), np.where(failures > 0, high, 1.0)


def similar_rates(
    texts: list[str],
    rate: Floats,
    wanted: NDArray[np.bool_],
) -> Floats:
    """Return the mean rate of the 20 prompts with the nearest texts, (P,).

    NaN where not ``wanted``, (P,), or without other prompts.
    """
    similar = np.full(len(rate), np.nan)
    count = min(_SIMILAR, len(rate) - 1)
    if count < 1:
        return similar
    features = text_features(texts)
    squares = (features**2).sum(axis=1)
    places = np.flatnonzero(wanted)
    for start in range(0, len(places), _BLOCK):
        rows = places[start : start + _BLOCK]
        distances = squares - 2 * features[rows] @ features.T
        distances[np.arange(len(rows)), rows] = np.inf  # not itself
        nearest = np.argpartition(distances, count - 1, axis=1)[:, :count]
        similar[rows] = rate[nearest].mean(axis=1)
    return similar
