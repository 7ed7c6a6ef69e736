"""The command openrlhf-dbb as one: its help, its errors, what it asks before it deletes, completion, missing extras."""

import functools
import json
import os
import pty
import re
import signal
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
        *("lab mse", "lab simulate", "lab replay", "lab calibration", "evaluate compare", "evaluate plot"),
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
        # before the flag that is missing for it
        ("prune old --keep_last 1", "unknown flag --keep_last, did you mean --keep-last? (openrlhf-dbb prune --help)"),
        ("evaluate --modl x", "unknown flag --modl, did you mean --model? (openrlhf-dbb evaluate --help)"),
        ("history", "the following arguments are required: PROMPT (openrlhf-dbb history --help)"),
        ("show old new", "unrecognized arguments: new (openrlhf-dbb show --help)"),
        (
            "evaluate --n 3 compare a b",
            "--n is no flag of compare, or comes after it (openrlhf-dbb evaluate --help)",
        ),
        ("evaluate", "evaluate needs --model (or --run) and --benchmarks, or a command: compare, plot"),
        (
            "lab mse --p 0.5 -o -",
            "argument -o/--output: several files are written; name a folder, not - (openrlhf-dbb lab mse --help)",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(capsys, argv, message):
    assert refused(capsys, *argv.split()) == message


@pytest.mark.parametrize("argv", [["--store.url", "{url}", "check"], ["check", "--store.url", "{url}"]])
def test_the_store_is_named_before_the_command_or_after_it(trained, capsys, argv):
    assert main([word.format(url=trained.url) for word in argv]) == 0
    assert capsys.readouterr().out == "the database is consistent; runs checked: 2\n"


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
        ("matplotlib", ["lab", "mse", "--p", "0.5"], 'figures need matplotlib: pip install "openrlhf-dbb[lab]"'),
        (
            "matplotlib",
            ["evaluate", "compare", "a", "b", "-o", "x"],
            'figures need matplotlib: pip install "openrlhf-dbb[lab]"',
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


# output


def test_a_check_as_json(trained, capsys):
    assert main(["check", "--json", "--store.url", trained.url]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with trained.database.transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE dbb_posterior SET visits = 7 WHERE prompt_id = 1")
    assert main(["check", "--json", "--store.url", trained.url]) == 1
    (violation,) = json.loads(capsys.readouterr().out)
    assert violation.keys() == {"run", "what", "where"} and violation["run"] == "new"


def test_a_report_on_standard_output(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "-o", "-", "--store.url", trained.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!DOCTYPE html>") and out.rstrip().endswith("</html>")
    assert not Path("-").exists()


def test_an_export_on_standard_output(trained, capsys):
    assert main(["export", "-o", "-", "--store.url", trained.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * 2


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


# consent

PRUNED = "6 history rows, 6 usage rows, 0 probe rows, 0 kept rollouts, 0 groups and 0 checkpoints of 3 steps"


@pytest.fixture
def terminal(monkeypatch):
    """Function: what is typed at the terminal that is now standard input."""
    master, slave = pty.openpty()
    with os.fdopen(slave) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        yield lambda text: os.write(master, text.encode())
    os.close(master)


def history_rows(store):
    return store.query("SELECT count(*) FROM posterior_history")[0][0]


def test_a_prune_asks_with_the_counts_and_takes_only_yes(trained, terminal, capsys):
    argv = ["prune", "new", "--keep-last", "0", "--store.url", trained.url]
    for answer in ("y\n", "\n", "\x04"):  # the last is the end of the input
        terminal(answer)
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == f"this deletes {PRUNED} of run new; type yes to do so: "
        assert err == "error: the answer was not yes; nothing was changed\n"
    assert history_rows(trained) == 6
    terminal("yes\n")
    assert main(argv) == 0
    assert f"run new: deleted {PRUNED}" in capsys.readouterr().out
    assert history_rows(trained) == 0
    assert main(argv) == 0
    assert capsys.readouterr().out == "run new: there is nothing to delete\n"


def test_a_prune_that_nobody_can_be_asked_about(trained, monkeypatch, capsys):
    argv = ["prune", "new", "--keep-last", "0", "--store.url", trained.url]
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        message = f"this deletes {PRUNED} of run new; repeat with --yes to do so, nobody can be asked here"
        assert refused(capsys, *argv) == message
        assert history_rows(trained) == 6
        for flags in (["--dry-run"], ["--dry-run", "--yes"]):
            assert main([*argv, *flags]) == 0
            assert capsys.readouterr().out == f"this deletes {PRUNED} of run new; nothing was changed\n"
        assert history_rows(trained) == 6
        assert main([*argv, "--yes"]) == 0
        assert history_rows(trained) == 0


def test_a_migration_asks(new_url, make_version, terminal, capsys):
    url = make_version(new_url("sqlite"), 1)
    what = "this upgrades the database from schema version 1 to 4, which older releases cannot read; "
    assert main(["migrate", "--dry-run", "--store.url", url]) == 0
    assert capsys.readouterr().out == f"{what}nothing was changed\n"
    terminal("no\n")
    assert main(["migrate", "--store.url", url]) == 2
    assert capsys.readouterr().out == f"{what}type yes to do so: "
    terminal("yes\n")
    assert main(["migrate", "--store.url", url]) == 0
    assert capsys.readouterr().out.endswith("upgraded from schema version 1 to 4\n")


def test_an_interrupt_ends_it_without_a_traceback(open_new, fill):
    store = open_new("sqlite")
    run = fill.run(store)
    fill.train(run, fill.prompts(store, 1), [1])
    run.finish()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "openrlhf_dbb", "prune", "run", "--keep-last", "0", "--store.url", store.url]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job, as these tests may be, hands down that it ignores interrupts.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=ROOT, stdin=slave, start_new_session=True, preexec_fn=heeds, **pipes) as asking:
        assert asking.stdout.read(len("this deletes")) == b"this deletes"
        asking.send_signal(signal.SIGINT)
        try:
            _, err = asking.communicate(timeout=60)
        finally:
            asking.kill()
    os.close(master)
    os.close(slave)
    assert (asking.returncode, err) == (130, b"")
    assert history_rows(store) == 1


# completion


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    """The script for bash, printed by the command."""
    path = tmp_path_factory.mktemp("completion") / "openrlhf-dbb.bash"
    command = [sys.executable, "-m", "openrlhf_dbb", "completion", "bash"]
    path.write_text(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    subprocess.run(["bash", "-n", path], check=True)
    return path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ru", ["runs"]),
        ("lab re", ["replay"]),
        ("evaluate pl", ["plot"]),
        ("prune my-run --dr", ["--drop-checkpoints", "--dry-run"]),
        ("export --format ", ["csv", "jsonl", "parquet"]),
    ],
)
def test_bash_completes(bash_script, typed, completed):
    words = ["openrlhf-dbb", *typed.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
        source {bash_script}
        COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
        $(complete -p openrlhf-dbb | sed 's/.* -F \\([^ ]*\\) .*/\\1/') 2>/dev/null  # its function
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == completed


def test_the_flags_of_train_are_completed(bash_script):
    pytest.importorskip("openrlhf")
    (flags,) = re.findall(r"_openrlhf_dbb_train_option_strings=\((.*)\)", bash_script.read_text())
    assert {"--estimator", "--dbb.discount", "--actor.model_name_or_path", "--resume"} <= set(flags.split())


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_scripts_of_other_shells(capsys, shell):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "openrlhf-dbb" in out and "history" in out and "keep-last" in out
