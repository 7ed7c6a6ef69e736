"""The report's table of prompts: state, posterior mean, text, and every visit with its credible interval.

Axes: P prompts, V visits.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.inspect import rollout_usage
from openrlhf_dbb.inspect.page import packed
from openrlhf_dbb.inspect.trajectories import NO_VISITS, Trajectories
from openrlhf_dbb.terminal import readable
from storage import PosteriorStore, UsageLog
from storage.inspection import Means, prompt_texts

LEVEL = 0.9
_TEXT_BUDGET = 24_000_000
_LONGEST_TEXT = 4_000
_SHORTEST_PREFIX = 16


def section(
    store: PosteriorStore,
    visits: Trajectories,
    means: Means,
    listed: NDArray[np.int64],
    most: int,
    usage: UsageLog,
) -> dict[str, Any]:
    """The table of prompts with the visits of each, and totals over all prompts.

    Args:
        visits: of all prompts with a visit in the store.
        means: (P,) current posteriors.
        listed: prompt ids that are in the table in any case.
        most: the table holds about this many prompts, every k-th if there are more.
        usage: the run's rollout usage; empty if it was not recorded.
    """
    every = -(-len(means.prompt_id) // most) or 1
    in_table = np.zeros(len(means.prompt_id), dtype=bool)
    in_table[::every] = True
    in_table |= np.isin(means.prompt_id, listed)
    ids = means.prompt_id[in_table]
    visited = np.isin(ids, visits.prompt_id)
    row = np.searchsorted(visits.prompt_id, ids[visited])
    first, last = np.zeros_like(ids), np.zeros_like(ids)
    first[visited], last[visited] = visits.first[row], visits.last[row]
    count = np.where(visited, last - first + 1, 0)
    state, mean, change = np.full(len(ids), NO_VISITS), means.mean[in_table].copy(), np.full(len(ids), np.nan)
    state[visited], mean[visited] = visits.state[last[visited]], visits.mean[last[visited]]
    change[visited] = visits.mean[last[visited]] - visits.mean[first[visited]]
    last_states = np.bincount(visits.state[visits.last], minlength=NO_VISITS)

    rows = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
    low, high = _intervals(visits, rows)
    length = int(np.clip(_TEXT_BUDGET // max(len(ids), 1), 80, _LONGEST_TEXT))
    texts, labels, sizes = [], [], []
    for _, prompt, label, size in prompt_texts(store, ids, length=length):
        texts.append(readable(prompt))
        labels.append(readable(label))
        sizes.append(size if size > length else 0)
    return {
        "state_counts": [*last_states.tolist(), len(means.prompt_id) - len(visits.prompt_id)],
        "all_prompts": len(means.prompt_id),
        "prompts": {
            "id": packed(ids),
            "state": packed(state),
            "mean": packed(mean),
            "change": packed(change),
            "visits": packed(means.visits[in_table]),
            "count": packed(count),
            "cut": packed(np.array(sizes, dtype=np.int64)),
            "text": texts,
            "label": labels,
        }
        | rollout_usage.per_prompt(usage, ids),
        "common_prefix": _common_prefix(texts),
        "visits": {
            "step": packed(visits.step[rows]),
            "rollouts": packed(visits.rollouts[rows]),
            "successes": packed(_whole(visits.successes[rows])),
            "mean": packed(visits.mean[rows]),
            "low": packed(low),
            "high": packed(high),
            "alpha": packed(visits.alpha[rows]),
            "beta": packed(visits.beta[rows]),
        },
    }


def _common_prefix(texts: list[str]) -> str:
    """What at least half of the texts begin with, up to the end of a word; "" if that is short."""
    if not texts:
        return ""
    ordered = sorted(texts)  # texts that begin differently end up at either end
    pairs = zip(ordered[len(texts) // 4], ordered[3 * len(texts) // 4], strict=False)
    alike = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = re.sub(r"\w+\Z", "", alike)
    return shared if len(texts) > 1 and len(shared) >= _SHORTEST_PREFIX else ""


def _whole(values: NDArray[np.float64]) -> NDArray[Any]:
    """As integers, which pack tighter, if all values are whole and none is negative."""
    whole = values.astype(np.int64)
    return whole if len(values) and (whole == values).all() and whole.min() >= 0 else values


def _intervals(visits: Trajectories, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Central credible interval after each visit; without alpha and beta, a normal one of the group's mean."""
    from scipy.special import betaincinv  # here, since no other command needs it

    alpha, beta = visits.alpha[rows], visits.beta[rows]
    half = 1.645 * np.sqrt(visits.variance[rows] / visits.rollouts[rows])  # 90 %
    low, high = visits.mean[rows] - half, visits.mean[rows] + half
    known = ~np.isnan(alpha + beta)
    low[known] = betaincinv(alpha[known], beta[known], (1 - LEVEL) / 2)
    high[known] = betaincinv(alpha[known], beta[known], (1 + LEVEL) / 2)
    return low, high
