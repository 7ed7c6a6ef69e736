"""The tutorial: its verifier on rows made by hand, and all of its commands, run as they stand on the page."""

import importlib.util
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


@pytest.fixture(scope="module")
def reward():
    spec = importlib.util.spec_from_file_location("tutorial_reward", FILES / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (" 82.<|im_end|>", "82", 1.0),
        (" 82, which is even", "82", 1.0),
        (" 28.", "82", 0.0),
        (" 820.", "82", 0.0),
        (" 8.2", "82", 0.0),
        (" -82", "82", 0.0),
        (" 82, 17, 28 or 30", "82", 0.0),  # all numbers of the question
        (" the one in the middle.", "82", 0.0),
    ],
)
def test_the_verifier(reward, response, label, expected):
    prompt = "the largest of 82, 17, 28, 30?"
    assert reward.reward_func([prompt + response], [prompt], [label], other=1) == {"rewards": [expected]}


def test_the_verifier_stops_at_a_label_that_is_no_number(reward):
    with pytest.raises(ValueError, match="the label 'eighty' is not a whole number"):
        reward.score(" 80.", "eighty")


def test_the_data_are_those_that_the_script_makes(tmp_path):
    shutil.copy(FILES / "make_data.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    made = {name: (tmp_path / name).read_text() for name in ("train.jsonl", "heldout.jsonl")}
    assert made == {name: (FILES / name).read_text() for name in made}
    train, heldout = (set(text.splitlines()) for text in made.values())
    assert (len(train), len(heldout), train & heldout) == (64, 64, set())


@pytest.mark.e2e
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    """With 8 questions of each file: 2 steps instead of 32."""
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    shutil.copytree(FILES, tmp_path / "examples/tutorial")
    settings = tmp_path / "examples/tutorial/largest.toml"
    few = "data.max_samples = 8\ntrain.num_episodes = 2\neval.steps = 2\n"
    settings.write_text(settings.read_text() + few)
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
    assert [tuple(run) for run in runs] == [("grpo", "point", "finished", 2), ("dbb", "dbb", "finished", 2)]
    assert [tuple(row) for row in evaluated] == [(run, step, 8, 4) for run in (1, 2) for step in (0, 2)]
