"""Benchmarks during training: their prompts are those of the command evaluate, and what cannot work is one line."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("datasets")

import datasets
from openrlhf.utils import get_tokenizer

from openrlhf_dbb import presets, tiny
from openrlhf_dbb.driver import arguments, checks, preflight, printed, validation
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import pipeline

ROWS = [{"input": "1+2=", "label": "3"}, {"input": "s31=", "label": "13"}, {"input": "12+34=", "label": "64"}]
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setattr("openrlhf_dbb.driver.cluster.RayStart", lambda _: pytest.fail("Ray was started"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "sorts.toml").write_text(
        "title = 'Sorts'\nfile = 'mine.jsonl'\nquestion = 'input'\nanswer = 'label'\nverifier = 'exact'\n"
        "max_tokens = 3\ntemplate = '{question}s'\n"
    )


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model whose tokenizer has a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.prepare(tiny.default_folder()).model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def parsed(*flags):
    return arguments.parse(["--preset", "tiny", "--estimator", "dbb", "--eval.steps", "4", *flags])


def test_prompts_are_those_of_the_command_evaluate(model):
    named = "mine=mine.jsonl,sorts.toml"
    settings = parsed("--eval.benchmarks", named, "--actor.model_name_or_path", str(model))
    made = validation.prepare(settings.args, get_tokenizer(str(model), None, "left", None, use_fast=True))
    evaluate = SimpleNamespace(
        model=str(model), benchmarks=named, input_key="input", label_key="label", template=None, limit=None,
        chat_template=None, max_new_tokens=10, max_model_len=None, name="x", n=8, temperature=1.0, top_p=1.0, runs=1,
        seed=0,
    )  # fmt: skip
    assert made == pipeline.prepare(evaluate).prompts
    assert made["mine"].texts == ["1+2=", "s31=", "12+34="]  # a data file's, verbatim
    assert made["sorts"].texts == ["<1+2=s>", "<s31=s>", "<12+34=s>"]
    assert [prompts.benchmark.verifier for prompts in made.values()] == ["math", "exact"]
    assert [prompts.max_new_tokens for prompts in made.values()] == [10, 10]  # as in training, not the benchmark's 3


def test_without_a_limit_a_response_may_fill_the_context(model):
    settings = parsed("--eval.benchmarks", "mine=mine.jsonl", "--data.max_len", "30")
    args = settings.openrlhf_args()
    args.rollout.max_new_tokens = None
    tokenizer = get_tokenizer(str(model), None, "left", None, use_fast=True)
    assert validation.prepare(args, tokenizer)["mine"].max_new_tokens == 30 - len("12+34=")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--eval.benchmarks", "aime26"],
            "--eval.benchmarks: unknown benchmark 'aime26'; available: math500, minerva, .*; or NAME=FILE",
        ),
        (["--eval.benchmarks", "math500,math500"], "--eval.benchmarks: math500 is named twice; name it once"),
        (["--eval.benchmarks", "x=nowhere.jsonl"], "--eval.benchmarks: nowhere.jsonl: there is no data file nowhere"),
        (
            ["--eval.benchmarks", "mine=mine.jsonl", "--eval.steps", "-1"],
            "--eval.benchmarks mine=mine.jsonl does nothing with --eval.steps -1; give the training steps between",
        ),
        (["--eval.top_p", "0"], r"--eval.top_p 0 is not in \(0, 1\]; 1 samples from the whole distribution"),
        (["--eval.top_p", "1.5"], r"--eval.top_p 1.5 is not in \(0, 1\]"),
        (["--eval.temperature", "-1"], r"--eval.temperature -1 is below 0; give 0 \(greedy\) or more"),
        (["--eval.n_samples_per_prompt", "0"], "--eval.n_samples_per_prompt 0 is below 1"),
        (
            ["--estimator", "none", "--eval.benchmarks", "mine=mine.jsonl"],
            "--eval.benchmarks mine=mine.jsonl is not OpenRLHF's, which --estimator none leaves as it is",
        ),
        (["--estimator", "none", "--eval.top_p", "0.5"], "--eval.top_p 0.5 is not OpenRLHF's"),
    ],
)
def test_what_the_flags_tell_is_refused_at_once(flags, line):
    with pytest.raises(UsageError, match=f"^{line}") as refused:
        checks.check(parsed(*flags))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--eval.benchmarks", "mine=mine.jsonl", "--data.max_len", "15"],
            r"--eval.benchmarks: the longest prompt of mine \(6 tokens\) and --rollout.max_new_tokens 10 do not fit "
            "into --data.max_len 15; raise it, or leave this benchmark out",
        ),
        (
            ["--eval.benchmarks", "default=mine.jsonl"],
            "--eval.benchmarks default: --eval.dataset .*heldout.jsonl has a data source of this name; give another",
        ),
    ],
)
def test_what_the_data_tell_is_refused_before_the_run_is_made(flags, line, tmp_path):
    settings = parsed(*flags)
    with pytest.raises(UsageError, match=f"^{line}") as refused:
        preflight.prepare(settings, preflight.check(settings), lambda _: pytest.fail("the run would be made"))
    assert len(str(refused.value).splitlines()) == 1


def test_a_data_set_that_is_out_of_reach_says_what_to_do(tmp_path):
    code = (
        "import sys\nfrom openrlhf_dbb.cli import train_grpo\n"
        "sys.exit(train_grpo.main(['--dry_run', '--preset', 'tiny', '--eval.benchmarks', 'aime24']))"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --eval.benchmarks: benchmark aime24: Couldn't reach 'Maxwell-Jia/AIME_2024'")
    assert f"copy its $HF_HOME/datasets to {tmp_path}/home/datasets, or give the data as aime24=FILE (.jsonl" in line


def test_a_start_says_what_is_validated_and_what_it_costs(tmp_path):
    settings = parsed("--eval.benchmarks", "mine=mine.jsonl", "--dry_run")
    settings, start = preflight.prepare(settings, preflight.check(settings))
    assert (
        "validation mine (3) prompts x 8 samples = 24 rollouts every 4 steps, beside those of training"
        in printed.configuration(settings, start).splitlines()
    )


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "8b"])
def test_the_papers_presets_validate_as_the_paper(size):
    flags = presets.load(f"qwen3-{size}").flags
    assert flags["eval.benchmarks"] == "aime24,aime25,amc24,minerva,math500"
    assert (flags["eval.temperature"], flags["eval.top_p"], flags["eval.n_samples_per_prompt"]) == (0.6, 0.95, 8)
    assert flags["eval.steps"] == flags["ckpt.save_steps"] == 27


def test_top_p_is_that_of_the_training_unless_given():
    assert parsed("--rollout.top_p", "0.9").args.eval.top_p == 0.9
    assert parsed("--rollout.top_p", "0.9", "--eval.top_p", "0.5").args.eval.top_p == 0.5


def test_a_presets_benchmarks_can_be_switched_off_with_the_evaluations(tmp_path):
    (tmp_path / "own.toml").write_text("extends = 'tiny'\n[flags]\neval.benchmarks = 'mine=mine.jsonl'\n")
    settings = arguments.parse(["--preset", "own.toml", "--eval.steps", "-1"])
    checks.check(settings)
    _, start = preflight.prepare(settings, preflight.check(settings))
    assert start.benchmarks == {}
