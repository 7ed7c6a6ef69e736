"""Rows that cannot be used: each kind with its lines, in one line; and what is dropped when told so."""

import json
from types import SimpleNamespace

import pytest

from openrlhf_dbb import prompts
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.rewards import MATH_FILES

cpu.prepare_driver()


@pytest.fixture
def arguments(tmp_path):
    """Function: what the loaders read of a command line."""

    def make(*files, reward="reward.py", **options):
        data = {
            "prompt_dataset": ",".join(str(tmp_path / file) for file in files), "prompt_probs": None,
            "prompt_split": "train", "max_samples": 10**8, "input_key": "input", "label_key": "label",
            "drop_duplicates": False, "skip_bad_rows": False,
            "image_key": "images",
        }  # fmt: skip
        return SimpleNamespace(
            data=SimpleNamespace(**(data | options)),
            reward=SimpleNamespace(remote_url=[str(reward)]),
            train=SimpleNamespace(seed=1),
            use_ms=False,
        )

    return make


@pytest.fixture
def load(tmp_path, arguments):
    """Function: the rows of a JSONL file with these lines (JSON, or text as it is), and the bad ones."""

    def read(*lines, file="data.jsonl", **options):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / file).write_text(text, encoding="utf-8", errors="surrogatepass")
        return check(arguments(file, **options))

    return read


def check(args):
    rows = prompts.load_rows(args, SimpleNamespace(args=args, print=lambda *_: None, is_rank_0=lambda: False))
    return rows, prompts.find_bad_rows(rows, args)


def row(prompt, label="1"):
    return {"input": prompt, "label": label}


def messages(*contents):
    return [{"role": "user", "content": content} for content in contents]


GOOD = row("good")
LABELS = [
    ({"input": "a"}, "without a label"),
    (row("a", None), "without a label"),
    (row("a", " \n"), "without a label"),
    (row("a", float("nan")), "without a label"),
    (row("a", ["5"]), "whose label is a list (line 2; name one answer)"),
    (row("a", {"gold": "5"}), "whose label is an object (line 2; name a field of it, as in --data.label_key label.ans"),
    (row("a", True), "whose label is true or false (line 2; write it as text)"),
]
PROMPTS = [
    ({"label": "1"}, "without a prompt"),
    (row(None), "without a prompt"),
    (row("\t "), "with an empty prompt"),
    (row([]), "with an empty prompt"),
    (row(5), "with a prompt that is neither text nor messages"),
    (row({"role": "user", "content": "a"}), "with a prompt that is neither text nor messages"),
]
NUL = "with a NUL character (line 2; PostgreSQL does not store it)"
LINES = [
    (row("a\0"), NUL),
    (row("a", "1\0"), NUL),
    ('{"input": "a", label: 1}', "of broken JSON (line 2; Expecting property name enclosed in double quotes at column"),
    ('{"input": "a"', "of broken JSON (line 2; Expecting ',' delimiter at column"),
    (r'{"input": "\ud800", "label": "1"}', "of broken JSON (line 2; 'utf-8' codec can't encode character '\\ud800'"),
    ("[" * 10**5, "of broken JSON (line 2; "),
    ('"a"', "of JSON that is no object"),
]


@pytest.mark.parametrize(("bad", "kind"), [*LABELS, *PROMPTS, *LINES])
def test_a_bad_row_is_refused_with_its_line_and_dropped_when_told(load, bad, kind):
    line = f": 1 of 3 rows cannot be used: 1 {kind}"
    with pytest.raises(UsageError) as refused:
        load(GOOD, bad, row("other"))
    assert line in str(refused.value)
    assert "(line 2" in str(refused.value)
    assert str(refused.value).endswith("; fix them, or give --data.skip_bad_rows to drop them")
    _, dropped = load(GOOD, bad, row("other"), skip_bad_rows=True)
    assert dropped.rows == {1}
    assert dropped.report() == f"1 bad row dropped (1 {kind.split(' (')[0]}: line 2)"


@pytest.mark.parametrize(
    "prompt", [["a"], [{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": 5}], [messages("a")]]
)
def test_a_list_has_to_be_one_of_messages(load, prompt):
    with pytest.raises(
        UsageError, match=r"1 with a prompt that is not a list of \{role, content\} messages \(line 1\)"
    ):
        load(row(prompt), GOOD)


def test_all_kinds_are_in_one_line_and_in_one_report(load, tmp_path):
    lines = [GOOD, row("a", None), "{", "", row("b"), row(" "), {"input": "c"}, "}", *[row(5)] * 7]
    with pytest.raises(UsageError) as refused:
        load(*lines)
    assert str(refused.value) == (
        f"--data.prompt_dataset {tmp_path}/data.jsonl: 12 of 14 rows cannot be used: 2 without a label (lines 2, 7), "
        "2 of broken JSON (lines 3, 8; the first: Expecting property name enclosed in double quotes at column 2), "
        "1 with an empty prompt (line 6), 7 with a prompt that is neither text nor messages "
        "(lines 9, 10, 11, 12, 13, ...); fix them, or give --data.skip_bad_rows to drop them"
    )
    rows, bad = load(*lines, skip_bad_rows=True)
    assert [each["input"] for place, each in enumerate(rows) if place not in bad.rows] == ["good", "b"]
    assert bad.report() == (
        "12 bad rows dropped (2 without a label: lines 2, 7; 2 of broken JSON: lines 3, 8; 1 with an empty prompt: "
        "line 6; 7 with a prompt that is neither text nor messages: lines 9, 10, 11, 12, 13, ...)"
    )


def test_where_every_row_is_bad_there_is_nothing_to_skip(load):
    with pytest.raises(UsageError, match=r"2 of 2 rows cannot be used: 2 without a label \(lines 1, 2\); fix them$"):
        load(row("a", None), row("b", None))


def test_labels_become_text(load):
    labels = [5, 5.0, -3.0, 0.5, "5.0", 10**30, "2024-01-31"]
    rows, _ = load(*(row(f"prompt {i}", label) for i, label in enumerate(labels)))
    assert rows["label"][:] == ["5", "5", "-3", "0.5", "5.0", "1" + 30 * "0", "2024-01-31"]


def test_integers_of_a_csv_file_that_misses_some_stay_integers(tmp_path, arguments):
    (tmp_path / "data.csv").write_text("input,label\na,5\nb,\nc,7\n")
    with pytest.raises(UsageError, match=r"1 of 3 rows cannot be used: 1 without a label \(row 2\); fix"):
        check(arguments("data.csv"))
    rows, bad = check(arguments("data.csv", skip_bad_rows=True))
    assert (rows["label"][:], bad.rows) == (["5", None, "7"], {1})


def test_without_a_label_key_a_row_needs_a_prompt_alone(load, tmp_path, arguments):
    rows, bad = load({"input": "a"}, {"input": "b", "label": ["no", "matter"]}, label_key=None)
    assert (rows["input"][:], bad.rows, "label" in rows.column_names) == (["a", "b"], set(), False)
    (tmp_path / "data.csv").write_text("input,label\na,\n,5\n")
    rows, bad = check(arguments("data.csv", label_key=None, skip_bad_rows=True))
    assert (rows["label"][:], bad.rows) == ([None, 5], {1})


@pytest.mark.parametrize("reward", ["math_answer.py", "exact_match.py", "last_result.py"])
def test_a_reward_that_compares_with_labels_needs_a_label_key(load, reward):
    with pytest.raises(UsageError, match=r"--data.label_key is missing: name the column that holds the answer"):
        load(GOOD, label_key=None, reward=MATH_FILES[0].with_name(reward))


def test_rows_of_parquet_files_are_counted_from_1(tmp_path, arguments):
    from datasets import Dataset

    Dataset.from_list([row("a", ["1"]), row("b", [])]).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(UsageError, match=r"2 whose label is a list \(rows 1, 2; name one answer\)"):
        check(arguments("data.parquet"))


def test_rows_of_several_files_are_counted_through(load, tmp_path, arguments):
    load(GOOD, row("a"), file="first.jsonl")
    (tmp_path / "second.jsonl").write_text('\n\n{"input": "b", "label": "1"}\n{"input": "c"}\n')
    with pytest.raises(UsageError, match=r"1 of 4 rows cannot be used: 1 without a label \(row 4\)"):
        check(arguments("first.jsonl", "second.jsonl"))


def test_only_the_samples_asked_for_are_checked(load):
    load(GOOD, row("a"), row("b", None), max_samples=2)


def test_a_json_file_may_be_one_list(load, tmp_path, arguments):
    (tmp_path / "data.json").write_text(json.dumps([GOOD, row("a", None), 5], indent=1))
    with pytest.raises(UsageError, match=r"1 without a label \(row 2\), 1 of JSON that is no object \(row 3\)"):
        check(arguments("data.json"))
    (tmp_path / "data.json").write_text('[{"input": "a"},\n {"input": b}]')
    with pytest.raises(UsageError, match=r"data.json is one JSON list, which is broken: Expecting value: line 2 col"):
        check(arguments("data.json"))


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        (["a", messages("b"), "c"], "with messages as prompt, where most have text"),
        ([messages("a"), "b", messages("c")], "with text as prompt, where most have messages"),
    ],
)
def test_text_and_messages_are_not_mixed(load, prompts, kind):
    with pytest.raises(UsageError, match=rf"1 of 3 rows cannot be used: 1 {kind} \(line 2\)"):
        load(*map(row, prompts))
    rows, bad = load(*map(row, prompts), skip_bad_rows=True)
    assert (rows["input"][::2], bad.rows) == (prompts[::2], {1})


def test_a_value_that_fits_no_column_is_named(load, tmp_path):
    lines = [row(messages("a")), row(messages("b")), row(messages([{"type": "text", "text": "c"}]))]
    with pytest.raises(UsageError, match=r"data.jsonl: line 3: 'input' has another type than in the rows before"):
        load(*lines)


def test_other_columns_may_hold_anything(load):
    rows, bad = load(row("a") | {"meta": 1}, row("b") | {"meta": "x"}, row("c") | {"datasource": "sums"})
    assert (len(rows), bad.rows, rows["datasource"][:]) == (3, set(), [None, None, "sums"])


SAME = [row("a", "4"), row("b"), row("a", " 4"), row("a", "5"), row("c"), row("c")]


def test_one_prompt_with_different_labels_is_refused_or_all_its_rows_are_dropped(load):
    with pytest.raises(UsageError) as refused:
        load(*SAME)
    assert (
        "3 of 6 rows cannot be used: 3 with the same prompt and different labels (lines 1, 3, 4; line 1 has '4', "
        "line 4 '5')"
    ) in str(refused.value)
    _, bad = load(*SAME, skip_bad_rows=True)
    assert bad.rows == {0, 2, 3}
    assert "3 with the same prompt and different labels: lines 1, 3, 4" in bad.report()


def test_messages_are_one_prompt_as_well(load):
    with pytest.raises(UsageError, match=r"2 with the same prompt and different labels \(lines 1, 2; line 1 has '1'"):
        load(row(messages("a")), row(messages("a"), "2"))


def test_where_only_the_first_of_equal_prompts_is_kept_its_label_counts(load):
    _, bad = load(*SAME, drop_duplicates=True)
    assert bad.rows == set()
    _, bad = load(*SAME, drop_duplicates=True, skip_bad_rows=True)
    assert bad.rows == {0, 2, 3}


def test_math_verify_reads_every_label(load, tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [row("a", "5"), row("b", r"\frac{1}{2}"), row("c", "no $ number"), row("d", None), row("e", "no $ number")]
    with pytest.raises(UsageError) as refused:
        load(*lines, reward=MATH_FILES[0])
    assert (
        "3 of 5 rows cannot be used: 1 without a label (line 4), 2 with a label that Math-Verify cannot read "
        "(lines 3, 5; the first: 'no $ number', understood as [])"
    ) in str(refused.value)
    _, bad = load(*lines, reward=MATH_FILES[0], skip_bad_rows=True)
    assert bad.rows == {2, 3, 4}
    _, bad = load(*lines, skip_bad_rows=True)  # another reward may know what it means
    assert bad.rows == {3}
