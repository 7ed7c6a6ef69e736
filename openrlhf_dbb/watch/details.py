"""Describe one prompt with its visits, the kept rollouts of a step, and a run, in texts that are safe to show.

Axes: V visits of a prompt.
"""

import json
from typing import Any

import numpy as np

from openrlhf_dbb.inspect.show import facts
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import prompt_history, prompt_texts
from openrlhf_dbb.terminal import readable, safe, shown
from openrlhf_dbb.watch.visits import summed

LEVEL = 0.9
"""Probability of the credible intervals."""

LONGEST_TEXT = 200_000
_LONGEST_IN_STEP = 20_000  # characters of a rollout where a whole step is shown
_PROMPT_IN_STEP = 4_000

_VISIT = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
_KEPT = """
    SELECT step, count(*) AS kept FROM dbb_rollout
    WHERE run_id = :run AND prompt_id = :prompt AND {of_steps} GROUP BY step"""
_EVENTS = "SELECT created_at, kind, from_step, to_step FROM dbb_event WHERE run_id = :run ORDER BY event_id"
_EXTENT = """
    SELECT (SELECT min(step) FROM dbb_rollout WHERE run_id = :run) AS first,
           (SELECT max(step) FROM dbb_rollout WHERE run_id = :run) AS last"""
_ROLLOUTS = """
    SELECT prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, lag, read,
           substr(text, 1, :longest) AS text, CASE WHEN length(text) > :longest THEN length(text) ELSE 0 END AS cut
    FROM rollouts WHERE run_id = :run AND step = :step {of_prompt} ORDER BY prompt_id, sample"""


def prompt(store: PosteriorStore, run: RunRecord, prompt_id: int) -> dict[str, Any] | None:
    """Return one prompt of a run with every visit; None if the run has no posterior of it.

    "low" and "high" are the central credible interval after each visit; without alpha and beta, a normal one.
    """
    from scipy.special import betaincinv  # here: a server starts without it

    key = {"run": run.run_id, "prompt": prompt_id}
    posterior = store.query("SELECT mean FROM posteriors WHERE run_id = :run AND prompt_id = :prompt", **key)
    texts = list(prompt_texts(store, np.array([prompt_id]), length=LONGEST_TEXT))
    if not (posterior and texts):
        return None
    ((_, text, label, _),) = texts
    rows = prompt_history(store, run, prompt_id)
    visits = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _VISIT}
    # By step, since the table is keyed by it: otherwise all kept rollouts of the run would be read.
    steps = store.database.ids(visits["step"].astype(np.int64))
    query = _KEPT.format(of_steps=store.database.one_of("step"))
    kept = {row.step: row.kept for row in store.query(query, ids=steps, **key)}
    alpha, beta = visits["alpha"], visits["beta"]
    has_beta = ~np.isnan(alpha + beta)
    half = 1.645 * np.sqrt(visits["variance"] / visits["rollouts"])  # 90 % of a normal distribution
    low, high = visits["mean"] - half, visits["mean"] + half
    low[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], (1 - LEVEL) / 2)
    high[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], (1 + LEVEL) / 2)
    columns = (visits["step"], np.full(len(rows), prompt_id), visits["rollouts"], visits["successes"], visits["mean"])
    now = summed(np.array([prompt_id]), np.array([posterior[0].mean], dtype=np.float64), np.stack(columns, axis=1))
    return {
        "text": readable(text),
        "label": readable(label),
        "state": now.state[0],
        "mean": now.mean[0],
        "level": LEVEL,
        "visits": visits | {"low": low, "high": high, "kept": [kept.get(row["step"], 0) for row in rows]},
    }


def rollouts(store: PosteriorStore, run: RunRecord, step: int | None, prompt_id: int | None = None) -> dict[str, Any]:
    """Return the kept rollouts of a step (None: the last that has any), or of one prompt in it, with their prompts.

    A long text is cut; its "cut" is its full length, and 0 for other texts.
    """
    (extent,) = store.query(_EXTENT, run=run.run_id)
    step = extent.last if step is None else step
    longest = _LONGEST_IN_STEP if prompt_id is None else LONGEST_TEXT
    query = _ROLLOUTS.format(of_prompt="" if prompt_id is None else "AND prompt_id = :prompt")
    key = {"run": run.run_id, "step": step, "prompt": prompt_id, "longest": longest}
    rows = [] if extent.last is None else [row._asdict() for row in store.query(query, **key)]
    ids = np.unique(np.array([row["prompt_id"] for row in rows], dtype=np.int64))
    texts = prompt_texts(store, ids, length=_PROMPT_IN_STEP) if len(ids) else ()
    return {
        "step": step,
        "steps": None if extent.last is None else [extent.first, extent.last],
        "rollouts": [row | {name: readable(row[name] or "") for name in ("text", "read")} for row in rows],
        "prompts": {str(key): {"text": readable(text), "label": readable(label)} for key, text, label, _ in texts},
    }


def about(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return facts, configuration and events (claims, take-overs, roll backs, ...) of a run."""
    return {
        "facts": [[name, str(value)] for name, value in facts(store, run).items()],
        "config": [
            [safe(key), shown(json.dumps(without_secrets(value, key), ensure_ascii=False), width=None)]
            for key, value in sorted(run.config.items())
        ],
        "events": [list(row) for row in store.query(_EVENTS, run=run.run_id)],
    }
