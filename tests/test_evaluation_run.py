"""An evaluation on disk and in the store: responses, settings, prompts, models, refusals before an engine starts."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from filler import check

from openrlhf_dbb import tiny as tiny_preset
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import command, results
from openrlhf_dbb.evaluation import model as evaluated_model
from openrlhf_dbb.evaluation.answering import answer
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.command import (
    Options,
    continued,
    engine_seed,
    print_summary,
    record,
    settings_of,
)
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts, prepare
from openrlhf_dbb.evaluation.model import Model
from openrlhf_dbb.evaluation.results import Key, Responses, Row, read_evaluation, read_rows
from openrlhf_dbb.platform.vllm_requests import Finished
from openrlhf_dbb.saved.checkpoints import write_json


def row(
    run=0, place=0, scores=(1.0, None), answers=("7", None), tokens=(3, 1), truncated=(False, True)
):
    """A row of benchmark "sums"; by default two samples, the second of which could not be verified."""
    texts = {
        "id": f"q{place}",
        "prompt": f"<user>{place}",
        "label": str(place),
        "responses": ["ja\n\u2212", ""],
    }
    lists = {"scores": scores, "answers": answers, "tokens": tokens, "truncated": truncated}
    return Row(
        "sums", run, place, **texts, **{name: list(values) for name, values in lists.items()}
    )


def prompts(size, labels=None):
    """Prompts "prompt 0", "prompt 1", ... of one token each, labelled "0", "1", ... unless given."""
    benchmark = Benchmark("sums", "Sums", file="sums.jsonl")
    ids, texts = ([f"{kind} {i}" for i in range(size)] for kind in ("id", "prompt"))
    tokens = [[i] for i in range(size)]
    labels = labels or [str(i) for i in range(size)]
    return BenchmarkPrompts(
        benchmark, ids, texts, labels, notes=[], tokens=tokens, max_new_tokens=5
    )


def settings(benchmarks=("sums",), fingerprint="f1", asked=None, **values):
    """The settings of an evaluation of three prompts of each benchmark."""
    options = Options(**{"n": 2, "temperature": 1.0, "runs": 2, "seed": 7} | values)
    model = Model("/models/a", None, fingerprint, 64, None)
    return settings_of(options, model, asked or {name: prompts(3) for name in benchmarks})


@pytest.mark.parametrize("kept", [20, -1])
def test_rows_are_read_as_written_a_torn_last_line_is_done_again_and_another_damaged_line_is_named(
    tmp_path, kept
):
    path = tmp_path / results.RESPONSES
    with closing(Responses(tmp_path)) as responses:
        responses.append(row(run=1, place=2))
        whole = path.stat().st_size
        responses.append(row(place=1))
    path.write_bytes(path.read_bytes()[: kept if kept < 0 else whole + kept])
    with closing(Responses(tmp_path)) as responses:
        assert responses.keys == {Key("sums", 1, 2)}
        responses.append(row(place=5))
    assert list(read_rows(path)) == [row(run=1, place=2), row(place=5)]
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(
        UsageError, match=r"responses.jsonl, line 1: .*delete this line and evaluate"
    ):
        Responses(tmp_path)


def test_two_processes_do_not_write_one_evaluation(tmp_path):
    with closing(Responses(tmp_path / "mine")):
        code = "from openrlhf_dbb.evaluation.results import *; Responses(Path('mine'))"
        other = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False
        )
    assert re.search(r"another process .*; wait, .*another --name", other.stderr)
    with pytest.raises(UsageError, match=r"^/proc/none/mine: .*; give another --output or --name"):
        Responses(Path("/proc/none/mine"))


def test_rows_are_answered_and_verified_as_their_keys_ask():
    keys = [Key("sums", 1, 2), Key("sums", 0, 1)]

    def generate(requests):
        assert [(request.prompt, request.max_tokens) for request in requests] == [
            ([2], 5),
            ([1], 5),
        ]
        yield []
        yield [
            Finished(request.number, ["1", "so 2"], [2, 5], [False, True])
            for request in reversed(requests)
        ]

    first, second = sorted(answer({"sums": prompts(3)}, keys, generate), key=lambda row: row.key)
    assert (first.key, first.id, first.prompt, first.label) == (keys[1], "id 1", "prompt 1", "1")
    assert (first.scores, second.scores) == ([1.0, 0.0], [0.0, 1.0])
    assert (second.answers, second.responses, second.tokens) == (["1", "2"], ["1", "so 2"], [2, 5])
    assert second.truncated == [False, True]


def test_more_runs_and_benchmarks_continue_an_evaluation():
    more = continued("mine", settings(), settings(runs=3, benchmarks=("sums", "sorts")))
    assert (more["runs"], list(more["benchmarks"])) == (3, ["sums", "sorts"])
    assert continued("mine", settings(), settings(runs=1))["runs"] == 2  # those that are there stay


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            settings(n=4, fingerprint="f2"),
            "made with fingerprint f1, not f2; n 2, not 4; give another",
        ),
        (settings(asked={"sums": prompts(3, labels=["0", "1", "3"])}), "digest of sums .*, not "),
        (settings(benchmarks=("sorts",)), "evaluation mine also has sums; add it to --benchmarks"),
    ],
)
def test_another_evaluation_under_the_same_name_is_refused(second, message):
    with pytest.raises(UsageError, match=message):
        continued("mine", settings(), second)


def test_no_engine_gets_the_seed_of_another():
    seeds = {engine_seed(7, done, engine) for done in (0, 1, 2, 100) for engine in range(8)}
    assert len(seeds) == 4 * 8
    assert engine_seed(7, 0, 0) != engine_seed(8, 0, 0)


@pytest.fixture
def evaluation(tmp_path):
    """A finished evaluation "mine": two prompts in two runs, three samples each."""
    with closing(Responses(tmp_path / "mine")) as responses:
        responses.append(row(1, 1, [None] * 3, ["1", "1", None], [9, 9, 9], [True] * 3))
        responses.append(row(0, 0, [1.0, 1.0, 0.0], ["0", "0", "5"], [4, 5, 6], [False] * 3))
        responses.append(row(1, 0, [0.0, 0.0, 0.0], ["8", None, None], [1, 1, 1], [False] * 3))
        responses.append(
            row(0, 1, [None, 0.0, 1.0], ["1", "2", "1"], [7, 7, 7], [True, False, False])
        )
    write_json(tmp_path / "mine" / results.SETTINGS, settings(n=3, asked={"sums": prompts(2)}))
    return read_evaluation(tmp_path / "mine")


def test_the_summary_has_means_and_deviations_over_runs(evaluation, capsys):
    print_summary(evaluation)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "3 samples per prompt" in lines[0]
    assert "standard deviation over 2 runs" in lines[0]
    # Accuracies of the runs: (2/3 + 1/2) / 2 and 0; best 1 and 0; majority (1 + 1/2) / 2 and 0; 66 tokens of 12.
    # Of the 4 groups only 0 0 0 has equal scores: a missing score equals no other.
    name, prompts, *numbers = lines[2].split()
    assert (name, prompts) == ("Sums", "2")
    assert numbers[:9:3] == ["29.17", "50.00", "37.50"]
    assert numbers[2:9:3] == ["41.25", "70.71", "53.03"]
    assert numbers[9:] == ["25%", "6", "33.3%", "33.3%"]


def test_the_results_are_stored_with_the_run(store, fill, evaluation, capsys):
    fill.run(store).finish()
    for _ in range(2):  # the second time takes the place of the first
        record(store.url, "run", evaluation)
    (stored,) = store.query("SELECT * FROM dbb_evaluation")
    assert (stored.name, stored.model, stored.run_id, stored.step) == ("mine", "/models/a", 1, None)
    assert json.loads(stored.config) == {
        name: of for name, of in evaluation.settings.items() if name != "model"
    }
    found = """SELECT samples, verified, successes, best, majority, tokens, truncated, prompt, label
               FROM evaluation_results JOIN prompts USING (prompt_id) ORDER BY repeat, place"""
    # "0" is right; "1" and "2" tie at one vote each, one right and one wrong; "8" is wrong; nothing verified
    assert store.query(found) == [
        (3, 3, 2.0, 1.0, 1.0, 15, 0, "<user>0", "0"), (3, 2, 1.0, 1.0, 0.5, 21, 1, "<user>1", "1"),
        (3, 3, 0.0, 0.0, 0.0, 3, 0, "<user>0", "0"), (3, 0, 0.0, None, None, 27, 3, "<user>1", "1"),
    ]  # fmt: skip
    assert "stored with run run in " in capsys.readouterr().out
    assert check(store) == []


def test_a_model_is_told_from_another_by_its_files(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    before = evaluated_model.fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("a model card, which may be edited")
    assert evaluated_model.fingerprint(tmp_path) == before
    os.utime(weights, (1, 1))  # written again
    assert evaluated_model.fingerprint(tmp_path) != before


def test_of_a_run_the_best_model_is_taken_else_the_last_and_it_is_said(tmp_path, capsys):
    run = tmp_path / "runs/mine"
    for name in ("model", "best"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")
        assert evaluated_model.choose(str(run)) == str(run / name)
        assert f"{run}/{name}" in capsys.readouterr().out
    for named in (
        f"{run}/model",
        f"{run}/best",
        "Qwen/Qwen3-1.7B-Base",
    ):  # what is no run is taken as it is
        assert evaluated_model.choose(named) == named
    assert evaluated_model.default_name(f"{run}/model") == "mine"


@pytest.fixture(scope="module")
def tiny_model():
    return evaluated_model.find_model(str(tiny_preset.prepare(tiny_preset.default_folder()).model))


def prepared(texts, model, asked=None, in_entry=True, max_new_tokens=None):
    benchmark = Benchmark("sums", "Sums", file="sums.jsonl", max_tokens=10, chat_template=in_entry)
    return prepare(
        BenchmarkPrompts(benchmark, ["a", "b"], texts, ["1", "2"], []), model, asked, max_new_tokens
    )


@pytest.mark.parametrize(
    ("asked", "entry", "texts"),
    [(None, True, ["s12=", "s31="]), (True, False, ["s12=", "s31="]), (False, True, ["12", "31"])],
)
def test_the_chat_template_is_applied_where_the_entry_or_the_flag_says_so(
    tiny_model, asked, entry, texts
):
    tokenizer = type(tiny_model.tokenizer).from_pretrained(tiny_model.name)
    tokenizer.chat_template = (
        "s{{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"
    )
    chat = Model(tiny_model.name, None, "f", 64, tokenizer)
    assert prepared(["12", "31"], chat, asked, entry).texts == texts


THINKS = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}0{% endif %}"
ARGUMENTS = "--chat_template_kwargs", '{"enable_thinking": false}'


@pytest.fixture
def thinking(tiny_model, tmp_path, monkeypatch):
    """Flags of a model whose template ends a prompt in 0 if it shall not think, and a benchmark."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model.name, tmp_path / "model")
    shutil.copytree(tiny_model.name, tmp_path / "plain")
    (tmp_path / "model/chat_template.jinja").write_text(THINKS)
    (tmp_path / "own.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    (tmp_path / "own.toml").write_text(
        'file = "own.jsonl"\nquestion = "q"\nanswer = "a"\nverifier = "math"\n'
    )
    return ["evaluate", "--model", "model", "--benchmarks", "own.toml", "--max_new_tokens", "8"]


@pytest.mark.parametrize(("flags", "ending"), [((), "="), (ARGUMENTS, "=0")])
def test_the_chat_template_gets_the_arguments_of_the_flag(thinking, monkeypatch, flags, ending):
    asked = []

    def no_response(prompts, keys, generate):
        asked.append(prompts)
        return []

    monkeypatch.setattr(command, "answer", no_response)
    monkeypatch.setattr(command, "ray_started", lambda *_: contextlib.nullcontext(1))
    assert main([*thinking, "--chat_template", *flags]) != 0
    [prompts] = asked
    [file] = Path().rglob(results.SETTINGS)
    settings = json.loads(file.read_text())
    assert prompts["own"].texts == ["1+1" + ending]
    assert settings["chat_template_kwargs"] == (flags[1] if flags else None)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--chat_template", "--chat_template_kwargs", "{'a': 1}"], "is no JSON"),
        (["--chat_template", "--chat_template_kwargs", '["enable_thinking"]'], "is no object"),
        (
            ["--chat_template", "--chat_template_kwargs", '{"think": false}'],
            "does not read 'think'",
        ),
        (["--model", "plain", *ARGUMENTS], "the tokenizer has no chat template"),
        (["--no-chat_template", *ARGUMENTS], "benchmark own gets no chat template"),
    ],
)
def test_arguments_that_no_chat_template_reads_are_refused(thinking, capsys, flags, problem):
    assert main([*thinking, *flags]) != 0
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "--chat_template_kwargs" in line
    assert problem in line


def test_an_evaluation_is_not_continued_with_other_arguments_of_the_chat_template():
    settings = {
        **{
            "model": "m",
            "fingerprint": "f",
            "n": 1,
            "temperature": 0.6,
            "top_p": 0.9,
            "seed": 0,
            "runs": 1,
        },
        "benchmarks": {},
    }
    now = {**settings, "chat_template_kwargs": '{"enable_thinking": false}'}
    with pytest.raises(UsageError, match=r"chat_template_kwargs None, not {\"enable_thinking"):
        command.continued("old", settings, now)
    assert command.continued("old", now, now) == now


def test_prompts_are_tokenized_as_they_are_and_must_fit_the_context(tiny_model):
    short = prepared(["1+2=", "s3="], tiny_model)
    assert (short.texts, short.chat_template, short.longest) == (["1+2=", "s3="], False, 4 + 10)
    assert [tiny_model.tokenizer.decode(tokens) for tokens in short.tokens] == ["1+2=", "s3="]
    # The model's context
    assert prepared(["1+2=", "s3="], tiny_model, max_new_tokens=60).longest == 64
    with pytest.raises(
        UsageError,
        match=r"\(4 tokens\) .*--max_new_tokens 61 .*\(64 tokens\); .*longer",
    ):
        prepared(["1+2=", "s3="], tiny_model, max_new_tokens=61)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "./nowhere"], "--model ./nowhere cannot be loaded: "),
        (["--model", "."], "has no weights"),
        (
            ["--model", "bare"],
            "bare cannot be loaded: the folder has no tokenizer; save the model's into it with tokenizer.save",
        ),
        (["--temperature", "0"], "use --n 1 --runs 1"),
        (["--run", "first"], "there is no store at"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_starts(
    tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "bare/model.safetensors").touch()
    assert (
        main(["evaluate", "--model", "./nowhere", "--benchmarks", "sums=sums.jsonl", *flags]) == 2
    )
    written = capsys.readouterr().err
    assert message in written and written.count("\n") == 1
    assert not (tmp_path / "evaluations").exists()
