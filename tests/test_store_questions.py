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
    code, printed = main([str(word) for word in command]), capsys.readouterr()
    return code, printed.err if code else printed.out


def trained(url, groups, **options):
    """A run with a step for each dict of rewards by prompt; the label of prompt p is P."""
    prompts = sorted({prompt for step in groups for prompt in step})
    labels_P = [text.upper() for text in prompts]
    estimator = options.get("estimator", "dbb")
    with Posteriors.create(url, "run", prompts, labels_P, estimator=estimator) as posteriors:
        for step, rewards in enumerate(groups, 1):
            rows = [(prompt, reward) for prompt, of in rewards.items() for reward in of]
            texts = [f"{prompt} {reward}" for prompt, reward in rows]
            names, values = zip(*rows, strict=True)
            responses, read = Responses(texts, keep=options.get("keep")), [f"read {reward}" for reward in values]
            extras = StepExtras(responses=responses, weights=options.get("weights"), read=read)
            labels, form = [name.upper() for name in names], options.get("form", "group_norm")
            posteriors.observe(step, names, labels, values, extras=extras, form=form)
        posteriors.finish()
        return {prompt: posteriors.prompt_ids[prompt, prompt.upper()] for prompt in prompts}


# ---- explain


def test_the_printed_arithmetic_is_the_stored_advantage(url, capsys):
    weights = np.repeat([2.0, 0.5], 4)
    ids = trained(url, [{"p": [1, 0, None, 0], "q": [1, 1, 1, 1]}] * 2, weights=weights, form="batch_centered")
    code, out = ran(capsys, "explain", "run", 2, ids["p"], "--store.url", url)
    assert code == 0 and [line[-6:] for line in out.splitlines()[-5:-2]] == ["  read", "read 1", "read 0"]
    # alpha, beta = 0.5 + 1, 0.5 + 2; then 0.75 + 1, 1.25 + 2
    for line in ("form:         batch_centered: X - p, minus its mean over the step",
                 "known before: alpha 1.5, beta 2.5, since step 1", "rewards seen: 3, sum 1",
                 "known after:  alpha 1.75, beta 3.25", "mean p:       0.35"):  # fmt: skip
        assert line in out.splitlines()
    printed = re.findall(r"(\S+) \* \((\S+) - (\S+)\) / (\S+) = (\S+)", out)
    stored = json.loads(ran(capsys, "explain", "run", 2, "p", "--store.url", url, "--json")[1])["rollouts"]
    kept = [row for row in stored if row["baseline"] is not None]
    assert len(printed) == len(kept) == 3 and out.count("could not be verified") == 1
    for (weight, reward, baseline, scale, advantage), row in zip(printed, kept, strict=True):
        again = float(weight) * (float(reward) - float(baseline)) / float(scale)
        assert again == pytest.approx(row["advantage"], abs=2e-5) == pytest.approx(float(advantage), abs=2e-5)
        assert row["weight"] * (row["reward"] - row["baseline"]) / row["scale"] == pytest.approx(row["advantage"])


def test_what_explain_cannot_show_it_says(url, capsys):
    ids = trained(url, [{"p": [1, 1], "q": [0, 1]}, {"q": [0, 0]}], keep=0)
    code, out = ran(capsys, "explain", "run", 1, ids["p"], "--store.url", url)
    assert code == 0 and "known before: nothing but the prior" in out and "none of its rollouts is kept" in out
    code, out = ran(capsys, "explain", "run", 2, ids["p"], "--store.url", url)
    assert code == 2 and f"no group of prompt {ids['p']} at step 2; openrlhf-dbb history {ids['p']} 1 lists" in out


# ---- prompts


def test_prompts_of_every_class_with_counts_intervals_and_a_list_to_leave_out(url, capsys, tmp_path):
    alike = {f"{number} + {number}": [1, 0, 1, 1, 0, 1, 1, 1] for number in range(20)}
    steps = [alike | {"wrong + label": [0] * 8, "easy + 1": [1] * 8, "lost + 2": [1] * 8, "flip + 3": [1] * 8},
             alike | {"wrong + label": [0] * 8, "easy + 1": [1] * 8, "lost + 2": [1] * 8, "flip + 3": [0] * 8},
             alike | {"wrong + label": [0] * 8, "lost + 2": [0] * 8, "flip + 3": [1] * 8}]  # fmt: skip
    trained(url, steps)
    file = tmp_path / "out.jsonl"
    code, out = ran(capsys, "prompts", "run", "--leave_out", file, "--store.url", url)
    assert code == 0
    counts = [line.split(":")[1].strip() for line in out.splitlines()[1:6]]
    assert counts == ["1", "1", "1", "1", "0"] and re.search(r"^never$", out, re.MULTILINE)
    told = json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])["prompts"]
    found = {row["prompt"]: row for row in told}
    whys = {name: row["why"] for name, row in found.items()}
    assert whys == {"wrong + label": "never", "easy + 1": "always", "flip + 3": "flipping", "lost + 2": "lost"}
    # of 24 and 16 rollouts: 1 - 0.025^(1/24), 0.025^(1/16)
    assert found["wrong + label"]["high"] == pytest.approx(1 - 0.025 ** (1 / 24))
    assert found["easy + 1"]["low"] == pytest.approx(0.025 ** (1 / 16))
    assert (found["flip + 3"]["flips"], found["lost + 2"]["last"], found["lost + 2"]["rollouts"]) == (2, 0, 24)
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
    texts, rate = ["aaaa", "aaab"] * 20 + ["zzzz 9 !"], np.array([0.2, 0.6] * 20 + [0.0])
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
    trained(url, [groups | flip, groups | {"flip": [wrong] * 8}, groups | flip], estimator="gaussian", keep=100)
    file = tmp_path / "out.jsonl"
    assert ran(capsys, "prompts", "--leave_out", file, "--store.url", url)[0] == 0
    left_out = {json.loads(line)["prompt"]: json.loads(line)["why"] for line in file.read_text().splitlines()}
    assert left_out == {"hard": "never", "easy": "always"}
    told = json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])
    assert told["scores"] == [wrong, right]
    rows = {row["prompt"]: row for row in told["prompts"]}
    assert (rows["flip"]["why"], rows["flip"]["flips"], rows["flip"]["successes"]) == ("flipping", 2, 16)


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [([3, 1, 2, 2], 100), ([0, 1, 1.2, 0], 100), ([-1, 1, -1, 1], 0), ([0, 1, 0, 1], 0)],
    ids=["any", "a bonus", "nobody knows", "nor of 0 and 1 without a kept one"],
)
def test_prompts_are_not_judged_by_other_scores_or_unknown_ones(url, capsys, tmp_path, rewards, keep):
    trained(url, [{"p": rewards}], estimator="gaussian", keep=keep)
    code, out = ran(capsys, "prompts", "--store.url", url)
    assert code == 0 and "not judged" in out and "never" not in out
    code, out = ran(capsys, "prompts", "--leave_out", tmp_path / "out.jsonl", "--store.url", url)
    assert code == 2 and "scores are not known to be two" in out and not (tmp_path / "out.jsonl").exists()


def test_prompts_lists_those_that_yield_no_score_and_leaves_them_out(url, capsys, tmp_path):
    trained(url, [{"mute": [None] * 4, "late": [None] * 4, "p": [1, 0, 0, 1]}] * 4 + [{"late": [1, None, 0, 1]}])
    code, out = ran(capsys, "prompts", "--leave_out", tmp_path / "out.jsonl", "--store.url", url)
    assert code == 0 and re.search(r"^unverified: +1: no score at the last 3 visits", out, re.MULTILINE)
    left_out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert left_out == [{"prompt": "mute", "label": "MUTE", "why": "unverified"}]
    [row] = json.loads(ran(capsys, "prompts", "--json", "--store.url", url)[1])["prompts"]
    assert (row["prompt"], row["visits"]) == ("mute", 4)


# ---- import

ROWS = [(3, "p", "1", 1, "p0"), (3, "p", "1", 0, "p1"), (3, "q", "2", 0, "q0"), (3, "q", "2", 0, "q1"),
        (7, "p", "1", 1, "p0"), (7, "p", "1", 1, "p1")]  # fmt: skip


def verl_dumps(table, folder):
    for step, rows in table.groupby("step"):
        rows.to_json(folder / f"{step}.jsonl", orient="records", lines=True)


def trl_tables(table, folder):
    """Messages, no column "label", a name with the step."""
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        table[name] = [[{"role": role, "content": text}] for text in table[name]]
    for step, rows in table.groupby("step"):
        rows.drop(columns="step").to_parquet(folder / f"completions_{step:05d}.parquet")


LOGS = {
    "verl's dumps": (verl_dumps, ("step", "input", "gts", "score", "output"), []),
    "a table of W&B": (
        lambda table, folder: table.to_json(folder / "a.json", orient="split", index=False),
        ("global_step", "prompt", "label", "reward", "response"), [],
    ),
    "CSV": (
        lambda table, folder: table.to_csv(folder / "a.csv", index=False), tuple("tqarx"),
        ["--step_key", "t", "--prompt_key", "q", "--label_key", "a", "--reward_key", "r", "--response_key", "x"],
    ),
    "TRL's tables": (
        trl_tables, ("step", "prompt", "label", "accuracy_reward", "completion"), ["--reward_key", "accuracy_reward"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("log", LOGS)
def test_a_log_becomes_a_finished_run(open_new, capsys, tmp_path, log):
    pandas = pytest.importorskip("pandas")
    (write, names, flags), store, folder = LOGS[log], open_new("sqlite"), tmp_path / "log"
    folder.mkdir()
    write(pandas.DataFrame(ROWS, columns=names), folder)
    code, out = ran(capsys, "import", folder, "--run_name", "log", *flags, "--store.url", store.url)
    assert code == 0 and out.startswith("run 'log': 2 steps, 2 prompts, 6 rollouts, estimator dbb\n")
    history = """SELECT step, prompt, label, rollouts, successes, alpha
                 FROM posterior_history JOIN prompts USING (prompt_id) ORDER BY step, prompt"""
    # 1 of 2, 0 of 2; then 2 of 2
    assert store.query(history) == [
        (1, "p", "1", 2, 1.0, 1.5), (1, "q", "2", 2, 0.0, 0.5), (2, "p", "1", 2, 2.0, 2.75),
    ]  # fmt: skip
    assert [json.loads(row.metrics)["import/step"] for row in store.query("SELECT metrics FROM steps")] == [3, 7]
    assert store.find_run("log").status == "finished"
    texts = "SELECT text FROM rollouts WHERE step = 1 AND sample = 1 ORDER BY text"
    assert [row.text for row in store.query(texts)] == ["p1", "q1"]
    # replay, the page, and warm start work on it
    assert ran(capsys, "lab", "replay", "log", "--store.url", store.url)[0] == 0
    assert ran(capsys, "report", "log", "-o", tmp_path / "report.html", "--store.url", store.url)[0] == 0
    with Posteriors.create(store, "next", ["p", "new"], ["1", ""], estimator="auto", warm_start="log") as posteriors:
        assert posteriors.warm_start.matched == 1


def test_rewards_that_are_missing_partial_or_of_any_size(open_new, capsys, tmp_path):
    store, file = open_new("sqlite"), tmp_path / "a.jsonl"
    for name, rewards, estimator, parameters in (
        ("partial", [0.5, 1, None], "dbb", {"partial_credit": True}), ("any", [-3, 7, float("nan")], "gaussian", {}),
    ):  # fmt: skip
        file.write_text("".join(json.dumps({"prompt": "p", "step": 1, "reward": reward}) + "\n" for reward in rewards))
        code, out = ran(capsys, "import", file, "--run_name", name, "--store.url", store.url)
        assert code == 0 and out == f"run '{name}': 1 steps, 1 prompts, 3 rollouts, estimator {estimator}\n"
        run = store.find_run(name)
        assert run.estimator == estimator and parameters.items() <= run.parameters.items()
        assert store.query("SELECT rollouts FROM steps WHERE run_id = :run", run=run.run_id) == [(2,)]


REFUSED = {
    "nothing.jsonl": (None, "there is no .*nothing.jsonl; name a log"),
    "a.jsonl": ('{"prompt": "p"', "a.jsonl cannot be read: line 1: broken JSON"),
    "b.jsonl": ('{"prompt": "p", "step": 1}', "line 1 has no column score or reward; give --reward_key of prompt"),
    "c.jsonl": ('{"prompt": "p", "reward": "good", "step": 1}', "line 1: reward 'good' or step '1' is not a number"),
    "e.jsonl": ('{"prompt": "p", "reward": null, "step": 1}', "has no rows with a reward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_log_that_cannot_be_read_is_refused_in_one_line_and_leaves_no_run(open_new, capsys, tmp_path, name):
    store, (content, message) = open_new("sqlite"), REFUSED[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    code, error = ran(capsys, "import", tmp_path / name, "--run_name", "log", "--store.url", store.url)
    assert code == 2 and error.count("\n") == 1 and re.search(message, error)
    assert store.runs() == []
