"""The command import: columns, steps and advantages of other trainers' logs, and what is refused."""

import gzip
import json
import re

import numpy as np
import pytest

from openrlhf_dbb import Posteriors
from openrlhf_dbb.cli.main import main

ROWS = [(3, "p", "1", 1, "p0"), (3, "p", "1", 0, "p1"), (3, "q", "2", 0, "q0"), (3, "q", "2", 0, "q1"),
        (7, "p", "1", 1, "p0"), (7, "p", "1", 1, "p1")]  # fmt: skip


def ran(capsys, *command):
    """The exit code, and what is printed."""
    code = main([str(word) for word in command])
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


def written(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(step, prompt, reward, **more):
    return ({} if step is None else {"step": step}) | {"prompt": prompt, "reward": reward} | more


@pytest.fixture
def imported(open_new, capsys):
    """Import logs into a new store; return the exit code and what is printed."""

    def run(*words, name="log"):
        return ran(capsys, "import", *words, "--run_name", name, "--store.url", run.store.url)

    run.store = open_new("sqlite")
    run.steps = lambda: [
        json.loads(row.metrics)["import/step"]
        for row in run.store.query("SELECT metrics FROM steps")
    ]
    return run


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
def test_a_log_becomes_a_finished_run(imported, capsys, tmp_path, log):
    pandas = pytest.importorskip("pandas")
    write, names, flags = LOGS[log]
    store = imported.store
    folder = tmp_path / "log"
    folder.mkdir()
    write(pandas.DataFrame(ROWS, columns=names), folder)
    code, out = imported(folder, *flags)
    assert code == 0
    check_imported_lines(out, prompt=names[1], reward=names[3])
    history = """SELECT step, prompt, label, rollouts, successes
                 FROM posterior_history JOIN prompts USING (prompt_id) ORDER BY step, prompt"""
    # 1 of 2, 0 of 2; then 2 of 2
    assert store.query(history) == [
        (1, "p", "1", 2, 1.0),
        (1, "q", "2", 2, 0.0),
        (2, "p", "1", 2, 2.0),
    ]
    assert imported.steps() == [3, 7]
    assert store.find_run("log").status == "finished"
    texts = store.query("SELECT text FROM rollouts WHERE step = 1 AND sample = 1 ORDER BY text")
    assert [text for (text,) in texts] == ["p1", "q1"]
    check_commands_read(capsys, store, tmp_path)


def check_imported_lines(out, *, prompt, reward):
    """The three lines of an import: the columns, the steps and what is stored."""
    columns, steps, counts = out.splitlines()
    for piece in (rf"prompt from {prompt}\b", rf"reward from {reward}\b", "no advantage"):
        assert re.search(piece, columns)
    assert "3 to 7" in steps
    for piece in ("'log'", r"\b2 steps", r"\b2 prompts", r"\b6 rollouts", r"memory auto\b"):
        assert re.search(piece, counts)


def check_commands_read(capsys, store, folder):
    """Replay, the page, and warm start work on an imported run."""
    at = ("--store.url", store.url)
    replayed, _ = ran(capsys, "lab", "replay", "log", *at)
    reported, _ = ran(capsys, "report", "log", "-o", folder / "report.html", *at)
    assert (replayed, reported) == (0, 0)
    with Posteriors.create(
        store, "next", ["p", "new"], ["1", ""], estimator="auto", warm_start="log"
    ) as posteriors:
        assert posteriors.warm_start.matched == 1


# ---- advantages


@pytest.fixture
def without_advantages(imported, tmp_path):
    """A store with the run of a log that has no advantages: of two groups a step one is all right, as dbb would give
    it an advantage, and one is mixed."""
    rows = []
    for step in (1, 2):
        for prompt, reward in (("p", 1), ("p", 1), ("q", 1), ("q", 0)):
            rows.append(row(step, prompt, reward))
    code, out = imported(written(tmp_path / "a.jsonl", rows))
    assert code == 0
    assert "advantages are not known" in out
    return imported.store


def test_without_a_column_of_advantages_none_is_stored_or_counted(without_advantages):
    counts = (
        "SELECT form, generated, zero_variance, groups, trained, informative, rescued FROM steps"
    )
    assert without_advantages.query(counts) == [(None, 4, 2, 2, None, None, None)] * 2
    kept = without_advantages.query("SELECT advantage, baseline, scale, weight FROM rollouts")
    assert kept == [(0, None, None, None)] * 8


@pytest.fixture
def answer(without_advantages, capsys):
    """Function: what a command prints about the run."""
    return lambda *words: ran(capsys, *words, "--store.url", without_advantages.url)[1]


def test_without_a_column_of_advantages_show_claims_none(answer):
    out = answer("show", "log")
    assert "50% of 4 had equal rewards" in out
    assert "given an advantage is not known" in out
    assert re.search(r"^estimator:\s+not known", out, re.MULTILINE)
    assert "trained on" not in out


def test_without_a_column_of_advantages_explain_claims_none(answer):
    out = answer("explain", "log", "1", "p")
    assert out.count("advantage not known") == 2
    assert "mean p" not in out


def test_without_a_column_of_advantages_no_list_of_runs_claims_an_estimator(answer):
    assert re.search("estimator .*log does not tell", answer("lab", "replay", "log"))
    assert re.search(r"log +finished +- +2 +import +8", answer("runs"))


def test_without_a_column_of_advantages_a_comparison_has_no_share_of_them(answer):
    numbers = json.loads(answer("compare", "log", "log", "--json"))["runs"][0]
    assert numbers["rollouts"] == 8
    assert numbers["zero_variance_share"] == 0.5
    for name in ("estimator", "given_advantage_share", "trained"):
        assert numbers[name] is None


def test_the_advantages_of_the_log_are_stored_and_counted(imported, capsys, tmp_path):
    rows = [
        row(1, "p", 1, adv=0.0),
        row(1, "p", 1, adv=0.0),
        row(1, "q", 1, adv=0.5),
        row(1, "q", 0, adv=-0.5),
    ]
    assert imported(written(tmp_path / "a.jsonl", rows), "--advantage_key", "adv")[0] == 0
    store = imported.store
    at = ("--store.url", imported.store.url)
    advantages = "SELECT advantage, weight FROM rollouts ORDER BY prompt_id, sample"
    assert store.query(advantages) == [(0, 1), (0, 1), (0.5, 1), (-0.5, 1)]
    assert store.query("SELECT form, trained, informative, rescued FROM steps") == [(None, 4, 2, 0)]
    assert "0% of these were given an advantage" in ran(capsys, "show", "log", *at)[1]
    explained = ran(capsys, "explain", "log", "1", "q", *at)[1]
    assert explained.count("the trainer's own advantage") == 2 and "-0.5" in explained


def test_a_column_that_some_rows_lack_is_refused_unless_they_have_no_reward(imported, tmp_path):
    rows = [row(1, "p", 1, advantage=0.5), row(1, "p", None), row(1, "p", 0)]
    code, error = imported(written(tmp_path / "a.jsonl", rows))
    assert code == 2 and "a.jsonl, line 3 has a reward and no advantage" in error
    assert imported(written(tmp_path / "a.jsonl", rows[:2]))[0] == 0
    nulls = [row(1, "p", 1, advantage=None), row(1, "p", 0, advantage=None)]
    assert "not known" in imported(written(tmp_path / "b.jsonl", nulls), name="nulls")[1]


# ---- steps

NAMES = {
    "a model's size": (["qwen2.5-7b_step1", "qwen2.5-7b_step2", "qwen2.5-7b_step3"], [1, 2, 3]),
    "a date": (["2026-11-28_rollouts_001", "2026-11-28_rollouts_002"], [1, 2]),
    "one rank": (["rank_0_step_1", "rank_0_step_2"], [1, 2]),
    "ranks of one step": (["rank_0_step_4", "rank_1_step_4"], [4]),
    "ranks of steps": (
        ["step_1_rank_0", "step_1_rank_1", "step_2_rank_0", "step_2_rank_1"],
        [1, 2],
    ),
    "times": (["12-30_step_7", "12-45_step_8"], [7, 8]),
    "every tenth, with another start": (["completions_00010", "completions_00020"], [10, 20]),
    "one file": (["completions_00005"], [5]),
    "one file of a model": (["qwen2.5_step_5"], [5]),
    "glued to the word": (["step5", "step6"], [5, 6]),
    "the number alone": (["000123", "000124"], [123, 124]),
    "a benchmark's name": (["gsm8k_12", "gsm8k_13"], [12, 13]),
    "shards of one step": (["step_4-00000-of-00002", "step_4-00001-of-00002"], [4]),
    "actors of one step": (["actor0_step_4", "actor1_step_4"], [4]),
}


@pytest.mark.parametrize("names", NAMES)
def test_the_step_is_the_number_of_the_names_that_tells_it(imported, tmp_path, names):
    files, steps = NAMES[names]
    for at, name in enumerate(files):
        written(
            tmp_path / "log_9" / f"{name}.jsonl", [row(None, f"p{at}", 1), row(None, f"p{at}", 0)]
        )
    code, out = imported(tmp_path / "log_9")
    assert code == 0 and f"steps from the file names: {steps[0]} to {steps[-1]}\n" in out
    assert imported.steps() == steps


@pytest.mark.parametrize(
    "files",
    [["a_1_2", "a_2_3"], ["epoch1_step1", "epoch2_step1"], ["rank_0", "rank_1"], ["a", "b"], ["a/step_1", "b/step_1"],
     ["rollouts"], ["qwen2.5"], ["train-00000-of-00002", "train-00001-of-00002"], ["part_0_of_2"], ["gsm8k"],
     ["aime24", "aime25"], ["actor0", "actor1"], ["actor_0", "actor_1"], ["replica_0", "replica_1"],
     ["seed_1", "seed_2"], ["qwen-7b"], ["2026-11-28", "2026-11-29"]],
)  # fmt: skip
def test_names_that_do_not_tell_the_step_are_refused(imported, tmp_path, files):
    logs = [
        written(tmp_path / f"{name}.jsonl", [row(None, f"p{at}", 1)])
        for at, name in enumerate(files)
    ]
    code, error = imported(*logs)
    assert (
        code == 2
        and error.count("\n") == 1
        and "give --step_key" in error
        and imported.store.runs() == []
    )


def test_a_file_counts_once(imported, tmp_path):
    rows = [row(1, "p", 1), row(1, "p", 0)]
    file = written(tmp_path / "a.jsonl", rows)
    copy = written(tmp_path / "b.jsonl", rows)
    for files, said in (
        ((file, file), "named twice"),
        ((tmp_path, file), "named twice"),
        ((file, copy), "a copy of"),
    ):
        code, error = imported(*files)
        assert code == 2 and said in error
    # Steps of names may hold the same.
    bare = [written(tmp_path / "steps" / f"{step}.jsonl", [row(None, "p", 1)]) for step in (1, 2)]
    assert imported(*bare)[0] == 0 and imported.steps() == [1, 2]


def test_a_file_and_its_packed_copy_count_once(imported, tmp_path):
    file = written(tmp_path / "a.jsonl", [row(1, "p", 1), row(1, "p", 0)])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes(), mtime=1))
    again = tmp_path / "b.jsonl.gz"
    again.write_bytes(gzip.compress(file.read_bytes(), mtime=2))
    for first, second in ((file, packed), (packed, again)):
        code, error = imported(first, second)
        assert code == 2
        assert f"{second} is a copy of {first} and would count twice; name one of them" in error
    assert imported.store.runs() == []


# ---- rewards


def test_missing_partial_and_large_rewards_are_imported_with_a_memory_that_takes_them(
    imported, tmp_path
):
    for name, rewards, memory in (("partial", [0.5, 1, None], "gaussian"), ("any", [-3, 7, float("nan")], "gaussian"),
                                  ("right", [1, 0, None], "auto")):  # fmt: skip
        file = written(tmp_path / f"{name}.jsonl", [row(1, "p", reward) for reward in rewards])
        code, out = imported(file, name=name)
        assert code == 0
        assert re.search(rf"'{name}': 1 steps.* 3 rollouts.* memory {memory};", out)
        assert re.search(r"1 rows have no reward, first .*line 3; 0 steps left out", out)
        run = imported.store.find_run(name)
        assert run.estimator == "point" and run.parameters == {"memory": memory}
        assert imported.store.query(
            "SELECT rollouts FROM steps WHERE run_id = :run", run=run.run_id
        ) == [(2,)]


def test_true_and_false_and_nested_rewards_are_read(imported, tmp_path):
    (tmp_path / "a.csv").write_text("step,prompt,reward\n1,p,True\n1,p,False\n1,p,true\n")
    nested = written(
        tmp_path / "b.jsonl", [row(1, "p", {"correct": value}) for value in (True, False, 1)]
    )
    for file, flags in ((tmp_path / "a.csv", []), (nested, ["--reward_key", "reward.correct"])):
        assert imported(file, *flags, name=file.name)[0] == 0
        run = imported.store.find_run(file.name).run_id
        assert imported.store.query(
            "SELECT rollouts, successes FROM steps WHERE run_id = :run", run=run
        ) == [(3, 2)]


REFUSED = {
    "nothing.jsonl": (None, "there is no .*nothing.jsonl; name a log"),
    "a.jsonl": ('{"prompt": "p"', "a.jsonl cannot be read: line 1: broken JSON"),
    "b.jsonl": (
        '{"prompt": "p", "step": 1}',
        "line 1 has no column score or reward.*; give --reward_key of prompt",
    ),
    "c.jsonl": (
        '{"prompt": "p", "reward": "good", "step": 1}',
        "line 1: reward 'good' is not a number",
    ),
    "d.jsonl": (
        '{"prompt": "p", "reward": 1, "step": 1.5}',
        "line 1: step '1.5' is not a whole number",
    ),
    "e.jsonl": ('{"prompt": "p", "reward": null, "step": 1}', "has no rows with a reward"),
    "f.jsonl": (
        '{"prompt": "p", "reward": Infinity, "step": 1}',
        "line 1: reward inf is not finite",
    ),
    "g.jsonl": (
        '{"prompt": "p", "reward": {"a": 1}, "step": 1}',
        "not a number; .* --reward_key reward.correct",
    ),
    "h.jsonl": ('{"prompt": "", "reward": 1, "step": 1}', "line 1 has no prompt"),
    "i.jsonl": (
        '{"prompt": "p", "reward": 1, "step": 1}\n{"prompt": "p", "step": 1}',
        "line 2 has no column reward",
    ),
    "k.jsonl": (
        '{"prompt": "p", "label": "1", "reward": 1, "step": 1}\n{"prompt": "p", "reward": 1, "step": 1}',
        "line 2: its label is '', but the same prompt in .*line 1 has '1'",
    ),
    "j.json": (
        '[{"columns": ["prompt", "reward", "step"], "data": [["p", 1]]}]',
        "row 1 has 2 values for 3 columns",
    ),
    "l.json": (
        '[{"columns": ["prompt", null, ["x"]], "data": [["p", 1, 2]]}]',
        "no column score or reward",
    ),
    "l.jsonl": ('{"prompt": ' + "[" * 100_000, "l.jsonl cannot be read: .*recursion"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_log_that_cannot_be_read_is_refused_in_one_line_and_leaves_no_run(
    imported, tmp_path, name
):
    content, message = REFUSED[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    code, error = imported(tmp_path / name)
    assert code == 2 and error.count("\n") == 1 and re.search(message, error)
    assert imported.store.runs() == []


def test_a_folder_of_folders_names_the_one_with_files(imported, tmp_path):
    written(tmp_path / "log" / "step_1" / "a.jsonl", [row(1, "p", 1)])
    code, error = imported(tmp_path / "log")
    assert code == 2 and "its folder step_1 does" in error


def test_a_name_of_a_run_that_holds_a_password_is_refused(imported, tmp_path):
    log = written(tmp_path / "a.jsonl", [row(1, "p", 1)])
    code, error = imported(log, name="http://ann:hunter2@host/x")
    assert code == 2 and re.search(r"name 'http://\*\*\*@host/x' holds a password", error)
    assert imported.store.runs() == []


# ---- the same in Python


def test_a_trainers_own_advantages_are_stored_as_they_are(url):
    with Posteriors.create(url, "run", ["p"], ["1"]) as posteriors:
        with pytest.raises(ValueError, match="pass form=None"):
            posteriors.observe(1, ["p"] * 2, ["1"] * 2, [1, 1], advantages=[0.5, 0.5])
        with pytest.raises(ValueError, match="advantage"):
            posteriors.observe(1, ["p"] * 2, ["1"] * 2, [1, 1], form=None, advantages=[0.5, None])
        scored = posteriors.observe(
            1, ["p"] * 2, ["1"] * 2, [1, 1], form=None, advantages=[0.5, 0.5]
        )
        # all right and given an advantage: rescued
        assert scored.advantages.tolist() == [0.5, 0.5] and scored.metrics["estimator/rescued"] == 1
        scored = posteriors.observe(2, ["p"] * 2, ["1"] * 2, [1, 0], form=None)
        assert np.isnan(scored.advantages).all() and "estimator/abs_advantage" not in scored.metrics
        posteriors.settle()
        counts = "SELECT trained, informative, rescued, zero_variance FROM steps ORDER BY step"
        assert posteriors.store.query(counts) == [(2, 2, 2, 2), (None, None, None, 0)]


def test_rounding_is_no_advantage_of_a_group_of_equal_rewards(url):
    prompts = ["p", "q"]
    labels = ["1", "2"]
    with Posteriors.create(
        url, "run", prompts, labels, parameters={"memory": "gaussian"}
    ) as posteriors:
        rollouts = (["p", "p", "q", "q"], ["1", "1", "2", "2"], [1.2, 1.2, 1, 0])
        scored = posteriors.observe(1, *rollouts, form=None, advantages=[3e-4, -4e-3, 0.5, -3e-4])
        posteriors.settle()
        counts = posteriors.store.query(
            "SELECT trained, informative, rescued, zero_variance FROM steps"
        )
    assert scored.advantages.tolist() == [0, 0, 0.5, -3e-4]
    assert counts == [(4, 2, 0, 2)]
