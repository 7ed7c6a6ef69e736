"""The tutorial: its verifier on rows made by hand, and all of its commands, run as they stand on the page."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import storage

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
    ("query", "label", "expected"),
    [
        ("74+8=28<eos>", "82", 1.0),
        ("74+8=28", "82", 1.0),  # cut off before the end token
        ("74+8= 28 <eos>", "82", 1.0),
        ("74+8=82<eos>", "82", 0.0),  # not from the last digit on
        ("74+8=280<eos>", "82", 0.0),  # 082 is not how people write it
        ("74+8=<eos>", "82", 0.0),
        ("74+8=74+8=28<eos>", "82", 0.0),  # the question is taken off once
    ],
)
def test_the_verifier(reward, query, label, expected):
    assert reward.reward_func([query], ["74+8="], [label], other=1) == {"rewards": [expected]}


def test_the_verifier_stops_at_a_label_that_is_no_number(reward):
    with pytest.raises(ValueError, match="the label 'eighty' is not a whole number"):
        reward.reward_func(["74+8=28<eos>"], ["74+8="], ["eighty"])


def test_the_data_are_those_that_the_script_makes(tmp_path):
    shutil.copy(FILES / "make_data.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    made = {name: (tmp_path / name).read_text() for name in ("train.jsonl", "heldout.jsonl")}
    assert made == {name: (FILES / name).read_text() for name in made}
    train, heldout = (set(text.splitlines()) for text in made.values())
    assert (len(train), len(heldout), train & heldout) == (256, 64, set())


@pytest.mark.e2e
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    shutil.copytree(FILES, tmp_path / "examples/tutorial")
    commands = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    done = subprocess.run(["bash", "-ec", "".join(commands)], cwd=tmp_path, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "{'rewards': [1.0, 0.0, 0.0]}" in done.stdout
    assert "dry run: all checks passed" in done.stdout
    assert re.search(r"^(no difference shown|the second is (higher|lower))$", done.stdout, re.MULTILINE)
    assert (tmp_path / "dbb.html").read_text().startswith("<!DOCTYPE html>")
    with storage.open_store(f"sqlite:///{tmp_path}/openrlhf_dbb.db") as store:
        runs = store.query("SELECT name, estimator, status, last_step FROM runs ORDER BY run_id")
        evaluated = store.query(
            "SELECT run_id, step, prompts, samples FROM evaluations WHERE accuracy BETWEEN 0.2 AND 0.9 ORDER BY 1, 2"
        )
    # 256 prompts, 64 a step, 4 passes
    assert [tuple(run) for run in runs] == [("dbb", "dbb", "finished", 16), ("grpo", "point", "finished", 16)]
    assert [tuple(row) for row in evaluated] == [(run, step, 64, 8) for run in (1, 2) for step in (0, 16)]
