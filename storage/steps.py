"""Write a step: its own row, its rows of history, probes and rollouts, and the posteriors it changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from storage.bulk import insert_columns
from storage.engine import execute
from storage.errors import StoreError
from storage.records import RunRecord, StateLayout, StepRows, history_columns, probe_columns
from storage.rollouts import rollout_columns
from storage.shared import to_text
from storage.usage import TOTALS

_RECORD = f"""
    INSERT INTO dbb_step (run_id, step, prompts, rollouts, successes, shared, digest, created_at, {", ".join(TOTALS)})
    VALUES (:run, :step, :prompts, :rollouts, :successes, :shared, :digest, :now, :{", :".join(TOTALS)})"""

_STALE = """
    SELECT h.prompt_id, h.prev_step, coalesce(q.step, -1)
    FROM dbb_history h LEFT JOIN dbb_posterior q ON q.run_id = h.run_id AND q.prompt_id = h.prompt_id
    WHERE h.run_id = :run AND h.step = :step AND h.prev_step <> coalesce(q.step, -1)
    LIMIT 1"""

# Values, never "alpha * discount" in SQL: a repeat must neither count twice nor differ in the last bit.
_APPLY = """
    INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
    SELECT run_id, prompt_id, alpha, beta, state, 1, step
    FROM dbb_history WHERE run_id = :run AND step = :step
    ON CONFLICT (run_id, prompt_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
        visits = dbb_posterior.visits + 1, step = excluded.step
    WHERE dbb_posterior.step < excluded.step"""


def write(connection: Connection, run: RunRecord, step: int, rows: StepRows, digest: bytes, now: str) -> None:
    """Write checked rows as a step of the run, in this transaction, which has advanced the run to it.

    Raises:
        StoreError: they do not start from the stored posteriors.
    """
    key = {"run": run.run_id, "step": step}
    totals: dict[str, Any] = {
        "prompts": len(rows.prompt_ids),
        "rollouts": int(rows.rollouts.sum()),
        "successes": float(rows.successes.sum()),
        "shared": to_text(rows.shared),
        "digest": digest,
        "now": now,
        **(dict.fromkeys(TOTALS) if rows.usage is None else rows.usage.columns()),
    }
    execute(connection, _RECORD, key | totals)
    layout = StateLayout(run.state_fields)
    insert_columns(connection, "dbb_history", history_columns(run.run_id, step, rows, layout))
    if rows.probes is not None:
        insert_columns(connection, "dbb_probe", probe_columns(run.run_id, step, rows.probes))
    if rows.kept is not None:
        insert_columns(connection, "dbb_rollout", rollout_columns(run.run_id, step, rows.kept))
    stale: Any = execute(connection, _STALE, key).first()
    if stale is not None:
        raise StoreError(
            f"step {step} of run {run.name!r}: previous_step of prompt {stale[0]} is "
            f"{stale[1]}, its posterior is of step {stale[2]}; load the posteriors again"
        )
    written = execute(connection, _APPLY, key).rowcount
    assert written == totals["prompts"], f"{written} of {totals['prompts']} posteriors written"
