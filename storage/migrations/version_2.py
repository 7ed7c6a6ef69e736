"""Version 2: run-wide state of estimators, probes, and views of both."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Text

ADDS = ("dbb_probe", "probes", "steps")


def upgrade() -> None:
    """From version 1, with Alembic's operations on the connection of the migration."""
    op.add_column("dbb_run", Column("shared_start", Text))
    op.add_column("dbb_step", Column("shared", Text))
    op.create_table(
        "dbb_probe",
        Column("run_id", BigInteger, primary_key=True, autoincrement=False),
        Column("step", BigInteger, primary_key=True, autoincrement=False),
        Column("prompt_id", BigInteger, primary_key=True, autoincrement=False),
        Column("samples", BigInteger, nullable=False),
        Column("successes", Double, nullable=False),
        Column("squares", Double, nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        """CREATE VIEW probes AS
           SELECT run_id, step, prompt_id, samples, successes, successes / samples AS mean
           FROM dbb_probe"""
    )
    op.execute(
        """CREATE VIEW steps AS
           SELECT run_id, step, prompts, rollouts, successes, shared, created_at FROM dbb_step"""
    )
