"""Benchmarks, their questions loaded from small data sets laid out as those of the hub, and what can be wrong.

The questions are made up; columns, types, files and configurations are the hub's.
"""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("datasets")
pytest.importorskip("math_verify")

import datasets

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading, verifiers
from openrlhf_dbb.tiny import task as tiny_task

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}."


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def json_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(list(rows)).to_parquet(path)


def card(folder, split, **files):
    """A data set's card: which files are which configuration."""
    configs = [
        {"config_name": name.replace("_dash_", "-"), "data_files": [{"split": split, "path": path}]}
        for name, path in files.items()
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


def from_folder(name, folder):
    """The entry, its data taken from a folder in place of the hub."""
    return dataclasses.replace(benchmarks.find(name), hub=str(folder))


def scores(loaded, *responses):
    """The scores of responses, one to each prompt."""
    kind = loaded.benchmark.verifier
    return [verifiers.verify(kind, *pair).score for pair in zip(responses, loaded.labels, strict=True)]


def test_the_papers_nine_benchmarks_are_known_by_name_in_the_order_of_its_table():
    entries = [benchmarks.find(name) for name in benchmarks.NAMES]
    assert [entry.title for entry in entries] == [
        "MATH500", "Minerva", "AIME24", "AIME25", "AMC24", "Olympiad", "MMLU-Pro", "GPQA-D", "BBH",
    ]  # fmt: skip
    assert [entry.group for entry in entries] == ["ID"] * 6 + ["OOD"] * 3
    for entry in entries:
        assert re.fullmatch("[0-9a-f]{40}", entry.revision), entry.name
        assert entry.chat_template
        assert entry.source
    assert len(entries[-1].configs) == len(set(entries[-1].configs)) == 27


def test_math500(tmp_path):
    row = {
        "problem": " What is $1+1$? ", "solution": "It is $\\boxed{2}$.", "answer": "\\frac{4}{2}",
        "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json",
    }  # fmt: skip
    json_lines(tmp_path / "test.jsonl", row)
    loaded = loading.load(from_folder("math500", tmp_path))
    assert loaded.prompts == ["What is $1+1$?" + BOXED]
    assert (loaded.ids, loaded.labels, loaded.notes) == (["test/algebra/1.json"], ["\\frac{4}{2}"], [])


def test_minerva_labels_in_python_become_latex_and_those_math_verify_cannot_read_are_told(tmp_path):
    rows = [
        {"question": "How bright?", "answer": "4.5e33"},
        {"question": "Which angle?", "answer": "np.arcsin(10/13)"},
        {
            "question": "Which product?",
            "answer": "K_{s p}=\\left[\\mathrm{A}^{2+}\\right]\\left[\\mathrm{B}^{-}\\right]^{2}",
        },
    ]
    json_lines(tmp_path / "test.jsonl", *rows)
    loaded = loading.load(from_folder("minerva", tmp_path))
    assert loaded.labels[:2] == ["4.5 \\times 10^{33}", "\\arcsin(10/13)"]
    assert loaded.ids == ["0", "1", "2"]
    assert loaded.notes == ["1 of 3 labels are compared as text, as Math-Verify cannot read them: rows 2"]
    responses = ["\\boxed{4.5 \\times 10^{33} \\text{ erg/s}}", "\\boxed{\\arcsin\\frac{10}{13}}"]
    responses.append("\\boxed{K_{sp} = [\\text{A}^{2+}][\\text{B}^{-}]^2}")
    assert scores(loaded, *responses) == [1.0, 1.0, 0.0]  # text: ^{2} is not ^2


def test_aime24(tmp_path):
    parquet(
        tmp_path / "aime_2024_problems.parquet",
        {"ID": "2024-II-4", "Problem": "Find $n$.", "Solution": "...", "Answer": 33},
    )
    loaded = loading.load(from_folder("aime24", tmp_path))
    assert (loaded.ids, loaded.prompts, loaded.labels) == (["2024-II-4"], ["Find $n$." + BOXED], ["33"])


def test_aime25_joins_both_papers(tmp_path):
    json_lines(
        tmp_path / "aime2025-I.jsonl",
        {"question": "Find $a$.", "answer": "70"},
        {"question": "Find $b$.", "answer": "588"},
    )
    json_lines(tmp_path / "aime2025-II.jsonl", {"question": "Find $c$.", "answer": "336^\\circ"})
    card(tmp_path, "test", AIME2025_dash_I="aime2025-I.jsonl", AIME2025_dash_II="aime2025-II.jsonl")
    loaded = loading.load(from_folder("aime25", tmp_path))
    assert loaded.ids == ["AIME2025-I/0", "AIME2025-I/1", "AIME2025-II/0"]
    assert loaded.labels == ["70", "588", "336^\\circ"]


def test_amc24(tmp_path):
    rows = [
        {"exam": "2024 AMC 12A", "problem_number": 13, "problem": "Which point?", "answer": "(0, \\frac{1}{2})"},
        {"exam": "2024 AMC 12B", "problem_number": 4, "problem": "In which bin?", "answer": "D"},
    ]
    json_lines(tmp_path / "amc12-2024.jsonl", *rows)
    loaded = loading.load(from_folder("amc24", tmp_path))
    assert loaded.prompts == ["Which point?" + BOXED, "In which bin?" + BOXED]
    assert scores(loaded, "\\boxed{(0,1/2)}", "\\boxed{\\text{D}}") == [1.0, 1.0]


def test_olympiad_takes_the_first_final_answer(tmp_path):
    name = "OE_TO_maths_en_COMP"
    row = {
        "id": 1606, "question": "Find all roots.", "solution": ["..."], "final_answer": ["$\\frac{1}{2}$,$-1$"],
        "context": None, "image_1": None, "modality": "Text-only", "difficulty": "Competition",
        "is_multiple_answer": True, "unit": None, "answer_type": "Numerical", "error": None,
        "question_type": "Open-ended", "subfield": "Algebra", "subject": "Math", "language": "English",
    }  # fmt: skip
    parquet(tmp_path / "OlympiadBench" / name / f"{name}.parquet", row)
    card(tmp_path, "train", **{name: f"OlympiadBench/{name}/{name}.parquet"})
    loaded = loading.load(from_folder("olympiad", tmp_path))
    assert (loaded.ids, loaded.labels) == (["1606"], ["$\\frac{1}{2}$,$-1$"])
    assert scores(loaded, "\\boxed{-1, \\frac12}") == [1.0]


def mmlu_row(**changed):
    row = {
        "question_id": 70, "question": "Which is prime?", "options": ["4", "6", "7"], "answer": "C", "answer_index": 2,
        "cot_content": "", "category": "math", "src": "made up",
    }  # fmt: skip
    return row | changed


def test_mmlu_pro(tmp_path):
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", mmlu_row())
    loaded = loading.load(from_folder("mmlu_pro", tmp_path))
    assert loaded.prompts == ["Which is prime?\n\n(A) 4\n(B) 6\n(C) 7" + LETTER]
    assert (loaded.ids, loaded.labels) == (["70"], ["C"])


def test_a_letter_beyond_the_options_is_an_error_that_names_the_row(tmp_path):
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", mmlu_row(), mmlu_row(question_id=71, answer="D"))
    with pytest.raises(UsageError, match=r"benchmark mmlu_pro: row '71' has 3 options, but the label 'D'"):
        loading.load(from_folder("mmlu_pro", tmp_path))


def gpqa(folder, ids):
    columns = [
        "Record ID",
        "Question",
        "Correct Answer",
        "Incorrect Answer 1",
        "Incorrect Answer 2",
        "Incorrect Answer 3",
        "Subdomain",
    ]
    with open(folder / "gpqa_diamond.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([i, f"Question {i}?", "right\n", "wrong 1", "wrong 2", "wrong 3", "Optics"] for i in ids)
    card(folder, "train", gpqa_diamond="gpqa_diamond.csv")
    return from_folder("gpqa_diamond", folder)


def test_gpqa_options_are_shuffled_by_question_and_the_label_follows(tmp_path):
    entry = gpqa(tmp_path, [f"rec{i}" for i in range(400)])
    loaded = loading.load(entry)
    for prompt, label in zip(loaded.prompts, loaded.labels, strict=True):
        assert f"\n({label}) right\n" in prompt
        assert sorted(re.findall(r"\) (.*)", prompt)) == ["right", "wrong 1", "wrong 2", "wrong 3"]
    # 400 draws at 1/4: 100 on average, standard deviation sqrt(400 * 3/16) = 8.7; four of them to each side.
    assert all(65 <= count <= 135 for count in Counter(loaded.labels).values())
    assert loading.load(entry, limit=7).prompts == loaded.prompts[:7]


def test_gpqa_order_of_a_question_does_not_depend_on_the_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = loading.load(gpqa(tmp_path / "a", ["rec1", "rec2", "rec3"]))
    second = loading.load(gpqa(tmp_path / "b", ["rec3", "rec9"]))
    assert first.prompts[2] == second.prompts[0]


BBH_TASKS = {"navigate": ("Do you return?\nOptions:\n- Yes\n- No", "No"), "word_sorting": ("Sort: b a", "a b")}


def bbh(folder, rows_per_task=1):
    for task, (question, target) in BBH_TASKS.items():
        rows = [{"input": f"{i}. {question}", "target": target} for i in range(rows_per_task)]
        parquet(folder / task / "test-00000-of-00001.parquet", *rows)
    card(folder, "test", **{task: f"{task}/test-*" for task in BBH_TASKS})
    entry = from_folder("bbh", folder)
    forms = tuple(entry.forms[entry.configs.index(task)] for task in BBH_TASKS)
    return dataclasses.replace(entry, configs=tuple(BBH_TASKS), forms=forms)


def test_bbh_joins_its_tasks_and_asks_for_the_form_of_each(tmp_path):
    loaded = loading.load(bbh(tmp_path))
    ask = "\n\nPlease reason step by step, and put your final answer ({}) within \\boxed{{}}."
    assert loaded.prompts == [
        "0. Do you return?\nOptions:\n- Yes\n- No" + ask.format("Yes or No"),
        "0. Sort: b a" + ask.format("the words, separated by spaces"),
    ]
    assert (loaded.ids, loaded.labels) == (["navigate/0", "word_sorting/0"], ["No", "a b"])


def test_limit_takes_from_every_configuration_in_turn(tmp_path):
    entry = bbh(tmp_path, rows_per_task=3)
    assert loading.load(entry, limit=3).ids == ["navigate/0", "navigate/1", "word_sorting/0"]
    assert len(loading.load(entry, limit=100).ids) == 6


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math50", "unknown benchmark 'math50'; available: math500, minerva, .*, bbh; or NAME=FILE"),
        ("x=nothing.jsonl", "no data file nothing.jsonl"),
        ("x=data.csv", r"the name of data file data.csv must end in .jsonl, .json, .parquet"),
        ("=data.jsonl", "'' in =data.jsonl cannot be the name of a benchmark"),
        ("nothing.toml", "nothing.toml: .*No such file"),
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
        ("hub = 'a/b'\nverifier = 'maths'", "verifier must be one of math, .*, exact, got 'maths'"),
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
