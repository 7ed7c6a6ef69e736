"""Benchmarks, their questions loaded from small data sets laid out as those of the hub, and verdicts on answers.

The questions are made up; columns, types, files and configurations are the hub's.
"""

import dataclasses
import json
import re
from collections import Counter
from unittest import mock

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("datasets")
pytest.importorskip("math_verify")

import datasets

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading
from openrlhf_dbb.evaluation.verifiers import VERIFIERS, Verdict
from openrlhf_dbb.rewards import math_answer
from openrlhf_dbb.rewards.values import canonical, read

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER_BOXED = (
    "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}."
)


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
    """Function: a known benchmark whose data are read from files {path: rows} in place of the hub, one of each of its
    first configurations."""

    def make(name, files, **changes):
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        entry = dataclasses.replace(benchmarks.find(name), hub=str(folder), **changes)
        for path, rows in files.items():
            write(folder / path, rows)
        card = [
            {"config_name": config, "data_files": [{"split": entry.split, "path": path}]}
            for config, path in zip(entry.configs, files, strict=False)
        ]
        if card:
            (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card)}\n---\n")
        return entry

    return make


def scores(loaded, *responses):
    """The scores of responses, one to each prompt."""
    kind = loaded.benchmark.verifier
    return [VERIFIERS[kind](*pair).score for pair in zip(responses, loaded.labels, strict=True)]


def test_the_papers_nine_benchmarks_are_known_at_a_fixed_revision():
    entries = [benchmarks.find(name) for name in benchmarks.NAMES]
    assert all(
        re.fullmatch("[0-9a-f]{40}", entry.revision) and entry.chat_template for entry in entries
    )
    assert len(entries[-1].configs) == len(set(entries[-1].configs)) == 27


ASKED = "Find $n$."
OLYMPIAD = {
    "id": 16,
    "question": ASKED,
    "final_answer": ["$1$,$-1$"],
    "unit": None,
    "is_multiple_answer": True,
}


@pytest.mark.parametrize(
    ("name", "files", "row", "id_", "label"),
    [
        (
            "math500",
            ["test.jsonl"],
            {"problem": f" {ASKED} ", "answer": "5", "unique_id": "t/1.json"},
            "t/1.json",
            "5",
        ),
        (
            "aime24",
            ["aime_2024.parquet"],
            {"ID": "2024-II-4", "Problem": ASKED, "Answer": 33},
            "2024-II-4",
            "33",
        ),
        (
            "aime25",
            ["I.jsonl", "II.jsonl"],
            {"question": ASKED, "answer": "70"},
            "AIME2025-I/0",
            "70",
        ),
        ("amc24", ["amc12-2024.jsonl"], {"problem": ASKED, "answer": "(0, 1)"}, "0", "(0, 1)"),
        ("olympiad", ["OE_TO_maths_en_COMP/1.parquet"], OLYMPIAD, "16", "$1$,$-1$"),
    ],
)
def test_a_benchmark_of_the_hub_has_its_ids_texts_and_labels_and_its_labels_earn_themselves(
    hub_folder, name, files, row, id_, label
):
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
    [note] = loaded.notes
    assert re.search(r"^1 of 3 labels .*as text.*: rows 2$", note)
    responses = ["\\boxed{4.5 \\times 10^{33} \\text{ erg/s}}", "\\boxed{\\arcsin\\frac{10}{13}}"]
    assert scores(loaded, *responses, "\\boxed{t (0, 4]}") == [1.0, 1.0, 1.0]


def test_options_have_letters_and_a_label_beyond_them_is_an_error_that_names_the_row(hub_folder):
    row = {
        "question_id": 70,
        "question": "Which is prime?",
        "options": ["4", "6", "7"],
        "answer": "C",
    }
    path = "data/test-00000-of-00001.parquet"
    loaded = loading.load(hub_folder("mmlu_pro", {path: [row]}))
    assert (loaded.ids, loaded.labels) == (["70"], ["C"])
    assert loaded.texts == ["Which is prime?\n\n(A) 4\n(B) 6\n(C) 7" + LETTER_BOXED]
    with pytest.raises(UsageError, match=r"mmlu_pro: row '71' .*\b3 options.*'D'"):
        loading.load(
            hub_folder("mmlu_pro", {path: [row, row | {"question_id": 71, "answer": "D"}]})
        )


def gpqa(hub_folder, ids):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    rows = [
        {"Record ID": i, "Question": f"Question {i}?", "Correct Answer": "right\n", **wrong}
        for i in ids
    ]
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


def test_bbh_joins_its_tasks_and_asks_for_the_form_of_each_and_a_limit_takes_from_each_in_turn(
    hub_folder,
):
    tasks = {
        "navigate": ("Do you return?\nOptions:\n- Yes\n- No", "No"),
        "word_sorting": ("Sort: b a", "a b"),
    }
    files = {
        f"{task}/test-00000-of-00001.parquet": [
            {"input": f"{i}. {question}", "target": target} for i in range(3)
        ]
        for task, (question, target) in tasks.items()
    }
    form_of = dict(zip((bbh := benchmarks.find("bbh")).configs, bbh.forms, strict=True))
    entry = hub_folder(
        "bbh", files, configs=tuple(tasks), forms=tuple(form_of[task] for task in tasks)
    )
    loaded = loading.load(entry, limit=3)
    ask = "\n\nPlease reason step by step, and put your final answer ({}) within \\boxed{{}}."
    assert loaded.ids == ["navigate/0", "navigate/1", "word_sorting/0"]
    assert loaded.texts[0] == "0. Do you return?\nOptions:\n- Yes\n- No" + ask.format("Yes or No")
    assert loaded.texts[2] == "0. Sort: b a" + ask.format("the words, separated by spaces")
    assert loaded.labels == ["No", "No", "a b"]
    assert len(loading.load(entry, limit=100).ids) == 6


def test_a_data_file_is_used_verbatim_and_a_benchmark_of_ones_own_is_one_toml_file(tmp_path):
    path = write(
        tmp_path / "mine.jsonl", [{"input": " 1+1=", "label": 2}, {"input": "2+2=", "label": 4}]
    )
    loaded = loading.load(benchmark := benchmarks.find(f"sums={path}"))
    assert (benchmark.name, benchmark.group, benchmark.chat_template) == ("sums", "", False)
    assert (loaded.ids, loaded.texts, loaded.labels) == (["0", "1"], [" 1+1=", "2+2="], ["2", "4"])
    write(
        tmp_path / "data" / "q.jsonl",
        [{"text": "Is 7 prime? {options}", "gold": "Yes", "key": "x1"}],
    )
    (tmp_path / "primes.toml").write_text(
        "title = 'Primes'\nfile = 'data/q.jsonl'\nquestion = 'text'\nanswer = 'gold'\nid = 'key'\nverifier = 'exact'\n"
        "chat_template = false\nmax_tokens = 64\ntemplate = 'Q: {question} A: \\boxed{}'\n"
    )
    loaded = loading.load(benchmark := benchmarks.find(f"{tmp_path}/primes.toml"))
    assert (benchmark.name, benchmark.title, benchmark.max_tokens) == ("primes", "Primes", 64)
    # what a question holds is never filled in
    assert (loaded.ids, loaded.texts) == (["x1"], ["Q: Is 7 prime? {options} A: \\boxed{}"])
    (tmp_path / "primes.toml").write_text(
        "file = 'data/q.jsonl'\nquestion = 'text'\ntemplate = 'Q: {text}'\n"
    )
    with pytest.raises(UsageError, match=r"primes.toml: the template has no \{question\}"):
        benchmarks.find(f"{tmp_path}/primes.toml")


ROWS = {
    "column": '{"input": "1+1=", "gold": "2"}\n',
    "none": '{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": null}\n',
    "empty": '{"input": "1+1=", "label": " "}\n',
    "unreadable": '{"input": "a", "label": 2}\n{"input": "b", "label": "$"}\n',
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "math50",
            "unknown benchmark 'math50'; available: math500, minerva, .*, bbh; or NAME=FILE",
        ),
        ("x=nothing.jsonl", "benchmark x: nothing.jsonl cannot be read: .*No such file"),
        ("mine.toml", "mine.toml: .*unexpected keyword argument 'anwser'"),
        ("x=column.jsonl", "benchmark x: 'label' is not a column of .*; it has input, gold"),
        ("x=none.jsonl", "benchmark x: row 2 has no label"),
        ("x=empty.jsonl", r"benchmark x: row 1 cannot be used: no label"),
        ("x=unreadable.jsonl", r"benchmark x: row 2 \(1 such rows\): "),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("hub = 'a/b'\nanwser = 'x'")
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(rows)
    with pytest.raises(UsageError, match=message):
        loading.load(benchmarks.find(text))


def test_a_gated_data_set_is_one_line_that_says_what_to_do(monkeypatch):
    answer = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    gated = mock.Mock(side_effect=GatedRepoError("403 Client Error", response=answer))
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", gated)
    page = "https://huggingface.co/datasets/Idavidrein/gpqa"
    with pytest.raises(
        UsageError, match=f"^benchmark gpqa_diamond: Idavidrein/gpqa .* gated .* {page}"
    ):
        loading.load(benchmarks.find("gpqa_diamond"))


LETTERS = {
    "B": [r"\boxed{B}", r"\[\boxed{\textbf{(B)}}\]", r"\boxed{(B) 42}", r"The answer is (B). \boxed{42}",
          r"The answer is A. No: \boxed{B}", "The answer is B, A is wrong.", r"\boxed{\left(B\right)}"],
    "C": [r"\boxed{A} is wrong, it is \boxed{C}", "The answer is not A but C.", "Option C is correct.",
          "(C) is the correct answer", "So it must be (C)."],
    "D": ["reasoning ...\n\n**D**"],
    "H": ["the final answer is **(H) 5 m/s**"],
    "I": ["The answer is I."],
    None: [r"\boxed{A lone pair}", r"\boxed{A, C}", r"\boxed{B", "The answer is a lone pair of electrons.",
           "The answer is not A.", "The answer is (A) or (B).", "The answer is option K", "So (A) or (B)",
           "Option C is incorrect", "Let us see. (A) 1 (B) 2, and then", ""],
}  # fmt: skip


@pytest.mark.parametrize(("letter", "responses"), LETTERS.items())
def test_the_letter_that_a_response_settles_on(letter, responses):
    verdicts = {response: VERIFIERS["choice"](response, "B") for response in responses}
    assert verdicts == dict.fromkeys(responses, Verdict(float(letter == "B"), letter))


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("Yes", ["Yes.", "**Yes**", r"\boxed{\text{Yes}}", "The answer is yes.", "Yes, she lies."], ["No", ""]),
        ("no", [r"\boxed{No}", r"\boxed{Yes}, or rather \boxed{No}", "The answer is: No."], [r"\boxed{Yes}", "not no"]),
        ("yes", ["There is no way it is not, so the answer is yes."], ["There is no way that it is."]),
        ("False", [r"\boxed{False}", "not ( True ) is\nFalse"], [r"\boxed{True}", "The answer is not False."]),
        ("invalid", [r"\boxed{\text{invalid}}", "It is deductively invalid."], [r"\boxed{valid}", "Invalidated"]),
        ("8", [r"\boxed{8 \text{ objects}}", "The answer is 8. 3 are red.", "the answer is (-5 + 9) * 2 = 8."],
         [r"\boxed{18}", "eight", ""]),
        ("] ) }",
         [r"\boxed{] ) }}", r"\boxed{] ) \}}", r"\boxed{\text{] ) }}}", "The answer is ] ) }.", "Answer: `]) }`"],
         [r"\boxed{] )}", r"\boxed{[ ( { } ) ]}", r"\boxed{\text{none}}", ""]),
        ("> )", [r"$\boxed{\rangle )}$"], [r"\boxed{) >}"]),
        ("ant bee cat",
         [r"\boxed{\text{ant bee cat}}", r"\boxed{\text{ant}, \text{bee}, \text{cat}}", r"\boxed{ant \, bee \, cat}",
          "The answer is: ant bee cat.", "**Ant, bee, cat**"],
         [r"\boxed{bee ant cat}", r"\boxed{ant bee}", "antbee cat", ""]),
        ("(A)", [r"\boxed{(A)}", r"\boxed{A}", "The answer is (A) Monday."], [r"\boxed{(B)}", "A man."]),
        ("(R)", ["The answer is (R).", r"\boxed{R}"], ["The answer is (Q)."]),
        ("Monsters, Inc", [r"\boxed{\text{Monsters, Inc}}", "The answer is Monsters, Inc."], [r"\boxed{(A)}"]),
    ],
)  # fmt: skip
def test_exact_rules_follow_the_labels_form(label, right, wrong):
    assert [VERIFIERS["exact"](response, label).score for response in right] == [1.0] * len(right)
    assert [VERIFIERS["exact"](response, label).score for response in wrong] == [0.0] * len(wrong)
    (answer,) = {VERIFIERS["exact"](response, label).answer for response in right}
    assert answer is not None


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        (r"\boxed{\dfrac{1}{2}}", "1/2", (1.0, "1/2")),
        (r"\boxed{4.5\times10^{33}\ \text{erg/s}}", "4.5e33", (1.0, "45" + "0" * 32)),
        ("\\boxed{336\u00b0}", r"336^\circ", (1.0, "336")),
        ("The answer is (B).", "B", (1.0, "B")),
        ("Yes, it is.", r"\text{Yes}", (1.0, "yes")),
        ("no idea", "5", (0.0, None)),
    ],
)
def test_training_and_evaluation_give_the_same_verdict(response, label, verdict):
    assert (
        VERIFIERS["math"](response, label) == VERIFIERS["math_or_text"](response, label) == verdict
    )
    assert math_answer.reward_func(["Q: " + response], ["Q: "], [label])["rewards"] == [verdict[0]]


def test_equal_answers_vote_together_and_different_ones_apart():
    for same in (
        ["5", r"5 \text{ cm}", r"5 \text{ cm}^2", "n=5", "5\u00b0", "5.0", "10/2"],
        [r"(0,1]", r"\left( 0, \, 1 \right]", r"\big(0,1\big]"],
        ["1,2", "2 and 1"],
        [r"2\sqrt{3}", r"2 \sqrt {3}", r"2\,\sqrt{3}\,\text{m}"],
    ):
        assert len({canonical(read(text)) for text in same}) == 1
    different = [
        "12",
        "1,2",
        "-12",
        "1/2",
        "12x",
        "x",
        "X",
        r"\sqrt{12}",
        "H_2O",
        "H_2",
        "(1,2)",
        "[1,2]",
        "12%",
    ]
    assert len({canonical(read(text)) for text in different}) == len(different)


def test_a_label_that_cannot_be_read_is_an_error_or_compared_as_text():
    label = "There are $12$ ways for $n=3$."
    with pytest.raises(ValueError, match="cannot read the label"):
        VERIFIERS["math"](r"\boxed{12}", label)
    responses = [rf"\boxed{{{label}}}", r"\boxed{12}", "12", ""]
    assert [VERIFIERS["math_or_text"](response, label).score for response in responses] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


FRAGMENTS = [
    "\\boxed{", "}", "{", "\\text{", "\\frac{", "$", "**", "answer is ", "Answer:", "option ", "A", "B", "(C)", " or ",
    "not ", "yes", "no", "8", "-", ",", ".", "1e9", "=", "\n", " ", "\\", "] )", "\u2212", "\u0661", "ant",
]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_no_text_breaks_a_rule(response):
    assert VERIFIERS["choice"](response, "B").answer in (None, *"ABCDEFGHIJ")
    for label in ("(B)", "yes", "8", "] )", "ant"):
        score, answer = VERIFIERS["exact"](response, label)
        assert score in (0.0, 1.0)
        assert (score == 1.0) <= (answer is not None)
    assert VERIFIERS["math"](response, "8").score in (0.0, 1.0)
