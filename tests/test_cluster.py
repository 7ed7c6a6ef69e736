"""Which Ray cluster a run joins, what it asks of the nodes, how long it waits, and what is said when a part dies."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.driver import arguments, cluster, nodes
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import machine

HERE = {
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "unreadable": [],
    "shared": True,
    "free": 50.0,
    "lacking": [],
}
FLAGS = {"/data/model": "--actor.model_name_or_path", "/data/reward.py": "--reward.remote_url"}


@pytest.mark.parametrize(
    ("there", "lines"),
    [
        ({}, []),
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.1"}},
            ["node b (10.0.0.2) has torch 2.12.1, this host 2.13.0; install the same there"],
        ),
        (
            {"versions": {"python": "3.11.7", "torch": None}},
            ["node b (10.0.0.2) has torch none, this host 2.13.0; install the same there"],
        ),
        (
            {"unreadable": ["/data/reward.py"]},
            [
                "node b (10.0.0.2) cannot read /data/reward.py (--reward.remote_url); put it there, or on a shared "
                "file system"
            ],
        ),
        (
            {"shared": False, "free": None},
            ["node b (10.0.0.2) does not see /out (--ckpt.path); all hosts have to share that folder"],
        ),
        ({"free": 0.25}, ["node b (10.0.0.2) has 0.2 GiB left in /out (--ckpt.path); make room there"]),
        ({"lacking": ["there is no C compiler"]}, ["node b (10.0.0.2): there is no C compiler"]),
    ],
    ids=["as here", "another version", "no torch", "a missing file", "not shared", "a full disk", "no compiler"],
)
def test_what_a_node_lacks_is_said_with_its_name_and_the_flag(there, lines):
    seen = {"a (10.0.0.1)": HERE, "b (10.0.0.2)": {**HERE, **there}}
    assert nodes.problems(HERE, seen, FLAGS, "/out") == lines


def test_a_look_at_this_host_finds_what_it_has(tmp_path):
    (tmp_path / "token").touch()
    found = nodes.look([str(tmp_path), str(tmp_path / "missing")], str(tmp_path / "token"))
    assert found["unreadable"] == [str(tmp_path / "missing")]
    assert found["shared"] and found["free"] > 0
    assert found["versions"]["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["versions"]["openrlhf"] == "0.11.2"
    assert nodes.look([], str(tmp_path / "elsewhere"))["shared"] is False


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
    line = rf"^the Ray cluster at {gone} does not answer \(Connection refused\); start it, call `ray stop` if"
    with pytest.raises(UsageError, match=line):
        cluster.RayStart(arguments.parse(["--preset", "tiny", "--estimator", "dbb"]))


def test_the_launcher_is_refused_with_more_than_one_host(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "CROSS_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert train_grpo.main(["--estimator", "dbb"]) == 2
    assert capsys.readouterr().err.startswith("error: the deepspeed launcher was given 2 hosts, but Ray places the")


OUTPUTS = [
    "--ckpt.path",
    "/out/checkpoints",
    "--ckpt.output_dir",
    "/out/model",
    "--logger.tensorboard_dir",
    "/out/logs",
]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [([], "--ckpt.path"), (OUTPUTS, "--store.url"), ([*OUTPUTS, "--store.url", "sqlite:////out/store.db"], None)],
)
def test_nothing_is_written_into_the_copy_that_ray_makes_of_a_jobs_folder(monkeypatch, tmp_path, argv, flag):
    copy = tmp_path / "working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    settings = arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv])
    if flag is None:
        cluster.check_places(settings)
        return
    with pytest.raises(
        UsageError, match=f"^{flag} {copy}/.* is in Ray's temporary copy of the working directory; give"
    ):
        cluster.check_places(settings)


# A cluster with two GPUs, one of which another actor holds; then that actor ends.
WAITING = """
import ray, threading
from openrlhf_dbb.driver import arguments, cluster

flags = ["--estimator", "dbb", "--preset", "tiny", "--actor.num_gpus_per_node", "2"]
settings = arguments.parse(flags)
cluster._POLL_S = 0.1
cluster.WAIT_MINUTES = 0.03
cluster.start(settings)

@ray.remote(num_gpus=1)
class Other:
    def environment(self):
        import os, sys
        return os.environ["PYTHONPATH"], any(path.endswith("openrlhf_dbb/platform/shims") for path in sys.path)

other = Other.remote()
print(*ray.get(other.environment.remote()))
try:
    cluster.wait_for_gpus(settings)
except Exception as error:
    print(type(error).__name__, error)
threading.Timer(1, ray.kill, [other]).start()
cluster.WAIT_MINUTES = 1
cluster.wait_for_gpus(settings)
print("free")
"""


def test_a_run_waits_for_gpus_that_others_use_and_says_so():
    """Also: a worker keeps the PYTHONPATH of its host, and finds what stands in for packages that need CUDA."""
    environment = os.environ | {"PYTHONPATH": "/of/the/host", "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    state = "1 of 2 are free, others run on the rest"
    assert done.stdout.splitlines() == [
        "/of/the/host True",
        f"waiting for 2 GPUs, 0.03 minutes at most: {state}",
        f"UsageError waited 0.03 minutes for 2 GPUs: {state}; start again when they are free, or need fewer with "
        "--actor.num_gpus_per_node and --vllm.num_engines",
        f"waiting for 2 GPUs, 1 minutes at most: {state}",
        "free",
    ]


# Three actors on one host: one is killed, one raises in its constructor, one lives.
DEATHS = """
import os, signal, time
import ray
from openrlhf_dbb.driver import deaths

ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, broken=False):
        if broken:
            raise ValueError("no such model")
    def pid(self):
        return os.getpid()
    def ask(self, other):
        return ray.get(other.pid.remote())

alive, killed, broken = Worker.remote(), Worker.remote(), Worker.remote(broken=True)
pid = ray.get(killed.pid.remote())
parts = [deaths.Part.of(name, actor) for name, actor in (("vLLM engine 0", alive), ("rank 1 of the policy", killed))]
ray.wait([part.place for part in parts], num_returns=2)
print(deaths.find(parts, deaths.oom_kills()))
os.kill(pid, signal.SIGKILL)
began = time.monotonic()
line = deaths.find(parts, deaths.oom_kills())
for known, name in ((pid, "PID"), (os.uname().nodename, "HOST"), (ray.util.get_node_ip_address(), "ADDRESS")):
    line = line.replace(str(known), name)
print(line)
print(time.monotonic() - began < 30)
print(deaths.find([deaths.Part.of("rank 0 of the policy", broken)], deaths.oom_kills()))
print(deaths.find(parts, -1).split(": ")[-1])

for asked in (killed, broken):
    try:
        ray.get(alive.ask.remote(asked))
    except ray.exceptions.RayError as error:
        print(str(deaths.named(error, deaths.oom_kills())).replace(str(pid), "PID"))
"""


def test_the_part_that_has_died_is_named_with_its_process_and_host():
    done = subprocess.run([sys.executable, "-c", DEATHS], capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stdout.splitlines() if "(raylet)" not in line] == [
        "None",
        "rank 1 of the policy (process PID on host HOST (ADDRESS)) has died: its process was killed or has crashed "
        "(for want of memory? dmesg on its host tells)",
        "True",
        "None",  # its own exception tells more
        "the kernel has killed a process for want of memory meanwhile",
        "Worker (process PID) has died: its process was killed or has crashed (for want of memory? dmesg on its host "
        "tells)",
        "None",
    ]


def test_the_role_that_the_page_makes_can_keep_a_store(new_url):
    import psycopg

    page = (Path(__file__).parents[1] / "docs/machines.md").read_text()
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
