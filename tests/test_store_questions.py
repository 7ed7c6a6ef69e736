"""Commands that answer from the store: why an advantage, which prompts are bad, what another trainer's log holds."""

import json
import re

import numpy as np
import pytest

from openrlhf_dbb import Posteriors, Responses, StepExtras
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.inspect.prompts import interval, similar_rates


def ran(capsys, *command):
    """The exit code, and what is printed."""
    code = main([str(word) for word in command])
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


def trained(url, groups, *, form="group_norm", **options):
    """A run with a step for each dict of rewards by prompt; the label of prompt p is P."""
    prompts = sorted(set().union(*groups))
    labels_P = [text.upper() for text in prompts]
    estimator = options.get("estimator", "dbb")
    with Posteriors.create(url, "run", prompts, labels_P, estimator=estimator) as posteriors:
        for step, rewards in enumerate(groups, 1):
            names = []
            values = []
            for prompt, of_prompt in rewards.items():
                names += [prompt] * len(of_prompt)
                values += of_prompt
            texts = list(map("{} {}".format, names, values))
            extras = StepExtras(
                responses=Responses(texts, keep=options.get("keep")),
                weights=options.get("weights"),
                read=list(map("read {}".format, values)),
            )
            labels = [name.upper() for name in names]
            posteriors.observe(step, names, labels, values, extras=extras, form=form)
        posteriors.finish()
        return {prompt: posteriors.prompt_ids[prompt, prompt.upper()] for prompt in prompts}


# ---- explain


@pytest.fixture
def explained(url, capsys):
    """What is printed and what is told in JSON about a prompt's second group, one of whose rollouts is missing."""
    rewards = {"p": [1, 0, None, 0], "q": [1, 1, 1, 1]}
    weights = np.repeat([2.0, 0.5], 4)
    ids = trained(url, [rewards] * 2, weights=weights, form="batch_centered")
    code, out = ran(capsys, "explain", "run", 2, ids["p"], "--store.url", url)
    assert code == 0
    _, told = ran(capsys, "explain", "run", 2, "p", "--store.url", url, "--json")
    kept = [row for row in json.loads(told)["rollouts"] if row["baseline"] is not None]
    return out, kept


def test_an_explanation_has_the_form_the_posterior_and_what_was_read(explained):
    out, _ = explained
    lines = out.splitlines()
    assert [line[-6:] for line in lines[-5:-2]] == ["  read", "read 1", "read 0"]
    assert any(line.startswith("form:         batch_centered: ") for line in lines)
    # alpha, beta = 0.5 + 1, 0.5 + 2; then 0.75 + 1, 1.25 + 2
    for line in (
        "known before: alpha 1.5, beta 2.5, since step 1",
        "rewards seen: 3, sum 1",
        "known after:  alpha 1.75, beta 3.25",
        "mean p:       0.35",
    ):
        assert line in lines


def test_the_printed_arithmetic_is_the_stored_advantage(explained):
    out, kept = explained
    printed = re.findall(r"(\S+) \* \((\S+) - (\S+)\) / (\S+) = (\S+)", out)
    assert len(printed) == len(kept) == 3
    assert out.count("could not be verified") == 1
    for numbers, row in zip(printed, kept, strict=True):
        weight, reward, baseline, scale, advantage = map(float, numbers)
        assert weight * (reward - baseline) / scale == pytest.approx(row["advantage"], abs=2e-5)
        assert advantage == pytest.approx(row["advantage"], abs=2e-5)
        again = row["weight"] * (row["reward"] - row["baseline"]) / row["scale"]
        assert again == pytest.approx(row["advantage"])


def test_what_explain_cannot_show_it_says(url, capsys):
    ids = trained(url, [{"p": [1, 1], "q": [0, 1]}, {"q": [0, 0]}], keep=0)
    code, out = ran(capsys, "explain", "run", 1, ids["p"], "--store.url", url)
    assert (
        code == 0
        and "known before: nothing but the prior" in out
        and "none of its rollouts is kept" in out
    )
    code, out = ran(capsys, "explain", "run", 2, ids["p"], "--store.url", url)
    assert code == 2
    number = ids["p"]
    assert re.search(rf"prompt {number} at step 2; openrlhf-dbb history {number} 1\b", out)


# ---- prompts


@pytest.fixture
def of_every_class(url):
    """The address of a run with a prompt of each class, beside 20 that are neither."""
    alike = {f"{number} + {number}": [1, 0, 1, 1, 0, 1, 1, 1] for number in range(20)}
    right = [1] * 8
    wrong = [0] * 8
    steps = [
        {"wrong + label": wrong, "easy + 1": right, "lost + 2": right, "flip + 3": right},
        {"wrong + label": wrong, "easy + 1": right, "lost + 2": right, "flip + 3": wrong},
        {"wrong + label": wrong, "lost + 2": wrong, "flip + 3": right},
    ]
    trained(url, [alike | step for step in steps])
    return url


def test_prompts_of_every_class_have_counts_and_intervals(of_every_class, capsys):
    _, out = ran(capsys, "prompts", "--json", "--store.url", of_every_class)
    found = {row["prompt"]: row for row in json.loads(out)["prompts"]}
    assert {name: row["why"] for name, row in found.items()} == {
        "wrong + label": "never",
        "easy + 1": "always",
        "flip + 3": "flipping",
        "lost + 2": "lost",
    }
    # of 24 and 16 rollouts: 1 - 0.025^(1/24), 0.025^(1/16)
    assert found["wrong + label"]["high"] == pytest.approx(1 - 0.025 ** (1 / 24))
    assert found["easy + 1"]["low"] == pytest.approx(0.025 ** (1 / 16))
    assert found["flip + 3"]["flips"] == 2
    lost = found["lost + 2"]
    assert (lost["last"], lost["rollouts"]) == (0, 24)


def test_prompts_that_teach_nothing_are_counted_and_listed_to_leave_them_out(
    of_every_class, capsys, tmp_path
):
    file = tmp_path / "out.jsonl"
    code, out = ran(capsys, "prompts", "run", "--leave_out", file, "--store.url", of_every_class)
    assert code == 0
    counts = [line.split(":")[1].strip() for line in out.splitlines()[1:6]]
    assert counts == ["1", "1", "1", "1", "0"]
    assert re.search(r"^never$", out, re.MULTILINE)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"prompt": "wrong + label", "label": "WRONG + LABEL", "why": "never"},
        {"prompt": "easy + 1", "label": "EASY + 1", "why": "always"},
    ]


def test_an_unsolved_prompt_whose_kind_is_unsolved_is_not_called_wrong(url, capsys):
    trained(url, [{f"{number} + {number}": [0] * 8 for number in range(30)}])
    assert json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])["prompts"] == []


def test_the_interval_and_the_similar_prompts_by_hand():
    low, high = interval(np.array([0.0, 2, 2]), np.array([2, 2, 4]))
    # none or all of 2: 1 - sqrt(0.025), sqrt(0.025); 2 of 4 is symmetric
    assert [low[0], high[0], low[1], high[1]] == pytest.approx([0, 1 - 0.025**0.5, 0.025**0.5, 1])
    assert low[2] + high[2] == pytest.approx(1)
    texts = ["aaaa", "aaab"] * 20 + ["zzzz 9 !"]
    rate = np.array([0.2, 0.6] * 20 + [0.0])
    similar = similar_rates(texts, rate, np.arange(41) == 0)
    assert similar[0] == pytest.approx((19 * 0.2 + 0.6) / 20) and np.isnan(similar[1:]).all()


def test_prompts_of_a_run_without_steps_and_of_a_single_prompt(store, fill, capsys):
    run = fill.run(store)
    for step, words in enumerate(("step 0", "step 1")):
        if step:
            fill.step(run, step, fill.prompts(store, 1), [0])
        code, out = ran(capsys, "prompts", "--store.url", store.url)
        assert code == 0 and len(re.findall(r"^\w+: +0: ", out, re.MULTILINE)) == 5
        assert re.match(rf"run: +run, {words}\n", out)


@pytest.mark.parametrize(("wrong", "right"), [(-1, 1), (0, 2), (0.1, 0.7), (-1, 0)])
def test_prompts_are_judged_by_the_two_scores_that_a_run_has(url, capsys, tmp_path, wrong, right):
    """A prompt with half right sums to 0 where scores are -1 and 1; of the others one is never, one always right."""
    groups = {"half": [wrong, right] * 8, "hard": [wrong] * 16, "easy": [right] * 16}
    groups |= {f"{number}": [right] * 14 + [wrong] * 2 for number in range(20)}
    flip = {"flip": [right] * 8, "half": [right] * 8}
    trained(
        url,
        [groups | flip, groups | {"flip": [wrong] * 8}, groups | flip],
        estimator="gaussian",
        keep=100,
    )
    file = tmp_path / "out.jsonl"
    assert ran(capsys, "prompts", "--leave_out", file, "--store.url", url)[0] == 0
    left_out = {
        json.loads(line)["prompt"]: json.loads(line)["why"]
        for line in file.read_text().splitlines()
    }
    assert left_out == {"hard": "never", "easy": "always"}
    told = json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])
    assert told["scores"] == [wrong, right]
    rows = {row["prompt"]: row for row in told["prompts"]}
    assert (rows["flip"]["why"], rows["flip"]["flips"], rows["flip"]["successes"]) == (
        "flipping",
        2,
        16,
    )


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [([3, 1, 2, 2], 100), ([0, 1, 1.2, 0], 100), ([-1, 1, -1, 1], 0), ([0, 1, 0, 1], 0)],
    ids=["any", "a bonus", "nobody knows", "nor of 0 and 1 without a kept one"],
)
def test_prompts_are_not_judged_by_other_scores_or_unknown_ones(
    url, capsys, tmp_path, rewards, keep
):
    trained(url, [{"p": rewards}], estimator="gaussian", keep=keep)
    code, out = ran(capsys, "prompts", "--store.url", url)
    assert code == 0 and "not judged" in out and "never" not in out
    code, out = ran(capsys, "prompts", "--leave_out", tmp_path / "out.jsonl", "--store.url", url)
    assert (
        code == 2
        and "scores are not known to be two" in out
        and not (tmp_path / "out.jsonl").exists()
    )


def test_prompts_lists_those_that_yield_no_score_and_leaves_them_out(url, capsys, tmp_path):
    trained(
        url,
        [{"mute": [None] * 4, "late": [None] * 4, "p": [1, 0, 0, 1]}] * 4
        + [{"late": [1, None, 0, 1]}],
    )
    code, out = ran(capsys, "prompts", "--leave_out", tmp_path / "out.jsonl", "--store.url", url)
    assert code == 0 and re.search(
        r"^unverified: +1: no score at the last 3 visits", out, re.MULTILINE
    )
    left_out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert left_out == [{"prompt": "mute", "label": "MUTE", "why": "unverified"}]
    [row] = json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])["prompts"]
    assert (row["prompt"], row["visits"]) == ("mute", 4)
