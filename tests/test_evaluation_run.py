"""Generation for an evaluation: journal, files, prompts, what may be continued, what is refused before it starts."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
from pyarrow import parquet

from openrlhf_dbb import tiny as tiny_preset
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import evaluated_model, writing
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.engines import SamplingSettings
from openrlhf_dbb.evaluation.evaluated_model import Model
from openrlhf_dbb.evaluation.journal import Journal, Key, Row
from openrlhf_dbb.evaluation.loading import Loaded
from openrlhf_dbb.evaluation.pipeline import choose_model, evaluation_folder, manifest_of
from openrlhf_dbb.evaluation.plan import Manifest, Plan, default_name
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts, prepare, sequence_length
from storage import open_store


def row(benchmark="sums", run=0, index=0):
    """Two samples, the second of which could not be verified and had no answer."""
    return Row(
        Key(benchmark, run, index), [1.0, None], [f"{run}{index}", None], ["ja\n\u2212", ""], [3, 1], [False, True]
    )


def prompts(size, **values):
    """Prompts "prompt 0", "prompt 1", ... with labels "0", "1", ..., of one token each."""
    numbers = range(size)
    arguments = {
        "benchmark": Benchmark("sums", "Sums", file="sums.jsonl"),
        "ids": [f"id {i}" for i in numbers],
        "texts": [f"prompt {i}" for i in numbers],
        "tokens": [[i] for i in numbers],
        "labels": [str(i) for i in numbers],
        "data_digest": "d",
        "max_new_tokens": 5,
        "chat_template": False,
        "notes": [],
    }
    return BenchmarkPrompts(**(arguments | values))


def plan(runs=2, benchmarks=("sums",), **values):
    arguments = {
        "name": "mine",
        "model": Model("/models/a", None, "f1", 64, None),
        "sampling": SamplingSettings(2, 1.0, 0.95),
        "seed": 7,
        "prompts": {name: prompts(3) for name in benchmarks},
    }
    return Plan(**(arguments | {"runs": runs} | values))


def recorded(folder, first, finished=True):
    """The manifest of an evaluation that was done as ``first`` says."""
    manifest = Manifest(folder)
    manifest.agree(first)
    manifest.new_seeds(1)
    manifest.finish() if finished else manifest.write()
    return Manifest(folder)


def test_a_journal_gives_back_what_was_appended(tmp_path):
    journal = Journal(tmp_path / "journal")
    for index in (2, 0):
        journal.append(row(index=index))
    again = Journal(tmp_path / "journal")
    assert again.keys == {Key("sums", 0, 0), Key("sums", 0, 2)}
    assert again.read(Key("sums", 0, 2)) == row(index=2)
    again.append(row(run=1))
    assert again.read(Key("sums", 1, 0)) == row(run=1)


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_done_again(tmp_path, kept):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(row(index=0))
    whole = path.stat().st_size
    journal.append(row(index=1))
    path.write_bytes(path.read_bytes()[: kept if kept < 0 else whole + kept])
    torn = Journal(path)
    assert torn.keys == {Key("sums", 0, 0)}
    torn.append(row(index=5))
    assert Journal(path).keys == {Key("sums", 0, 0), Key("sums", 0, 5)}


def test_a_damaged_line_within_the_journal_is_an_error(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(row(index=0))
    journal.append(row(index=1))
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(UsageError, match=r"line 1 of .*journal is damaged .*delete this line"):
        Journal(path)


def test_files_hold_rows_in_order_and_keep_earlier_runs(tmp_path):
    journal = Journal(tmp_path / "journal")
    for run, index in [(1, 0), (0, 1), (1, 1), (0, 0)]:
        journal.append(row(run=run, index=index))
    writing.write(tmp_path, "sums", prompts(2), 1, journal)
    one = parquet.read_table(tmp_path / "sums.parquet").to_pylist()
    expected = {"id": "id 1", "prompt": "prompt 1", "label": "1", "scores": [1.0, None], "answers": ["01", None]}
    expected |= {"responses": ["ja\n\u2212", ""], "tokens": [3, 1], "truncated": [False, True]}
    assert one[1] == {"run": 0, "index": 1, **expected}
    journal.remove()

    later = Journal(tmp_path / "journal")
    with pytest.raises(KeyError):
        writing.write(tmp_path, "sums", prompts(2), 2, later)
    assert parquet.read_table(tmp_path / "sums.parquet").to_pylist() == one
    for index in (1, 0):
        later.append(row(run=1, index=index))
    writing.write(tmp_path, "sums", prompts(2), 2, later)
    both = parquet.read_table(tmp_path / "sums.parquet").to_pylist()
    assert both[:2] == one
    assert [(each["run"], each["index"], each["answers"][0]) for each in both[2:]] == [(1, 0, "10"), (1, 1, "11")]


def test_more_runs_and_benchmarks_continue_an_evaluation(tmp_path):
    manifest = recorded(tmp_path, plan())
    manifest.agree(plan(runs=3, benchmarks=("sums", "sorts")))
    assert (manifest.runs, list(manifest.values["benchmarks"]), manifest.finished) == (3, ["sums", "sorts"], False)


def test_fewer_runs_leave_those_that_are_there(tmp_path):
    manifest = recorded(tmp_path, plan(benchmarks=("sums", "sorts")))
    manifest.agree(plan(runs=1))
    assert (manifest.runs, list(manifest.values["benchmarks"]), manifest.finished) == (2, ["sums", "sorts"], True)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            plan(sampling=SamplingSettings(4, 0.6, 0.95)),
            r"made with --n 2, not 4; --temperature 1.0, not 0.6; give another",
        ),
        (plan(seed=8), r"--seed 7, not 8"),
        (
            plan(model=Model("/models/a", None, "f2", 64, None)),
            r"of model /models/a \(the files in it have changed",
        ),
        (plan(model=Model("/models/b", None, "f2", 64, None)), r"of model /models/a, not of /models/b"),
        (plan(prompts={"sums": prompts(2)}), r"number of prompts of sums 3, not 2"),
        (plan(prompts={"sums": prompts(3, data_digest="e")}), r"data of sums d, not e"),
        (plan(prompts={"sums": prompts(3, max_new_tokens=6)}), r"--max_new_tokens of sums 5, not 6"),
        (plan(prompts={"sums": prompts(3, chat_template=True)}), r"chat template of sums False, not True"),
        (plan(runs=3, benchmarks=("sums",)), r"has 2 runs, also of sorts; for --runs 3"),
    ],
)
def test_another_evaluation_under_the_same_name_is_refused(tmp_path, second, message):
    manifest = recorded(tmp_path, plan(benchmarks=("sums", "sorts")))
    with pytest.raises(UsageError, match=message):
        manifest.agree(second)


def test_an_unfinished_evaluation_is_continued_whole(tmp_path):
    manifest = recorded(tmp_path, plan(benchmarks=("sums", "sorts")), finished=False)
    with pytest.raises(UsageError, match="is not finished and also has sorts"):
        manifest.agree(plan())


def test_what_ended_before_its_first_row_may_be_begun_otherwise(tmp_path):
    recorded(tmp_path, plan(), finished=False)
    journal = Journal(tmp_path / "journal")
    manifest = manifest_of(tmp_path, journal)
    manifest.agree(plan(seed=8))
    assert manifest.values["seed"] == 8
    journal.append(row())
    with pytest.raises(UsageError, match="--seed 7, not 8"):
        manifest_of(tmp_path, journal).agree(plan(seed=8))


def test_no_engine_ever_gets_a_seed_again(tmp_path):
    manifest = recorded(tmp_path, plan())  # one engine, seed 7
    assert manifest.new_seeds(2) == [8, 9]
    assert manifest.new_seeds(1) == [10]


def test_a_model_is_told_from_another_by_its_content(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    before = evaluated_model.fingerprint(tmp_path)
    assert evaluated_model.fingerprint(tmp_path) == before
    changed = bytearray(10_000_000)
    for place in range(0, len(changed), 1000):
        changed[place] = 1
    weights.write_bytes(changed)
    assert evaluated_model.fingerprint(tmp_path) != before


def test_names_of_evaluations():
    assert default_name("/home/me/runs/first/model") == "first"
    assert default_name("Qwen/Qwen3-1.7B-Base") == "Qwen3-1.7B-Base"


@pytest.fixture(scope="module")
def tiny():
    """The tiny preset's files."""
    return tiny_preset.prepare(tiny_preset.default_folder())


@pytest.fixture(scope="module")
def tiny_found(tiny):
    return evaluated_model.find(str(tiny.model))


def loaded(texts, **entry):
    values = {"file": "sums.jsonl", "max_tokens": 10} | entry
    return Loaded(Benchmark("sums", "Sums", **values), ["a", "b"], texts, ["1", "2"], "d", [])


def test_prompts_are_tokenized_as_they_are(tiny_found):
    found = prepare(loaded(["1+2=", "s31="]), tiny_found, chat_template=None, max_new_tokens=None)
    assert (found.texts, found.chat_template, found.max_new_tokens) == (["1+2=", "s31="], False, 10)
    assert [tiny_found.tokenizer.decode(tokens) for tokens in found.tokens] == ["1+2=", "s31="]
    assert found.longest == 4 + 10


def test_the_chat_template_is_applied_where_the_entry_says_so(tiny_found):
    tokenizer = type(tiny_found.tokenizer).from_pretrained(tiny_found.name)
    tokenizer.chat_template = "s{{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"
    chat = Model(tiny_found.name, None, "f", 64, tokenizer)

    def texts(asked, entry):
        values = loaded(["12", "31"], chat_template=entry)
        return prepare(values, chat, chat_template=asked, max_new_tokens=None).texts

    assert texts(None, entry=True) == texts(True, entry=False) == ["s12=", "s31="]
    assert texts(None, entry=False) == texts(False, entry=True) == ["12", "31"]


def test_prompts_that_the_tokenizer_has_no_token_for_are_refused(tiny_found):
    from tokenizers.models import WordLevel

    tokenizer = type(tiny_found.tokenizer).from_pretrained(tiny_found.name)
    tokenizer.backend_tokenizer.model = WordLevel(tokenizer.get_vocab())  # without a token for unknown characters
    strict = Model(tiny_found.name, None, "f", 64, tokenizer)
    with pytest.raises(UsageError, match="cannot encode its prompts"):
        prepare(loaded(["1+1=", "what?"]), strict, chat_template=None, max_new_tokens=None)


@pytest.mark.parametrize(
    ("texts", "chat_template", "message"),
    [
        (["1+1=", ""], None, "the prompt of 'b' is empty"),
        (["1+1=", "2+2="], True, "--chat_template: the tokenizer of .* has none"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(tiny_found, texts, chat_template, message):
    with pytest.raises(UsageError, match=message):
        prepare(loaded(texts), tiny_found, chat_template=chat_template, max_new_tokens=None)


def test_prompts_must_fit_the_model_and_the_limit(tiny_found):
    found = prepare(loaded(["1+2=", "s3="]), tiny_found, chat_template=None, max_new_tokens=60)
    assert sequence_length([found], tiny_found, None) == 64  # the model's context
    with pytest.raises(
        UsageError, match=r"longest prompt \(4 tokens\) and --max_new_tokens 60 do not fit into --max_model_len"
    ):
        sequence_length([found], tiny_found, 63)
    longer = prepare(loaded(["1+2=", "s3="]), tiny_found, chat_template=None, max_new_tokens=61)
    with pytest.raises(UsageError, match=r"do not fit into the context of .* \(64 tokens\)"):
        sequence_length([longer], tiny_found, None)


def model_folder(path, **best):
    """A folder as a training saves a model; with ``best`` as the best one."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if best:
        said = {"run": "r", "step": 8, "measure": "eval_mean@8", "value": 0.5, "evaluated": ["aime24"]}
        (path / "best.json").write_text(json.dumps(said))
    return str(path)


def test_of_a_run_the_best_model_is_taken_else_the_last_and_it_is_said(tmp_path, capsys):
    run = tmp_path / "runs/mine"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"mine has saved no model: there is neither .*best nor .*model; wait for its"):
        evaluated_model.choose(str(run))
    last = model_folder(run / "model")
    assert evaluated_model.choose(f"{run}/") == last
    assert capsys.readouterr().out == f"{run}/: its last model, as it has kept no best one: {last}\n"
    best = model_folder(run / "best", step=8)
    assert evaluated_model.choose(str(run)) == best
    assert capsys.readouterr().out == f"{run}: its best model, by eval_mean@8 0.5 after step 8: {best}\n"
    for named in (last, best, "Qwen/Qwen3-1.7B-Base"):  # what is no run is taken as it is
        assert evaluated_model.choose(named) == named
    assert capsys.readouterr().out == ""


def test_a_run_of_the_store_is_found_wherever_its_folder_is(tmp_path, fill, capsys):
    url = f"sqlite:///{tmp_path}/store.db"
    best, last = model_folder(tmp_path / "far/ckpt/best", step=8), model_folder(tmp_path / "away/last")
    with open_store(url) as store:
        fill.run(store, "mine", config={"ckpt.path": str(tmp_path / "far/ckpt"), "ckpt.output_dir": last})
        fill.run(store, "other", config={"ckpt.path": str(tmp_path / "nowhere"), "ckpt.output_dir": last})
        fill.run(store, "trl", config={})
    for run, found in (("mine", best), ("other", last)):
        named = Namespace(model=None, run=run, name=None, store_url=url)
        choose_model(named)
        assert (named.model, named.name) == (found, run)
        assert capsys.readouterr().out.startswith(f"{run}: its ")
    with pytest.raises(UsageError, match="--run trl does not say where its models are; give --model too"):
        choose_model(Namespace(model=None, run="trl", name=None, store_url=url))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--benchmarks", "maths500"], "unknown benchmark 'maths500'; available: math500, minerva"),
        (["--benchmarks", "math500,math500"], "--benchmarks: math500 is named twice"),
        (["--benchmarks", ","], "--benchmarks: no benchmark is named; available: math500"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
        (["--n", "0"], "--n must be at least 1, got 0"),
        (["--runs", "0"], "--runs must be at least 1, got 0"),
        (["--top_p", "1.5"], "--top_p must be above 0 and at most 1, got 1.5"),
        (["--temperature", "0"], "use --n 1 --runs 1 or a temperature above 0"),
        (["--template", "nowhere.txt"], "--template nowhere.txt cannot be read"),
        (["--run", "first"], "there is no store at"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_starts(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    (tmp_path / "sums.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    arguments = ["--model", "./nowhere", "--benchmarks", "sums=sums.jsonl"]
    assert main(["evaluate", *arguments, *flags]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert written.count("\n") == 1
    assert not (tmp_path / "evaluations").exists()


def test_two_processes_do_not_write_one_evaluation(tmp_path):
    with evaluation_folder(tmp_path / "mine"):
        code = "from openrlhf_dbb.evaluation.pipeline import *; evaluation_folder(Path('mine')).__enter__()"
        command = [sys.executable, "-c", code]
        other = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert "another process is evaluating into it; wait, or give another --name" in other.stderr
    with evaluation_folder(tmp_path / "mine"):
        pass  # it is free again
