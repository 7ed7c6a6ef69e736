"""Answer questions about the prompts of a run: a table, the visits of each, the kept rollouts.

Axes: P prompts, V visits.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import prompt_texts
from openrlhf_dbb.storage.records import Floats, Integers
from openrlhf_dbb.terminal import readable
from openrlhf_dbb.watch import history, queries
from openrlhf_dbb.watch.history import Visits
from openrlhf_dbb.watch.queries import Columns

Answer = dict[str, Any]

_TEXT = 500  # characters of a prompt in the table
_BLOCK = 20_000  # prompts that are read at a time
_STEPS = 50  # steps whose rollouts are read at a time
_SHOWN_OF_GROUP = (
    "rollouts",
    "successes",
    "before",
    "mean",
    "low",
    "high",
)


def prompt_table(store: PosteriorStore, visits: Visits) -> Answer:
    """Return the "columns" of a table of all prompts, (P,) each.

    Raise StoreError if the text of a prompt is not stored.
    """
    texts = prompt_texts(store, visits.prompt_id, length=_TEXT)
    table = {
        "id": visits.prompt_id,
        "state": visits.state,
        "mean": visits.mean,
        "change": visits.mean - visits.first,
        "visits": visits.visits,
        "text": [readable(text) for text, _ in texts],
        "label": [readable(label) for _, label in texts],
    }
    return {"last": visits.last, "unit": visits.unit, "columns": table}


def one_prompt(
    store: PosteriorStore, run: RunRecord, prompt_id: int, *, unit: bool
) -> Answer | None:
    """Return one prompt of a run with every visit; None if the run has no posterior of it.

    ``unit``: whether the scores of the run lie in [0, 1]; otherwise "state" is None.
    """
    found = queries.prompt(store, run, prompt_id)
    if found is None:
        return None
    mean, log, kept = found
    ((_, answer),) = _answers(store, np.array([prompt_id]), mean, log, kept, unit)
    return answer


def every_prompt(
    store: PosteriorStore, run: RunRecord, visits: Visits, order: Integers
) -> Iterator[tuple[int, Answer]]:
    """Yield each prompt as :func:`one_prompt`, with its id; many are read at a time.

    ``order``: (P,) places in ``visits``.
    """
    for start in range(0, len(order), _BLOCK):
        places = order[start : start + _BLOCK]
        ids = visits.prompt_id[places]
        log, kept = queries.prompts(store, run, ids)
        yield from _answers(store, ids, visits.mean[places], log, kept, visits.unit)


def _answers(
    store: PosteriorStore, ids: Integers, means: Floats, log: Columns, kept: list[Any], unit: bool
) -> Iterator[tuple[int, Answer]]:
    """Yield each prompt with its id.

    Args:
        ids, means: (P,) of the prompts; a mean counts for a prompt without visits.
        log: their visits by column, (V,), ordered by prompt, then step.
        kept: rows of prompt_id, step and the number of kept rollouts.
    """
    columns = np.stack([log[name] for name in ("step", "prompt_id", "successes", "mean")], axis=1)
    ascending = np.argsort(ids)
    now = history.summed(ids[ascending], means[ascending], columns, unit=unit)
    starts = np.searchsorted(log["prompt_id"], ids, side="left")
    ends = np.searchsorted(log["prompt_id"], ids, side="right")
    kept_of = {(row.prompt_id, row.step): row.kept for row in kept}
    log |= _interval(log)
    del log["prompt_id"]
    texts = prompt_texts(store, ids)
    for at, prompt_id in enumerate(ids.tolist()):
        visits = {name: column[starts[at] : ends[at]].tolist() for name, column in log.items()}
        visits["kept"] = [kept_of.get((prompt_id, step), 0) for step in visits["step"]]
        place = np.searchsorted(now.prompt_id, prompt_id)
        text, label = texts[at]
        yield (
            prompt_id,
            {
                "text": readable(text),
                "label": readable(label),
                "state": now.state[place] if unit else None,
                "mean": now.mean[place],
                "visits": visits,
            },
        )


def _interval(log: Columns) -> Columns:
    """Return "low" and "high" of the central 90 % of Beta(alpha, beta), or of a normal distribution."""
    from scipy.special import betaincinv  # here: a server starts without it

    alpha = log["alpha"]
    beta = log["beta"]
    has_beta = ~np.isnan(alpha + beta)
    with np.errstate(divide="ignore", invalid="ignore"):  # of an edited row; shown as not known
        half = 1.645 * np.sqrt(log["variance"] / log["rollouts"])
    low = log["mean"] - half
    high = log["mean"] + half
    low[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], 0.05)
    high[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], 0.95)
    return {"low": low, "high": high}


def latest_rollouts(store: PosteriorStore, run: RunRecord) -> Answer:
    """Return the kept rollouts of the last step that has any, as :func:`rollouts_of_step`."""
    step = queries.latest_step(store, run)
    if step is None:
        return {"step": None, "rollouts": [], "prompts": {}}
    return rollouts_of_step(store, run, step)


def rollouts_of_step(
    store: PosteriorStore, run: RunRecord, step: int, prompt_id: int | None = None
) -> Answer:
    """Return a step with its kept rollouts and their prompts; None: of all prompts."""
    ((_, answer),) = rollouts_of_steps(store, run, [step], prompt_id)
    return answer


def rollouts_of_steps(
    store: PosteriorStore, run: RunRecord, steps: list[int], prompt_id: int | None = None
) -> Iterator[tuple[int, Answer]]:
    """Yield each step with its kept rollouts and their prompts; None: of all prompts.

    A step with very many rollouts has the first 5,000 of them, and a step with very long responses
    the beginning of each: "kept" is the number of all, "cut_from" the characters of the whole text.
    """
    for start in range(0, len(steps), _STEPS):
        part = steps[start : start + _STEPS]
        found = queries.rollouts(store, run, part, prompt_id)
        rows_of = defaultdict(list)
        ids = set()
        for row in found.rows:
            rows_of[row.step].append(row._asdict())
            ids.add(row.prompt_id)
        counted = {row.step: row._asdict() for row in found.counted}
        numbers = np.array(sorted(ids), dtype=np.int64)
        texts = dict(zip(numbers.tolist(), prompt_texts(store, numbers), strict=True))
        groups = _groups(found.groups)
        for step in part:
            answer = {"step": step, **counted.get(step, {})}
            if answer.get("form"):
                answer["form"] = readable(answer["form"])
            yield step, answer | _of_step(rows_of[step], texts, groups)


def _groups(log: Columns) -> dict[tuple[int, int], Answer]:
    """Return by step and prompt the rewards seen of a group, and the posterior around it."""
    log = log | _interval(log)
    groups = {}
    for at in range(len(log["step"])):
        group = {name: log[name][at] for name in _SHOWN_OF_GROUP}
        groups[int(log["step"][at]), int(log["prompt_id"][at])] = group
    return groups


def _of_step(
    rows: list[Answer],
    texts: dict[int, tuple[str, str]],
    groups: dict[tuple[int, int], Answer],
) -> Answer:
    prompts = {}
    kept = 0
    for row in rows:
        kept = row.pop("kept")
        del row["place"]
        row["text"] = readable(row["text"])
        row["read"] = readable(row["read"] or "")
        number = row["prompt_id"]
        text, label = texts[number]
        prompts[number] = {
            "text": readable(text),
            "label": readable(label),
            "group": groups.get((row.pop("step"), number)),
        }
    return {"kept": kept, "rollouts": rows, "prompts": prompts}
