"""The openrlhf-dbb command: held-out accuracy and whether a run still runs, on a terminal, into a pipe, as JSON."""

import json
import re
import socket
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from rich.cells import cell_len
from scipy import stats
from sqlalchemy import text

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.inspect.overview import age

HOSTILE = "[red]bold[/red] \x1b[31m :smile: \u202e\u6f22\u5b57"


def evaluated(store, fill, name, successes_by_step, **values):
    """A run of two steps of 6 prompts, evaluated on these with 4 samples each; its prompts' ids."""
    run, ids = fill.run(store, name, **values), np.sort(fill.prompts(store, 6))
    fill.train(run, ids, (1, 2))
    for step, successes in successes_by_step.items():
        run.record_evaluation(step, "training", [fill.evaluation(ids, successes)], model="tiny", config={})
    return run, ids


@pytest.fixture
def two(store, fill):
    """Run "a", best at step 1, and "b", which is better at its end."""
    evaluated(store, fill, "a", {0: [1, 0, 0, 1, 0, 1], 1: [2, 2, 2, 2, 2, 2], 2: [0, 1, 1, 2, 2, 0]}, method="grpo")
    evaluated(store, fill, "b", {0: [1, 0, 0, 1, 0, 1], 2: [2, 4, 3, 4, 4, 3]}, method="grpo")
    return store


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns, without colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def printed(capsys, store, *command):
    """What a command prints, and the same without the codes for bold and dim, line by line."""
    assert main([*command, "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    return out, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()


def test_accuracy_comes_first(two, capsys):
    newest, oldest = printed(capsys, two, "runs")[1][1:]
    # of 24: 3 right at the start, then 20 and 6
    assert re.split("  +", newest) == ["2", "b", "running", "12.5 -> 83.3 %", "2", "grpo+dbb", "48", "0 s"]
    assert re.split("  +", oldest)[3] == "12.5 -> 25.0 %"
    for run, then in (("a", "50.0 % at step 1 (best) -> 25.0 % at step 2"), ("b", "83.3 % at step 2 (best)")):
        _, lines = printed(capsys, two, "show", run)
        assert lines[1] == f"held-out accuracy: 12.5 % at step 0 -> {then}; 6 prompts x 4 samples"


DIFFERENCES = np.array([2, 3, 2, 2, 2, 3]) / 4  # of "b" and "a" at step 2


def test_compare_names_the_better_of_two_models(two, capsys):
    _, lines = printed(capsys, two, "compare")  # the two newest: "a", then "b"
    at = lines.index("held-out accuracy")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["start", "best", "last"],
        ["first", "12.5", "%", "(step", "0)", "50.0", "%", "(step", "1)", "25.0", "%", "(step", "2)"],
        ["second", "12.5", "%", "(step", "0)", "83.3", "%", "(step", "2)", "83.3", "%", "(step", "2)"],
    ]
    low, high = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval()
    assert lines[at + 4] == (
        f"second - first, last evaluations: +58.3 points, 95 % interval +{100 * low:.1f} to +{100 * high:.1f} "
        "(6 prompts x 4 samples)"
    )
    assert lines[at + 5] == "the second is higher"
    assert lines[at + 6].startswith("One run of each: this tells about these two models, not about the methods")
    assert "the second is lower" in printed(capsys, two, "compare", "b", "a")[1]


def test_compare_shows_no_difference_where_there_is_none(two, fill, capsys):
    evaluated(two, fill, "c", {2: [4, 1, 3, 4, 4, 4]})
    _, lines = printed(capsys, two, "compare", "b")  # with the newest other
    assert lines[0].startswith("first:  b ") and lines[1].startswith("second: c ")
    at = lines.index("held-out accuracy")
    assert "+0.0 points" in lines[at + 4] and lines[at + 5] == "no difference shown"


def test_compare_pairs_the_prompts_that_both_answered(two, fill, capsys):
    run, ids = evaluated(two, fill, "c", {})
    run.record_evaluation(2, "training", [fill.evaluation(ids[2:5], [4, 4, 3], samples=8)], model="", config={})
    found = json.loads(printed(capsys, two, "compare", "a", "c", "--json")[0])["held_out"]
    assert (found["prompts"], found["samples"], found["steps"]) == (3, [4, 8], [2, 2])
    # "a" had 1, 2, 2 of 4 on these
    assert (found["first"], found["second"]) == pytest.approx((5 / 12, 11 / 24))
    assert found["p"] == pytest.approx(stats.ttest_1samp([1 / 4, 0, -1 / 8], 0).pvalue)
    assert found["verdict"] == "no difference shown"


def test_compare_without_a_test(store, fill, capsys):
    evaluated(store, fill, "a", {1: [1, 1, 1, 1, 1, 1]})
    evaluated(store, fill, "b", {})
    _, lines = printed(capsys, store, "compare")
    assert "not measured in both on the same prompts, so there is no test" in lines
    assert json.loads(printed(capsys, store, "compare", "--json")[0])["held_out"] is None


def test_compare_runs_that_share_held_out_prompts_only(store, fill, capsys):
    held_out, *trained = fill.prompts(store, 3)
    for name, prompt in zip(("a", "b"), trained, strict=True):
        run = fill.run(store, name)
        run.record_evaluation(0, "training", [fill.evaluation([held_out], [3])], model="", config={})
        fill.step(run, 1, [prompt], [1])
    _, lines = printed(capsys, store, "compare")
    assert "no difference shown" in lines and lines[-1] == "no training prompt in common"


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ([], [], "has 0 of the two runs to compare; train another one first"),
        (["a"], [], "has 1 of the two runs to compare; train another one first"),
        (["a"], ["a"], "has no run to compare 'a' with; train another one first"),
    ],
)
def test_compare_needs_two_runs(store, fill, capsys, names, arguments, message):
    for name in names:
        fill.run(store, name)
    assert main(["compare", *arguments, "--store.url", store.url]) == 2
    assert capsys.readouterr().err == f"error: {store.location} {message}\n"


def _owner(store, host, pid, heartbeat):
    with store.database.transaction(write=True) as connection:
        connection.execute(
            text("UPDATE dbb_run SET owner_host = :host, owner_pid = :pid, owner_started = NULL, heartbeat_at = :at"),
            {"host": host, "pid": pid, "at": heartbeat},
        )


@pytest.mark.parametrize(
    ("host", "shown"),
    [(socket.gethostname(), r"stale \d+ d"), ("another-host", r"stale \d+ d")],
)
def test_a_run_whose_process_has_ended_is_stale_everywhere(store, fill, tmp_path, capsys, host, shown):
    evaluated(store, fill, "a b", {})
    fill.run(store, "c")
    _owner(store, host, 2**22 + 1, "2026-01-01T00:00:00.000Z")  # above the largest process id
    _, lines = printed(capsys, store, "runs")
    assert all(re.search(f" {shown} ", line) for line in lines[1:])
    _, lines = printed(capsys, store, "show", "a b")
    assert re.fullmatch(f"status: +{shown}, step 2", lines[2])
    assert "to go on:          the same training command with --resume 'a b'" in lines
    out, _ = printed(capsys, store, "show", "--json")
    assert json.loads(out)["status"] == "stale" and json.loads(out)["last_write"] == "2026-01-01T00:00:00.000Z"
    evaluated(store, fill, "d", {})
    assert re.search(f"{shown} at step 2; dbb", printed(capsys, store, "compare", "a b")[1][0])
    page = tmp_path / "report.html"
    assert main(["report", "a b", "-o", str(page), "--store.url", store.url]) == 0
    assert re.search(f'"status","{shown}, step 2"', page.read_text())


def test_a_run_whose_process_lives_is_running_however_long_it_is_silent(store, fill, capsys):
    run = fill.run(store)
    owner = run.record.owner
    _owner(store, owner.host, owner.pid, "2026-01-01T00:00:00.000Z")
    assert "  running  " in printed(capsys, store, "runs")[1][1]
    _, lines = printed(capsys, store, "show")
    assert lines[2] == "status:            running, step 0" and not any(line.startswith("to go on") for line in lines)


COMMANDS = (["runs"], ["show"], ["costs"], ["compare"], ["history", "prompt 1"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_terminal_of_100_columns_holds_it(terminal, two, fill, capsys, command):
    evaluated(two, fill, "x" * 90, {0: [0] * 6, 2: [4] * 6}, model="m" * 300, estimator="e" * 70)
    _, lines = printed(capsys, two, *command)
    assert lines and max(map(len, lines)) <= 100
    assert command != ["show"] or len(lines) <= 40


def test_what_a_terminal_cuts_is_whole_when_wide_and_in_a_pipe(two, fill, capsys, monkeypatch):
    name = "x" * 90
    evaluated(two, fill, name, {})
    assert name in printed(capsys, two, "runs")[0]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    out, lines = printed(capsys, two, "runs")
    assert name not in out and "\u2026  " in lines[2]
    assert "\x1b[32mrunning" in out  # green
    _, lines = printed(capsys, two, "runs", "--wide")
    assert name in lines[-3] and "replayed" in lines[-4]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(capsys, two, "runs")[0]


def test_a_pipe_gets_plain_aligned_text(two, capsys):
    for command in COMMANDS:
        out, lines = printed(capsys, two, *command)
        assert "\x1b" not in out and out.splitlines() == lines
    assert [line[:7] for line in printed(capsys, two, "runs")[1]] == ["#  name", "2  b   ", "1  a   "]


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_texts_of_a_store_are_neither_markup_nor_control_characters(store, fill, capsys, request, where):
    if where == "terminal":
        request.getfixturevalue("terminal")
    for name in ("a [bold]", "b :smile:"):
        run = fill.run(store, name, model=HOSTILE, method="[blink]x[/blink]", estimator="[/]")
        (prompt,) = store.register_prompts([HOSTILE], [HOSTILE])
        fill.step(run, 1, [prompt], [4 if name[0] == "a" else 0])
    for command in (["runs", "--wide"], ["show"], ["costs"], ["compare"], ["history", str(prompt)]):
        _, lines = printed(capsys, store, *command)
        assert all(line.isprintable() for line in lines)
        assert "[" in "".join(lines)
    _, lines = printed(capsys, store, "show")
    assert sum("[red]bold[/red] \\x1b[31m :smile: \\u202e\u6f22\u5b57" in line for line in lines) == 3
    _, lines = printed(capsys, store, "runs")
    assert "b :smile:" in lines[1] and "a [bold]" in lines[2] and "[blink]x[/blink]+[/]" in lines[1]
    assert where == "pipe" or len({cell_len(line) for line in lines}) == 1


def test_json_has_the_numbers_that_are_printed(two, fill, capsys):
    fill.run(two, "new")
    new, b, a = json.loads(printed(capsys, two, "runs", "--json")[0])
    assert (a["number"], a["name"], a["status"], a["step"]) == (1, "a", "running", 2)
    assert (a["rollouts"], a["tokens"], a["groups"], a["mixed_groups"]) == (48, 480, 12, 8)
    assert (a["method"], a["estimator"], a["parameters"]["discount"]) == ("grpo", "dbb", 0.5)
    assert a["held_out"] == {
        "start": 0.125, "start_step": 0, "best": 0.5, "best_step": 1, "last": 0.25, "last_step": 2,
        "prompts": 6, "samples": 4, "benchmarks": 1,
    }  # fmt: skip
    assert new.keys() == a.keys() == b.keys()
    assert (new["held_out"], new["method"], new["rollouts"], new["mixed_groups"]) == (None,) * 4
    shown = json.loads(printed(capsys, two, "show", "a", "--prompts", "2", "--json")[0])
    assert a.items() <= shown.items()
    assert shown["training_rate"] == pytest.approx(((1 + 2 + 3 + 4 + 0 + 1) + (2 + 3 + 4 + 0 + 1 + 2)) / 48)
    assert [len(shown[name]) for name in ("hardest", "easiest")] == [2, 2] and shown["configuration"] == {"seed": 7}
    of_new, of_a, of_b = json.loads(printed(capsys, two, "costs", "--json")[0])
    assert of_new["run"] == "new" and of_new["rollouts"] is None
    assert (of_a["run"], of_a["rollouts"], of_a["rollouts_per_mixed_group"], of_b["run"]) == ("a", 48, 6.0, "b")
    history = json.loads(printed(capsys, two, "history", "prompt 1", "a", "--json")[0])
    assert (history["run"], history["prompt"], history["label"]) == ("a", "prompt 1", "1")
    assert [visit["step"] for visit in history["visits"]] == [1, 2]
    compared = json.loads(printed(capsys, two, "compare", "a", "b", "--json")[0])
    assert [run["name"] for run in compared["runs"]] == ["a", "b"] and compared["runs"][0] == a
    assert compared["held_out"]["difference"] == pytest.approx(DIFFERENCES.mean())
    assert compared["held_out"]["verdict"] == "the second is higher"
    assert compared["training"]["prompts"] == {"both": 6, "only_first": 0, "only_second": 0}
    assert compared["training"]["posterior_mean"]["difference"] == 0
    assert len(compared["training"]["curves"]) == 5 and compared["training"]["curves"][0]["from"] == 1


@pytest.mark.parametrize(
    ("seconds", "found"), [(0.5, "0 s"), (58, "58 s"), (60, "1 min"), (7_200, "2 h"), (300_000, "3 d")]
)
def test_the_age_of_a_moment(seconds, found):
    moment = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    assert age(moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")) == found
