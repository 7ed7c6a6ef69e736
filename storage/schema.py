"""The tables, every column once; the creation of tables and views, and the version check.

A change here or in a view needs a new ``SCHEMA_VERSION``. A database of another version is refused, since there are no
migrations.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    inspect,
    select,
    text,
)

from storage.engine import Database
from storage.errors import StoreError
from storage.retry import retried
from storage.usage import TOTALS
from storage.views import VIEWS

SCHEMA_VERSION = 5

metadata = MetaData()

# SQLite generates ids only in a column of exactly this type.
_Id = BigInteger().with_variant(Integer, "sqlite")


def _run_id() -> Column[int]:
    return Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), primary_key=True, comment="the run")


schema_version = Table(
    "dbb_version",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False, comment="version of these tables"),
    Column("library_version", Text, nullable=False, comment="openrlhf-dbb release that made them"),
)

# Where development versions before 0.1.0 kept their version, 1 to 3; the present versions are none of them.
_DEVELOPMENT_TABLE = "dbb_schema"

run = Table(
    "dbb_run",
    metadata,
    Column("run_id", _Id, primary_key=True, comment="id of the run in this database"),
    Column("uuid", Text, nullable=False, unique=True, comment="32 hex digits, unique in all databases"),
    Column("name", Text, nullable=False, unique=True, comment="name given by the user"),
    Column("status", Text, nullable=False, comment="running or finished"),
    Column("last_step", BigInteger, nullable=False, comment="last recorded training step, 0 before the first"),
    Column("estimator", Text, nullable=False, comment="name of the reward estimator"),
    Column("estimator_version", Integer, nullable=False, comment="version of the meaning of its state"),
    Column("parameters", Text, nullable=False, comment="parameters of the estimator, JSON"),
    Column("state_fields", Text, nullable=False, comment="names of the state's fields, JSON list"),
    Column("model", Text, nullable=False, comment="model that is trained"),
    Column("dataset", Text, nullable=False, comment="data set of the prompts"),
    Column("dataset_digest", Text, nullable=False, comment="digest of its prompts and labels"),
    Column("reward", Text, nullable=False, comment="reward function"),
    Column("config", Text, nullable=False, comment="training configuration, JSON"),
    Column("method", Text, comment="training method (grpo, dapo, ...); NULL if not given"),
    Column("created_at", Text, nullable=False, comment="start of the run, UTC, ISO 8601"),
    Column("heartbeat_at", Text, nullable=False, comment="last write of its owner, UTC, ISO 8601"),
    Column("writer_token", Text, nullable=False, comment="secret of the process that may write, its owner"),
    Column("owner_host", Text, nullable=False, comment="host of the owner"),
    Column("owner_pid", BigInteger, nullable=False, comment="its process id"),
    Column("owner_started", Text, comment="its start, ticks since boot and boot id; NULL if unknown"),
    Column("parent_name", Text, comment="run this one was warm-started from; NULL if none"),
    Column("parent_uuid", Text, comment="uuid of that run"),
    Column("parent_step", BigInteger, comment="its last step at that time"),
    Column("parent_weight", Double, comment="factor in (0, 1] on its alpha and beta"),
    Column("parent_database", Text, comment="where it is stored"),
    Column("shared_start", Text, comment="run-wide state from the warm start, JSON; NULL if none"),
    comment="Training runs",
    sqlite_autoincrement=True,
)

prompt = Table(
    "dbb_prompt",
    metadata,
    Column("prompt_id", _Id, primary_key=True, comment="id of the prompt in this database"),
    Column("hash", LargeBinary, nullable=False, unique=True, comment="16 bytes, BLAKE2b of prompt and label"),
    Column("prompt", Text, nullable=False, comment="what the model saw; U+0000 is stored as U+FFFD"),
    Column("label", Text, nullable=False, comment="reference answer; U+0000 is stored as U+FFFD"),
    comment="Prompts of all runs; the same text with another label is another prompt",
    sqlite_autoincrement=True,
)

# No foreign keys in the next four tables, nor in dbb_evaluation_result: they are large, and always written together
# with a row of dbb_step or dbb_evaluation, which have them.
posterior = Table(
    "dbb_posterior",
    metadata,
    Column("run_id", BigInteger, primary_key=True, autoincrement=False, comment="the run"),
    Column("prompt_id", BigInteger, primary_key=True, autoincrement=False, comment="the prompt"),
    Column("alpha", Double, comment="discounted successes, rollouts; NULL if the estimator has none"),
    Column("beta", Double, comment="discounted failures, rollouts; NULL if the estimator has none"),
    Column("state", LargeBinary, comment="other state fields, little-endian float64; NULL if none"),
    Column("visits", BigInteger, nullable=False, comment="steps of this run that trained on the prompt"),
    Column("step", BigInteger, nullable=False, comment="the last of them; 0: warm start only"),
    comment="Current posterior of each prompt that a run has seen or was warm-started with",
    sqlite_with_rowid=False,
)

# Keyed by step first: appends stay at the end of the index however long the history is.
history = Table(
    "dbb_history",
    metadata,
    Column("run_id", BigInteger, primary_key=True, autoincrement=False, comment="the run"),
    Column("step", BigInteger, primary_key=True, autoincrement=False, comment="training step, from 1"),
    Column("prompt_id", BigInteger, primary_key=True, autoincrement=False, comment="the prompt"),
    Column("rollouts", BigInteger, nullable=False, comment="rewards seen in this step"),
    Column("successes", Double, nullable=False, comment="their sum"),
    Column("alpha", Double, comment="posterior after the step, as in dbb_posterior"),
    Column("beta", Double, comment="posterior after the step"),
    Column("state", LargeBinary, comment="posterior after the step"),
    Column("mean", Double, nullable=False, comment="estimated mean of one reward, used in this step"),
    Column("variance", Double, nullable=False, comment="estimated variance of one reward, used in this step"),
    Column("prev_alpha", Double, comment="posterior before the step; NULL if there was none"),
    Column("prev_beta", Double, comment="posterior before the step"),
    Column("prev_state", LargeBinary, comment="posterior before the step"),
    Column("prev_step", BigInteger, nullable=False, comment="step of that posterior; 0: warm start; -1: none"),
    Column("policy_version", Double, comment="training steps its rollouts' policy had seen, mean; NULL: step - 1"),
    Column(
        "inclusion", Double, comment="probability with which the strategy drew the prompt; NULL: it does not choose"
    ),
    comment="Every posterior of every step, with the one before it, so that steps can be undone",
    sqlite_with_rowid=False,
)

probe = Table(
    "dbb_probe",
    metadata,
    Column("run_id", BigInteger, primary_key=True, autoincrement=False, comment="the run"),
    Column("step", BigInteger, primary_key=True, autoincrement=False, comment="training step whose policy was probed"),
    Column("prompt_id", BigInteger, primary_key=True, autoincrement=False, comment="the prompt"),
    Column("samples", BigInteger, nullable=False, comment="extra rollouts"),
    Column("successes", Double, nullable=False, comment="sum of their scores"),
    Column("squares", Double, nullable=False, comment="sum of their squared scores"),
    comment="Extra rollouts that measure the policy; never trained on, never seen by the estimator",
    sqlite_with_rowid=False,
)

# With row ids, unlike its neighbours: its texts are long.
rollout = Table(
    "dbb_rollout",
    metadata,
    Column("run_id", BigInteger, primary_key=True, autoincrement=False, comment="the run"),
    Column("step", BigInteger, primary_key=True, autoincrement=False, comment="training step, from 1"),
    Column("prompt_id", BigInteger, primary_key=True, autoincrement=False, comment="the prompt"),
    Column("sample", BigInteger, primary_key=True, autoincrement=False, comment="place in its group, from 0"),
    Column("reward", Double, comment="what was optimized; NULL if it could not be verified"),
    Column("score", Double, comment="the verifier's, before penalties; NULL if it could not be verified"),
    Column("advantage", Double, nullable=False, comment="0 if it could not be verified"),
    Column("length", BigInteger, nullable=False, comment="response tokens"),
    Column("truncated", BigInteger, comment="1: cut at the length limit; 0: not; NULL: not known"),
    Column("log_prob", Double, comment="sum over the response's tokens when sampled; NULL if not known"),
    Column("text", Text, nullable=False, comment="what the model wrote; U+0000 is stored as U+FFFD"),
    Column("policy_version", Double, comment="training steps the policy had seen that wrote it; NULL: step - 1"),
    comment="Some rollouts of every step",
)

step = Table(
    "dbb_step",
    metadata,
    _run_id(),
    Column("step", BigInteger, primary_key=True, autoincrement=False, comment="training step, from 1"),
    Column("prompts", BigInteger, nullable=False, comment="rows of dbb_history in this step"),
    Column("rollouts", BigInteger, nullable=False, comment="rewards seen in this step"),
    Column("successes", Double, nullable=False, comment="their sum"),
    Column("digest", LargeBinary, nullable=False, comment="16 bytes, identifies the content of the step"),
    Column("created_at", Text, nullable=False, comment="UTC, ISO 8601"),
    Column("shared", Text, comment="run-wide state after the step, vectors by name, JSON; NULL: none or unchanged"),
    # NULL: the step's rollouts were not counted.
    *(Column(name, BigInteger, comment=f"{comment}; NULL if not counted") for name, comment in TOTALS.items()),
    Column("metrics", Text, comment="what the trainer logged of the step, numbers by name, JSON; NULL if nothing"),
    comment="Recorded steps: a step is here if and only if all of it was written",
    sqlite_with_rowid=False,
)

checkpoint = Table(
    "dbb_checkpoint",
    metadata,
    _run_id(),
    Column("step", BigInteger, primary_key=True, autoincrement=False, comment="step the model was saved at"),
    Column("tag", Text, primary_key=True, comment="name of the model checkpoint"),
    Column("created_at", Text, nullable=False, comment="UTC, ISO 8601"),
    comment="Model checkpoints that the stored posteriors are known to cover",
    sqlite_with_rowid=False,
)

event = Table(
    "dbb_event",
    metadata,
    Column("event_id", _Id, primary_key=True, comment="id of the event in this database"),
    Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), nullable=False, comment="the run"),
    Column("created_at", Text, nullable=False, comment="UTC, ISO 8601"),
    Column("kind", Text, nullable=False, comment="claim, take_over, roll_back, warm_start or finish"),
    Column("from_step", BigInteger, nullable=False, comment="last step before the event"),
    Column("to_step", BigInteger, nullable=False, comment="last step after the event"),
    Column("detail", Text, nullable=False, comment="JSON"),
    comment="What happened to a run besides steps and checkpoints",
    sqlite_autoincrement=True,
)

# A model may be evaluated without its training run.
evaluation = Table(
    "dbb_evaluation",
    metadata,
    Column("evaluation_id", _Id, primary_key=True, comment="id of the evaluation in this database"),
    Column("run_id", BigInteger, ForeignKey("dbb_run.run_id"), comment="the run that trained it; NULL if not given"),
    Column("step", BigInteger, comment="training step after which it was evaluated; NULL if not given"),
    Column("name", Text, nullable=False, comment="name of the evaluation; training: made during training"),
    Column("model", Text, nullable=False, comment="model that was evaluated"),
    Column("config", Text, nullable=False, comment="sampling parameters and whatever else was given, JSON"),
    Column("generated_total", BigInteger, comment="training rollouts generated by then; NULL if not given"),
    Column("created_at", Text, nullable=False, comment="UTC, ISO 8601"),
    comment="Evaluations of a model; a new one replaces that of the same run, step and name",
    sqlite_autoincrement=True,
)

evaluation_result = Table(
    "dbb_evaluation_result",
    metadata,
    Column("evaluation_id", BigInteger, primary_key=True, autoincrement=False, comment="the evaluation"),
    Column("benchmark", Text, primary_key=True, comment="name of the benchmark"),
    Column("repeat", BigInteger, primary_key=True, autoincrement=False, comment="evaluation run (seed), from 0"),
    Column("place", BigInteger, primary_key=True, autoincrement=False, comment="place of the prompt, from 0"),
    Column("prompt_id", BigInteger, nullable=False, comment="the prompt"),
    Column("samples", BigInteger, nullable=False, comment="responses (N)"),
    Column("verified", BigInteger, nullable=False, comment="of these, responses with a score"),
    Column("successes", Double, nullable=False, comment="sum of the scores"),
    Column("best", Double, comment="highest score; NULL if none is verified"),
    Column("majority", Double, comment="score of the most frequent answer; NULL if there are no answers"),
    Column("tokens", BigInteger, nullable=False, comment="tokens of all responses"),
    Column("truncated", BigInteger, nullable=False, comment="responses cut at the length limit"),
    comment="Results of a model on each prompt of a benchmark in each evaluation run",
    sqlite_with_rowid=False,
)

# Any constant that no other program uses: all programs on a PostgreSQL database share its advisory locks.
_CREATION_LOCK = int.from_bytes(b"orlhfdbb", "big")


@retried
def prepare(database: Database, *, create: bool) -> None:
    """Check the tables, or create them; any number of processes may do so at once.

    Raises:
        StoreError: another version, another program's table under one of our names, or no tables and ``create``
            is False.
    """
    with database.transaction() as connection:
        missing = _check(connection, database, create)
    if create:
        database.use_wal()
    if not missing:
        return
    with database.transaction(write=True) as connection:
        lock(connection, database)
        # Check again, now that nobody else can create them.
        if not _check(connection, database, create):
            return
        metadata.create_all(connection, checkfirst=False)
        for name, query in VIEWS.items():
            connection.execute(text(f"CREATE VIEW {name} AS {query}"))
        if not database.is_sqlite:
            # Room for updates in place, and a vacuum before dead rows double the table.
            connection.execute(
                text("ALTER TABLE dbb_posterior SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02)")
            )
        connection.execute(schema_version.insert().values(version=SCHEMA_VERSION, library_version=library_version()))


def lock(connection: Connection, database: Database) -> None:
    """Keep every other process from creating the tables until the transaction ends."""
    if not database.is_sqlite:  # SQLite's write transactions exclude each other
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CREATION_LOCK})


def _check(connection: Connection, database: Database, create: bool) -> bool:
    """Whether the tables must be created; raises StoreError as :func:`prepare`."""
    stored = stored_version(connection, database)
    if stored is not None:
        found, library = stored
        if found < SCHEMA_VERSION:
            raise StoreError(
                f"{database.location} has schema version {found}, this openrlhf-dbb ({library_version()}) needs "
                f"version {SCHEMA_VERSION}; read it with openrlhf-dbb {library}, which made it, or name a new database"
            )
        return False
    if not create:
        raise StoreError(f"{database.location} holds no posteriors; check the URL, or start a run to create them")
    inspector = inspect(connection)
    names = {*inspector.get_table_names(), *inspector.get_view_names()}
    refuse_taken(names & {*metadata.tables, *VIEWS}, database)
    return True


def refuse_taken(names: set[str], database: Database) -> None:
    """Raise StoreError if another program has a table or view under one of our names."""
    for name in sorted(names):
        raise StoreError(
            f"{database.location} already has a table or view {name!r} that is not openrlhf-dbb's; "
            "give the posteriors a database of their own"
        )


def stored_version(connection: Connection, database: Database) -> tuple[int, str] | None:
    """Return the tables' version and the release that made them; None if there are no tables.

    Raises:
        StoreError: it is newer than this library's, or from before the first release.
    """
    inspector = inspect(connection)
    if inspector.has_table(_DEVELOPMENT_TABLE):
        move = "move the file away, or " if database.is_sqlite else ""
        raise StoreError(
            f"{database.location} was made by a development version of openrlhf-dbb before 0.1.0, which this release "
            f"({library_version()}) cannot read; {move}name a new database"
        )
    if not inspector.has_table(schema_version.name):
        return None
    found, library = connection.execute(select(schema_version.c.version, schema_version.c.library_version)).one()
    if found > SCHEMA_VERSION:
        raise StoreError(
            f"{database.location} has schema version {found}, this openrlhf-dbb ({library_version()}) "
            f"works with version {SCHEMA_VERSION}; upgrade openrlhf-dbb to {library} or later, or name a new database"
        )
    return int(found), str(library)


def library_version() -> str:
    """Version of the installed openrlhf-dbb."""
    try:
        return version("openrlhf-dbb")
    except PackageNotFoundError:
        return "unknown release"
