"""Version 3: the ledger of groups, and the policy versions of visits and kept rollouts."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, ForeignKey, Text

ADDS = ("dbb_group", "groups")

_VERSION = "coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION))"

_POSTERIOR_HISTORY = f"""
        SELECT run_id, step, prompt_id, rollouts, successes, alpha, beta, mean, variance,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag
        FROM dbb_history"""

_ROLLOUTS = f"""
        SELECT run_id, step, prompt_id, sample, reward, score, advantage, length, truncated,
               CASE WHEN score IS NULL THEN 1 ELSE 0 END AS missing, log_prob, text,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag
        FROM dbb_rollout"""

_GROUPS = """
        SELECT run_id, ordinal, pass, prompt_id, rollouts, policy_version, fate, step,
               step - 1 - policy_version AS lag
        FROM dbb_group"""


def upgrade() -> None:
    """From version 2 to 3."""
    for table in ("dbb_history", "dbb_rollout"):
        op.add_column(table, Column("policy_version", Double))
    op.create_table(
        "dbb_group",
        Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), primary_key=True),
        Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
        Column("pass", BigInteger, nullable=False),
        Column("prompt_id", BigInteger, nullable=False),
        Column("rollouts", BigInteger, nullable=False),
        Column("policy_version", Double, nullable=False),
        Column("fate", Text, nullable=False),
        Column("step", BigInteger),
        sqlite_with_rowid=False,
    )
    op.execute(f"CREATE VIEW groups AS {_GROUPS}")
    for view, query in (("posterior_history", _POSTERIOR_HISTORY), ("rollouts", _ROLLOUTS)):
        if op.get_bind().dialect.name == "sqlite":
            op.execute(f"DROP VIEW {view}")
            op.execute(f"CREATE VIEW {view} AS {query}")
        else:  # in place: grants, and views of others over it, stay
            op.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")
