"""What a start chooses by itself and prints, seen by dry runs, which leave nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
from sqlalchemy import text

from openrlhf_dbb import Posteriors, storage, tiny
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.driver import arguments, prepare, start
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import evaluated_model

PROMPTS = 64  # of the tiny task


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setattr("openrlhf_dbb.driver.cluster.RayStart", lambda _: pytest.fail("Ray was started"))


@pytest.fixture
def own(tmp_path):
    """Flags of a model and data of one's own: a copy of the tiny model, and of some of its prompts."""
    made = tiny.prepare(tiny.default_folder())
    shutil.copytree(made.model, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(made.train.open().readlines()[:PROMPTS]))
    return [
        "--actor.model_name_or_path", str(tmp_path / "model"), "--data.prompt_dataset", str(tmp_path / "data.jsonl"),
        "--eval.dataset", str(made.heldout), "--data.label_key", "label", "--reward.remote_url", "math_answer",
        "--rollout.batch_size", "16", "--run_name", "mine",
    ]  # fmt: skip


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Function: what a dry run prints, line by line; no file may appear or change."""

    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def run(*argv):
        before = files()
        capsys.readouterr()
        code = train_grpo.main(["--dry_run", *argv])
        shown = capsys.readouterr()
        assert files() == before
        if code:
            return shown.err.splitlines()
        lines = shown.out.splitlines()
        assert lines[-1] == "dry run: all checks passed, nothing was started or stored"
        return lines

    return run


def test_a_dry_run_prints_what_a_run_would_and_leaves_nothing(dry_run, tmp_path):
    lines = dry_run("--preset", "tiny", "--run_name", "mine")
    assert "   --rollout.n_samples_per_prompt 8  [preset tiny]" in lines
    assert "budget     16384 rollouts: 512 prompts x 8 samples x 4 episodes" in lines
    assert f"run        mine (is new) in {tmp_path}/openrlhf_dbb.db" in lines


def test_a_dry_run_refuses_what_a_run_would_refuse(dry_run, own, tmp_path):
    with storage.open_store("runs.db") as store:
        Posteriors.create(store, "mine", ["1+1="], ["2"]).close()
    [line] = dry_run(*own, "--store.url", "runs.db")
    assert line == f"error: --run_name mine: there is such a run in {tmp_path}/runs.db; give another name"
    [line] = dry_run(*own, "--store.url", "/proc/x.db")
    assert line == "error: --store.url /proc/x.db: its folder takes no files; name another"
    (tmp_path / "none.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    [line] = dry_run(*own, "--reward.remote_url", "none.py")
    assert line == (
        'error: reward_func of none.py returned None; return {"rewards": [one number or None for each response]}'
    )


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "brought.Config"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["brought.Slow", None]}}),
        ("custom_generate/generate.py", {}),
        ("base/config.json", {"auto_map": {"AutoModelForCausalLM": "brought.Model"}}),
    ],
)
def test_the_code_that_a_model_brings_along_runs_only_where_that_is_asked_for(dry_run, own, tmp_path, file, values):
    path = (model := tmp_path / "model") / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    (model / "brought.py").write_text("raise RuntimeError('code has run')")
    if file == "base/config.json":
        (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(path.parent)}))
    refused = f"{model} brings code along, named in {path}, which loading would run; read the code and give --trust"
    [line] = dry_run(*own)
    assert line.startswith(f"error: --actor.model_name_or_path {refused}")
    with pytest.raises(UsageError, match=f"^--model {refused}"):
        evaluated_model.find(str(model))
    if "AutoConfig" in values.get("auto_map", ()):
        with pytest.raises(RuntimeError, match="code has run"):
            dry_run(*own, "--trust_remote_code")
        with pytest.raises(RuntimeError, match="code has run"):
            evaluated_model.find(str(model), trusted=True)


def test_a_model_of_ones_own_gets_the_papers_passes_ten_checkpoints_and_half_batches(dry_run, own):
    lines = dry_run(*own)
    assert any("grpo: all prompts, all groups; estimator point; " in line for line in lines)
    # 64 prompts, 16 a step, 4 times: 16 steps of 16 x 8 rollouts, on which two gradient steps are made
    assert "budget     2048 rollouts: 64 prompts x 8 samples x 4 episodes" in lines
    assert "   --ckpt.save_steps 10  [a tenth of the run; checkpoints at least 10 steps apart]" in lines
    assert " * --train.batch_size 64  [half of a step's rollouts, as in the paper]  paper: 512" in lines
    assert "   --eval.steps 1  [a tenth of the run; checkpoints at least 10 steps apart]" in lines
    assert "   --ckpt.save_steps 40  [a tenth of the run; checkpoints at least 10 steps apart]" in dry_run(
        *own, "--train.num_episodes", "100"
    )


def test_a_dry_run_of_a_resume_leaves_the_run_to_its_owner(dry_run, own, tmp_path):
    settings = arguments.parse([*own, "--run_name", "mine"])
    start.begin(prepare.prepare(settings, None))
    with storage.open_store("openrlhf_dbb.db") as store:
        store.claim_run(1)
        with store.database.transaction(write=True) as connection:  # of another host
            connection.execute(text("UPDATE dbb_run SET owner_host = 'elsewhere'"))
    [line] = dry_run(*own, "--resume", "mine")
    assert line.startswith("error: run 'mine' is owned by process ") and "on elsewhere" in line
    assert line.endswith("take the run over with --store.take_over")
    line = f"run        mine (continues after step 0 at most) in {tmp_path}/openrlhf_dbb.db"
    assert line in dry_run(*own, "--resume", "mine", "--store.take_over")
    with storage.open_store("openrlhf_dbb.db") as store:
        assert store.find_run("mine").owner.host == "elsewhere"


def test_a_finished_run_is_advised_as_a_warm_start(dry_run, own):
    with Posteriors.create("openrlhf_dbb.db", "mine", ["1+1="], ["2"]) as posteriors:
        posteriors.finish()
    [line] = dry_run(*own, "--resume", "mine")
    advice = "start a new run, with --warm_start mine from its posteriors"
    assert line == f"error: --resume mine: that run finished at step 0; {advice}"


def warnings(lines):
    return [line.partition(";")[0] for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("argv", "visits"),
    [
        (["--train.num_episodes", "1"], "1.0"),
        (["--train.max_rollouts", "896"], "1.8"),  # 1.75 x 64 prompts x 8 rollouts
        (["--train.max_rollouts", "1024"], None),
        (["--train.num_episodes", "1", "--estimator", "point"], None),  # has no history
        (["--train.num_episodes", "1", "--method", "reinforce"], None),  # does not use it
    ],
)
def test_a_plan_with_hardly_any_history_is_warned_about_once(dry_run, own, argv, visits):
    said = f"warning: a prompt is visited {visits} times on average, so that history hardly matters"
    assert warnings(dry_run(*own, "--estimator", "dbb", *argv)) == ([said] if visits else [])


def test_the_models_chat_template_is_applied_unless_told_otherwise(dry_run, own, tmp_path):
    line = "   --data.apply_chat_template True  [the model has a chat template]"
    assert line not in dry_run(*own)
    template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    assert line in dry_run(*own)
    for more in (["--no-data.apply_chat_template"], ["--data.input_template", "{}="], ["--preset", "none"]):
        sizes = ["--rollout.n_samples_per_prompt", "8", "--estimator", "dbb"]
        assert not [shown for shown in dry_run(*own, *sizes, *more) if "apply_chat_template True" in shown]


def test_a_warm_start_is_tried_out(dry_run, own, tmp_path):
    rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    with storage.open_store("openrlhf_dbb.db") as store:
        texts, labels = [row["input"] for row in rows[:3]], [row["label"] for row in rows[:3]]
        with Posteriors.create(store, "before", texts, labels) as posteriors:
            posteriors.observe(1, texts * 2, labels * 2, [1, 0, 1, 1, 1, 0])
    lines = dry_run(*own, "--estimator", "dbb", "--warm_start", "before", "--train.num_episodes", "1")
    assert "warm start 3 prompts from before, weight 1; 61 start from the prior" in lines
    assert not [line for line in warnings(lines) if "visited" in line]


def test_a_name_is_free_again_if_its_run_ended_before_the_first_step(dry_run, own):
    settings = arguments.parse([*own, "--run_name", "mine"])
    start.begin(prepare.prepare(settings, None))  # creates the run and releases it
    assert dry_run(*own, "--run_name", "mine")[-1].startswith("dry run: all checks passed")
    with storage.open_store("openrlhf_dbb.db") as store:
        store.claim_run(1)
    assert dry_run(*own, "--run_name", "mine")[0].startswith("error: --run_name mine: there is such a run in ")
