"""The command openrlhf-dbb: its help and errors; runs, show, history and compare on a terminal, in a pipe, as JSON."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from scipy import stats
from sqlalchemy import text

from openrlhf_dbb import Posteriors
from openrlhf_dbb.cli.main import COMMANDS, main
from openrlhf_dbb.inspect.facts import read_view
from openrlhf_dbb.storage import StoreError, read
from openrlhf_dbb.storage.read import progress
from openrlhf_dbb.terminal import shown

ROOT = Path(__file__).parents[1]
HOSTILE = "[red]bold[/red] \x1b[31m :smile: \u202e\u6f22\u5b57"


def printed(capsys, store, *command):
    """Return what a command prints, and its lines without the codes for bold and dim."""
    assert main([*command, "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    return out, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()


def as_json(capsys, store, *command):
    return json.loads(printed(capsys, store, *command, "--json")[0])


def facts(capsys, store, *command):
    """The lines "name: value" that a command prints."""
    return dict(
        re.split(": +", line, maxsplit=1)
        for line in printed(capsys, store, *command)[1]
        if ": " in line
    )


def refused(capsys, *command):
    """The one line that a command prints when it refuses."""
    assert main(list(command)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_the_value_of_an_unknown_flag_is_not_taken_for_the_command(capsys):
    error = refused(capsys, "--hub_token", "hunter2", "runs")
    assert "unknown flag --hub_token" in error and "hunter2" not in error


@pytest.mark.parametrize(
    "command", [*sorted(COMMANDS.keys() - {"train"}), "lab replay", "evaluate compare"]
)
def test_every_command_prints_its_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: openrlhf-dbb {command} ")
    assert not re.search(r"SUPPRESS|%\(|%%|None", out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("rnus", r"COMMAND: .*'rnus'.*\bruns\b"),
        ("runs --stor.url x", "--stor.url.*--store.url.*openrlhf-dbb runs --help"),
        ("evaluate", "evaluate needs --model and --benchmarks.* compare"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(capsys, argv, message):
    line = refused(capsys, *argv.split())
    assert re.search(f"^error: .*{message}", line), line


def test_the_store_is_named_before_the_command_or_after_it(store, fill, capsys):
    fill.run(store)
    for words in ("--store.url {url} runs --json", "runs --json --store.url {url}"):
        assert main(words.format(url=store.url).split()) == 0
        assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["run"]


def test_a_command_whose_extra_is_missing_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    stack = (
        "needs the training stack, which pip alone cannot install: run bash scripts/setup_env.sh"
    )
    for argv in ("train", "evaluate --model x --benchmarks math500"):
        assert stack in refused(capsys, *argv.split())


def test_train_reads_its_own_arguments(tmp_path):
    pytest.importorskip("openrlhf")
    command = [
        sys.executable,
        "-m",
        "openrlhf_dbb",
        "--store.url",
        "sqlite:///x.db",
        "train",
        "--estimator",
        "nobody",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --estimator: unknown estimator 'nobody'; known: ")


@pytest.fixture
def filled(store, fill):
    """A store with run "old", and run "new" warm-started from it."""
    old = fill.run(store, "old")
    a, b, c = fill.prompts(store, 3)
    fill.step(old, 1, [a, b], [4, 1])
    new = fill.run(store, "new", config={"seed": 7, "actor": {"lr": 1e-6}})
    new.warm_start(
        store, old.record, store.register_prompts(["prompt 0", "prompt 2"], ["0", "2"]), weight=0.5
    )
    for step, successes in ((1, 0), (2, 2)):
        shared = {"discount": np.array([step / 3]), "prior": np.array([1.0, 2.0])}
        fill.step(
            new,
            step,
            [c],
            [successes],
            shared=shared,
            probes=fill.probes([a, c], [128, 64], [100, 4]),
        )
    new.record_checkpoint(1, "global_step1")
    return store, (a, b, c)


def evaluated(store, fill, name, successes_by_step, **values):
    """A run of two steps of 6 prompts, evaluated on these with 4 samples each; its prompts' ids."""
    run = fill.run(store, name, **values)
    ids = np.sort(fill.prompts(store, 6))
    fill.train(run, ids, (1, 2))
    for step, successes in successes_by_step.items():
        run.record_evaluation(
            step, "training", [fill.evaluation(ids, successes)], model="tiny", config={}
        )
    return run, ids


@pytest.fixture
def two(store, fill):
    """Run "a", best at step 1, and "b", which is better at its end."""
    evaluated(
        store,
        fill,
        "a",
        {0: [1, 0, 0, 1, 0, 1], 1: [2, 2, 2, 2, 2, 2], 2: [0, 1, 1, 2, 2, 0]},
        method="grpo",
    )
    evaluated(store, fill, "b", {0: [1, 0, 0, 1, 0, 1], 2: [2, 4, 3, 4, 4, 3]}, method="grpo")
    return store


# ---- runs, show


def test_runs_and_show_give_held_out_accuracy(two, fill, capsys):
    fill.run(two, "c")
    rows = [re.split("  +", line)[:7] for line in printed(capsys, two, "runs")[1][1:]]
    # of 24: 3 right at the start, then 20 and 6
    assert rows == [
        ["3", "c", "running", "-", "0", "dbb", "-"],
        ["2", "b", "running", "12.5 -> 83.3 %", "2", "grpo+dbb", "48"],
        ["1", "a", "running", "12.5 -> 25.0 %", "2", "grpo+dbb", "48"],
    ]
    for run, then in (
        ("a", "50.0 % (best) at step 1 -> 25.0 % (last) at step 2"),
        ("b", "83.3 % (last) at step 2"),
    ):
        held_out = facts(capsys, two, "show", run)["held-out accuracy"]
        assert held_out.startswith(f"12.5 % (start) at step 0 -> {then};")
        assert held_out.endswith("; 6 prompts x 4 samples")


def test_show_prints_a_run_s_facts_and_its_hardest_and_easiest_prompts(filled, capsys):
    store, (a, _, c) = filled
    out, lines = printed(capsys, store, "show", "new")
    assert printed(capsys, store, "show")[1][0] == lines[0]  # the latest run
    found = facts(capsys, store, "show")
    # prompt 0: (2.25, 0.25), 0.9; prompt 2: (0.5, 4.5), then (2.25, 4.25), 2.25 / 6.5
    told = {"run": "new (number 2)", "status": "running, step 2", "held-out accuracy": "not measured",
            "checkpoint": "step 1", "run-wide state": "discount 0.6667",
            "probes": "384 rollouts of 4 groups, never trained on",
            "estimator": "dbb version 1, discount = 0.5, prior_alpha = 1.0, prior_beta = 1.0",
            "training": "25.0 % of the full reward, 8 rollouts in 2 visits",
            "began from": f"run old at step 1, weight 0.5, in {store.location}",
            "posterior mean": f"{(0.9 + 2.25 / 6.5) / 2:.4f} over 2 prompts, 1 visited"}  # fmt: skip
    assert found.items() >= told.items()
    hardest, easiest = (part.splitlines()[2:4] for part in out.split("\n\n")[-2:])
    assert [line.split() for line in hardest] == [
        [str(c), "0.3462", "0.2263", "2", "prompt", "2"],
        [str(a), "0.9", "0.09", "0", "prompt", "0"],
    ]
    assert easiest == hardest[::-1]


def test_show_and_history_tell_questions_of_one_template_apart(store, fill, capsys):
    chat = "<|user|>\nYou are a helpful assistant that adds two numbers.\n{} + 1?<|end|>\n<|assistant|>\n"
    ids = store.register_prompts([chat.format(number) for number in (7, 8, 9)], ["8", "9", "10"])
    fill.step(fill.run(store), 1, ids, [1, 2, 3])
    lines = printed(capsys, store, "show")[1]
    assert [line.split("  ")[-1] for line in lines[-3:]] == ["9 + 1?", "8 + 1?", "7 + 1?"]
    assert f"{ids[1]} (8 + 1?, label 9), " in refused(
        capsys, "history", "adds two", "--store.url", store.url
    )


def test_tables_of_prompts_show_where_the_texts_differ(store, fill, capsys):
    asked = "State the final answer to the following arithmetic problem and nothing else: {} = ?"
    others = [
        "请计算下面这个算式的结果,并且只写出最后的答案,不要写出任何别的文字,也不要解释你的计算过程和任何一个中间步骤,谢谢:"
        + end
        for end in ("七加二", "八加二")
    ]
    prompts = [asked.format(sum) for sum in ("-12 + 9", "-13 + 9", "14 + 9")] + [*others, "Who?"]
    ids = store.register_prompts(prompts, [""] * 6)
    fill.step(fill.run(store), 1, ids, [0, 1, 2, 3, 4, 4])
    lines = printed(capsys, store, "show")[1]
    assert [line.split("  ")[-1] for line in lines[-5:]] == [
        "...八加二", "Who?", "...七加二", "...14 + 9 = ?", "...-13 + 9 = ?",
    ]  # fmt: skip
    assert f"{ids[0]} (...-12 + 9 = ?, label )" in refused(
        capsys, "history", "arithmetic", "--store.url", store.url
    )
    # JSON has the whole texts.
    assert as_json(capsys, store, "show")["hardest"][0]["prompt"] == prompts[0]


def test_times_have_a_zone_and_a_run_that_is_deleted_meanwhile_is_named(
    store, fill, capsys, monkeypatch
):
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, 2), [0, 1])
    assert re.match(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ; last step ", facts(capsys, store, "show")["started"]
    )
    totals = progress(store, run.record)
    run.finish()
    store.delete_run(run.record)
    monkeypatch.setattr(read, "progress", lambda *_: totals)
    with pytest.raises(StoreError, match="run 'run' has been deleted"):
        read_view(store, run.record)


# ---- history


@pytest.mark.parametrize("ref", ["{}", "PROMPT 2"])
def test_history_prints_the_visits_of_a_prompt_and_says_where_there_are_none(filled, capsys, ref):
    store, (a, _, c) = filled
    lines = printed(capsys, store, "history", ref.format(c))[1]
    assert lines[:3] == ["run:    new", f"prompt: {c}: prompt 2", "label:  2"]
    assert [line.split() for line in lines[3:]] == [
        ["step", "rollouts", "successes", "alpha", "beta", "mean", "variance"],
        ["1", "4", "0", "0.5", "4.5", "0.1", "0.09"],
        ["2", "4", "2", "2.25", "4.25", "0.3462", "0.2263"],
    ]
    assert printed(capsys, store, "history", str(a), "old")[1][-1].split()[:5] == [
        "1",
        "4",
        "4",
        "4.5",
        "0.5",
    ]
    assert "not visited in this run" in printed(capsys, store, "history", str(a))[0]


# ---- compare


def test_runs_have_the_rollouts_and_tokens_that_a_mixed_group_costs(store, fill, capsys):
    """Runs of two methods, without usage, and of single rollouts."""
    ids = fill.prompts(store, 2)
    fill.step(fill.run(store, "c"), 1, ids, [4, 2])
    # the first group is filtered out; the second is informative, but not rescued
    filtered = fill.usage(ids, [4, 2], trained=4, informative=4, rescued=0)
    fill.step(fill.run(store, "b", method="dapo"), 1, ids, [4, 2], usage=filtered)
    fill.step(fill.run(store, "a"), 1, ids[:1], [4], usage=None)
    fill.step(fill.run(store, "single"), 1, ids, [1, 0], rollouts=1)
    nothing = fill.usage(ids[:1], [0], informative=0, rescued=0)
    fill.step(fill.run(store, "zero"), 1, ids[:1], [0], usage=nothing)
    names = (
        "rollouts",
        "filtered",
        "mixed_groups",
        "rollouts_per_mixed_group",
        "tokens_per_mixed_group",
    )
    names += ("zero_variance_share", "given_advantage_share")
    assert {
        run["name"]: [run[name] for name in names] for run in as_json(capsys, store, "runs")
    } == {
        "b": [8, 4, 1, 8, 80, 0.5, 0],
        "a": [None] * 7,
        "c": [8, 0, 1, 8, 80, 0.5, 1],
        "single": [2, 0, None, None, None, None, None],
        "zero": [4, 0, 0, None, None, 1, 0],
    }
    assert "rollouts" not in facts(capsys, store, "show", "a")
    out, _ = printed(capsys, store, "compare", "b", "c")
    assert "not measured in both on the same prompts" in out
    assert out.splitlines()[-2].split() == ["b", "dapo", "dbb", "8", "4", "1", "8", "0.5", "0"]


def test_compare_names_the_better_of_two_models(two, fill, capsys):
    _, lines = printed(capsys, two, "compare", "a", "b")
    at = lines.index("held-out accuracy")
    assert [re.split("  +", line)[1:] for line in lines[at + 2 : at + 4]] == [
        ["12.5 % (step 0)", "50.0 % (step 1)", "25.0 % (step 2)"],
        ["12.5 % (step 0)", "83.3 % (step 2)", "83.3 % (step 2)"],
    ]
    low, high = stats.ttest_1samp(np.array([2, 3, 2, 2, 2, 3]) / 4, 0).confidence_interval()
    interval = f"95 % interval +{100 * low:.1f} to +{100 * high:.1f}"
    assert lines[at + 4].endswith(f" +58.3 points, {interval} (6 prompts x 4 samples)")
    assert lines[at + 5] == "the second is higher" and lines[at + 6].startswith("One run of each")
    assert "the second is lower" in printed(capsys, two, "compare", "b", "a")[1]
    evaluated(two, fill, "c", {2: [4, 1, 3, 4, 4, 4]})
    _, lines = printed(capsys, two, "compare", "b", "c")
    assert "+0.0 points" in lines[at + 4] and lines[at + 5] == "no difference shown"


def test_compare_pairs_the_prompts_that_both_answered(two, fill, capsys):
    run, ids = evaluated(two, fill, "c", {})
    run.record_evaluation(
        2, "training", [fill.evaluation(ids[2:5], [4, 4, 3], samples=8)], model="", config={}
    )
    tested = as_json(capsys, two, "compare", "a", "c")["held_out"]
    assert (tested["prompts"], tested["samples"], tested["steps"]) == (3, [4, 8], [2, 2])
    first = np.array([1, 2, 2]) / 4
    second = np.array([4, 4, 3]) / 8
    assert (tested["first"], tested["second"]) == pytest.approx((first.mean(), second.mean()))
    intervals = [list(stats.ttest_1samp(of, 0).confidence_interval()) for of in (first, second)]
    np.testing.assert_allclose(tested["intervals"], intervals)
    assert tested["p"] == pytest.approx(stats.ttest_1samp(second - first, 0).pvalue)


def test_compare_has_unbiased_pass_at_k_with_its_interval(two, fill, capsys):
    # 1 - C(4 - c, k) / C(4, k): of "a" c is 0, 1, 1, 2, 2, 0; of "b" 2, 4, 3, 4, 4, 3
    first = np.array([0, 1 / 2, 1 / 2, 5 / 6, 5 / 6, 0])
    second = np.array([5 / 6, 1, 1, 1, 1, 1])
    of_2, of_4 = as_json(capsys, two, "compare", "a", "b")["held_out"]["pass_at_k"]
    low, high = stats.ttest_1samp(second - first, 0).confidence_interval()
    wanted = {"k": 2, "first": first.mean(), "second": second.mean(), "low": low, "high": high}
    assert {name: of_2[name] for name in wanted} == pytest.approx(wanted)
    assert (of_4["k"], of_4["first"], of_4["second"]) == pytest.approx((4, 4 / 6, 1))
    evaluated(two, fill, "partial", {2: [0.5, 1, 3, 4, 4, 4]})
    assert "pass@k" not in printed(capsys, two, "compare", "b", "partial")[0]


# ---- whether a run still runs


@pytest.mark.parametrize("host", [socket.gethostname(), "another-host"])
def test_a_run_whose_process_has_ended_is_stale(store, fill, capsys, host):
    evaluated(store, fill, "a b", {}, method="grpo")
    # above the largest process id
    killed = "UPDATE dbb_run SET owner_host = :host, owner_pid = 4194305, heartbeat_at = '2026-01-01T00:00:00.000Z'"
    with store.database.transaction(write=True) as connection:
        connection.execute(text(killed), {"host": host})
    assert re.search(r" stale \d+ d ", printed(capsys, store, "runs")[1][1])
    found = facts(capsys, store, "show", "a b")
    assert re.fullmatch(r"stale \d+ d, step 2", found["status"])
    assert as_json(capsys, store, "show")["status"] == "stale"


# ---- terminal, pipe, JSON, refusals

SHOWN = (["runs"], ["show"], ["compare", "a", "b"], ["history", "prompt 1"])


def test_a_terminal_of_100_columns_cuts_what_is_whole_in_a_pipe(two, fill, capsys, monkeypatch):
    name = "x" * 90
    evaluated(two, fill, name, {0: [0] * 6, 2: [4] * 6}, model="m" * 300, estimator="e" * 70)
    for command in SHOWN:
        out, lines = printed(capsys, two, *command)
        assert "\x1b" not in out and out.splitlines() == lines
    assert name in printed(capsys, two, "runs")[0]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    for command in SHOWN:
        assert max(map(len, printed(capsys, two, *command)[1])) <= 100
    out, lines = printed(capsys, two, "runs")
    assert name not in out and "\u2026  " in lines[1]


@pytest.fixture(params=[None, "100"])
def hostile(request, open_new, fill, monkeypatch):
    """A store with two runs whose texts are markup, on a terminal of unknown width and on one of 100 columns."""
    if request.param:
        for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "100"), ("NO_COLOR", "1")):
            monkeypatch.setenv(name, value)
    store = open_new("sqlite")
    config = {"n": HOSTILE}
    [prompt] = store.register_prompts([HOSTILE + "x" * 500], [HOSTILE])
    for name, successes in (("a [bold]", 4), ("b :smile:", 0)):
        run = fill.run(
            store,
            name,
            model=HOSTILE,
            method="[blink]x[/blink]",
            estimator="[/]",
            config=config,
        )
        fill.step(run, 1, [prompt], [successes])
    return store, prompt, request.param


def test_no_command_prints_a_text_s_control_characters(hostile, capsys):
    store, prompt, _ = hostile
    for command in (["runs"], ["show"], ["compare", "1", "2"], ["history", str(prompt)]):
        _, lines = printed(capsys, store, *command)
        assert all(line.isprintable() for line in lines)


def test_texts_of_a_store_are_not_read_as_markup(hostile, capsys):
    store, _, columns = hostile
    _, lines = printed(capsys, store, "runs")
    assert "b :smile:" in lines[1]
    assert "[blink]x[/blink]+[/]" in lines[1]
    assert "a [bold]" in lines[2]
    if columns:
        assert len({cell_len(line) for line in lines}) == 1


def test_a_text_is_shown_without_control_characters_in_its_width():
    assert shown("\x1b[2J\x07 \u202e" + "x" * 500, 21) == "\\x1b[2J\\x07 \\u202e..."


def test_json_of_the_runs_has_the_numbers_that_are_printed(two, fill, capsys):
    fill.run(two, "new")
    new, _, a = as_json(capsys, two, "runs")
    wanted = {
        "number": 1,
        "name": "a",
        "status": "running",
        "step": 2,
        "method": "grpo",
        "estimator": "dbb",
        "rollouts": 48,
        "tokens": 480,
        "groups": 12,
        "mixed_groups": 8,
    }
    assert wanted.items() <= a.items()
    assert a["parameters"]["discount"] == 0.5
    assert a["held_out"] == {
        "start": 0.125, "start_step": 0, "best": 0.5, "best_step": 1, "last": 0.25, "last_step": 2,
        "prompts": 6, "samples": 4, "benchmarks": 1,
    }  # fmt: skip
    for name in ("held_out", "method", "rollouts", "mixed_groups"):
        assert new[name] is None


def test_json_of_a_run_has_what_the_list_has_and_its_configuration(two, capsys):
    [a] = [run for run in as_json(capsys, two, "runs") if run["name"] == "a"]
    of_a = as_json(capsys, two, "show", "a")
    assert a.items() <= of_a.items()
    assert of_a["configuration"] == {"seed": 7}
    assert of_a["progress"]["successes"] == 11 + 12
    assert (len(of_a["hardest"]), len(of_a["easiest"])) == (5, 5)


def test_json_of_a_history_has_the_prompt_and_its_visits(two, capsys):
    history = as_json(capsys, two, "history", "prompt 1", "a")
    assert (history["run"], history["prompt"], history["label"]) == ("a", "prompt 1", "1")
    assert [visit["step"] for visit in history["visits"]] == [1, 2]


def test_refusals_are_one_line_and_exit_2(store, fill, tmp_path, capsys):
    url = ("--store.url", store.url)
    assert "there are no runs in " in refused(capsys, "show", *url)
    assert printed(capsys, store, "runs")[0] == f"no runs in {store.location}\n"
    run = fill.run(store)
    assert (
        facts(capsys, store, "show")["training"]
        == "none of the full reward, 0 rollouts in 0 visits"
    )
    fill.step(run, 1, fill.prompts(store, 2), [1, 2])
    assert "'nobody'" in refused(capsys, "show", "nobody", *url)
    assert "'9999'" in refused(capsys, "history", "9999", *url)
    assert "(prompt " in refused(capsys, "history", "prompt", *url)
    missing = tmp_path / "missing.db"
    assert f"there is no store at {missing};" in refused(
        capsys, "runs", "--store.url", f"sqlite:///{missing}"
    )
    assert not missing.exists()


def test_a_closed_pipe_ends_a_command_quietly(open_new, fill):
    store = open_new("sqlite")
    fill.run(store)
    command = f"{sys.executable} -m openrlhf_dbb runs --store.url {store.url}"
    piped = ["bash", "-c", f"{{ {command}; echo $? >&2; }} | true"]
    assert subprocess.run(piped, cwd=ROOT, text=True, capture_output=True).stderr.strip() == "0"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}


@pytest.fixture
def shell(tmp_path):
    """Function: run a command on a store with texts beyond ASCII in a shell; exit code, stdout, stderr."""
    url = str(tmp_path / "größe.db")
    asked = ["is 12 ≤ 9?"] * 2
    with Posteriors.create(url, "größe", [asked[0]], ["日本"], model="≤") as posteriors:
        posteriors.observe(1, asked, ["日本"] * 2, [1, 0])

    def run_it(command, redirected=""):
        line = f"{sys.executable} -m openrlhf_dbb {command} {redirected}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, text=True, capture_output=True,
            env=ASCII | {"OPENRLHF_DBB_STORE_URL": url},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run_it


@pytest.mark.parametrize("command", ["runs", "show", "prompts", "history 1"])
def test_an_output_that_is_not_in_utf_8_gets_escapes(shell, command):
    code, out, errors = shell(command)
    assert ((code, errors) == (0, "") and r"gr\xf6\xdfe" in out) or r"\u2264" in out


@pytest.mark.parametrize("command", ["runs", "runs --json", "--help", "--version", "train --help"])
def test_an_output_that_takes_nothing_ends_in_one_line(shell, command):
    code, _, errors = shell(command, "> /dev/full")
    assert code == 1 and re.fullmatch(r"error: the output cannot be written: No space.*\n", errors)
    assert shell(command, ">&-") == (0, "", "")
    assert shell(command, "| true; exit ${PIPESTATUS[0]}")[0] == 0


def test_an_error_line_that_nobody_can_read_leaves_the_exit_code(shell):
    assert shell("show nobody")[0] == 2
    for where in ("2> /dev/full", "2>&-", "<&- >&- 2>&-", "2>&1 | true; exit ${PIPESTATUS[0]}"):
        assert shell("show nobody", where) == (2, "", "")
