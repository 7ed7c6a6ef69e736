"""The command openrlhf-dbb as one: its help, its errors, missing extras."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_dbb.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]


def refused(capsys, *argv):
    """The one line with which these arguments are refused, without its prefix."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("command", [*sorted(COMMANDS.keys() - {"train"}), "lab replay", "evaluate compare"])
def test_help_of_every_command(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: openrlhf-dbb {command} ")
    assert re.search(r"\n\n[A-Z][^.]+\.\n", out), "no description"
    assert not re.search(r"SUPPRESS|%\(|%%|None", out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("rnus", "unknown command 'rnus', did you mean runs? (openrlhf-dbb --help)"),
        ("runs --stor.url x", "unknown flag --stor.url, did you mean --store.url? (openrlhf-dbb runs --help)"),
        ("evaluate", "evaluate needs --model and --benchmarks, or the command compare"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(capsys, argv, message):
    assert refused(capsys, *argv.split()) == message


def test_the_store_is_named_before_the_command_or_after_it(store, fill, capsys):
    fill.run(store)
    for words in ("--store.url {url} runs --json", "runs --json --store.url {url}"):
        assert main(words.format(url=store.url).split()) == 0
        assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["run"]


def test_a_command_whose_extra_is_missing_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    stack = "needs the training stack, which pip alone cannot install: run bash scripts/setup_env.sh"
    for argv in ("train", "evaluate --model x --benchmarks math500"):
        assert stack in refused(capsys, *argv.split())


def test_train_reads_its_own_arguments(tmp_path):
    pytest.importorskip("openrlhf")
    command = [sys.executable, "-m", "openrlhf_dbb", "--store.url", "sqlite:///x.db", "train", "--estimator", "nobody"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --estimator: unknown estimator 'nobody'; known: ")
