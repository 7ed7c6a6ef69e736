"""The tutorial: all of its commands, run as they stand on the page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_dbb import storage

ROOT = Path(__file__).parents[1]
FILES = ROOT / "examples/tutorial"
PAGE = (ROOT / "docs/tutorial.md").read_text()


@pytest.mark.e2e
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    """With 4 questions of each file: one step instead of 32."""
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    shutil.copytree(FILES, tmp_path / "examples/tutorial")
    settings = tmp_path / "examples/tutorial/largest.toml"
    few = {
        "data.max_samples": 4, "train.num_episodes": 1, "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16, "rollout.micro_batch_size": 16, "train.micro_batch_size": 16, "eval.steps": 1,
    }  # fmt: skip
    settings.write_text(settings.read_text() + "".join(f"{flag} = {value}\n" for flag, value in few.items()))
    commands = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    done = subprocess.run(["bash", "-ec", "".join(commands)], cwd=tmp_path, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1.0  93." in done.stdout
    assert "dry run: all checks passed" in done.stdout
    assert re.search(r"^(no difference shown|the second is (higher|lower))$", done.stdout, re.MULTILINE)
    assert (tmp_path / "grpo.html").read_text().startswith("<!DOCTYPE html>")
    with storage.open_store(f"sqlite:///{tmp_path}/openrlhf_dbb.db") as store:
        runs = store.query("SELECT name, estimator, status, last_step FROM runs ORDER BY run_id")
        evaluated = store.query("SELECT run_id, step, prompts, samples FROM evaluations ORDER BY 1, 2")
    assert [tuple(run) for run in runs] == [("grpo", "point", "finished", 1), ("dbb", "dbb", "finished", 1)]
    assert [tuple(row) for row in evaluated] == [(run, step, 4, 4) for run in (1, 2) for step in (0, 1)]
