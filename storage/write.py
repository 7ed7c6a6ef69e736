"""Write and undo steps, write prompts, evaluations, events and other rows; all in the transaction of the caller."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
from sqlalchemy import Connection, select, text

from openrlhf_dbb.storage import decode, records, schema
from openrlhf_dbb.storage.engine import driver
from openrlhf_dbb.storage.errors import StoreError
from openrlhf_dbb.storage.records import EvaluationRows, RunRecord, StateLayout, StepRows

_FIND = "SELECT hash, prompt_id FROM dbb_prompt WHERE hash "

_STALE = text("""SELECT h.prompt_id, h.prev_step, coalesce(q.step, -1)
    FROM dbb_history h LEFT JOIN dbb_posterior q ON q.run_id = h.run_id AND q.prompt_id = h.prompt_id
    WHERE h.run_id = :run_id AND h.step = :step AND h.prev_step <> coalesce(q.step, -1)
    LIMIT 1""")

# Values, never "alpha * discount" in SQL: a repeat must neither count twice nor differ in the last bit.
_APPLY = text("""INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
    SELECT run_id, prompt_id, alpha, beta, state, 1, step
    FROM dbb_history WHERE run_id = :run_id AND step = :step
    ON CONFLICT (run_id, prompt_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
        visits = dbb_posterior.visits + 1, step = excluded.step""")

# For each prompt changed after :step, its first such row (prev_step <= :step) holds the posterior to restore.
_UNDO_CHANGED = text("""INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
    SELECT h.run_id, h.prompt_id, h.prev_alpha, h.prev_beta,
           CASE WHEN h.state IS NULL OR h.prev_step = 0 THEN h.prev_state
                ELSE (SELECT b.state FROM dbb_history b
                      WHERE b.run_id = h.run_id AND b.step = h.prev_step AND b.prompt_id = h.prompt_id) END,
           u.undone, h.prev_step
    FROM dbb_history h
    JOIN (SELECT prompt_id, count(*) AS undone FROM dbb_history
          WHERE run_id = :run AND step > :step GROUP BY prompt_id) u ON u.prompt_id = h.prompt_id
    WHERE h.run_id = :run AND h.step > :step AND h.prev_step BETWEEN 0 AND :step
    ON CONFLICT (run_id, prompt_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
        visits = dbb_posterior.visits - excluded.visits, step = excluded.step""")

_UNDO_NEW = text("""DELETE FROM dbb_posterior WHERE run_id = :run AND prompt_id IN
    (SELECT prompt_id FROM dbb_history WHERE run_id = :run AND step > :step AND prev_step = -1)""")


def prompt_hash(prompt: str, label: str) -> bytes:
    """Return 16 bytes that identify a prompt with its label, in every database and run.

    The bytes are the BLAKE2b hash of a version tag and of the two texts as UTF-8. The length of each text in bytes (8
    bytes, little-endian) precedes it, so that ("ab", "c") and ("a", "bc") differ. Nothing is normalised; pass the
    prompt as the model sees it. Another label means another reward, hence another prompt.

    Example:
        >>> prompt_hash("1 + 1 = ?", "2").hex()
        'cf41dd1039e7e2bfe8da859a83110c47'
    """
    # JSON files may contain half a surrogate pair, which strict UTF-8 rejects.
    text = prompt.encode("utf-8", "surrogatepass")
    answer = label.encode("utf-8", "surrogatepass")
    text_size = len(text).to_bytes(8, "little")
    answer_size = len(answer).to_bytes(8, "little")
    # By one call, since a data set has a million prompts.
    data = b"openrlhf-dbb prompt 1" + text_size + text + answer_size + answer
    return hashlib.blake2b(data, digest_size=16).digest()


# On the driver's connection, since SQLAlchemy takes several times as long for many values.
def find_prompts(connection: Connection, hashes: list[bytes], total: int) -> dict[bytes, int]:
    """Return the ids of the stored prompts among these ascending hashes, perhaps with others.

    ``total`` is the number of hashes of all calls.
    """
    if connection.dialect.name != "sqlite":
        cursor = driver(connection).cursor(binary=True)
        return dict(cursor.execute(f"{_FIND} = ANY(%b)", (hashes,)).fetchall())
    execute = driver(connection).cursor().execute
    newest = execute("SELECT max(prompt_id) FROM dbb_prompt").fetchone()[0] or 0
    if newest <= 4 * total:  # a look-up takes as long as five rows of a scan
        return dict(execute(f"{_FIND} BETWEEN ? AND ?", (hashes[0], hashes[-1])).fetchall())
    return dict(row for digest in hashes if (row := execute(f"{_FIND} = ?", (digest,)).fetchone()))


def new_prompts(connection: Connection, rows: list[tuple[bytes, str, str]]) -> None:
    """Insert hashes, prompts and labels, but for those that another process has stored since they were looked for."""
    new = "INSERT INTO dbb_prompt (hash, prompt, label) {} ON CONFLICT DO NOTHING"
    if connection.dialect.name == "sqlite":
        driver(connection).executemany(new.format("VALUES (?, ?, ?)"), rows)
    else:
        arrays = new.format("SELECT * FROM unnest(%b::bytea[], %b::text[], %b::text[])")
        driver(connection).execute(arrays, tuple(map(list, zip(*rows, strict=True))))


def step(
    connection: Connection, run: RunRecord, number: int, rows: StepRows, digest: bytes
) -> None:
    """Write checked rows as a step of the run, which the transaction has advanced to it.

    Raise StoreError if the rows do not start from the stored posteriors.
    """
    of_step: dict[str, Any] = {"run_id": run.run_id, "step": number}
    totals: dict[str, Any] = {
        "prompts": len(rows.prompt_ids),
        "rollouts": int(rows.rollouts.sum()),
        "successes": float(rows.successes.sum()),
        "shared": records.shared_to_text(rows.shared),
        "form": rows.form,
        "digest": digest,
        "created_at": utc_now(),
    }
    if rows.usage is not None:
        for name, count in vars(rows.usage).items():
            totals[name] = None if count is None else int(count)
    connection.execute(schema.step.insert(), of_step | totals)
    layout = StateLayout(run.state_fields)
    previous = rows.previous_state.copy()
    # A posterior that a step left is in the history; written twice, its text would double the cost of a step.
    for place in layout.others:
        previous[rows.previous_step > 0, place] = np.nan
    states = {"state": None} | layout.to_columns(rows.state) | layout.to_columns(previous, "prev_")
    history = vars(rows) | states | {"prompt_id": rows.prompt_ids, "prev_step": rows.previous_step}
    insert(connection, "dbb_history", of_step | history)
    for table, beside in (("dbb_probe", rows.probes), ("dbb_rollout", rows.kept)):
        if beside is not None:
            columns = of_step | {"prompt_id": beside.prompt_ids} | vars(beside)
            insert(connection, table, columns)
    stale = connection.execute(_STALE, of_step).first()
    if stale is not None:
        raise StoreError(
            f"step {number} of run {run.name!r}: previous_step of prompt {stale[0]} is "
            f"{stale[1]}, its posterior is of step {stale[2]}; load the posteriors again"
        )
    connection.execute(_APPLY, of_step)


def undo(connection: Connection, run_id: int, last_step: int, target: int) -> int:
    """Undo the steps after ``target``: every posterior becomes what it was, bit for bit. Return the number of changes.

    The cost grows with the steps that are undone, not with the history.
    """
    key = {"run": run_id, "step": target}
    connection.execute(_UNDO_NEW, key)
    connection.execute(_UNDO_CHANGED, key)
    # Deleting the rows of the steps also restores the run-wide state, which lies in them.
    deleted = {}
    for table in ("dbb_history", "dbb_step", "dbb_checkpoint", "dbb_probe", "dbb_rollout"):
        delete = text(f"DELETE FROM {table} WHERE run_id = :run AND step > :step")
        deleted[table] = connection.execute(delete, key).rowcount
    deleted["dbb_evaluation"] = delete_evaluations(connection, run_id, after_step=target)
    connection.execute(text("UPDATE dbb_run SET last_step = :step WHERE run_id = :run"), key)
    event(connection, run_id, "roll_back", last_step, target, deleted)
    return deleted["dbb_history"]


def evaluation(
    connection: Connection,
    run_id: int,
    step: int | None,
    name: str,
    rows: Sequence[EvaluationRows],
    model: str,
    config: Mapping[str, Any],
    generated_total: int | None,
) -> int:
    """Write an evaluation, or replace that of the same run, step and name; return its id. The run must be locked."""
    key = {"run_id": run_id, "step": step, "name": name}
    values = {
        "model": records.storable(model),
        "config": json.dumps(dict(config), allow_nan=False),
        "generated_total": generated_total,
        "created_at": utc_now(),
    }
    columns = schema.evaluation.c
    same = [columns[column].is_not_distinct_from(value) for column, value in key.items()]
    stored = connection.scalar(select(columns.evaluation_id).where(*same))
    if stored is None:
        (stored,) = connection.execute(
            schema.evaluation.insert().values(key | values)
        ).inserted_primary_key or (0,)
    else:
        connection.execute(
            schema.evaluation.update().where(columns.evaluation_id == stored).values(values)
        )
        connection.execute(
            text("DELETE FROM dbb_evaluation_result WHERE evaluation_id = :id"), {"id": stored}
        )
    for result in rows:
        shape = result.samples.shape
        repeats, places = np.indices(shape)
        ids = np.broadcast_to(result.prompt_ids, shape)
        columns_R_P = vars(result) | {"repeat": repeats, "place": places, "prompt_id": ids}
        del columns_R_P["benchmark"]
        numbers = {name: values_R_P.ravel() for name, values_R_P in columns_R_P.items()}
        of_benchmark = {"evaluation_id": int(stored), "benchmark": result.benchmark}
        insert(connection, "dbb_evaluation_result", numbers | of_benchmark)
    return int(stored)


def delete_evaluations(connection: Connection, run_id: int, after_step: int = -1) -> int:
    """Delete a run's evaluations after a step; return their number."""
    key = {"run": run_id, "step": after_step}
    of_run = "WHERE run_id = :run AND coalesce(step, 0) > :step"
    ids = f"SELECT evaluation_id FROM dbb_evaluation {of_run}"
    connection.execute(
        text(f"DELETE FROM dbb_evaluation_result WHERE evaluation_id IN ({ids})"), key
    )
    return connection.execute(text(f"DELETE FROM dbb_evaluation {of_run}"), key).rowcount


def delete_run(connection: Connection, run_id: int) -> None:
    """Delete a run with all that belongs to it; prompts stay."""
    delete_evaluations(connection, run_id)
    # Those that point to the run before the run
    for table in reversed(schema.metadata.sorted_tables):
        if "run_id" in table.c:
            connection.execute(table.delete().where(table.c.run_id == run_id))


def event(
    connection: Connection,
    run_id: int,
    kind: str,
    from_step: int,
    to_step: int,
    detail: dict[str, Any],
) -> None:
    """Record what happened to a run besides steps and checkpoints."""
    values = {
        "run_id": run_id,
        "created_at": utc_now(),
        "kind": kind,
        "from_step": from_step,
        "to_step": to_step,
    }
    connection.execute(schema.event.insert().values(values | {"detail": json.dumps(detail)}))


def utc_now() -> str:
    """Return the time in UTC, ISO 8601 with milliseconds: it sorts as text, and is the same in every database."""
    return decode.utc_text(datetime.now(timezone.utc))


def insert(connection: Connection, table: str, columns: Mapping[str, Any]) -> None:
    """Insert rows in bulk: by one statement on SQLite, by binary COPY on PostgreSQL.

    A column has one integer or text for all rows, or (P,) int64, float64 (NaN for NULL) or texts; None: it is NULL. A
    name that is no column is left out.
    """
    kinds = schema.metadata.tables[table].columns
    columns = {
        name: values for name, values in columns.items() if values is not None and name in kinds
    }
    size = len(columns["prompt_id"])
    if not size:
        return
    listed = [
        _listed(column, size, kinds[name].type.python_type) for name, column in columns.items()
    ]
    rows = list(zip(*listed, strict=True))
    if connection.dialect.name == "sqlite":
        marks = ", ".join(["?"] * len(columns))
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        connection.exec_driver_sql(statement, rows)
        return
    with (
        driver(connection).cursor() as cursor,
        cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types([kinds[name].type.compile(connection.dialect).lower() for name in columns])
        for row in rows:
            copy.write_row(row)


def _listed(column: Any, size: int, kind: type) -> list[Any]:
    if isinstance(column, (int, str)):
        return [column] * size
    if not isinstance(column, np.ndarray):
        return list(column)
    values = column.tolist()
    if column.dtype.kind == "f" and (kind is int or np.isnan(column).any()):
        return [None if math.isnan(value) else kind(value) for value in values]
    return list(values)
