"""One prompt with all its visits; the kept rollouts of one step.

Axes: V visits of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.terminal import readable
from openrlhf_dbb.watch.numbers import number, rounded, whole
from openrlhf_dbb.watch.visits import NO_VISITS, states
from storage import PosteriorStore, RunRecord
from storage.inspection import prompt_history, prompt_texts

LEVEL = 0.9
"""Of the credible intervals."""

LONGEST_TEXT = 200_000
PROMPT_IN_STEP = 4_000
_ALL_ROLLOUTS = 8_000_000  # characters of all rollouts of a step together
_SHORTEST = 2_000

USAGE = ("generated", "trained", "skipped", "replayed")

# By step, since the tables are keyed by it: the whole history would have to be read to find the rows of a prompt.
_USAGE = f"""
    SELECT {", ".join(f"CAST(sum(u.{name}) AS BIGINT) AS {name}" for name in USAGE)}
    FROM dbb_step s CROSS JOIN dbb_usage u
    WHERE s.run_id = :run AND u.run_id = :run AND u.step = s.step AND u.prompt_id = :prompt"""
_KEPT = """
    SELECT step, count(*) AS kept FROM dbb_rollout
    WHERE run_id = :run AND prompt_id = :prompt AND {of_steps} GROUP BY step"""
_ROLLOUTS = """
    SELECT prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, lag,
           substr(text, 1, :longest) AS text, length(text) AS size
    FROM rollouts WHERE run_id = :run AND step = :step {of_prompt} ORDER BY prompt_id, sample"""


def prompt(store: PosteriorStore, run: RunRecord, prompt_id: int) -> dict[str, Any] | None:
    """One prompt of a run with every visit; None if the run has no posterior of it."""
    key = {"run": run.run_id, "prompt": prompt_id}
    found = store.query("SELECT visits, mean FROM posteriors WHERE run_id = :run AND prompt_id = :prompt", **key)
    if not found:
        return None
    ((_, text, label, _),) = prompt_texts(store, np.array([prompt_id]), length=LONGEST_TEXT)
    usage = store.query(_USAGE, **key)[0]._asdict()
    visits = prompt_history(store, run, prompt_id)
    columns = {name: np.array([row[name] for row in visits], dtype=np.float64) for name in VISIT}
    steps = store.database.ids(columns["step"].astype(np.int64))
    query = _KEPT.format(of_steps=store.database.one_of("step"))
    kept = {row.step: row.kept for row in store.query(query, ids=steps, **key)}
    return described(prompt_id, text, label, found[0].visits, found[0].mean, usage, columns, kept)


VISIT = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
"""What is known of a visit."""


def described(
    prompt_id: int,
    text: str,
    label: str,
    visits_total: int,
    mean: float | None,
    usage: Mapping[str, int | None],
    visits: Mapping[str, NDArray[np.float64]],
    kept: Mapping[int, int],
) -> dict[str, Any]:
    """What the page shows of one prompt.

    Args:
        visits_total: all visits.
        mean: posterior mean now.
        usage: sums by name; None where it was not counted.
        visits: (V,) each of ``VISIT``, in order of the steps.
        kept: number of kept rollouts by step.
    """
    alpha, beta = visits["alpha"], visits["beta"]
    known = ~np.isnan(alpha + beta)
    mean_V = np.divide(alpha, alpha + beta, out=visits["mean"].copy(), where=known)
    low, high = _intervals(alpha, beta, mean_V, visits["variance"], visits["rollouts"])
    state_V = states(mean_V, visits["successes"])
    steps = visits["step"].astype(np.int64).tolist()
    return {
        "id": prompt_id,
        "text": readable(text),
        "label": readable(label),
        "state": int(state_V[-1]) if len(state_V) else NO_VISITS,
        "mean": number(mean_V[-1] if len(mean_V) else mean),
        "visits_total": visits_total,
        "usage": None if usage["generated"] is None else {name: usage[name] for name in USAGE},
        "level": LEVEL,
        "visits": {
            "step": steps,
            "rollouts": whole(visits["rollouts"]),
            "successes": rounded(visits["successes"]),
            "mean": rounded(mean_V),
            "low": rounded(low),
            "high": rounded(high),
            "alpha": rounded(alpha),
            "beta": rounded(beta),
            "lag": rounded(visits["lag"]),
            "kept": [kept.get(step, 0) for step in steps],
        },
    }


def _intervals(*visits: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Central credible interval after each visit; without alpha and beta, a normal one of the group's mean."""
    from scipy.special import betaincinv  # here: a server starts without it

    alpha, beta, mean, variance, rollouts = visits
    half = 1.645 * np.sqrt(variance / rollouts)  # 90 %
    low, high = mean - half, mean + half
    known = ~np.isnan(alpha + beta)
    low[known] = betaincinv(alpha[known], beta[known], (1 - LEVEL) / 2)
    high[known] = betaincinv(alpha[known], beta[known], (1 + LEVEL) / 2)
    return low, high


def kept_steps(store: PosteriorStore, run: RunRecord) -> list[int] | None:
    """The first and the last step with kept rollouts, None if there is none."""
    query = """SELECT (SELECT min(step) FROM dbb_rollout WHERE run_id = :run) AS first,
                      (SELECT max(step) FROM dbb_rollout WHERE run_id = :run) AS last"""
    (row,) = store.query(query, run=run.run_id)
    return None if row.first is None else [row.first, row.last]


def rollouts(store: PosteriorStore, run: RunRecord, step: int | None, prompt_id: int | None = None) -> dict[str, Any]:
    """The kept rollouts of a step, or of one prompt in it, with the texts of their prompts.

    Texts are cut so that those of a step stay readable by a browser; "cut" is the full length of such a text, else 0.

    Args:
        step: None: the last one that has any.
    """
    steps = kept_steps(store, run)
    if step is None and steps is not None:
        step = steps[1]
    longest = LONGEST_TEXT
    key = {"run": run.run_id, "step": step, "prompt": prompt_id}
    if prompt_id is None and steps is not None:
        (counted,) = store.query("SELECT count(*) AS n FROM dbb_rollout WHERE run_id = :run AND step = :step", **key)
        longest = int(np.clip(_ALL_ROLLOUTS // max(counted.n, 1), _SHORTEST, LONGEST_TEXT))
    query = _ROLLOUTS.format(of_prompt="" if prompt_id is None else "AND prompt_id = :prompt")
    rows = [] if steps is None else store.query(query, longest=longest, **key)
    ids = np.unique(np.array([row.prompt_id for row in rows], dtype=np.int64))
    texts = prompt_texts(store, ids, length=PROMPT_IN_STEP) if len(ids) else ()
    return {
        "step": step,
        "steps": steps,
        "rollouts": described_rollouts(rows, longest),
        "prompts": {str(each): {"text": readable(text), "label": readable(label)} for each, text, label, _ in texts},
    }


_REALS = ("reward", "score", "advantage", "log_prob", "lag")


def described_rollouts(rows: Sequence[Any], longest: int) -> list[dict[str, Any]]:
    """Rows of the query of :func:`rollouts`, whose texts were cut to ``longest`` characters."""
    reals = {name: rounded(np.array([getattr(row, name) for row in rows], dtype=np.float64)) for name in _REALS}
    return [
        {
            "prompt_id": row.prompt_id,
            "sample": row.sample,
            **{name: values[place] for name, values in reals.items()},
            "length": row.length,
            "truncated": row.truncated,
            "missing": row.missing,
            "text": readable(row.text),
            "cut": row.size if row.size > longest else 0,
        }
        for place, row in enumerate(rows)
    ]
