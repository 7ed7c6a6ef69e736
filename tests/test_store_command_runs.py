"""The openrlhf-dbb command: runs side by side, and where their rollouts went."""

import csv
import io

import pytest

from openrlhf_dbb.cli.main import main
from storage import Usage


def filtered():
    """Usage of two prompts' groups of 4 rollouts of 10 tokens: the first, drawn after it was skipped twice, has zero
    variance and is filtered out; the second is trained on and informative, and as many of its rollouts are replayed."""
    return Usage(
        generated=8, generated_tokens=80, trained=4, trained_tokens=40, zero_variance=4, informative=4, rescued=0,
        replayed=4, replayed_tokens=40, skipped=2, groups=2, informative_groups=1,
    )  # fmt: skip


def test_show_where_the_rollouts_went(store, fill, capsys):
    run = fill.run(store, method="dapo")
    ids = fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 2], usage=filtered())
    fill.step(run, 2, ids, [4, 2], usage=filtered())
    run.finish(unused_rollouts=3, unused_tokens=30)
    assert main(["show", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    assert "method:            dapo\n" in out
    assert (
        "rollouts:          16 generated, 8 trained on, 8 filtered out, 8 replayed, 4 prompt skips; "
        "3 more rollouts unused at the end\n"
    ) in out
    assert (
        "groups:            2 of 4 mixed (some rollouts right, some wrong); "
        "2 with zero variance (all rewards the same); none of them were given an advantage\n"
    ) in out


# compare


@pytest.fixture
def two(store, fill):
    """Runs "a" and "b" on three and two prompts, two of them the same, as ids in the order of a table."""
    x, y, z = sorted(int(i) for i in fill.prompts(store, 3))
    a, b = fill.run(store, "a"), fill.run(store, "b")
    fill.step(a, 1, [x, y], [4, 0])  # (4.5, 0.5), (0.5, 4.5)
    fill.step(a, 2, [z], [2])
    fill.step(b, 1, [x], [4])  # (4.5, 0.5)
    fill.step(b, 2, [y], [4])  # (4.5, 0.5)
    return store, (x, y, z)


def test_compare(two, capsys):
    store, (_, y, _) = two
    assert main(["compare", "a", "b", "--store.url", store.url]) == 0
    out = capsys.readouterr().out
    parameters = "discount = 0.5, prior_alpha = 1.0, prior_beta = 1.0"
    assert out.startswith(f"first:  a (number 1), running at step 2; dbb ({parameters})\nsecond: b (number 2)")
    assert "held-out accuracy\nnot measured in either\n" in out
    assert "prompts: 2 in both, 1 only in the first, 0 only in the second\n" in out
    paid = out.split("where the rollouts went\n")[1].splitlines()[1:3]
    assert [line.split()[:5] for line in paid] == [["a", "-", "dbb", "12", "0"], ["b", "-", "dbb", "8", "0"]]
    # means of x and y: (0.9 + 0.1) / 2 and 0.9
    assert "posterior mean: 0.5000 and 0.9000, difference +0.4000, mean absolute 0.4000\n" in out
    assert "more than 0.1 higher in the second: 1 prompts; lower: 0\n" in out
    differences = out.split("prompts that differ most\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[:4] for line in differences] == [[str(y), "0.1", "0.9", "0.8"]]
    curves = [line.split() for line in out.split("learning curves by rollouts of the run\n")[1].splitlines()[1:]]
    # groups of shared prompts end at 4 and 8 rollouts, also where a third prompt's were generated afterwards
    assert [row for row in curves if row[1:] != ["-"] * 4] == [
        ["4-5", "1", "1", "0.9", "0.9"], ["7-8", "0", "1", "0.1", "0.9"],
    ]  # fmt: skip


def test_compare_runs_that_share_nothing(store, fill, capsys):
    x, y = fill.prompts(store, 2)
    for name, prompt in (("a", x), ("b", y)):
        fill.step(fill.run(store, name), 1, [prompt], [1])
    assert main(["compare", "a", "b", "--store.url", store.url]) == 2
    assert capsys.readouterr().err == (
        "error: runs 'a' and 'b' have no prompt in common; compare runs on the same data set\n"
    )


# costs

COSTS = [
    "run", "method", "estimator", "rollouts", "tokens", "trained_on", "filtered_out", "skipped", "replayed",
    "groups", "mixed_groups", "rollouts_per_mixed_group", "tokens_per_mixed_group", "zero_variance_share",
    "given_advantage_share",
]  # fmt: skip


@pytest.fixture
def methods(store, fill):
    """Runs of two methods, without a method, and without usage."""
    ids = fill.prompts(store, 2)
    fill.step(fill.run(store, "c", method="grpo"), 1, ids, [4, 2])
    fill.step(fill.run(store, "b", method="dapo"), 1, ids, [4, 2], usage=filtered())
    fill.step(fill.run(store, "a", method="grpo"), 1, ids[:1], [4], usage=None)
    fill.run(store, "d")
    return store


def test_costs(methods, capsys):
    assert main(["costs", "--store.url", methods.url]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "run" and header.endswith("  zero variance share  given advantage share")
    assert [line.split() for line in lines] == [
        ["d", "-", "dbb", *["-"] * 6],
        ["b", "dapo", "dbb", "8", "4", "1", "8", "0.5", "0"],
        ["a", "grpo", "dbb", *["-"] * 6],
        ["c", "grpo", "dbb", "8", "0", "1", "8", "0.5", "1"],
    ]
    assert main(["costs", "--wide", "--store.url", methods.url]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    # 4 of 8 rollouts are in a zero-variance group: filtered out by "b", given an advantage by "c"; by method, then name
    assert [line.split() for line in lines] == [
        ["d", "-", "dbb", *["-"] * 12],
        ["b", "dapo", "dbb", "8", "80", "4", "4", "2", "4", "2", "1", "8", "80", "0.5", "0"],
        ["a", "grpo", "dbb", *["-"] * 12],
        ["c", "grpo", "dbb", "8", "80", "8", "0", "2", "6", "2", "1", "8", "80", "0.5", "1"],
    ]


def test_costs_of_some_runs_as_csv(methods, capsys):
    assert main(["costs", "c", "a", "--format", "csv", "--store.url", methods.url]) == 0
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == COSTS
    assert rows == [
        ["a", "grpo", "dbb", *[""] * 12],
        ["c", "grpo", "dbb", "8", "80", "8", "0", "2", "6", "2", "1", "8.0", "80", "0.5", "1.0"],
    ]
    assert main(["costs", "c", "nothing", "--store.url", methods.url]) == 2
    assert "nothing" in capsys.readouterr().err


def test_costs_without_runs_or_without_a_mixed_group(store, fill, capsys):
    assert main(["costs", "--store.url", store.url]) == 0
    assert capsys.readouterr().out == f"no runs in {store.location}\n"
    ids = fill.prompts(store, 1)
    nothing = fill.usage(ids, [0], informative=0, rescued=0)
    fill.step(fill.run(store), 1, ids, [0], usage=nothing)
    assert main(["costs", "--store.url", store.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4:] == ["0", "0", "-", "1", "0"]


def test_zero_variance_costs_nothing_to_tell_of_one_rollout_a_prompt(store, fill, capsys):
    ids = fill.prompts(store, 2)
    fill.step(fill.run(store), 1, ids, [1, 0], rollouts=1)
    assert main(["costs", "--store.url", store.url]) == 0
    # 2 rollouts of 2 groups, none filtered out; nothing about mixed groups and zero variance
    assert capsys.readouterr().out.splitlines()[1].split()[3:] == ["2", "0", "-", "-", "-", "-"]
