"""The command prompts: which rows of the data look wrong, or teach nothing, by what a run has seen of them.

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
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.inspect.show import print_prompts
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.read import prompt_rates, unverified_visits, whole_prompts
from openrlhf_dbb.terminal import json_text, print_facts

CLASSES = {
    "never": "no rollout right, though the most similar prompts are solved more often: is label or verifier wrong?",
    "always": "every rollout right, 8 or more",
    "flipping": "from all right to all wrong or back, twice or more",
    "lost": "once all right, now wrong beyond chance",
}
UNVERIFIED = "unverified"
LEFT_OUT = ("never", "always", UNVERIFIED)
_NOT_JUDGED = "its scores are not known to be two, such as 0 and 1: which prompts are solved is open"
_SIMILAR = 20  # prompts
_FEW = 8  # rollouts
_EXAMPLES = 5
_BLOCK = 256  # prompts whose distances to all others are in memory at once


def add_commands(add: Any) -> None:
    parser = add("prompts", prompts)
    add_run(parser)
    text = "write the prompts never or always solved, or without a score, for train --data.leave_out FILE"
    parser.add_argument("--leave_out", metavar="FILE", type=Path, help=text)
    add_json(parser)


def prompts(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    scores = verdicts(store, run)
    if scores is None and arguments.leave_out is not None:
        raise StoreError(f"--leave_out: run {run.name!r}: {_NOT_JUDGED}; nothing was written")
    rows = unverified(store, run)
    if scores is not None:
        rows = judged(store, run, *scores) + rows
    if arguments.leave_out is not None:
        write_list(arguments.leave_out, rows)
    if arguments.json:
        print(json_text({"run": run.name, "scores": scores, "prompts": rows}))
    else:
        show_classes(run, rows, judged=scores is not None)


def write_list(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the prompts that teach nothing; raise StoreError if the file cannot be written."""
    lines = [{name: row[name] for name in ("prompt", "label", "why")} for row in rows if row["why"] in LEFT_OUT]
    try:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise StoreError(f"--leave_out {file} cannot be written: {error.strerror}") from None


def show_classes(run: RunRecord, rows: list[dict[str, Any]], *, judged: bool) -> None:
    """Print how many prompts each class has, and examples; not ``judged``: those without a score."""
    silent = f"no score at the last {SET_ASIDE} visits or more: look at label and verifier"
    classes = {UNVERIFIED: silent}
    counted = []
    if judged:
        classes = CLASSES | classes
    else:
        counted.append(("not judged", _NOT_JUDGED))
    for name, text in classes.items():
        counted.append((name, f"{sum(row['why'] == name for row in rows)}: {text}"))
    print_facts([("run", f"{run.name}, step {run.last_step}"), *counted])
    examples = {name: [row for row in rows if row["why"] == name][:_EXAMPLES] for name in CLASSES}
    print_prompts(examples, ("prompt_id", "visits", "rollouts", "rate", "low", "high", "similar", "last"))
    examples = {UNVERIFIED: [row for row in rows if row["why"] == UNVERIFIED][:_EXAMPLES]}
    print_prompts(examples, ("prompt_id", "visits"))


def unverified(store: PosteriorStore, run: RunRecord) -> list[dict[str, Any]]:
    """Return the prompts whose last visits, counted by ``visits``, yielded no score; most first."""
    visits = unverified_visits(store, run)
    ids = [prompt_id for prompt_id, number in visits.items() if number >= SET_ASIDE]
    ids.sort(key=lambda prompt_id: -visits[prompt_id])
    texts = whole_prompts(store, np.array(ids, dtype=np.int64))
    rows: list[dict[str, Any]] = []
    for prompt_id, (text, label) in zip(ids, texts, strict=True):
        about = {"prompt": text, "label": label, "why": UNVERIFIED}
        rows.append(about | {"prompt_id": prompt_id, "visits": visits[prompt_id]})
    return rows


def judged(store: PosteriorStore, run: RunRecord, wrong: float, right: float) -> list[dict[str, Any]]:
    """Return the prompts of a class, class by class, the clearest first; ``why`` is the class.

    ``wrong`` and ``right`` are the two scores of a rollout.

    ``rate`` is successes / rollouts over all visits, ``low`` to ``high`` its 95 % interval (Clopper and Pearson),
    ``similar`` the mean rate of the 20 prompts with the nearest texts, ``last`` the rate of the last visit.
    """
    found = prompt_rates(store, run, wrong, right)
    rollouts, successes, visits = found["rollouts"], found["successes"], found["visits"]
    texts = whole_prompts(store, found["prompt_id"])
    rate, (low, high) = successes / np.maximum(rollouts, 1), interval(successes, rollouts)
    similar = similar_rates([text for text, _ in texts], rate, successes == 0)
    group = rollouts / np.maximum(visits, 1)
    fell = interval(found["last"] * group, group)[1] < interval(group, group)[0]
    why = np.select(
        [(successes == 0) & (high < similar), (successes == rollouts) & (rollouts >= _FEW), found["flips"] >= 2,
         (found["best"] == 1) & fell],
        list(CLASSES), default="",
    )  # fmt: skip
    clearest = {"never": similar - high, "always": rollouts, "flipping": found["flips"], "lost": -found["last"]}
    columns = found | {"rate": rate, "low": low, "high": high, "similar": similar}
    return [
        {"prompt": texts[row][0], "label": texts[row][1], "why": name}
        | {of: values[row].item() for of, values in columns.items()}
        for name in CLASSES
        for row in sorted(np.flatnonzero(why == name), key=lambda row: -clearest[name][row])
    ]


def interval(successes: NDArray[Any], rollouts: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the 95 % interval of success rates, (P,) each. Source: Clopper and Pearson 1934."""
    failures = rollouts - successes
    low = np.where(successes > 0, special.betaincinv(np.maximum(successes, 1e-9), failures + 1, 0.025), 0.0)
    high = np.where(failures > 0, special.betaincinv(successes + 1, np.maximum(failures, 1e-9), 0.975), 1.0)
    return low, high


def similar_rates(texts: list[str], rate: NDArray[np.float64], wanted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean rate of the 20 prompts with the nearest texts, (P,); NaN where not wanted, or without others."""
    similar, count = np.full(len(rate), np.nan), min(_SIMILAR, len(rate) - 1)
    if count < 1:
        return similar
    features = text_features(texts)
    squares = (features**2).sum(axis=1)
    for rows in np.array_split(np.flatnonzero(wanted), -(-int(wanted.sum()) // _BLOCK) or 1):
        distances = squares - 2 * features[rows] @ features.T
        distances[np.arange(len(rows)), rows] = np.inf  # not itself
        similar[rows] = rate[np.argpartition(distances, count - 1, axis=1)[:, :count]].mean(axis=1)
    return similar
