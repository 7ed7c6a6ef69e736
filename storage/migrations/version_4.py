"""Version 4: how likely it was that a strategy that chooses its prompts drew this one."""

from alembic import op
from sqlalchemy import Column, Double

ADDS = ()

_VERSION = "coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION))"

_POSTERIOR_HISTORY = f"""
        SELECT run_id, step, prompt_id, rollouts, successes, alpha, beta, mean, variance,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag, inclusion
        FROM dbb_history"""


def upgrade() -> None:
    """From version 3 to 4."""
    op.add_column("dbb_history", Column("inclusion", Double))
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP VIEW posterior_history")
        op.execute(f"CREATE VIEW posterior_history AS {_POSTERIOR_HISTORY}")
    else:  # in place: grants, and views of others over it, stay
        op.execute(f"CREATE OR REPLACE VIEW posterior_history AS {_POSTERIOR_HISTORY}")
