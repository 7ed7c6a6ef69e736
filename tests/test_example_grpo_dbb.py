"""The example that shows GRPO-DBB whole runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_dbb.py"


def test_the_example_trains_for_two_steps():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in (lines[0], lines[-1])] == [
        "held-out accuracy before",
        "held-out accuracy after",
    ]
    rewards = [float(re.search(r"reward (\d\.\d+)", line)[1]) for line in lines[1:-1]]
    # The supervised warm start leaves some prompts solved and some unsolved.
    assert len(rewards) == 2
    assert all(0.1 < reward < 0.9 for reward in rewards)


def test_the_example_needs_no_training_framework():
    imports = re.findall(r"^(?:import|from) (\w+)", EXAMPLE.read_text(), re.MULTILINE)
    assert not {"ray", "openrlhf", "vllm", "deepspeed"} & set(imports)
