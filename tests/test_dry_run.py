"""Dry runs show what a start chooses by itself, prints and refuses; they leave nothing behind."""

import contextlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet
from ray.exceptions import RayTaskError
from sqlalchemy import text

from openrlhf_dbb import Posteriors, storage, tiny
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.core.filling import Group
from openrlhf_dbb.core.recorded import RecordedBatch, RecordedRollout, Recorder
from openrlhf_dbb.driver import arguments, prepare, printed
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.evaluation import model as evaluated_model

PROMPTS = 64  # of the tiny task


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setattr(
        "openrlhf_dbb.driver.ray_session.RayStart", lambda _: pytest.fail("Ray was started")
    )


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
    """Function: what a dry run prints, line by line, or its refusal; no file may appear or change."""

    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def run(*argv):
        before = files()
        capsys.readouterr()
        code = train_grpo.main(["--dry_run", *argv])
        shown = capsys.readouterr()
        assert files() == before
        if code:
            # A slow machine says after 10 s what it is waiting for
            lines = shown.err.splitlines()
            return [line for line in lines if not line.startswith("reading data and model")]
        lines = shown.out.splitlines()
        assert "all checks passed" in lines[-1]
        return lines

    return run


def has(lines, pattern):
    """Whether some line matches a regular expression."""
    return any(re.search(pattern, line) for line in lines)


def begun(*argv):
    """Start a run, and stop before its first step; return what was prepared."""
    prepared = prepare.prepare(arguments.parse(list(argv)), None)
    return prepare.begin(prepared)


def test_shares_of_sources_are_checked_with_the_data(dry_run, tmp_path):
    data = tmp_path / "data.jsonl"
    kinds = ["sum", "sum", "sort"] * 30
    with data.open("w") as file:
        for number, kind in enumerate(kinds):
            row = {"input": f"{number}+1=", "label": str(number + 1), "kind": kind}
            file.write(json.dumps(row) + "\n")
    argv = ["--preset", "tiny", "--data.prompt_dataset", str(data), "--rollout.strategy", "shares"]
    by_kind = [*argv, "--data.group_key", "kind"]
    lines = dry_run(*by_kind, "--shares.of", "sort=0.25,rest")
    assert has(lines, "method .*0.25 of sort, 0.75 of rest")
    for flags, problem in (
        ([*argv, "--shares.of", "sort=0.25,rest"], "'shares' needs the source .*--data.group_key"),
        ([*by_kind, "--shares.of", "sort=1"], "names no share of source 'sum'"),
        ([*by_kind, "--shares.of", "sort=0.75,rest"], "'sort' has 30 prompts, .* up to 48 of them"),
        ([*by_kind, "--shares.of", "sort=0.75"], "--shares.of = .*sum to 0.75; give"),
    ):
        with pytest.raises(UsageError, match=problem):
            begun(*flags)


def test_a_dry_run_prints_what_a_run_would_and_leaves_nothing(dry_run, tmp_path):
    lines = dry_run("--preset", "tiny", "--run_name", "mine")
    assert has(lines, r"--rollout.n_samples_per_prompt 8 .*preset tiny")
    plan = {line.split()[0]: line for line in lines[-10:]}
    folder = re.escape(str(tiny.default_folder()))
    for name in ("model", "machine", "method", "look"):
        assert name in plan
    assert has(lines, "- preset tiny: ")
    assert re.search(rf"\b512 of 512 prompts .*{folder}/train.jsonl", plan["data"])
    assert re.search(r"\b16384 rollouts: 512 prompts x 8 samples x 4 episodes", plan["budget"])
    assert re.search(
        rf"\b128 prompts .*{folder}/heldout.jsonl.*\b8 samples.*\b16 steps", plan["held-out"]
    )
    assert re.search(rf"\bmine .*new.* {re.escape(str(tmp_path))}/openrlhf_dbb.db", plan["run"])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--actor.model_name_or_path", "./none"],
            "--actor.model_name_or_path ./none: .*no such folder",
        ),
        (["--dbb.discount", "0.9"], "--dbb.discount is not read .*plain and point; leave it out"),
        (
            ["--data.prompt_dataset", "/no/such.jsonl"],
            "--data.prompt_dataset /no/such.jsonl cannot be read",
        ),
        (
            ["--data.apply_chat_template"],
            "--data.apply_chat_template: .*--actor.model_name_or_path",
        ),
        (["--reward.remote_url", "none.py"], 'none.py returned None; return .*"rewards"'),
        (["--preset", "own.toml"], "--data.input_template 'Q: ': .*no {}"),
        (["--data.input_template", "{{}}"], "--data.input_template '{{}}': .*no {}"),
        (["--data.input_template", "{} {x}"], "--data.input_template '{} {x}': .*'x'.*only {}"),
        (["--data.input_template", "{}", "--data.apply_chat_template"], "leave one out"),
        (["--resume", "nobody"], "--resume nobody: .*no database FOLDER/openrlhf_dbb.db"),
        (["--resume"], "--resume: .*no database FOLDER/openrlhf_dbb.db"),
        (["--resume", "nobody", "--store.url", "runs.db"], "no run 'nobody' in FOLDER/runs.db"),
        (
            ["--resume", "done", "--store.url", "runs.db"],
            "--resume done: .*finished at step 0; .*--warm_start done",
        ),
        (["--warm_start", "x", "--warm_start_url", "runs.db"], "no run 'x'"),
        (["--store.url", "runs.db"], "--run_name mine: .*FOLDER/runs.db; give another name"),
        (["--store.url", "postgresql://u:hunter2@127.0.0.1:1/x"], "postgresql://127.0.0.1:1/x"),
    ],
)
def test_a_start_is_refused_in_one_line(dry_run, own, tmp_path, argv, problem):
    (tmp_path / "own.toml").write_text('[flags]\ndata.input_template = "Q: "')
    (tmp_path / "none.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    Posteriors.create("runs.db", "mine", ["1+1="], ["2"]).close()
    with Posteriors.create("runs.db", "done", ["1+1="], ["2"]) as done:
        done.finish()
    [line] = dry_run(*own, *argv)
    assert not Path("openrlhf_dbb.db").exists()
    assert line.startswith("error: ")
    assert re.search(problem.replace("FOLDER", re.escape(str(tmp_path))), line), line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "brought.Config"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["brought.Slow", None]}}),
        ("custom_generate/generate.py", {}),
        ("base/config.json", {"auto_map": {"AutoModelForCausalLM": "brought.Model"}}),
    ],
)
def test_the_code_that_a_model_brings_along_runs_only_where_that_is_asked_for(
    dry_run, own, tmp_path, file, values
):
    model = tmp_path / "model"
    path = model / file
    path.parent.mkdir(exist_ok=True)
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | values))
    (model / "brought.py").write_text("raise RuntimeError('code has run')")
    if file == "base/config.json":
        (model / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(path.parent)})
        )
    refused = f"{re.escape(str(model))} .*{re.escape(str(path))}.*--trust"
    [line] = dry_run(*own)
    assert re.search(f"^error: --actor.model_name_or_path {refused}", line), line
    with pytest.raises(UsageError, match=f"^--model {refused}"):
        evaluated_model.find_model(str(model))
    if "AutoConfig" in values.get("auto_map", ()):
        with pytest.raises(RuntimeError, match="code has run"):
            dry_run(*own, "--trust_remote_code")
        with pytest.raises(RuntimeError, match="code has run"):
            evaluated_model.find_model(str(model), trusted=True)


def test_a_model_of_ones_own_gets_the_papers_passes_ten_checkpoints_and_half_batches(dry_run, own):
    lines = dry_run(*own)
    # 64 prompts, 16 a step, 4 times: 16 steps of 16 x 8 rollouts, on which two gradient steps are made
    assert has(lines, "^budget +2048 rollouts: 64 prompts x 8 samples x 4 episodes")
    assert has(lines, r"^ \* --train.batch_size 64 .*half.* paper: 512")
    assert has(lines, "--ckpt.save_steps 10 .*a tenth of the run.* 10 steps")
    assert has(lines, "--eval.steps 1 .*a tenth of the run")
    assert has(
        dry_run(*own, "--train.num_episodes", "100"), "--ckpt.save_steps 40 .*a tenth of the run"
    )


def test_a_dry_run_of_a_resume_leaves_the_run_to_its_owner(dry_run, own, tmp_path):
    begun(*own)
    with storage.open_store("openrlhf_dbb.db") as store:
        store.claim_run(1)
        with store.database.transaction(write=True) as connection:  # of another host
            connection.execute(text("UPDATE dbb_run SET owner_host = 'elsewhere'"))
    [line] = dry_run(*own, "--resume", "mine")
    assert re.search(
        "^error: run 'mine' is owned by process .* on elsewhere.*--store.take_over", line
    ), line
    lines = dry_run(*own, "--resume", "mine", "--store.take_over")
    assert has(lines, rf"^run +mine .*after step 0\b.* {re.escape(str(tmp_path))}/openrlhf_dbb.db")
    with storage.open_store("openrlhf_dbb.db") as store:
        assert store.find_run("mine").owner.host == "elsewhere"


def test_a_plan_that_measures_no_held_out_accuracy_is_warned_about(dry_run, own):
    assert not has(dry_run(*own), "^warning: ")
    lines = dry_run(*own, "--eval.steps", "-1")
    assert has(
        lines, "^warning: held-out accuracy is not measured.*--eval.dataset and --eval.steps"
    )


def test_the_models_chat_template_is_applied_unless_told_otherwise(dry_run, own, tmp_path):
    applied = "--data.apply_chat_template True"
    assert not has(dry_run(*own), applied)
    template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    assert has(dry_run(*own), f"{applied} .*the model has a chat template")
    sizes = ["--rollout.n_samples_per_prompt", "8", "--estimator", "dbb"]
    for more in (
        ["--no-data.apply_chat_template"],
        ["--data.input_template", "{}="],
        ["--preset", "none"],
    ):
        assert not has(dry_run(*own, *sizes, *more), applied)


THINKS = (
    "{% for message in messages %}{{ message.content }}={% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}0{% endif %}"
)


@pytest.fixture
def thinking(own, tmp_path):
    """Flags of a model whose template ends a prompt in 0 if it shall not think."""
    (tmp_path / "model/chat_template.jinja").write_text(THINKS)
    (tmp_path / "own.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    (tmp_path / "own.toml").write_text(
        'file = "own.jsonl"\nquestion = "q"\nanswer = "a"\nverifier = "math"\nchat_template = true\n'
    )
    return [*own, "--eval.benchmarks", str(tmp_path / "own.toml"), "--eval.steps", "1"]


def no_thoughts(text):
    return "--data.chat_template_kwargs", text


def test_arguments_of_the_chat_template_reach_every_prompt(dry_run, thinking, monkeypatch):
    plain = prepare.prepare(arguments.parse(thinking), None)
    assert plain.prompts.texts[0].endswith("=")
    assert plain.settings.flags["data.chat_template_kwargs"] is None

    flag = no_thoughts('{"enable_thinking":false}')
    prepared = prepare.prepare(arguments.parse([*thinking, *flag]), None)
    assert prepared.prompts.texts == [text + "0" for text in plain.prompts.texts]
    assert prepared.benchmarks["own"].texts == [
        text + "0" for text in plain.benchmarks["own"].texts
    ]
    tokenizer = pickle.loads(pickle.dumps(prepared.tokenizer))  # as an engine gets it
    chat = [{"role": "user", "content": "1"}]
    for used in (
        prepared.tokenizer,
        tokenizer,
    ):  # held-out prompts are OpenRLHF's to make, by this tokenizer
        assert used.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "1=0"
    assert has(dry_run(*thinking, *flag), '--data.chat_template_kwargs {"enable_thinking": false}')


def test_a_resume_with_other_arguments_of_the_chat_template_is_refused(dry_run, thinking):
    run = begun(*thinking, *no_thoughts('{"enable_thinking": false}')).run
    assert run.config["data.chat_template_kwargs"] == '{"enable_thinking": false}'
    for other in ([], no_thoughts('{"enable_thinking": true}')):
        [line] = dry_run(*thinking, *other, "--resume", "mine")
        assert line.startswith("error: --resume mine: ")
        assert "chat_template_kwargs" in line
    dry_run(*thinking, *no_thoughts('{ "enable_thinking":false}'), "--resume", "mine")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{enable_thinking: false}", "is no JSON"),
        ("", "is no JSON"),
        ("[1]", r"'\[1\]' is no object"),
        ("false", "'false' is no object"),
        ('{"enable_thinkin": false}', "does not read 'enable_thinkin'"),
        ('{"tokenize": true}', "does not read 'tokenize'"),
        ('{"add_generation_prompt": false}', "'add_generation_prompt' is set for each prompt"),
        ('{"messages": []}', "'messages' is set for each prompt"),
    ],
)
def test_arguments_that_the_chat_template_does_not_take_are_refused(
    dry_run, thinking, text, problem
):
    [line] = dry_run(*thinking, *no_thoughts(text))
    assert "--data.chat_template_kwargs" in line
    assert re.search(problem, line), line


def test_openrlhf_alone_takes_no_arguments_of_the_chat_template(dry_run, thinking):
    flags = [*thinking[:-4], *no_thoughts('{"enable_thinking": false}')]
    [line] = dry_run(*flags, "--estimator", "none", "--data.apply_chat_template")
    assert re.search("--data.chat_template_kwargs .*OpenRLHF alone has no such thing", line)


def test_arguments_without_a_chat_template_are_refused(dry_run, own):
    [line] = dry_run(*own, *no_thoughts('{"enable_thinking": false}'))
    assert re.search(
        "--data.chat_template_kwargs .*no chat template is applied; leave it out", line
    )


def test_a_model_without_an_end_token_is_warned_about(dry_run, own, tmp_path):
    assert not has(dry_run(*own), "no end token")
    for path in (tmp_path / "model").glob("*config.json"):
        values = json.loads(path.read_text())
        for name in [name for name in values if name.startswith("eos_token")]:
            del values[name]
        path.write_text(json.dumps(values))
    assert has(dry_run(*own), "^warning: .*no end token.*eos_token_id in its config.json")


@pytest.mark.parametrize("flag", ["--data.prompt_dataset", "--eval.dataset", "--data.leave_out"])
@pytest.mark.parametrize(
    "url",
    [
        "https://u:hunter2@127.0.0.1:1/x.jsonl",
        "hf://datasets/a/b?token=hunter2",
        "https://hunter2Zq9@127.0.0.1:1/a/b",
        "hf://hunter2Zq9@datasets/a/b",
    ],
)
def test_a_data_set_whose_name_holds_a_secret_is_refused_in_one_masked_line(
    dry_run, own, flag, url
):
    [line] = dry_run(*own, flag, url)
    assert line.startswith("error: ")
    assert flag in line
    assert "hunter2" not in line


def test_a_benchmark_whose_name_holds_a_secret_is_refused_in_one_masked_line(dry_run, own):
    [line] = dry_run(*own, "--eval.steps", "1", "--eval.benchmarks", "https://h/x?token=hunter2")
    assert line.startswith("error: --eval.benchmarks")
    assert "hunter2" not in line


def test_a_model_folder_without_a_tokenizer_is_refused_with_the_cure(dry_run, own, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    line = dry_run(*own, "--actor.model_name_or_path", str(folder))[-1]  # behind "reading data"
    assert line == (
        f"error: --actor.model_name_or_path {folder} cannot be loaded: the folder has no tokenizer; "
        "save the model's into it with tokenizer.save_pretrained(FOLDER)"
    )
    # One with a damaged tokenizer is told as transformers tells it, to the end
    (folder / "tokenizer_config.json").write_text("{}")
    line = dry_run(*own, "--actor.model_name_or_path", str(folder))[-1]  # behind "reading data"
    assert "cannot be loaded: Couldn't instantiate the backend tokenizer from one of: (1) " in line
    assert line.endswith(" to convert a slow tokenizer to a fast one.")


def test_a_folder_that_datasets_cannot_read_says_why(dry_run, own, tmp_path):
    (tmp_path / "folder").mkdir()
    twice = pa.table([["1+1="], ["2"], ["3"]], names=["input", "label", "label"])
    parquet.write_table(twice, tmp_path / "folder/a.parquet")
    [line] = dry_run(*own, "--data.prompt_dataset", str(tmp_path / "folder"))
    assert re.search(r"--data.prompt_dataset \S+folder cannot be loaded: .*label", line), line


def test_a_reward_server_is_asked_by_a_dry_run(dry_run, own, monkeypatch):
    from openrlhf_dbb.rewards import reward_server

    monkeypatch.setattr(
        reward_server, "check", lambda url, prompts, labels, _: [f"reward     {url} {len(prompts)}"]
    )
    servers = ["--reward.remote_url", "http://h/a,http://h/b"]
    assert {"reward     http://h/a 64", "reward     http://h/b 64"} <= set(dry_run(*own, *servers))


def test_a_warm_start_is_tried_out(dry_run, own, tmp_path):
    rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()[:3]]
    texts = [row["input"] for row in rows]
    labels = [row["label"] for row in rows]
    with Posteriors.create("openrlhf_dbb.db", "before", texts, labels) as posteriors:
        posteriors.observe(1, texts * 2, labels * 2, [1, 0, 1, 1, 1, 0])
    lines = dry_run(*own, "--estimator", "dbb", "--warm_start", "before")
    assert has(lines, r"^warm start +3 prompts from before, weight 1\b.*\b61 start from the prior")


def test_a_name_is_free_again_if_its_run_ended_before_the_first_step(dry_run, own):
    begun(*own)
    dry_run(*own)
    with storage.open_store("openrlhf_dbb.db") as store:
        store.claim_run(1)
    [line] = dry_run(*own)
    assert line.startswith("error: --run_name mine: ")


@pytest.mark.parametrize(
    ("argv", "difference"),
    [
        (["--dbb.discount", "0.75"], "--dbb.discount 0.5, not 0.75"),
        (["--estimator", "auto"], "--estimator 'dbb', not 'auto'"),
        (["--data.max_samples", "32"], "prompts and labels, or their order"),
        (["--replay.samples", "8"], "--replay.samples 0, not 8"),
        (
            ["--actor.num_nodes", "2", "--vllm.num_engines", "2"],
            "--actor.num_nodes x --actor.num_gpus_per_node 1, not",
        ),
    ],
)
def test_a_run_is_resumed_only_with_what_it_was_trained_with(dry_run, own, argv, difference):
    begun(*own, "--estimator", "dbb")
    [line] = dry_run(*own, "--estimator", "dbb", "--resume", "mine", *argv)
    assert line.startswith("error: --resume mine: ")
    assert difference in line
    assert "--warm_start mine" in line
    if "--data.max_samples" not in argv:
        assert re.search("--resume mine .*openrlhf-dbb train ", line), line


@pytest.mark.parametrize("checkpoint", [None, "global_step1"])
def test_flags_that_a_resume_may_change_are_said(dry_run, own, monkeypatch, checkpoint):
    begun(*own)
    monkeypatch.setattr("openrlhf_dbb.saved.checkpoints.newest_whole", lambda *_: (checkpoint, []))
    lines = dry_run(*own, "--resume", "mine", "--actor.adam.lr", "0.5", "--train.seed", "7")
    [note] = [line for line in lines if line.startswith("note: ")]
    assert "--train.seed 42 -> 7, --actor.adam.lr 1e-06 -> 0.5" in note
    assert ("--actor.adam.lr has no effect" in note) == (checkpoint is not None)


def test_a_run_killed_before_its_first_checkpoint_starts_over_but_no_lost_checkpoint_is_passed_over(
    dry_run, own, tmp_path
):
    begun(*own)
    nobody = np.empty(0, dtype=np.int64)
    with storage.open_store("openrlhf_dbb.db") as store:
        run = store.claim_run(1)
        states = np.empty((2, 0, len(run.record.state_fields)))
        run.record_step(1, storage.StepRows(nobody, nobody, *np.empty((3, 0)), *states, nobody))
        run.release()
        lines = dry_run(*own, "--resume", "mine")
        assert has(lines, "^note: no checkpoint of the 1 steps .*starts over from step 0")
        run = store.claim_run(1)
        run.record_checkpoint(1, "global_step1")
        run.release()
    [line] = dry_run(*own, "--resume", "mine")
    folder = f"{tmp_path}/runs/mine/checkpoints"
    assert re.search(f"no checkpoint in {re.escape(folder)}; .*recorded global_step1", line), line


def test_greso_gets_the_rollouts_that_its_episodes_would_cost(dry_run, own):
    greso = [*own, "--method", "greso", "--train.num_episodes", "3"]
    # 64 prompts x 8 samples x 3 episodes
    assert has(dry_run(*greso), "^budget +1536 rollouts at most, .* 3 passes")
    begun(*greso)
    more = dry_run(*greso, "--resume", "mine", "--train.max_rollouts", "640")
    assert has(more, r"^budget +640 rollouts at most, .* 1\.25 passes")


def test_a_training_that_gives_up_ends_in_one_line(own, monkeypatch, capsys):
    def give_up(*_):  # as Ray hands on an actor's error: below its traceback
        raise RayTaskError("train", "Traceback ...", RunError("no batch")).as_instanceof_cause()

    no_ray = SimpleNamespace(check_hosts=lambda _: [])
    monkeypatch.setattr("openrlhf_dbb.driver.ray_session.RayStart", lambda _: no_ray)
    monkeypatch.setattr("openrlhf_dbb.driver.launch.launch", give_up)
    assert train_grpo.main([*own, "--run_name", "mine"]) == 1
    *_, way_on, error = capsys.readouterr().err.splitlines()
    assert re.search("run mine .*no checkpoint; .*--resume mine", way_on)
    assert error == "error: no batch"


def children_until_the_end(started):
    """All processes that a process has started until its end, with their names."""
    processes = {}
    while started.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(started.pid).children(recursive=True):
                processes[process] = process.name()
        time.sleep(0.05)
    return processes


def test_what_is_refused_while_ray_starts_leaves_one_line_no_process_and_no_run(own, tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *own, "--data.max_samples", "8"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    processes = children_until_the_end(started)
    output, errors = started.communicate()
    # On a busy machine
    refused = [line for line in errors.splitlines() if not line.startswith("reading data")]
    assert started.returncode == 2
    assert output == ""
    assert len(refused) == 1
    assert re.search(r"\b8 of 8 prompts: .*--rollout.batch_size 16", errors)
    assert {"gcs_server", "raylet"} <= set(processes.values())
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []
    with storage.open_store("openrlhf_dbb.db", create=False) as store:
        assert store.runs() == []


TINY = ["--preset", "tiny", "--estimator", "dbb"]
ROWS = [
    {"input": "1+2=", "label": "3"},
    {"input": "s31=", "label": "13"},
    {"input": "12+34=", "label": "64"},
]


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    """Write two benchmarks into the working folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "sorts.toml").write_text(
        "title = 'Sorts'\nfile = 'mine.jsonl'\nquestion = 'input'\nanswer = 'label'\nverifier = 'exact'\n"
        "max_tokens = 3\ntemplate = '{question}s'\n"
    )


def test_a_start_has_the_prompts_of_the_command_evaluate_and_says_what_they_cost(
    benchmarks, own, tmp_path
):
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    named = [
        *TINY,
        "--eval.benchmarks",
        "mine=mine.jsonl,sorts.toml",
        "--eval.steps",
        "4",
        *own[:2],
    ]
    start = begun(*named, "--no-data.apply_chat_template")
    made = start.benchmarks
    assert made["mine"].texts == ["1+2=", "s31=", "12+34="]  # a data file's, verbatim
    assert made["sorts"].texts == ["<1+2=s>", "<s31=s>", "<12+34=s>"]
    assert [prompts.benchmark.verifier for prompts in made.values()] == ["math", "exact"]
    assert [prompts.max_new_tokens for prompts in made.values()] == [
        10,
        10,
    ]  # as in training, not the benchmark's 3
    plan = printed.plan(start)
    assert re.search(r"\b3 prompts of mine, 3 prompts of sorts: 8 samples.*\b4 steps", plan)
    assert plan.partition("\n")[0].endswith(" - preset tiny")  # its description is of another model


def test_what_the_benchmarks_tell_is_refused_before_the_run_is_made(benchmarks, monkeypatch):
    evaluated = [*TINY, "--eval.steps", "4", "--eval.benchmarks"]
    with pytest.raises(
        UsageError,
        match=r"longest prompt of mine \(6 tokens\) .* do not fit into --data.max_len 15",
    ):
        begun(*evaluated, "mine=mine.jsonl", "--data.max_len", "15")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError, match=r"^--eval.benchmarks: benchmark aime24: .* Couldn't reach .* aime24=FILE"
    ):
        begun(*evaluated, "aime24")


def test_a_presets_benchmarks_can_be_switched_off_with_the_evaluations(tmp_path):
    (tmp_path / "own.toml").write_text(
        "extends = 'tiny'\n[flags]\neval.benchmarks = 'mine=mine.jsonl'\n"
    )
    assert begun("--preset", "own.toml", "--eval.steps", "-1").benchmarks == {}


@pytest.fixture
def recorded(own, tmp_path):
    """A folder with the record of a step of these flags."""
    prepared = prepare.prepare(arguments.parse([*own, "--rollouts.record"]), None)
    folder = tmp_path / "copied"
    tokens = np.array([1, 2], dtype=np.int32)
    unknown = np.array([np.nan], dtype=np.float32)
    rollout = RecordedRollout(tokens, np.array([True]), unknown, 1.0)
    key = (prepared.prompts.texts[0], prepared.prompts.labels[0])
    group = Group(key, 1, rollouts=(rollout,), scores=np.array([1.0]))
    Recorder(folder, prepared.about).write(1, RecordedBatch(trained=(group,)))
    return folder


def test_a_run_on_recorded_rollouts_starts_no_engine_and_asks_no_reward(dry_run, own, recorded):
    gone = ["--reward.remote_url", "http://127.0.0.1:9", "--vllm.num_engines", "1"]
    lines = dry_run(*own, *gone, "--eval.steps", "1", "--rollouts.of_run", str(recorded))
    assert has(lines, r"rollouts +1 recorded steps of mine: no engine is started, nothing is eval")
    assert has(lines, r"--vllm.num_engines 0 .*rollouts.of_run") and not has(lines, "held-out")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--rollout.batch_size", "8"], r"--rollout.batch_size 16, here it is 8; give the same"),
        (["--data.max_samples", "32"], r"the data set .* here it is \w+; give the same"),
        (["--train.vllm_log_probs"], r"step-000001.npz lacks log-probs .*; leave out"),
        (["--rollout.strategy", "dynamic"], r"dynamic: .*nothing is generated; .*strategy plain"),
        (["--probe.fraction", "0.5"], r"probe.fraction 0.5: .*nothing is generated; leave one"),
        (["--rollouts.record"], r"recorded already; leave one out"),
        (["--estimator", "none"], r"--rollouts.of_run .* --estimator none: .*--estimator point"),
    ],
)
def test_recorded_rollouts_that_do_not_fit_are_refused(dry_run, own, recorded, flags, pattern):
    [line] = dry_run(*own, "--rollouts.of_run", str(recorded), *flags)
    assert re.search(pattern, line)


def test_a_record_that_is_not_there_or_damaged_is_refused(dry_run, own, recorded, tmp_path):
    [line] = dry_run(*own, "--rollouts.of_run", "nothing")
    assert re.search(r"--rollouts.of_run nothing: there is no run 'nothing'", line)
    [line] = dry_run(*own, "--rollouts.of_run", str(tmp_path / "model"))
    assert re.search(r"/model has no record.json: .*; name a folder", line)
    (recorded / "step-000001.npz").write_bytes(b"PK")
    [line] = dry_run(*own, "--rollouts.of_run", str(recorded))
    assert re.search(r"step-000001.npz is damaged; copy", line)


def test_another_vocabulary_is_refused(dry_run, own, recorded, tmp_path):
    words = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(words.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = [word for word in vocabulary if len(word) == 1]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    words.write_text(json.dumps(tokenizer))
    [line] = dry_run(*own, "--rollouts.of_run", str(recorded))
    assert re.search(r"the vocabulary \(digest\) \w+, here it is \w+", line)


def test_a_new_run_does_not_record_over_another(dry_run, own, recorded, tmp_path):
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    assert has(dry_run(*own, "--rollouts.record"), rf"rollouts +recorded in {folder}/rollouts")
    shutil.copytree(recorded, folder / "rollouts")
    [line] = dry_run(*own, "--rollouts.record")
    assert re.search(r"holds recorded rollouts already; move them, or give another", line)
