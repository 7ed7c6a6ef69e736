"""A host's GPUs, driver, compilers and compiled modules are described, their faults named, and Ray starts on it."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.platform import cuda, machine, ray_start

ROOT = Path(__file__).parents[1]
GPU = machine.Gpu("NVIDIA H100", 80 * 2**30, (9, 0))


def test_setup_runs_the_same_file_before_anything_is_installed():
    program = [sys.executable, "-I", "-S", str(ROOT / "openrlhf_dbb/platform/machine.py"), "13.0"]
    done = subprocess.run(program, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("there is no C compiler")
    assert subprocess.run(program, env={"CC": "cc"}).returncode == 0


def test_an_environment_without_cuda_says_that_it_leaves_a_gpu_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "torch_cuda", lambda: None)
    monkeypatch.setattr(machine, "look", lambda: machine.Machine((GPU,), (13, 0)))
    monkeypatch.chdir(tmp_path)
    assert train_grpo.main(["--preset", "tiny", "--dry_run"]) == 0
    assert "warning: there is 1 x NVIDIA H100 (80 GiB), but" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "include", "why"),
    [
        (machine.Machine((), None), None, "there is no NVIDIA driver"),
        (
            machine.Machine((GPU,), (12, 4)),
            None,
            r"\(CUDA 12.4\) is too old for CUDA 13.0; update it",
        ),
        (machine.Machine((), (13, 0)), None, r"\(CUDA_VISIBLE_DEVICES is ''\)"),
        (machine.Machine((GPU,), (13, 0)), "/nowhere", "there is no /nowhere/Python.h"),
    ],
)
def test_a_stack_for_cuda_never_trains_on_a_host_that_lacks_something(
    monkeypatch, host, include, why
):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "look", lambda: host)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if include:
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": include})
    with pytest.raises(UsageError, match=why):
        cuda.check_machine()


LOOK = """
from openrlhf_dbb.platform import cpu, machine
machine.add_shims()
if not machine.is_real("flash_attn_2_cuda"):
    import flash_attn_2_cuda
print(cpu.active(), machine.torch_cuda(), machine.is_real("flash_attn_2_cuda"))
"""


@pytest.mark.parametrize(
    ("cuda", "files", "seen"),
    [
        (None, [], "True None False"),
        ("12.9", ["flash_attn_2_cuda.py"], "False 12.9 True"),
    ],  # compiled: before its shim
)
def test_what_is_installed_is_seen_without_an_import(tmp_path, cuda, files, seen):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch/version.py").write_text(f"cuda = {cuda!r}")
    for file in files:
        (tmp_path / file).touch()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    shown = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == seen


START = """
import contextlib, os, time, psutil
from openrlhf_dbb.platform import ray_start
ray_start.prepare()
import ray
ray_start.start({"num_cpus": 1, "num_gpus": 1}, {}, verbose=False)
ray_start.start_workers(1)
def running():
    found = {}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's shell commands end at once
            found[each.pid] = " ".join(each.cmdline())
    return found
while not (idle := [pid for pid, words in running().items() if words.startswith("ray::IDLE")]):
    time.sleep(0.1)
@ray.remote(num_gpus=1)
class Actor:
    def process(self):
        return os.getpid()
assert idle == [ray.get(Actor.remote().process.remote())]
words = " ".join(running().values())
print([name for name in ("gcs_server", "raylet", "monitor.py", "dashboard.py") if name in words])
"""
# Python imports this module first in every process. Ray's raylet gives its agents 15 s.
SLOW_AGENTS = """
import sys, time
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv):
    time.sleep(18)
"""


@pytest.mark.slow
def test_rays_agents_may_take_longer_than_its_own_limit_and_an_actor_takes_a_worker_that_was_started_early(
    tmp_path,
):
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "['gcs_server', 'raylet']\n", done.stderr


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_of_ray_is_tried_twice_and_then_ends_in_one_line(monkeypatch, failures):
    import ray

    calls = []

    def start(**options):
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.\nMore lines.")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    line = (
        r"^Ray did not start, tried 2 times in \d+ s .*: "
        r"The current node timed out during startup\. Its logs .+ busy$"
    )
    with pytest.raises(RunError, match=line) if failures == 2 else contextlib.nullcontext():
        ray_start.init(num_cpus=3)
    assert calls == [{"num_cpus": 3}] * 2


def test_only_a_late_start_is_put_down_to_a_busy_machine_and_the_logs_are_where_ray_was_told(
    monkeypatch,
):
    import ray

    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        ray, "init", lambda **_: (_ for _ in ()).throw(PermissionError("may not write"))
    )
    with pytest.raises(
        RunError, match=r"may not write .*logs .*/elsewhere/ray/session_latest/logs$"
    ):
        ray_start.init()


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_whose_sockets_have_too_long_a_path_is_refused_before_ray_starts(
    monkeypatch, variable
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, "/tmp/" + "a" * 90)
    with pytest.raises(UsageError, match=rf"^{variable} /tmp/a+ .*\d+ bytes too long.*RAY_TMPDIR"):
        ray_start.check_socket_path()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # that cluster has a folder of its own
    ray_start.check_socket_path()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv(variable, "/tmp/short")
    ray_start.check_socket_path()
