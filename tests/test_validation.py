"""Benchmarks during training: their prompts are those of the command evaluate, and what cannot work is one line."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("datasets")

import datasets

from openrlhf_dbb import tiny
from openrlhf_dbb.driver import arguments, checks, prepare, printed, start
from openrlhf_dbb.errors import UsageError

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


def prepared(*flags):
    settings = arguments.parse(["--preset", "tiny", "--estimator", "dbb", "--eval.steps", "4", "--dry_run", *flags])
    checks.check(settings)
    prepared = prepare.prepare(settings, start.find(settings))
    start.begin(prepared)
    return prepared


def test_a_start_has_the_prompts_of_the_command_evaluate_and_says_what_they_cost(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.prepare(tiny.default_folder()).model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    named = ["--eval.benchmarks", "mine=mine.jsonl,sorts.toml", "--actor.model_name_or_path", str(model)]
    start = prepared(*named, "--no-data.apply_chat_template")
    made = start.benchmarks
    assert made["mine"].texts == ["1+2=", "s31=", "12+34="]  # a data file's, verbatim
    assert made["sorts"].texts == ["<1+2=s>", "<s31=s>", "<12+34=s>"]
    assert [prompts.benchmark.verifier for prompts in made.values()] == ["math", "exact"]
    assert [prompts.max_new_tokens for prompts in made.values()] == [10, 10]  # as in training, not the benchmark's 3
    plan = printed.plan(start).splitlines()
    held_out = (
        f"128 prompts ({start.settings.args.eval.dataset}), 3 prompts of mine, 3 prompts of sorts"  # 128: the preset's
    )
    assert f"held-out   {held_out}: 8 samples a prompt, every 4 steps" in plan
    assert plan[0].endswith(" - preset tiny")  # its description is of another model


def test_what_the_benchmarks_tell_is_refused_before_the_run_is_made():
    with pytest.raises(UsageError, match=r"longest prompt of mine \(6 tokens\) .* do not fit into --data.max_len 15"):
        prepared("--eval.benchmarks", "mine=mine.jsonl", "--data.max_len", "15")


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
    assert "give the data as aime24=FILE (.json" in line


def test_top_p_is_that_of_the_training_unless_given():
    top_p = ["--preset", "tiny", "--rollout.top_p", "0.9"]
    assert arguments.parse(top_p).args.eval.top_p == 0.9
    assert arguments.parse([*top_p, "--eval.top_p", "0.5"]).args.eval.top_p == 0.5


def test_a_presets_benchmarks_can_be_switched_off_with_the_evaluations(tmp_path):
    (tmp_path / "own.toml").write_text("extends = 'tiny'\n[flags]\neval.benchmarks = 'mine=mine.jsonl'\n")
    assert prepared("--preset", "own.toml", "--eval.steps", "-1").benchmarks == {}
