"""Benchmarks, their questions loaded from small data sets laid out as those of the hub, and what can be wrong.

The questions are made up; columns, types, files and configurations are the hub's.
"""

import dataclasses
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("datasets")
pytest.importorskip("math_verify")

import datasets

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading, verifiers

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}."


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path, rows):
    """Rows as a file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = datasets.Dataset.from_list(rows)
    {".jsonl": data.to_json, ".parquet": data.to_parquet, ".csv": data.to_csv}[path.suffix](path)
    return path


@pytest.fixture
def hub_folder(tmp_path):
    """Function: a known benchmark whose data are read from files {path: rows} in place of the hub.

    ``configs``: the configuration of each file, as the data set's card has it; the benchmark's unless given.
    """

    def make(name, files, configs=None):
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        for path, rows in files.items():
            write(folder / path, rows)
        entry = benchmarks.find(name)
        card = [
            {"config_name": config, "data_files": [{"split": entry.split, "path": path}]}
            for config, path in zip(configs or entry.configs, files, strict=False)
        ]
        if card:
            (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card)}\n---\n")
        return dataclasses.replace(entry, hub=str(folder))

    return make


def scores(loaded, *responses):
    """The scores of responses, one to each prompt."""
    kind = loaded.benchmark.verifier
    return [verifiers.VERIFIERS[kind](*pair).score for pair in zip(responses, loaded.labels, strict=True)]


def test_the_papers_nine_benchmarks_are_known_at_a_fixed_revision():
    entries = [benchmarks.find(name) for name in benchmarks.NAMES]
    assert all(re.fullmatch("[0-9a-f]{40}", entry.revision) and entry.chat_template for entry in entries)
    assert len(entries[-1].configs) == len(set(entries[-1].configs)) == 27


ASKED = "Find $n$."
OLYMPIAD = {"id": 16, "question": ASKED, "final_answer": ["$1$,$-1$"], "unit": None, "is_multiple_answer": True}


@pytest.mark.parametrize(
    ("name", "files", "row", "id_", "label"),
    [
        ("math500", ["test.jsonl"], {"problem": f" {ASKED} ", "answer": "5", "unique_id": "t/1.json"}, "t/1.json", "5"),
        ("aime24", ["aime_2024.parquet"], {"ID": "2024-II-4", "Problem": ASKED, "Answer": 33}, "2024-II-4", "33"),
        ("aime25", ["I.jsonl", "II.jsonl"], {"question": ASKED, "answer": "70"}, "AIME2025-I/0", "70"),
        ("amc24", ["amc12-2024.jsonl"], {"problem": ASKED, "answer": "(0, 1)"}, "0", "(0, 1)"),
        ("olympiad", ["OE_TO_maths_en_COMP/1.parquet"], OLYMPIAD, "16", "$1$,$-1$"),
    ],
)
def test_a_benchmark_of_the_hub(hub_folder, name, files, row, id_, label):
    loaded = loading.load(hub_folder(name, {file: [row] for file in files}))
    assert (loaded.ids[0], loaded.texts[0], loaded.labels[0]) == (id_, ASKED + BOXED, label)
    assert len(loaded.ids) == len(files) and loaded.notes == []
    assert set(scores(loaded, *[f"\\boxed{{{label}}}"] * len(files))) == {1.0}


def test_minerva_labels_in_python_are_read_and_those_that_nothing_earns_are_told(hub_folder):
    product = "t(0,4]"
    labels = ["4.5e33", "np.arcsin(10/13)", product]
    rows = [{"question": "Which number?", "answer": label} for label in labels]
    loaded = loading.load(hub_folder("minerva", {"test.jsonl": rows}))
    assert loaded.labels == labels
    assert loaded.notes == ["1 of 3 labels are compared as text, as no answer can be read like them: rows 2"]
    responses = ["\\boxed{4.5 \\times 10^{33} \\text{ erg/s}}", "\\boxed{\\arcsin\\frac{10}{13}}"]
    assert scores(loaded, *responses, "\\boxed{t (0, 4]}") == [1.0, 1.0, 1.0]


def test_options_have_letters_and_a_label_beyond_them_is_an_error_that_names_the_row(hub_folder):
    row = {"question_id": 70, "question": "Which is prime?", "options": ["4", "6", "7"], "answer": "C"}
    path = "data/test-00000-of-00001.parquet"
    loaded = loading.load(hub_folder("mmlu_pro", {path: [row]}))
    assert (loaded.ids, loaded.labels) == (["70"], ["C"])
    assert loaded.texts == ["Which is prime?\n\n(A) 4\n(B) 6\n(C) 7" + LETTER]
    with pytest.raises(UsageError, match=r"benchmark mmlu_pro: row '71' has 3 options, but the label 'D'"):
        loading.load(hub_folder("mmlu_pro", {path: [row, row | {"question_id": 71, "answer": "D"}]}))


def gpqa(hub_folder, ids):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    rows = [{"Record ID": i, "Question": f"Question {i}?", "Correct Answer": "right\n", **wrong} for i in ids]
    return hub_folder("gpqa_diamond", {"gpqa_diamond.csv": rows})


def test_gpqa_options_are_shuffled_by_question_and_the_label_follows(hub_folder):
    entry = gpqa(hub_folder, [f"rec{i}" for i in range(400)])
    loaded = loading.load(entry)
    for prompt, label in zip(loaded.texts, loaded.labels, strict=True):
        assert f"\n({label}) right\n" in prompt
        assert sorted(re.findall(r"\) (.*)", prompt)) == ["right", "wrong 1", "wrong 2", "wrong 3"]
    # 400 draws at 1/4: 100 on average, standard deviation sqrt(400 * 3/16) = 8.7; four of them to each side.
    assert all(65 <= count <= 135 for count in Counter(loaded.labels).values())
    # The order of a question's options does not depend on the other questions.
    assert loading.load(gpqa(hub_folder, ["rec3", "other"])).texts[0] == loaded.texts[3]


def test_bbh_joins_its_tasks_and_asks_for_the_form_of_each_and_a_limit_takes_from_each_in_turn(hub_folder):
    tasks = {"navigate": ("Do you return?\nOptions:\n- Yes\n- No", "No"), "word_sorting": ("Sort: b a", "a b")}
    files = {
        f"{task}/test-00000-of-00001.parquet": [{"input": f"{i}. {question}", "target": target} for i in range(3)]
        for task, (question, target) in tasks.items()
    }
    entry = hub_folder("bbh", files, tasks)
    forms = tuple(entry.forms[entry.configs.index(task)] for task in tasks)
    entry = dataclasses.replace(entry, configs=tuple(tasks), forms=forms)
    loaded = loading.load(entry, limit=3)
    ask = "\n\nPlease reason step by step, and put your final answer ({}) within \\boxed{{}}."
    assert loaded.ids == ["navigate/0", "navigate/1", "word_sorting/0"]
    assert loaded.texts[0] == "0. Do you return?\nOptions:\n- Yes\n- No" + ask.format("Yes or No")
    assert loaded.texts[2] == "0. Sort: b a" + ask.format("the words, separated by spaces")
    assert loaded.labels == ["No", "No", "a b"]
    assert len(loading.load(entry, limit=100).ids) == 6


def test_a_data_file_is_used_verbatim(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"input": " 1+1=", "label": 2}, {"input": "2+2=", "label": 4}])
    benchmark = benchmarks.find(f"sums={path}")
    loaded = loading.load(benchmark)
    assert (benchmark.name, benchmark.group, benchmark.chat_template) == ("sums", "", False)
    assert (loaded.ids, loaded.texts, loaded.labels) == (["0", "1"], [" 1+1=", "2+2="], ["2", "4"])


def test_a_benchmark_of_ones_own_is_one_toml_file(tmp_path):
    write(tmp_path / "data" / "q.jsonl", [{"text": "Is 7 prime? {options}", "gold": "Yes", "key": "x1"}])
    (tmp_path / "primes.toml").write_text(
        "title = 'Primes'\nfile = 'data/q.jsonl'\nquestion = 'text'\nanswer = 'gold'\nid = 'key'\nverifier = 'exact'\n"
        "chat_template = false\nmax_tokens = 64\ntemplate = 'Q: {question} A: \\boxed{}'\n"
    )
    loaded = loading.load(benchmark := benchmarks.find(f"{tmp_path}/primes.toml"))
    assert (benchmark.name, benchmark.title, benchmark.max_tokens) == ("primes", "Primes", 64)
    # what a question holds is never filled in
    assert (loaded.ids, loaded.texts) == (["x1"], ["Q: Is 7 prime? {options} A: \\boxed{}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math50", "unknown benchmark 'math50'; available: math500, minerva, .*, bbh; or NAME=FILE"),
        ("x=nothing.jsonl", "benchmark x: nothing.jsonl cannot be read: .*No such file"),
        ("mine.toml", "mine.toml: .*unexpected keyword argument 'anwser'"),
    ],
)
def test_what_is_no_benchmark_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("hub = 'a/b'\nanwser = 'x'")
    with pytest.raises(UsageError, match=message):
        loading.load(benchmarks.find(text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "1+1=", "gold": "2"}\n', "'label' is not a column of .*; it has input, gold"),
        ('{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": null}\n', "row '1' has no label"),
        ('{"input": "1+1=", "label": " "}\n', r"row '0' \(1 such rows\): the label is empty"),
        ('{"input": "a", "label": 2}\n{"input": "b", "label": "$"}\n', r"row '1' \(1 such rows\): "),
        ('{"input": \n', "cannot be read: line 1: broken JSON: Expecting value"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_data_is_told_with_the_row(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UsageError, match=f"benchmark mine: .*{message}"):
        loading.load(benchmarks.find(f"mine={tmp_path}/bad.jsonl"))


class GatingHub(BaseHTTPRequestHandler):
    """A hub that refuses everything, with the status and code that the real one has for a gated data set."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_a_gated_data_set_is_one_line_that_says_what_to_do(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), GatingHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub)
        page = "https://huggingface.co/datasets/Idavidrein/gpqa"
        with pytest.raises(UsageError, match=f"^benchmark gpqa_diamond: Idavidrein/gpqa is gated: .* terms at {page}"):
            loading.load(benchmarks.find("gpqa_diamond"))
        server.shutdown()
