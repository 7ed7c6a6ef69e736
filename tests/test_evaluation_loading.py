"""A benchmark of one's own, the digest, and everything that can be wrong with an entry, its data or the hub."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("datasets")
pytest.importorskip("math_verify")

import datasets

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading, verifiers
from openrlhf_dbb.tiny import task as tiny_task


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def json_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_tiny_presets_held_out_set_is_used_verbatim(tmp_path):
    rows = tiny_task.generate("heldout", 12, seed=1)
    path = json_lines(tmp_path / "heldout.jsonl", *rows)
    benchmark = benchmarks.find(f"tiny={path}")
    loaded = loading.load(benchmark)
    assert (benchmark.name, benchmark.group, benchmark.chat_template) == ("tiny", "", False)
    assert loaded.prompts == [row["input"] for row in rows]
    assert loaded.labels == [row["label"] for row in rows]
    assert loaded.ids == [str(place) for place in range(12)]
    assert {verifiers.verify(benchmark.verifier, label, label).score for label in loaded.labels} == {1.0}


def test_a_parquet_file(tmp_path):
    datasets.Dataset.from_list([{"input": "1+1=", "label": 2}]).to_parquet(tmp_path / "mine.parquet")
    loaded = loading.load(benchmarks.find(f"mine={tmp_path}/mine.parquet"))
    assert (loaded.prompts, loaded.labels) == (["1+1="], ["2"])


def test_a_benchmark_of_ones_own_is_one_toml_file(tmp_path):
    json_lines(tmp_path / "data" / "q.jsonl", {"text": "Is 7 prime? {options}", "gold": "Yes", "key": "x1"})
    (tmp_path / "primes.toml").write_text(
        "title = 'Primes'\nfile = 'data/q.jsonl'\nquestion = 'text'\nanswer = 'gold'\nid = 'key'\nverifier = 'exact'\n"
        "chat_template = false\nmax_tokens = 64\ntemplate = 'Q: {question} A: \\boxed{}'\n"
    )
    benchmark = benchmarks.find(f"{tmp_path}/primes.toml")
    assert (benchmark.name, benchmark.title, benchmark.max_tokens) == ("primes", "Primes", 64)
    loaded = loading.load(benchmark)
    # what a question holds is never filled in
    assert (loaded.ids, loaded.prompts) == (["x1"], ["Q: Is 7 prime? {options} A: \\boxed{}"])


def test_digest_depends_on_prompts_labels_and_order(tmp_path):
    def digest(*rows, **options):
        path = json_lines(tmp_path / "rows.jsonl", *[{"input": text, "label": label} for text, label in rows])
        return loading.load(benchmarks.find(f"x={path}"), **options).digest

    digests = {
        digest(("a", "1"), ("b", "2")),
        digest(("b", "2"), ("a", "1")),
        digest(("a", "1"), ("b", "3")),
        digest(("ab", "1"), ("b", "2")),
        digest(("a", "1"), ("b", "2"), limit=1),
    }
    assert len(digests) == 5
    assert digest(("a", "1"), ("b", "2")) in digests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math50", "unknown benchmark 'math50'; available: math500, minerva, .*, bbh; or NAME=FILE"),
        ("x=nothing.jsonl", "no data file nothing.jsonl"),
        ("x=data.csv", r"data file 'data.csv': its name must end in .jsonl, .json, .parquet"),
        ("=data.jsonl", "'' in =data.jsonl cannot be the name of a benchmark"),
        ("nothing.toml", "no benchmark file nothing.toml"),
    ],
)
def test_what_is_no_benchmark_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        benchmarks.find(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("hub = 'a/b'\nanwser = 'x'", ".*unexpected keyword argument 'anwser'"),
        ("title = 'x'", "give either hub = .* or file ="),
        ("hub = 'a/b'\nverifier = 'maths'", "unknown verifier 'maths'; available: math, math_or_text, choice, exact"),
        ("hub = 'a/b'\ntemplate = 'Answer this.'", "the template has no {question}"),
        ("hub = 'a/b'\noptions = 'options'", "{options} in the template and options or choices need each other"),
        ("hub = 'a/b'\ntemplate = '{question} {form}'", r"{form} in the template needs a table \[configs\]"),
        ("hub = ", "Invalid value"),
    ],
)
def test_mistakes_in_an_entry_are_named(tmp_path, lines, message):
    (tmp_path / "mine.toml").write_text(lines)
    with pytest.raises(UsageError, match=rf"mine\.toml: {message}"):
        benchmarks.find(f"{tmp_path}/mine.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "1+1=", "gold": "2"}\n', "'label' is not a column of .*; it has input, gold"),
        ('{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": null}\n', "row '1' has no label"),
        ('{"input": " ", "label": "2"}\n', "row '0' has no text in column 'input': ' '"),
        ('{"input": "a", "label": 2}\n{"input": "b", "label": "$"}\n', r"row '1' \(1 such rows\): "),
        ('{"input": "1+1=", "label": " "}\n', r"row '0' \(1 such rows\): the label is empty"),
        ("", "is empty"),
        ('{"input": \n', "cannot be read: JSON parse error"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_data_is_told_with_the_row(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UsageError, match=f"benchmark mine: .*{message}"):
        loading.load(benchmarks.find(f"mine={tmp_path}/bad.jsonl"))


def test_ids_must_differ(tmp_path):
    json_lines(tmp_path / "rows.jsonl", *[{"input": "a", "label": "1", "key": "x"}] * 2)
    (tmp_path / "mine.toml").write_text("file = 'rows.jsonl'\nid = 'key'\n")
    with pytest.raises(UsageError, match="column 'key' has an id twice"):
        loading.load(benchmarks.find(f"{tmp_path}/mine.toml"))


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses everything, with the status and code of the real one."""

    refusal = (404, "RepoNotFound")

    def do_GET(self):
        self.send_response(self.refusal[0])
        self.send_header("X-Error-Code", self.refusal[1])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def said_on_loading(name, home, **environment):
    """What the error says, from a process of its own: the hub's address is read once."""
    code = (
        "from openrlhf_dbb.errors import UsageError\n"
        "from openrlhf_dbb.evaluation import benchmarks, loading\n"
        f"try: loading.load(benchmarks.find({name!r}))\n"
        "except UsageError as error: print(error)"
    )
    environment = os.environ | {"HF_HOME": str(home)} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((403, "GatedRepo"), "Idavidrein/gpqa is gated: accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa"),
        ((404, "RepoNotFound"), "doesn't exist on the Hub or cannot be accessed"),
        ((404, "RevisionNotFound"), "Revision '633f5ee89ab8ad4522a9f850766b73f62147ffdd' doesn't exist"),
    ],
)  # fmt: skip
def test_refusals_of_the_hub_are_one_clear_line(tmp_path, hub, monkeypatch, refusal, message):
    monkeypatch.setattr(Hub, "refusal", refusal)
    said = said_on_loading("gpqa_diamond", tmp_path, HF_ENDPOINT=hub)
    assert said.startswith("benchmark gpqa_diamond: ")
    assert message in said
    assert said.count("\n") == 1


def test_without_a_network_it_says_what_to_do(tmp_path):
    said = said_on_loading("math500", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("benchmark math500: Couldn't reach 'HuggingFaceH4/MATH-500' on the Hub")
    assert f"copy its $HF_HOME/datasets to {tmp_path}/datasets, or give the data as math500=FILE (.jsonl, .json" in said


def test_entries_and_verifiers_load_neither_torch_nor_datasets():
    code = (
        "import openrlhf_dbb.evaluation.loading, sys\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'datasets', 'pyarrow', 'math_verify'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
