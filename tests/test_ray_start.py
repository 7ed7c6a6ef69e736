"""Ray starts on a machine where its agents are slow, and a start that fails twice ends in one line."""

import os
import re
import subprocess
import sys

import pytest

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform import ray_start

START = """
from openrlhf_dbb.platform import ray_start
ray_start.prepare()
import ray
ray_start.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
print("answer", ray.get(ray.remote(lambda: 7).remote()))
"""
# Python imports this module first in every process. Ray's raylet gives its agents 15 s.
SLOW_AGENTS = """
import sys, time
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv):
    time.sleep(18)
"""


@pytest.mark.slow
def test_agents_may_take_longer_than_rays_own_limit(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout == "answer 7\n"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_is_tried_twice(monkeypatch, failures):
    import ray

    calls = []

    def start(**options):
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.\nMore lines.")

    monkeypatch.setattr(ray, "init", start)
    if failures == 1:
        ray_start.init(num_cpus=3)
    else:
        with pytest.raises(RunError) as raised:
            ray_start.init(num_cpus=3)
        line = re.sub(r"in \d+ s \(load \d+ on \d+ cores\)", "in T", str(raised.value))
        assert line.startswith(
            "Ray did not start, tried 2 times in T: The current node timed out during startup. Its logs"
        )
        assert "\n" not in line
    assert calls == [{"num_cpus": 3}] * 2
