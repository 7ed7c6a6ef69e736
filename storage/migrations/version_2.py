"""Version 2: kept rollouts with their texts, and each step's metrics."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Text

ADDS = ("dbb_rollout", "rollouts")

_ROLLOUTS = """
        SELECT run_id, step, prompt_id, sample, reward, score, advantage, length, truncated,
               CASE WHEN score IS NULL THEN 1 ELSE 0 END AS missing, log_prob, text
        FROM dbb_rollout"""

_TOTALS = (
    "generated, generated_tokens, trained, trained_tokens, zero_variance, informative, rescued, replayed, "
    "replayed_tokens, skipped, groups, informative_groups"
)

_STEPS = f"""
        SELECT run_id, step, prompts, rollouts, successes, shared, created_at,
               {_TOTALS}, generated - trained AS filtered,
               CAST(sum(generated) OVER (PARTITION BY run_id ORDER BY step) AS BIGINT) AS generated_total, metrics
        FROM dbb_step"""


def upgrade() -> None:
    """From version 1 to 2."""
    op.add_column("dbb_step", Column("metrics", Text))
    op.create_table(
        "dbb_rollout",
        *(
            Column(name, BigInteger, primary_key=True, autoincrement=False)
            for name in ("run_id", "step", "prompt_id", "sample")
        ),
        Column("reward", Double),
        Column("score", Double),
        Column("advantage", Double, nullable=False),
        Column("length", BigInteger, nullable=False),
        Column("truncated", BigInteger),
        Column("log_prob", Double),
        Column("text", Text, nullable=False),
    )
    op.execute(f"CREATE VIEW rollouts AS {_ROLLOUTS}")
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP VIEW steps")
        op.execute(f"CREATE VIEW steps AS {_STEPS}")
    else:  # in place: grants, and views of others over it, stay
        op.execute(f"CREATE OR REPLACE VIEW steps AS {_STEPS}")
