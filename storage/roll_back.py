"""Undo steps: every posterior becomes what it was, bit for bit; the cost grows with the steps undone."""

from __future__ import annotations

from sqlalchemy import Connection, text

from storage import evaluations
from storage.events import record_event

# For each prompt changed after :step, its first such row (prev_step <= :step) holds the posterior to restore.
_UNDO_CHANGED = text(
    """INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
       SELECT h.run_id, h.prompt_id, h.prev_alpha, h.prev_beta, h.prev_state, u.undone, h.prev_step
       FROM dbb_history h
       JOIN (SELECT prompt_id, count(*) AS undone FROM dbb_history
             WHERE run_id = :run AND step > :step GROUP BY prompt_id) u ON u.prompt_id = h.prompt_id
       WHERE h.run_id = :run AND h.step > :step AND h.prev_step BETWEEN 0 AND :step
       ON CONFLICT (run_id, prompt_id) DO UPDATE
       SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
           visits = dbb_posterior.visits - excluded.visits, step = excluded.step"""
)

_UNDO_NEW = text(
    """DELETE FROM dbb_posterior WHERE run_id = :run AND prompt_id IN
       (SELECT prompt_id FROM dbb_history WHERE run_id = :run AND step > :step AND prev_step = -1)"""
)


def undo(connection: Connection, run_id: int, last_step: int, step: int) -> int:
    """Undo the steps after ``step`` in this transaction; how many posterior changes were undone."""
    key = {"run": run_id, "step": step}
    connection.execute(_UNDO_NEW, key)
    connection.execute(_UNDO_CHANGED, key)
    # The run-wide state is restored by deleting the rows of its steps.
    undone, steps, checkpoints, probes, rollouts = (
        connection.execute(text(f"DELETE FROM {table} WHERE run_id = :run AND step > :step"), key).rowcount
        for table in ("dbb_history", "dbb_step", "dbb_checkpoint", "dbb_probe", "dbb_rollout")
    )
    evaluated = evaluations.delete(connection, run_id, after_step=step)
    connection.execute(text("UPDATE dbb_run SET last_step = :step WHERE run_id = :run"), key)
    detail = {
        "history_rows": undone, "steps": steps, "checkpoints": checkpoints, "probes": probes,
        "rollouts": rollouts, "evaluations": evaluated,
    }  # fmt: skip
    record_event(connection, run_id, "roll_back", last_step, step, detail)
    return undone
