"""The openrlhf-dbb command: what it prints, and how it refuses."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.terminal import shown
from storage import ProbeRows

ROOT = Path(__file__).parents[1]


@pytest.fixture
def filled(store, fill):
    """A store with run "old", and run "new" warm-started from it."""
    old = fill.run(store, "old")
    a, b, c = fill.prompts(store, 3)
    fill.step(old, 1, [a, b], [4, 1])
    new = fill.run(store, "new", config={"seed": 7, "actor": {"lr": 1e-6}})
    new.warm_start(store, old.record, store.register_prompts(["prompt 0", "prompt 2"], ["0", "2"]), weight=0.5)
    fill.step(new, 1, [c], [0])
    fill.step(new, 2, [c], [2])
    new.record_checkpoint(1, "global_step1")
    return store, (a, b, c)


def test_runs(filled, capsys):
    store, _ = filled
    assert main(["runs", "--store.url", store.url]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["#", "name", "status", "held-out", "accuracy", "step", "method", "rollouts", "age"]
    assert [line.split()[:7] for line in lines] == [
        ["2", "new", "running", "-", "2", "dbb", "8"],
        ["1", "old", "running", "-", "1", "dbb", "8"],
    ]
    assert main(["runs", "--wide", "--store.url", store.url]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    more = "trained  filtered  skipped  replayed  mixed groups  model  data set  started"
    assert header.endswith(more)
    # each visit: 4 rollouts of 10 tokens, all trained on, the prompt skipped once, successes replayed
    assert [line.split()[9:16] for line in lines] == [
        ["8", "0", "2", "2", "1", "tiny", "sums"],
        ["8", "0", "2", "5", "1", "tiny", "sums"],
    ]


def test_runs_without_usage(store, fill, capsys):
    fill.step(fill.run(store, method="grpo"), 1, fill.prompts(store, 1), [1], usage=None)
    assert main(["runs", "--store.url", store.url]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[:7] == ["1", "run", "running", "-", "1", "grpo+dbb", "-"]
    assert main(["show", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "method:            grpo\n" in out and "rollouts: " not in out and "cost:" not in out


def test_show(filled, capsys):
    store, (a, _, c) = filled
    assert main(["--store.url", store.url, "show", "new"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "run:               new (number 2)\n"
        "held-out accuracy: not measured; --eval.dataset of the training names held-out prompts\n"
        "status:            running, step 2\n"
    )
    assert f"uuid:              {store.find_run('new').uuid}\n" in out
    assert "checkpoint:        step 1\n" in out
    assert "estimator:         dbb version 1, discount = 0.5, prior_alpha = 1.0, prior_beta = 1.0\n" in out
    old = store.find_run("old")
    assert f"began from:        run old at step 1, weight 0.5 ({old.uuid} in {store.location})\n" in out
    assert "training:          25.0 % of the full reward, 8 rollouts in 2 visits\n" in out
    assert "method:            not recorded\n" in out
    # prompt 0: (2.25, 0.25), 0.9; prompt 2: (0.5, 4.5), then (2.25, 4.25), 2.25 / 6.5
    assert f"posterior mean:    {(0.9 + 2.25 / 6.5) / 2:.4f} over 2 prompts, 1 visited\n" in out
    hardest = out.split("hardest prompts\n")[1].split("\n\n")[0].splitlines()[1:]
    easiest = out.split("easiest prompts\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split() for line in hardest] == [
        [str(c), "0.3462", "0.2263", "2", "prompt", "2"],
        [str(a), "0.9", "0.09", "0", "prompt", "0"],
    ]
    assert easiest == hardest[::-1]
    assert main(["show", "--prompts", "1", "--store.url", store.url]) == 0
    listed = capsys.readouterr().out.split("hardest prompts\n")[1].splitlines()
    assert [line.split()[:1] for line in listed] == [["prompt"], [str(c)], [], ["easiest"], ["prompt"], [str(a)]]


def test_show_a_negative_number_of_prompts(filled, capsys):
    store, _ = filled
    assert main(["show", "--prompts", "-1", "--store.url", store.url]) == 2
    assert capsys.readouterr().err.startswith("error: --prompts: -1 is below 0; give how many")


def test_show_the_configuration(filled, capsys):
    store, _ = filled
    assert main(["show", "--config", "--store.url", store.url]) == 0
    assert capsys.readouterr().out == 'actor: {"lr": 1e-06}\nseed: 7\n'


def test_show_run_wide_state_and_probes(store, fill, capsys):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    assert main(["show", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "run-wide" not in out and "probes" not in out
    for step in (1, 2):
        shared = {"discount": np.array([step / 3]), "prior": np.array([1.0, 2.0])}
        probes = ProbeRows(ids, np.array([128, 64]), np.array([100.0, 4.0]), np.array([100.0, 4.0]))
        fill.step(run, step, ids, [4, 0], shared=shared, probes=probes)
    assert main(["show", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "run-wide state:    discount 0.6667, prior (2 values)\n" in out
    assert "probes:            384 rollouts of 4 groups, never trained on\n" in out
    assert "training:          50.0 % of the full reward, 16 rollouts in 4 visits\n" in out


def test_show_without_a_name_is_of_the_latest_run(filled, capsys):
    store, _ = filled
    assert main(["show", "--store.url", store.url]) == 0
    assert capsys.readouterr().out.startswith("run:               new ")


def test_show_a_run_without_steps(store, fill, capsys):
    fill.run(store, "empty", config={})
    assert main(["show", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "last step" not in out and "posterior mean:    none yet\n" in out
    assert "began from:        its prior\n" in out
    assert "training:          none of the full reward, 0 rollouts in 0 visits\n" in out
    assert "hardest" not in out


@pytest.mark.parametrize("by", ["number", "text"])
def test_history(filled, capsys, by):
    store, (_, _, c) = filled
    ref = str(c) if by == "number" else "PROMPT 2"
    assert main(["history", ref, "--store.url", store.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["run:    new", f"prompt: {c}: prompt 2", "label:  2"]
    assert [line.split() for line in lines[3:]] == [
        ["step", "rollouts", "successes", "alpha", "beta", "mean", "variance"],
        ["1", "4", "0", "0.5", "4.5", "0.1", "0.09", "##"],
        ["2", "4", "2", "2.25", "4.25", "0.3462", "0.2263", "#######"],
    ]


def test_history_of_another_run_and_of_a_warm_start_only(filled, capsys):
    store, (a, _, _) = filled
    assert main(["history", str(a), "old", "--store.url", store.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:5] == ["1", "4", "4", "4.5", "0.5"]
    assert main(["history", str(a), "--store.url", store.url]) == 0
    assert "not visited in this run" in capsys.readouterr().out


def test_a_long_history_is_walked_in_order_with_gaps(store, fill, capsys):
    run = fill.run(store)
    a, b = fill.prompts(store, 2)
    for step in range(1, 30):
        fill.step(run, step, [a] if step % 7 == 0 else [b], [step % 5])
    assert main(["history", str(a), "--store.url", store.url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[4:]] == ["7", "14", "21", "28"]


def test_several_prompts_are_named(filled, capsys):
    store, (a, _, c) = filled
    assert main(["history", "prompt", "--store.url", store.url]) == 2
    message = f"error: 'prompt' is in several prompts: {a} (prompt 0), {c} (prompt 2); give the id of one\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("ref", ["100%", "_", "99999999999999999999", "-"])
def test_no_such_prompt(filled, capsys, ref):
    store, _ = filled
    assert main(["history", "--store.url", store.url, "--", ref]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: run 'new' has no posterior of a prompt with id or text {ref!r}")
    assert error.count("\n") == 1


def test_refusals_are_one_line_and_exit_2(store, tmp_path, capsys):
    assert main(["show", "--store.url", store.url]) == 2
    assert capsys.readouterr().err == f"error: there are no runs in {store.location}; start one first\n"
    assert main(["runs", "--store.url", store.url]) == 0
    assert capsys.readouterr().out == f"no runs in {store.location}\n"
    missing = tmp_path / "missing.db"
    assert main(["runs", "--store.url", f"sqlite:///{missing}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no store at {missing};")
    assert not missing.exists()


def test_a_prompt_cannot_write_to_the_terminal(store, fill, capsys):
    run = fill.run(store, config={"note": "\x1b]0;title\x07"})
    nasty = "\x1b[2J\x07 \u202e" + "x" * 500
    ids = store.register_prompts([nasty], ["\x9b31m"])
    fill.step(run, 1, ids, [1])
    for command in (["show"], ["show", "--config"], ["history", str(ids[0])], ["runs"]):
        assert main([*command, "--store.url", store.url]) == 0
        out = capsys.readouterr().out
        assert not any(not character.isprintable() for character in out.replace("\n", ""))
        assert max(map(len, out.splitlines())) < 300
    assert shown(nasty, 21) == "\\x1b[2J\\x07 \\u202e..."


def test_the_module_runs_as_a_command(open_new, fill):
    store = open_new("sqlite")
    fill.run(store, "it")
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_dbb", "runs", "--store.url", store.url],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert " it " in done.stdout
