"""What bad input gets: one clear line on stderr, exit code 2, before any engine starts."""

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from openrlhf_dbb import storage
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.tiny import build_tokenizer

SIZES = [
    "--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "8",
    "--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4", "--rollout.max_new_tokens", "4",
    "--data.max_len", "32",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder with a character tokenizer; nothing here gets as far as loading weights."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(8)))
    return path


@pytest.fixture
def command(model, data, tmp_path, monkeypatch, capfd):
    """Function: run the command in this process; its exit code and stderr's last line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)

    def run(*argv, label=("--data.label_key", "label")):
        base = ["--actor.model_name_or_path", model, "--data.prompt_dataset", data, *label,
                "--reward.remote_url", "math_answer", "--estimator", "dbb", *SIZES]  # fmt: skip
        capfd.readouterr()
        code = train_grpo.main([str(word) for word in [*base, *argv]])
        return code, capfd.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.fixture(autouse=True)
def no_engine_starts(monkeypatch):
    """These inputs must be refused before this."""
    monkeypatch.setattr("openrlhf_dbb.driver.cluster.start", lambda _: None)
    monkeypatch.setattr("openrlhf_dbb.driver.launch.launch", lambda *_: pytest.fail("the launch was reached"))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--actor.model_name_or_path", "./none"], "--actor.model_name_or_path ./none: there is no such folder"),
        (["--estimator", "point", "--dbb.discount", "0.9"], "--dbb.discount is not read by this run's plain and point"),
        (["--data.prompt_dataset", "/no/such.jsonl"], "--data.prompt_dataset /no/such.jsonl cannot be loaded"),
        (["--resume", "nobody"], "there is no run 'nobody'"),
        (["--estimator", "point", "--warm_start", "x"], "there is no run 'x'"),
        (["--reward.remote_url", "/no/reward.py"], "/no/reward.py failed: FileNotFoundError"),
        (["--data.apply_chat_template"], "--data.apply_chat_template: the tokenizer of --actor.model_name_or_path"),
        (["--store.url", "postgresql://u:hunter2@127.0.0.1:1/x"], "postgresql://127.0.0.1:1/x"),
    ],
)  # fmt: skip
def test_refused_in_one_line(command, argv, line):
    code, said = command(*argv)
    assert code == 2
    assert said.startswith("error: ")
    assert line in said
    assert "hunter2" not in said


def test_held_out_data_are_checked_like_the_training_data(command, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    code, said = command("--eval.dataset", held_out)
    assert code == 2 and said.startswith(f"error: --eval.dataset {held_out} cannot be loaded: ")
    held_out.write_text('{"input": "1+1=", "label": "2"}\n{"input": "1+2="}\n{"input": "1+3=", "label": [4]}\n')
    code, said = command("--eval.dataset", held_out)
    assert code == 2
    assert said.startswith(f"error: --eval.dataset {held_out}: 2 of 3 rows cannot be used: line 2: no label; line 3: ")


@pytest.fixture
def unfinished(command, monkeypatch):
    """A run in the default database that was stopped before its first step."""

    start_until_launch(command, monkeypatch, "--run_name", "mine")


def start_until_launch(command, monkeypatch, *argv):
    """Run the command up to the launch, which is to be reached; return its settings."""

    class Stopped(Exception):
        pass

    def stop(settings, *_):
        raise Stopped(settings)

    with monkeypatch.context() as patch:
        patch.setattr("openrlhf_dbb.driver.launch.launch", stop)
        with pytest.raises(Stopped) as stopped:
            command(*argv)
    return stopped.value.args[0]


def test_a_strategy_that_gives_up_ends_the_command_in_one_line(command, monkeypatch, capfd):
    def give_up(*_):
        raise RunError("no batch")

    monkeypatch.setattr("openrlhf_dbb.driver.launch.launch", give_up)
    assert command("--run_name", "mine") == (1, "error: no batch")


def test_what_is_refused_while_ray_starts_leaves_one_line_no_process_and_no_run(model, data, tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--actor.model_name_or_path", model,
         "--data.prompt_dataset", data, "--data.label_key", "label", "--reward.remote_url", "math_answer",
         "--estimator", "dbb", *SIZES, "--rollout.batch_size", "16", "--store.url", f"sqlite:///{tmp_path}/store.db"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    processes = {}
    while started.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes |= {each: each.name() for each in psutil.Process(started.pid).children(recursive=True)}
        time.sleep(0.05)
    output, errors = started.communicate()
    refused = [line for line in errors.splitlines() if not line.startswith("reading data")]  # on a busy machine
    assert (started.returncode, output, len(refused)) == (2, "", 1)
    assert "leaves 8 of 8 prompts: below --rollout.batch_size 16" in errors
    assert {"gcs_server", "raylet"} <= set(processes.values())
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    with storage.open_store(f"sqlite:///{tmp_path}/store.db", create=False) as store:
        assert store.runs() == []


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--dbb.discount", "0.75"], "it was trained with estimator parameters {'discount': 0.5"),
        (["--estimator", "auto"], "it was trained with estimator 'dbb', not 'auto'"),
        (["--data.max_samples", "4"], "it was trained with prompts and labels 'of other content or order', not"),
        (["--method", "dapo"], "it was trained with method 'grpo', not 'dapo'"),
        (["--ds.zero_stage", "3"], "it was trained with --ds.zero_stage 2, not 3"),
        (
            ["--actor.num_nodes", "2", "--vllm.num_engines", "2"],
            "ranks (--actor.num_nodes x --actor.num_gpus_per_node) 1, not 2",
        ),
    ],
)
def test_a_run_is_resumed_only_with_what_it_was_trained_with(unfinished, command, argv, line):
    code, said = command("--resume", "mine", *argv)
    assert code == 2
    assert line in said and "--warm_start mine" in said


@pytest.mark.parametrize("checkpoint", [None, "global_step1"])
def test_flags_that_a_resume_may_change_are_said(unfinished, command, monkeypatch, capfd, checkpoint):
    monkeypatch.setattr("openrlhf_dbb.core.checkpoints.newest_whole", lambda *_: (checkpoint, []))
    start_until_launch(command, monkeypatch, "--resume", "mine")
    assert "note: " not in capfd.readouterr().out
    start_until_launch(command, monkeypatch, "--resume", "mine", "--actor.adam.lr", "0.5", "--train.seed", "7")
    [note] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note: ")]
    changes, _, effect = note.partition("; ")
    assert changes == "note: changed since the run began: --train.seed 42 -> 7, --actor.adam.lr 1e-06 -> 0.5"
    assert ("--actor.adam.lr has no effect" in effect) == (checkpoint is not None)


def test_greso_gets_the_rollouts_that_its_episodes_would_cost(command, monkeypatch, tmp_path, capfd):
    decays = ["--actor.lr_scheduler", "cosine_with_min_lr"]
    greso = ["--method", "greso", "--estimator", "dbb", "--train.num_episodes", "3", *decays]
    start_until_launch(command, monkeypatch, "--run_name", "mine", *greso)
    printed = capfd.readouterr().out
    # 8 prompts x 4 samples x 3 episodes
    assert "budget     96 rollouts at most, as many as 3 passes over the prompts" in printed
    with storage.open_store(f"sqlite:///{tmp_path}/openrlhf_dbb.db") as store:
        run = store.find_run("mine")
        assert (run.method, run.config["train.max_rollouts"]) == ("greso", 96)
    start_until_launch(command, monkeypatch, "--resume", "mine", *greso)
    start_until_launch(command, monkeypatch, "--resume", "mine", *greso, "--train.max_rollouts", "640")
    assert "budget     640 rollouts at most" in capfd.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_starts_over_but_no_lost_checkpoint_is_passed_over(
    unfinished, command, monkeypatch, tmp_path
):
    nobody = np.empty(0, dtype=np.int64)
    none = storage.StepRows(nobody, nobody, *np.empty((3, 0)), *np.empty((2, 0, 2)), nobody)
    with storage.open_store(f"sqlite:///{tmp_path}/openrlhf_dbb.db") as store:
        run = store.claim_run(1)
        run.record_step(1, none)
        run.release()
        start_until_launch(command, monkeypatch, "--resume", "mine")
        run = store.claim_run(1)
        run.record_checkpoint(1, "global_step1")
        run.release()
    code, said = command("--resume", "mine")
    assert code == 2
    assert f"there is no checkpoint in {tmp_path}/runs/mine/checkpoints; the run has recorded global_step1" in said


def test_ranks_other_than_0_leave_at_once(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert train_grpo.main(["--no-such-flag"]) == 0
