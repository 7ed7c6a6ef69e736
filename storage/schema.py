"""The tables, every column once, and the views; their creation, and the check of their version.

The views are the same on both databases. Build on the views: tables may change with the schema version. A change here
needs a new ``SCHEMA_VERSION``. A database of another version is refused, since there are no migrations.
"""

import math
from importlib.metadata import version
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    inspect,
)
from sqlalchemy.engine import Connection

from openrlhf_dbb.storage.engine import Database
from openrlhf_dbb.storage.errors import StoreError, retried
from openrlhf_dbb.storage.records import TOTALS

SCHEMA_VERSION = 8

metadata = MetaData()

# SQLite generates ids only in a column of exactly this type.
_Id = BigInteger().with_variant(Integer, "sqlite")


def _table(name: str, *columns: Column[Any], **options: Any) -> Table:
    return Table(name, metadata, *columns, **options)


# A number outside of ``least`` and ``most`` was edited by hand; the defaults are those of :func:`bounds`.
def _key(name: str, kind: Any, comment: str, **bounds: float) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False, comment=comment, info=bounds)


def _required(name: str, kind: Any, comment: str, **bounds: float) -> Column[Any]:
    return Column(name, kind, nullable=False, comment=comment, info=bounds)


def _optional(name: str, kind: Any, comment: str, **bounds: float) -> Column[Any]:
    return Column(name, kind, comment=comment, info=bounds)


_MOST_COUNTED = 10**12  # the sum of a run's steps fits into 64 bits
_LARGEST = 1e150  # its square is finite
_ANY: dict[str, float] = {"least": -math.inf, "most": math.inf}


def bounds(column: Column[Any]) -> tuple[float, float]:
    """Return the least and the largest number that a run writes into a column of numbers."""
    is_whole = column.type.python_type is int
    least = column.info.get("least", 0 if is_whole else -_LARGEST)
    most = column.info.get("most", _MOST_COUNTED if is_whole else _LARGEST)
    return least, most


schema_version = _table(
    "dbb_version",
    _key("version", Integer, "version of these tables"),
    _required("library_version", Text, "openrlhf-dbb release that made them"),
)

run = _table(
    "dbb_run",
    Column("run_id", _Id, primary_key=True, comment="id of the run in this database"),
    Column(
        "uuid", Text, nullable=False, unique=True, comment="32 hex digits, unique in all databases"
    ),
    Column("name", Text, nullable=False, unique=True, comment="name given by the user"),
    _required("status", Text, "running, stale (released unfinished) or finished"),
    _required("last_step", BigInteger, "last recorded training step, 0 before the first"),
    _required("estimator", Text, "name of the reward estimator"),
    _required("estimator_version", Integer, "version of the meaning of its state"),
    _required("parameters", Text, "parameters of the estimator, JSON"),
    _required("state_fields", Text, "names of the state's fields, JSON list"),
    _required("model", Text, "model that is trained"),
    _required("dataset", Text, "data set of the prompts"),
    _required("dataset_digest", Text, "digest of its prompts and labels"),
    _required("reward", Text, "reward function"),
    _required("config", Text, "training configuration, JSON"),
    _optional("method", Text, "training method (grpo, dapo, ...); NULL if not given"),
    _required("created_at", Text, "start of the run, UTC, ISO 8601"),
    _required("heartbeat_at", Text, "last write of its owner, UTC, ISO 8601"),
    _required("writer_token", Text, "secret of the process that may write, its owner"),
    _required("owner_host", Text, "host of the owner"),
    _required("owner_pid", BigInteger, "its process id"),
    _optional(
        "owner_started", Text, "its start: clock ticks @ boot id @ PID namespace; NULL if unknown"
    ),
    _optional("parent_name", Text, "run this one was warm-started from; NULL if none"),
    _optional("parent_uuid", Text, "uuid of that run"),
    _optional("parent_step", BigInteger, "its last step at that time"),
    _optional("parent_weight", Double, "factor in (0, 1] on its alpha and beta", least=0, most=1),
    _optional("parent_database", Text, "where it is stored"),
    _optional("shared_start", Text, "run-wide state from the warm start, JSON; NULL if none"),
    comment="Training runs",
    sqlite_autoincrement=True,
)

prompt = _table(
    "dbb_prompt",
    Column("prompt_id", _Id, primary_key=True, comment="id of the prompt in this database"),
    Column(
        "hash",
        LargeBinary,
        nullable=False,
        unique=True,
        comment="16 bytes, BLAKE2b of prompt and label",
    ),
    _required("prompt", Text, "what the model saw; U+0000 is stored as U+FFFD"),
    _required("label", Text, "reference answer; U+0000 is stored as U+FFFD"),
    comment="Prompts of all runs; the same text with another label is another prompt",
    sqlite_autoincrement=True,
)

# The next four tables and dbb_evaluation_result have no foreign keys: they are large, and always written together with
# a row of dbb_step or dbb_evaluation, which have them.
posterior = _table(
    "dbb_posterior",
    _key("run_id", BigInteger, "the run"),
    _key("prompt_id", BigInteger, "the prompt"),
    _optional("alpha", Double, "discounted successes, rollouts; NULL if the estimator has none"),
    _optional("beta", Double, "discounted failures, rollouts; NULL if the estimator has none"),
    _optional(
        "state", Text, "other state fields, JSON list in the order of state_fields; NULL if none"
    ),
    _required("visits", BigInteger, "steps of this run that trained on the prompt"),
    _required("step", BigInteger, "the last of them; 0: warm start only"),
    comment="Current posterior of each prompt that a run has seen or was warm-started with",
    sqlite_with_rowid=False,
)

# Keyed by step first: appends stay at the end of the index however long the history is.
history = _table(
    "dbb_history",
    _key("run_id", BigInteger, "the run"),
    _key("step", BigInteger, "training step, from 1", least=1),
    _key("prompt_id", BigInteger, "the prompt"),
    _required("rollouts", BigInteger, "rewards seen in this step", least=1),
    _required("successes", Double, "their sum"),
    _optional("alpha", Double, "posterior after the step, as in dbb_posterior"),
    _optional("beta", Double, "posterior after the step"),
    _optional("state", Text, "posterior after the step"),
    _required("mean", Double, "estimated mean of one reward, used in this step"),
    _required("variance", Double, "estimated variance of one reward, used in this step"),
    _optional("prev_alpha", Double, "posterior before the step; NULL if there was none"),
    _optional("prev_beta", Double, "posterior before the step"),
    _optional(
        "prev_state", Text, "posterior before the step if prev_step is 0; else that step has it"
    ),
    _required("prev_step", BigInteger, "step of that posterior; 0: warm start; -1: none", least=-1),
    _optional(
        "policy_version",
        Double,
        "training steps its rollouts' policy had seen, mean; NULL: step - 1",
        least=0,
    ),
    _optional(
        "inclusion",
        Double,
        "probability that the strategy drew the prompt; NULL: it does not choose",
        least=0,
        most=1,
    ),
    comment="Every posterior of every step, with the one before it, so that steps can be undone",
    sqlite_with_rowid=False,
)

probe = _table(
    "dbb_probe",
    _key("run_id", BigInteger, "the run"),
    _key("step", BigInteger, "training step whose policy was probed", least=1),
    _key("prompt_id", BigInteger, "the prompt"),
    _required("samples", BigInteger, "extra rollouts", least=1),
    _required("successes", Double, "sum of their scores"),
    _required("squares", Double, "sum of their squared scores", least=0),
    comment="Extra rollouts that measure the policy; never trained on, never seen by the estimator",
    sqlite_with_rowid=False,
)

# With row ids, unlike its neighbours: its texts are long.
rollout = _table(
    "dbb_rollout",
    _key("run_id", BigInteger, "the run"),
    _key("step", BigInteger, "training step, from 1", least=1),
    _key("prompt_id", BigInteger, "the prompt"),
    _key("sample", BigInteger, "place in its group, from 0"),
    _optional("reward", Double, "what was optimized; NULL if it could not be verified"),
    _optional(
        "score", Double, "the verifier's, before penalties; NULL if it could not be verified"
    ),
    _required("advantage", Double, "0 if it could not be verified", **_ANY),
    _required("length", BigInteger, "response tokens"),
    _optional(
        "truncated", BigInteger, "1: cut at the length limit; 0: not; NULL: not known", most=1
    ),
    _optional(
        "log_prob", Double, "sum over the response's tokens when sampled; NULL if not known", **_ANY
    ),
    _required("text", Text, "what the model wrote; U+0000 is stored as U+FFFD"),
    _optional(
        "policy_version",
        Double,
        "training steps the policy had seen that wrote it; NULL: step - 1",
        least=0,
    ),
    _optional(
        "baseline",
        Double,
        "advantage = weight * (reward - baseline) / scale; NULL if not trained on",
        **_ANY,
    ),
    _optional("scale", Double, "the advantage is 0 where it is 0; NULL if not trained on", **_ANY),
    _optional(
        "weight",
        Double,
        "importance weight of the strategy, 1 without; NULL if not trained on",
        **_ANY,
    ),
    _optional(
        "read", Text, "what the verifier read, or 'no answer' and why; NULL if it does not tell"
    ),
    comment="Some rollouts of every step",
)

step = _table(
    "dbb_step",
    Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), primary_key=True, comment="the run"),
    _key("step", BigInteger, "training step, from 1", least=1),
    _required("prompts", BigInteger, "rows of dbb_history in this step"),
    _required("rollouts", BigInteger, "rewards seen in this step"),
    _required("successes", Double, "their sum"),
    _required("digest", LargeBinary, "16 bytes, identifies the content of the step"),
    _required("created_at", Text, "UTC, ISO 8601"),
    _optional(
        "shared",
        Text,
        "run-wide state after the step, vectors by name, JSON; NULL: none or unchanged",
    ),
    # NULL: the step's rollouts were not counted.
    *(
        _optional(name, BigInteger, f"{comment}; NULL if not counted")
        for name, comment in TOTALS.items()
    ),
    _optional("form", Text, "how a reward became an advantage, by name; NULL if not known"),
    _optional(
        "metrics",
        Text,
        "what the trainer logged of the step, numbers by name, JSON; NULL if nothing",
    ),
    comment="Recorded steps: a step is here if and only if all of it was written",
    sqlite_with_rowid=False,
)

checkpoint = _table(
    "dbb_checkpoint",
    Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), primary_key=True, comment="the run"),
    _key("step", BigInteger, "step the model was saved at"),
    _key("tag", Text, "name of the model checkpoint"),
    comment="Model checkpoints that the stored posteriors are known to cover",
    sqlite_with_rowid=False,
)

event = _table(
    "dbb_event",
    Column("event_id", _Id, primary_key=True, comment="id of the event in this database"),
    Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), nullable=False, comment="the run"),
    _required("created_at", Text, "UTC, ISO 8601"),
    _required("kind", Text, "claim, take_over, roll_back, warm_start, known_rates or finish"),
    _required("from_step", BigInteger, "last step before the event"),
    _required("to_step", BigInteger, "last step after the event"),
    _required("detail", Text, "JSON"),
    comment="What happened to a run besides steps and checkpoints",
    sqlite_autoincrement=True,
)

evaluation = _table(
    "dbb_evaluation",
    Column("evaluation_id", _Id, primary_key=True, comment="id of the evaluation in this database"),
    Column(
        "run_id", BigInteger, ForeignKey("dbb_run.run_id"), comment="the run that trained the model"
    ),
    _optional("step", BigInteger, "training step after which it was evaluated; NULL if not given"),
    _required("name", Text, "name of the evaluation; training: made during training"),
    _required("model", Text, "model that was evaluated"),
    _required("config", Text, "sampling parameters and whatever else was given, JSON"),
    _optional(
        "generated_total", BigInteger, "training rollouts generated by then; NULL if not given"
    ),
    _required("created_at", Text, "UTC, ISO 8601"),
    comment="Evaluations of a model; a new one replaces that of the same run, step and name",
    sqlite_autoincrement=True,
)

evaluation_result = _table(
    "dbb_evaluation_result",
    _key("evaluation_id", BigInteger, "the evaluation"),
    _key("benchmark", Text, "name of the benchmark"),
    _key("repeat", BigInteger, "evaluation run (seed), from 0"),
    _key("place", BigInteger, "place of the prompt, from 0"),
    _required("prompt_id", BigInteger, "the prompt"),
    _required("samples", BigInteger, "responses (N)", least=1),
    _required("verified", BigInteger, "of these, responses with a score"),
    _required("successes", Double, "sum of the scores", **_ANY),
    _optional("best", Double, "highest score; NULL if none is verified", **_ANY),
    _optional(
        "majority",
        Double,
        "score of the most frequent answer; NULL if there are no answers",
        **_ANY,
    ),
    _required("tokens", BigInteger, "tokens of all responses"),
    _required("truncated", BigInteger, "responses cut at the length limit"),
    comment="Results of a model on each prompt of a benchmark in each evaluation run",
    sqlite_with_rowid=False,
)

# What the databases write differently in the view states: the fields of a run, a field's name, and its value.
_SQLITE = {"fields": "json_each(r.state_fields) f", "field": "f.value",
           "value": "json_extract(q.state, '$[' || f.key || ']')"}  # fmt: skip
_POSTGRESQL = {
    "fields": "json_array_elements_text(CAST(r.state_fields AS JSON)) WITH ORDINALITY AS f(name, place)",
    "field": "f.name", "value": "CAST(CAST(q.state AS JSON) ->> CAST(f.place - 1 AS INTEGER) AS DOUBLE PRECISION)",
}  # fmt: skip


def _sum(count: str) -> str:
    """Return SQL of a sum that cannot overflow: SQLite sums the rows of all runs before it chooses those of one."""
    return f"sum(CAST({count} AS DOUBLE PRECISION))"


MEAN = "coalesce(alpha / nullif(alpha + beta, 0), mean)"
"""SQL of the mean of a posterior in a row of the history; the estimate's where there is no posterior."""

# The product of two ratios, not alpha * beta / (alpha + beta)^2, which may overflow, or underflow to 0.
VARIANCE = """
    coalesce((alpha / nullif(alpha + beta, 0)) * (beta / nullif(alpha + beta, 0)), variance)"""
_SAMPLES = f"nullif({_sum('r.samples')}, 0)"
_VERSION = "coalesce(policy_version, CAST(step - 1 AS DOUBLE PRECISION))"

VIEWS = {
    "runs": """
        SELECT run_id, name, uuid, status, last_step, estimator, estimator_version, parameters, state_fields, model,
               dataset, reward, method, created_at, heartbeat_at, parent_name, parent_uuid, parent_step, parent_weight
        FROM dbb_run""",
    "prompts": "SELECT prompt_id, prompt, label FROM dbb_prompt",
    "posterior_history": f"""
        SELECT run_id, step, prompt_id, rollouts, successes, alpha, beta, state, mean, variance, prev_step,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag, inclusion
        FROM dbb_history""",
    "states": """
        SELECT q.run_id, q.prompt_id, {field} AS field,
               CASE {field} WHEN 'alpha' THEN q.alpha WHEN 'beta' THEN q.beta ELSE {value} END AS value
        FROM dbb_posterior q JOIN dbb_run r ON r.run_id = q.run_id CROSS JOIN {fields}""",
    # A flip is from all right to all wrong or back; of fewer than four rollouts both come by chance.
    "prompt_rates": """
        SELECT run_id, prompt_id, count(*) AS visits, CAST(sum(rollouts) AS BIGINT) AS rollouts,
               sum(successes) AS successes, max(rate) AS best, max(CASE WHEN later IS NULL THEN rate END) AS last,
               sum(CASE WHEN rollouts >= 4 AND rate + before = 1 AND rate * before = 0 THEN 1 ELSE 0 END) AS flips
        FROM (SELECT run_id, prompt_id, rollouts, successes, successes / rollouts AS rate,
                     lag(successes / rollouts) OVER visit AS before, lead(step) OVER visit AS later
              FROM dbb_history WINDOW visit AS (PARTITION BY run_id, prompt_id ORDER BY step)) of_visit
        GROUP BY run_id, prompt_id""",
    "probes": """
        SELECT run_id, step, prompt_id, samples, successes, successes / samples AS mean
        FROM dbb_probe""",
    "rollouts": f"""
        SELECT run_id, step, prompt_id, sample, reward, score, advantage, baseline, scale, weight, length, truncated,
               CASE WHEN score IS NULL THEN 1 ELSE 0 END AS missing, log_prob, text, read,
               {_VERSION} AS policy_version, step - 1 - {_VERSION} AS lag
        FROM dbb_rollout""",
    # The sum of big integers is a decimal on PostgreSQL.
    "steps": f"""
        SELECT run_id, step, prompts, rollouts, successes, shared, created_at,
               {", ".join(TOTALS)}, generated - trained AS filtered,
               CAST(sum(generated) OVER (PARTITION BY run_id ORDER BY step) AS BIGINT) AS generated_total, form, metrics
        FROM dbb_step""",
    "evaluation_results": """
        SELECT r.evaluation_id, e.run_id, e.step, e.name, r.benchmark, r.repeat, r.place, r.prompt_id,
               r.samples, r.verified, r.successes, r.best, r.majority, r.tokens, r.truncated
        FROM dbb_evaluation_result r JOIN dbb_evaluation e ON e.evaluation_id = r.evaluation_id""",
    # Means over the prompts of each evaluation run, then over evaluation runs. A prompt without a verified response
    # counts in none of the means; shares and lengths are of all responses.
    "evaluations": f"""
        SELECT evaluation_id, run_id, step, name, model, benchmark, count(*) AS repeats, max(prompts) AS prompts,
               max(samples) AS samples, avg(accuracy) AS accuracy, avg(best) AS best, avg(majority) AS majority,
               avg(length) AS length, avg(truncated) AS truncated, avg(missing) AS missing, generated_total, created_at
        FROM (SELECT e.evaluation_id, e.run_id, e.step, e.name, e.model, r.benchmark, r.repeat,
                     count(*) AS prompts, max(r.samples) AS samples,
                     avg(r.successes / nullif(r.verified, 0)) AS accuracy,
                     avg(r.best) AS best, avg(r.majority) AS majority,
                     {_sum("r.tokens")} / {_SAMPLES} AS length,
                     {_sum("r.truncated")} / {_SAMPLES} AS truncated,
                     ({_sum("r.samples")} - {_sum("r.verified")}) / {_SAMPLES} AS missing,
                     e.generated_total, e.created_at
              FROM dbb_evaluation e JOIN dbb_evaluation_result r ON r.evaluation_id = e.evaluation_id
              GROUP BY e.evaluation_id, e.run_id, e.step, e.name, e.model, e.generated_total, e.created_at,
                       r.benchmark, r.repeat) of_repeat
        GROUP BY evaluation_id, run_id, step, name, model, generated_total, created_at, benchmark""",
    # As MEAN and VARIANCE
    "posteriors": """
        SELECT q.run_id, q.prompt_id, q.alpha, q.beta, q.state,
               coalesce(q.alpha / nullif(q.alpha + q.beta, 0), h.mean) AS mean,
               coalesce((q.alpha / nullif(q.alpha + q.beta, 0)) * (q.beta / nullif(q.alpha + q.beta, 0)),
                        h.variance) AS variance,
               q.visits, q.step
        FROM dbb_posterior q
        LEFT JOIN dbb_history h ON h.run_id = q.run_id AND h.step = q.step AND h.prompt_id = q.prompt_id""",
}

# Any constant that no other program uses: all programs on a PostgreSQL database share its advisory locks.
_CREATION_LOCK = int.from_bytes(b"orlhfdbb", "big")


@retried
def prepare(database: Database, *, create: bool) -> None:
    """Check the tables, or create them; any number of processes may do so at once.

    Raise StoreError if the tables are of another version or program, or there are none and ``create`` is False.
    """
    with database.transaction() as connection:
        database.check_encoding(connection)
        exists = _check_version(connection, database)
    if not create and not exists:
        raise StoreError(
            f"{database.location} holds no posteriors; check the URL, or start a run to create them"
        )
    if create and database.is_sqlite:
        database.use_wal()
    if exists:
        return
    with database.transaction(write=True) as connection:
        if not database.is_sqlite:  # SQLite's write transactions exclude each other
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
        # Another process may have created them meanwhile
        if not _check_version(connection, database):
            _create(connection, database)


def _create(connection: Connection, database: Database) -> None:
    inspector = inspect(connection)
    taken = {*metadata.tables, *VIEWS} & {*inspector.get_table_names(), *inspector.get_view_names()}
    if taken:
        raise StoreError(
            f"{database.location} already has a table or view {min(taken)!r} that is not openrlhf-dbb's; "
            "give the posteriors a database of their own"
        )
    metadata.create_all(connection, checkfirst=False)
    for name, query in VIEWS.items():
        query = query.format(**(_SQLITE if database.is_sqlite else _POSTGRESQL))
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")
    if not database.is_sqlite:
        # Room for updates in place, and a vacuum before dead rows double the table.
        parameters = "fillfactor=80, autovacuum_vacuum_scale_factor=0.02"
        connection.exec_driver_sql(f"ALTER TABLE dbb_posterior SET ({parameters})")
    connection.execute(
        schema_version.insert().values(
            version=SCHEMA_VERSION, library_version=version("openrlhf-dbb")
        )
    )


def _check_version(connection: Connection, database: Database) -> bool:
    if not inspect(connection).has_table(schema_version.name):
        return False
    rows = connection.execute(schema_version.select()).all()
    if len(rows) != 1:
        raise StoreError(
            f"{database.location} has {len(rows)} rows in {schema_version.name}; it must have one, "
            f"of version {SCHEMA_VERSION}; restore a backup"
        )
    [(stored, library)] = rows
    if stored != SCHEMA_VERSION:
        raise StoreError(
            f"{database.location} has schema version {stored!r:.60} of openrlhf-dbb {library!r:.60}; this openrlhf-dbb "
            f"({version('openrlhf-dbb')}) needs version {SCHEMA_VERSION}; use that release, or name a new database"
        )
    return True
