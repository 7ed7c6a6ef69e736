"""The command openrlhf-dbb as one: its help, its errors, what it asks before it deletes, completion, missing extras."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf_dbb
from openrlhf_dbb.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]


def refused(capsys, *argv):
    """The one line with which these arguments are refused, without its prefix."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def trained(store, fill):
    """Runs "old" and "new"; "new" has three steps of two prompts, and is finished."""
    fill.run(store, "old")
    run = fill.run(store, "new")
    ids = fill.prompts(store, 2)
    fill.train(run, ids, [1, 2, 3])
    run.finish()
    return store


# help and errors


def test_without_arguments_it_prints_its_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: openrlhf-dbb [-h] [--version] [--store.url URL] COMMAND ...\n")
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(text)}$", out, flags=re.MULTILINE), name


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"openrlhf-dbb {openrlhf_dbb.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        *sorted(COMMANDS.keys() - {"train"}),
        *("lab mse", "lab replay", "evaluate compare"),
    ],
)
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
        ("lab reply", "unknown command 'reply', did you mean replay? (openrlhf-dbb lab --help)"),
        ("zzz", "unknown command 'zzz' (openrlhf-dbb --help)"),
        ("runs --stor.url x", "unknown flag --stor.url, did you mean --store.url? (openrlhf-dbb runs --help)"),
        ("--store-url x runs", "unknown flag --store-url, did you mean --store.url? (openrlhf-dbb --help)"),
        ("evaluate --modl x", "unknown flag --modl, did you mean --model? (openrlhf-dbb evaluate --help)"),
        ("history", "the following arguments are required: PROMPT (openrlhf-dbb history --help)"),
        ("show old new", "unrecognized arguments: new (openrlhf-dbb show --help)"),
        ("evaluate", "evaluate needs --model and --benchmarks, or the command compare"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(capsys, argv, message):
    assert refused(capsys, *argv.split()) == message


@pytest.mark.parametrize("words", ["--store.url {url} runs --json", "runs --json --store.url {url}"])
def test_the_store_is_named_before_the_command_or_after_it(trained, capsys, words):
    assert main(words.format(url=trained.url).split()) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["new", "old"]


@pytest.mark.parametrize(
    ("absent", "argv", "message"),
    [
        ("torch", ["train"], "openrlhf-dbb train needs the training stack: {stack} (here: no module named torch)"),
        ("vllm", ["train"], "openrlhf-dbb train needs the training stack: {stack} (here: no module named vllm)"),
        (
            "torch",
            ["evaluate", "--model", "x", "--benchmarks", "math500"],
            "openrlhf-dbb evaluate --model needs the training stack: {stack} (here: no module named torch)",
        ),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(capsys, monkeypatch, absent, argv, message):
    for name in ("torch", "ray", "vllm", "openrlhf"):
        if name != absent and message.startswith("openrlhf-dbb"):
            pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, absent, None)
    stack = 'pip install "openrlhf-dbb[cuda]" or, without a GPU, "openrlhf-dbb[cpu]"'
    assert refused(capsys, *argv) == message.format(stack=stack)


@pytest.mark.parametrize("before", [[], ["--store.url", "sqlite:///x.db"], ["--store.url=sqlite:///x.db"]])
def test_train_reads_its_own_arguments(tmp_path, before):
    pytest.importorskip("openrlhf")
    command = [sys.executable, "-m", "openrlhf_dbb", *before, "train", "--estimator", "nobody"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --estimator: unknown estimator 'nobody'; known: ")


def test_a_number_is_an_id_first_and_text_if_there_is_no_such_id(store, fill, capsys):
    run = fill.run(store)
    first, second = store.register_prompts(["2 + 3 = ?", "7 + 9 = ?"], ["5", "16"])
    fill.step(run, 1, [first, second], [1, 2])
    assert (first, second) == (1, 2)
    assert main(["history", "2", "--store.url", store.url]) == 0
    out, err = capsys.readouterr()
    assert "2: 7 + 9 = ?\n" in out
    assert err == "2 is taken as an id; it is also in the text of other prompts\n"
    for number, prompt, text in (("1", 1, "2 + 3 = ?"), ("9", 2, "7 + 9 = ?")):
        assert main(["history", number, "run", "--store.url", store.url]) == 0
        out, err = capsys.readouterr()
        assert f"{prompt}: {text}\n" in out and err == ""
