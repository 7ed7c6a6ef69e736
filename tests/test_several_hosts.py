"""A run over two hosts on Ray, as docs/scale.md describes it.

Hosts are namespaces of this machine: each has its own network, host name, processes, home folder, shared memory and
/etc/hosts (with the host's name as 127.0.1.1, as Debian writes it), and they are linked by a virtual cable. Nothing of
it is visible outside, and no address is taken from outside.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from trainings import SMALL, check_posteriors, last_step, logged, rows, wait_for_step

from openrlhf_dbb import tiny

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
NODES = {"nodea": "10.77.9.1", "nodeb": "10.77.9.2"}
HEAD, JOIN = re.findall(r"^ray start .*", (ROOT / "docs/scale.md").read_text(), re.M)
RAY = str(Path(sys.executable).parent / "ray")
# Ray would start 16 idle workers, take a minute to notice that a host is gone, and let other trainings go first.
QUICK = {
    "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "15000", "RAY_health_check_failure_threshold": "2",
}  # fmt: skip
# One rank and one engine on each host.
FLAGS = [
    "--estimator", "dbb", *SMALL, "--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1", "--ref.num_nodes", "2",
    "--vllm.num_engines", "2", "--eval.steps", "-1", "--ckpt.save_steps", "2", "--train.num_episodes", "3",
    "--ds.zero_stage", "3", "--actor.adam.lr", "1e-3",
    "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "0", "1e9",
]  # fmt: skip
CONTINUED = ["--resume", "mine", "--store.take_over"]


def namespaces_are_missing():
    """Why this machine cannot play two hosts; None if it can."""
    for tool in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run(["unshare", "-Urnmupf", "true"], capture_output=True, text=True)
    return f"namespaces are forbidden: {tried.stderr.strip()}" if tried.returncode else None


MISSING = namespaces_are_missing()


class Hosts:
    """Two hosts in namespaces. Each has a folder of its own, mounted as its home; ``shared`` is the same on both."""

    def __init__(self, folder):
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        # The outermost process: it holds the namespaces in which both hosts are made.
        self._outer = self._hold(["unshare", "-Urnm"])
        self._outside = [
            "nsenter",
            "-t",
            str(self._outer.pid),
            "-U",
            "-n",
            "-m",
            "--preserve-credentials",
        ]
        self._inner = {}
        self.start()

    def _hold(self, command):
        process = subprocess.Popen([*command, "sleep", "3600"], start_new_session=True)
        time.sleep(0.3)
        assert process.poll() is None
        return process

    def start(self):
        """Start both, also after a power cut: the disks are as they were, the cable is plugged in, nothing runs."""
        for name in NODES:
            held = self._hold(
                [*self._outside, "unshare", "-nmupif", "--mount-proc", "--kill-child"]
            )
            self._inner[name] = (held, self._first_process(held.pid))
        a, b = (str(self._inner[name][1]) for name in NODES)
        cable = [
            "ip",
            "link",
            "add",
            "va0",
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            "vb0",
            "netns",
            b,
        ]
        subprocess.run([*self._outside, *cable], check=True)
        for name in NODES:
            self._set_up(name)
        # The address belongs to a bridge, so that a host keeps it when the other one is lost, and the cable with it.
        for name, link in zip(NODES, ("va0", "vb0"), strict=True):
            self.run(name, "ip", "link", "set", link, "master", "br0", "up", check=True)

    @staticmethod
    def _first_process(pid):
        """The process that is number 1 on the host."""
        for _ in range(50):
            children = [pid]
            while children:
                pid = children[0]
                children = [
                    int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                ]
            if "sleep" in Path(f"/proc/{pid}/comm").read_text():
                return pid
            time.sleep(0.1)
        raise AssertionError("the host did not start")

    def _set_up(self, name):
        home = self.folder / name
        for part in ("home", "ray"):
            (home / part).mkdir(parents=True, exist_ok=True)
        (home / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        script = f"""
            set -e
            hostname {name}
            ip link set lo up
            ip link add br0 type bridge
            ip addr add {NODES[name]}/24 dev br0
            ip link set br0 up
            mkdir -p /tmp/ray
            mount --bind {home}/ray /tmp/ray
            mount -t tmpfs tmpfs /dev/shm
            mount --bind {home}/hosts /etc/hosts
        """
        self.run(name, "bash", "-c", script, check=True)

    def _enter(self, name):
        options = ["-U", "-n", "-m", "-u", "-i", "-p", "--preserve-credentials"]
        return ["nsenter", "-t", str(self._inner[name][1]), *options, "--"]

    def environment(self, name):
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return inherited | {
            "HOME": str(self.folder / name / "home"),
            "XDG_CACHE_HOME": str(self.shared / "cache"),
            # What vLLM knows of the model's class; a process of 10 s would find it out for each engine.
            "VLLM_CACHE_ROOT": str(Path.home() / ".cache/vllm"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **QUICK,
        }

    def run(self, name, *command, cwd=None, **options):
        """Run a command on a host, to its end."""
        return subprocess.run(
            [*self._enter(name), *command], cwd=cwd or self.folder / name / "home", env=self.environment(name),
            text=True, capture_output=True, timeout=900, **options,
        )  # fmt: skip

    def begin(self, name, *command, log):
        """Start a command on a host."""
        with open(log, "w") as file:
            return subprocess.Popen(
                [*self._enter(name), *command], cwd=self.folder / name / "home", env=self.environment(name),
                stdout=file, stderr=file,
            )  # fmt: skip

    def ray_over_both(self, head, other):
        self._ray(head, HEAD, {"10.77.9.1": NODES[head]}, "--include-dashboard", "false")
        self._ray(other, JOIN, {"10.77.9.1": NODES[head], "10.77.9.2": NODES[other]})

    def _ray(self, name, line, addresses, *options):
        """A command of the page with these hosts' addresses, and with what a host without GPUs needs."""
        words = [
            re.sub(r"10\.77\.9\.\d", lambda found: addresses[found[0]], word)
            for word in line.split()[2:]
        ]
        done = self.run(
            name,
            RAY,
            "start",
            *words,
            "--num-gpus",
            "1",
            "--num-cpus",
            "8",
            "--disable-usage-stats",
            *options,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self, name):
        """What a power cut does: all of its processes are gone at once."""
        held, first = self._inner[name]
        os.kill(first, 9)
        held.wait(timeout=120)

    def restart(self, head, other):
        """End what is left of both hosts, start both again, and start Ray over them."""
        self._end()
        self.start()
        self.ray_over_both(head, other)

    def close(self):
        self._end()
        self._outer.kill()
        self._outer.wait()

    def _end(self):
        for held, first in self._inner.values():
            if held.poll() is None:
                os.kill(first, 9)
                held.wait(timeout=120)


def command(hosts, *flags):
    places = {
        "store.url": f"sqlite:///{hosts.shared}/openrlhf_dbb.db",
        "ckpt.path": f"{hosts.shared}/runs/mine/checkpoints",
        "ckpt.output_dir": f"{hosts.shared}/runs/mine/model",
        "logger.tensorboard_dir": f"{hosts.shared}/runs/mine/tensorboard",
    }
    placed = [word for flag, value in places.items() for word in (f"--{flag}", value)]
    return [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *FLAGS, *placed, *flags]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    tiny.prepare(tiny.default_folder())
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    shutil.copytree(tiny.default_folder(), made.shared / "cache/openrlhf_dbb/tiny")
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(hosts):
    hosts.ray_over_both("nodea", "nodeb")
    return hosts


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
class TestSeveralHosts:
    """In this order, on one cluster; the last ones end hosts."""

    def test_a_folder_that_is_not_shared_is_refused_before_the_run_is_made(self, cluster):
        alone = cluster.folder / "nodea/home/alone"
        # The other host's home is another folder under the same name: hide this one there.
        cluster.run("nodeb", "mount", "-t", "tmpfs", "tmpfs", str(cluster.folder / "nodea"))
        refused = cluster.run("nodea", *command(cluster, "--ckpt.path", str(alone)))
        assert refused.returncode == 2, refused.stderr[-4000:]
        *waits, line = refused.stderr.splitlines()
        assert re.match(
            rf"error: node nodeb \(10.77.9.2\) .*{alone} \(--ckpt.path\); .*share", line
        )
        assert all(wait.startswith("reading data and model") for wait in waits)  # on a slow machine
        assert rows(cluster.shared, "SELECT count(*) FROM dbb_run") == [(0,)]

    def test_a_run_over_both_hosts_outlives_the_loss_of_either_and_trains_exactly(self, cluster):
        """The driver's host is lost; the run continues from the other, until it has lost the worker's host."""
        log = cluster.shared / "log"
        driver = cluster.begin("nodea", *command(cluster, "--run_name", "mine"), log=log)
        wait_for_step(cluster.shared, 3, driver)
        cluster.kill("nodea")
        check_posteriors(cluster.shared, steps=last_step(cluster.shared))

        cluster.restart("nodeb", "nodea")
        driver = cluster.begin("nodeb", *command(cluster, *CONTINUED), log=log)
        wait_for_step(cluster.shared, 5, driver)
        cluster.kill("nodea")
        assert driver.wait(timeout=300) == 1, log.read_text()[-4000:]
        printed = log.read_text()
        for piece in ("10.77.9.2:6379: 2 GPUs on 2 nodes", "nodea (10.77.9.1), nodeb (10.77.9.2)"):
            assert piece in printed
        (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert re.search(
            r"rank [01] of the policy \(process \d+ on host nodea \(10.77.9.1\)\)", line
        )
        assert " has died: " in line
        assert re.search("checkpoint .*global_step4; .*--resume mine; .* in /", line)
        check_posteriors(cluster.shared, steps=last_step(cluster.shared))
        manifest = json.loads(
            (cluster.shared / "runs/mine/checkpoints/_actor/global_step4/manifest.json").read_text()
        )
        # The second rank has saved its part
        assert any("pp_rank_1_" in name for name in manifest["files"])
        divergence = logged(cluster.shared / "runs/mine/tensorboard/mine")["train/vllm_kl"]
        # Both engines have the weights: see test_training.py, where the policy moves as far.
        assert {*divergence} >= {1, 2, 3, 4} and median(map(abs, divergence.values())) < 0.005, (
            divergence
        )

    @pytest.mark.long
    def test_that_run_is_finished(self, cluster):
        cluster.restart("nodeb", "nodea")
        done = cluster.run("nodeb", *command(cluster, *CONTINUED))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        check_posteriors(cluster.shared, steps=6)
