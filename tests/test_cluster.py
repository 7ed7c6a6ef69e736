"""A run finds its Ray cluster, refuses one that cannot serve it, and names an actor that has died."""

import functools
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from openrlhf_dbb import storage
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.driver import arguments, checks, ray_session, watching
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import engines
from openrlhf_dbb.platform import machine, ray_start

ROOT = Path(__file__).parents[1]
SEPARATE = ["--no-train.colocate_all", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "3"]


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        (["--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"], 2),  # colocated: shared
        (SEPARATE, 2 + 3),
        ([*SEPARATE, "--vllm.tensor_parallel_size", "2"], 2 + 6),
        ([*SEPARATE, "--algo.kl.init_coef", "0.1", "--ref.num_gpus_per_node", "1"], 2 + 3 + 1),
        ([*SEPARATE, "--algo.kl.init_coef", "0.1", "--train.colocate_actor_ref"], 2 + 3),
    ],
)
def test_gpus_are_counted_as_openrlhf_reserves_them(flags, gpus):
    assert checks.gpus_needed(arguments.parse(["--preset", "tiny", *flags]).args) == gpus


def test_fewer_cpus_than_gpus_are_given_or_counted_and_the_part_that_has_died_is_named(
    pretend_gpus, monkeypatch
):
    ray_start.prepare()
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("PYTHONPATH", f"/of/the/host:{ROOT}")
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: 1)
    pretend_gpus(2)
    given = []
    one_cpu = functools.partial(ray_start.init, num_cpus=1, num_gpus=2)
    monkeypatch.setattr(
        ray_start, "init", lambda num_cpus, **more: given.append(num_cpus) or one_cpu(**more)
    )
    try:
        with pytest.raises(
            UsageError, match=r"^these flags need 3 GPUs, there are 1; .*--cpus-per-task"
        ):
            ray_session.start(
                arguments.parse(["--preset", "tiny", *SEPARATE, "--vllm.num_engines", "1"])
            )
        assert ray_start.places(2) == 1
        see_a_host_that_runs_no_task(monkeypatch)
        see_who_has_died(ray)
    finally:
        ray.shutdown()
    with pytest.raises(UsageError, match=r"^Ray has GPUs, each with a CPU, for 1 engines with"):
        engines.ray_started(2, 1, verbose=False).__enter__()
    assert given == [2 + 2, 2 + 2]


def see_a_host_that_runs_no_task(monkeypatch):
    """Within no time at all none does."""
    monkeypatch.setattr(ray_session, "_TASK_WITHIN_S", 0)
    refusal = r"^node \S+ \(\S+\) has run no task for 0 minutes; .*RAY_worker_niceness=0"
    with pytest.raises(UsageError, match=refusal):
        ray_session._check_seen(ROOT)


def see_who_has_died(ray):
    """Also: a worker keeps the PYTHONPATH of its host, and finds what stands in for packages that need CUDA."""

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, broken=False):
            if broken:
                raise ValueError("no such model")

        def process(self):
            stands_in = any("openrlhf_dbb/platform/shims" in path for path in sys.path)
            return os.getpid(), os.environ["PYTHONPATH"], stands_in

    alive = Worker.remote()
    killed = Worker.remote()
    broken = Worker.remote(broken=True)
    pid, path, stands_in = ray.get(killed.process.remote())
    assert (path, stands_in) == (f"/of/the/host:{ROOT}", True)
    parts = {"vLLM engine 0": alive, "rank 1 of the policy": killed}
    assert watching.find_dead(parts, 0) is None
    os.kill(pid, signal.SIGKILL)
    on = f"(process {pid} on host {os.uname().nodename} ({ray.util.get_node_ip_address()}))"
    crashed = "has died: killed or crashed, perhaps for want of memory (see dmesg on that host)"
    assert watching.find_dead(parts, 120) == f"rank 1 of the policy {on} {crashed}"
    ray.wait([broken.process.remote()], timeout=120)
    # The exception of its constructor says more
    assert watching.find_dead({"rank 0 of the policy": broken}) is None


@pytest.mark.parametrize(
    ("alive", "gpus", "line"),
    [
        ("ab", 16, None),
        ("a", 8, None),  # the others are not needed
        ("a", 9, "too few hosts are left (without b 8 of 9 GPUs): Ray has lost the host, which"),
        ("", 0, "no host is left (a, b): Ray has lost the host, which"),
    ],
)
def test_a_run_that_has_too_few_hosts_left_is_told_which_are_lost(monkeypatch, alive, gpus, line):
    import ray

    resources = {"GPU": 8.0, "CPU": 64.0}
    hosts = [
        {"NodeManagerHostname": name, "Alive": name in alive, "Resources": resources}
        for name in "ab"
    ]
    monkeypatch.setattr(ray, "nodes", lambda: hosts)
    lost = ray_start.find_lost(gpus)
    assert lost is line or lost.startswith(line)


def test_a_cluster_is_that_of_ray_address_or_the_one_on_this_host_or_none(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert machine.ray_cluster() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert machine.ray_cluster() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert machine.ray_cluster() == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert machine.ray_cluster() is None


def test_a_cluster_that_is_gone_is_refused_at_once(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", gone)
    with pytest.raises(
        UsageError,
        match=rf"Ray cluster at {gone} .*Connection refused.*; start",
    ):
        ray_session.RayStart(arguments.parse(["--preset", "tiny", "--estimator", "dbb"]))


@pytest.mark.parametrize(("outputs", "flag"), [("runs", "--ckpt.path"), ("/out", "--store.url")])
def test_nothing_is_written_into_the_copy_that_ray_makes_of_a_jobs_folder(
    monkeypatch, tmp_path, outputs, flag
):
    copy = tmp_path / "working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    settings = arguments.parse(
        ["--preset", "tiny", *(f"--{each}={outputs}" for each in arguments.OUTPUTS)]
    )
    with pytest.raises(UsageError, match=rf"^{flag} {copy}/.*Ray's temporary copy"):
        checks.check(settings)


def test_the_role_that_the_page_makes_can_keep_a_store(new_url):
    import psycopg

    page = (ROOT / "docs/store.md").read_text()
    statements = re.findall(r'-c "([^"]+)"', page)
    assert [statement.split()[0] for statement in statements] == ["CREATE", "GRANT"]
    url = new_url("postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
        try:
            with storage.open_store(url.replace("postgres:@", "trainer:...@")) as store:
                assert store.runs() == []
                assert store.query("SELECT current_user")[0][0] == "trainer"
        finally:
            connection.execute("DROP OWNED BY trainer")
            connection.execute("DROP ROLE trainer")


def test_the_launcher_is_refused_with_more_than_one_host(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "CROSS_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert train_grpo.main(["--estimator", "dbb"]) == 2
    assert re.match(r"error: .*deepspeed launcher .*\b2 hosts.*Ray", capsys.readouterr().err)
