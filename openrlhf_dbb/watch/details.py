"""One prompt with its visits; the kept rollouts of one step.

Axes: V visits of a prompt.
"""

from __future__ import annotations

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
_PROMPT_IN_STEP = 4_000
_ALL_ROLLOUTS = 8_000_000  # characters of all rollouts of a step together
_SHORTEST = 2_000

_VISIT = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
_KEPT = """
    SELECT step, count(*) AS kept FROM dbb_rollout
    WHERE run_id = :run AND prompt_id = :prompt AND {of_steps} GROUP BY step"""
_EXTENT = """
    SELECT (SELECT min(step) FROM dbb_rollout WHERE run_id = :run) AS first,
           (SELECT max(step) FROM dbb_rollout WHERE run_id = :run) AS last"""
_ROLLOUTS = """
    SELECT prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, lag,
           substr(text, 1, :longest) AS text, length(text) AS size
    FROM rollouts WHERE run_id = :run AND step = :step {of_prompt} ORDER BY prompt_id, sample"""


def prompt(store: PosteriorStore, run: RunRecord, prompt_id: int) -> dict[str, Any] | None:
    """Return one prompt of a run with every visit; None if the run has no posterior of it."""
    key = {"run": run.run_id, "prompt": prompt_id}
    posterior = store.query("SELECT mean FROM posteriors WHERE run_id = :run AND prompt_id = :prompt", **key)
    if not posterior:
        return None
    ((_, text, label, _),) = prompt_texts(store, np.array([prompt_id]), length=LONGEST_TEXT)
    rows = prompt_history(store, run, prompt_id)
    visits = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _VISIT}
    # By step, since the table is keyed by it: otherwise all kept rollouts of the run would be read.
    steps = store.database.ids(visits["step"].astype(np.int64))
    query = _KEPT.format(of_steps=store.database.one_of("step"))
    kept = {row.step: row.kept for row in store.query(query, ids=steps, **key)}
    alpha, beta = visits["alpha"], visits["beta"]
    has_beta = ~np.isnan(alpha + beta)
    mean_V = np.divide(alpha, alpha + beta, out=visits["mean"].copy(), where=has_beta)
    low, high = _intervals(alpha, beta, mean_V, np.sqrt(visits["variance"] / visits["rollouts"]))
    state_V = states(mean_V, visits["successes"])
    return {
        "id": prompt_id,
        "text": readable(text),
        "label": readable(label),
        "state": int(state_V[-1]) if len(state_V) else NO_VISITS,
        "mean": number(mean_V[-1] if len(mean_V) else posterior[0].mean),
        "level": LEVEL,
        "visits": {
            "step": whole(visits["step"]),
            "rollouts": whole(visits["rollouts"]),
            "successes": rounded(visits["successes"]),
            "mean": rounded(mean_V),
            "low": rounded(low),
            "high": rounded(high),
            "alpha": rounded(alpha),
            "beta": rounded(beta),
            "lag": rounded(visits["lag"]),
            "kept": [kept.get(row["step"], 0) for row in rows],
        },
    }


def _intervals(*visits: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the central credible interval after each visit; without alpha and beta, a normal one."""
    from scipy.special import betaincinv  # here: a server starts without it

    alpha, beta, mean, standard_error = visits
    half = 1.645 * standard_error  # 90 % of a normal distribution
    low, high = mean - half, mean + half
    has_beta = ~np.isnan(alpha + beta)
    low[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], (1 - LEVEL) / 2)
    high[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], (1 + LEVEL) / 2)
    return low, high


def rollouts(store: PosteriorStore, run: RunRecord, step: int | None, prompt_id: int | None = None) -> dict[str, Any]:
    """Return the kept rollouts of a step, or of one prompt in it, with the texts of their prompts.

    A text that is too long for a browser is cut; its "cut" is its full length, 0 for other texts.

    Args:
        step: None for the last step that has any.
    """
    (extent,) = store.query(_EXTENT, run=run.run_id)
    step = extent.last if step is None else step
    longest = LONGEST_TEXT
    key = {"run": run.run_id, "step": step, "prompt": prompt_id}
    if prompt_id is None:
        (counted,) = store.query("SELECT count(*) AS n FROM dbb_rollout WHERE run_id = :run AND step = :step", **key)
        longest = int(np.clip(_ALL_ROLLOUTS // max(counted.n, 1), _SHORTEST, LONGEST_TEXT))
    query = _ROLLOUTS.format(of_prompt="" if prompt_id is None else "AND prompt_id = :prompt")
    rows = [] if extent.last is None else store.query(query, longest=longest, **key)
    ids = np.unique(np.array([row.prompt_id for row in rows], dtype=np.int64))
    texts = prompt_texts(store, ids, length=_PROMPT_IN_STEP) if len(ids) else ()
    return {
        "step": step,
        "steps": None if extent.last is None else [extent.first, extent.last],
        "rollouts": [_rollout(row._asdict(), longest) for row in rows],
        "prompts": {
            str(number): {"text": readable(text), "label": readable(label)} for number, text, label, _ in texts
        },
    }


def _rollout(row: dict[str, Any], longest: int) -> dict[str, Any]:
    size = row.pop("size")
    numbers = {name: number(row[name]) for name in ("reward", "score", "advantage", "log_prob", "lag")}
    return row | numbers | {"text": readable(row["text"]), "cut": size if size > longest else 0}
