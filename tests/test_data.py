"""Rows that cannot be used are named with their line, and the rows that are trained on."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken

from openrlhf_dbb import data
from openrlhf_dbb.core.posteriors import dataset_digest
from openrlhf_dbb.data.files import RATE
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.rewards import MATH_FILE

cpu.prepare_driver()


class Words:
    """A tokenizer of one token per word, with a chat template."""

    def __call__(self, texts, **_):
        return {"input_ids": [text.replace("\u200b", "").split() for text in texts]}

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        return " ".join(message["content"] for message in chat) + " Answer:"


def arguments(*files, reward="reward.py", **options):
    flags = {
        "prompt_dataset": ",".join(map(str, files)), "prompt_probs": None, "prompt_split": "train",
        "max_samples": 10**8, "input_key": "input", "label_key": "label", "input_template": None,
        "apply_chat_template": False, "max_len": 32, "drop_duplicates": False, "leave_out": None, "image_key": "images",
        "pass_rate_key": None, "pass_rate_attempts": None, "group_key": None,
    }  # fmt: skip
    return SimpleNamespace(
        data=SimpleNamespace(**(flags | options)),
        eval=SimpleNamespace(dataset=str(files[0]), split="train"),
        reward=SimpleNamespace(remote_url=[str(reward)]),
        actor=SimpleNamespace(model_name_or_path="some/model"),
        rollout=SimpleNamespace(batch_size=2, max_new_tokens=8),
        train=SimpleNamespace(seed=1),
        use_ms=False,
    )


def strategy(args):
    return SimpleNamespace(args=args, print=lambda *_: None, is_rank_0=lambda: False)


def check(*files, **options):
    """The rows that a training would load from files."""
    args = arguments(*files, **options)
    return data.load(args, strategy(args), data.TRAINING)


@pytest.fixture
def load(tmp_path):
    """Function: the rows of a JSONL file with these lines, each JSON or a text as it is."""

    def read(*lines, **options):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "data.jsonl").write_text("\n".join(texts))
        return check(tmp_path / "data.jsonl", **options)

    return read


def row(prompt, label="1"):
    return {"input": prompt, "label": label}


def said(role, content):
    return {"role": role, "content": content}


GOOD = row("good")
REFUSED = [
    ({"input": "a"}, "no label"),
    (row("a", float("nan")), "no label"),
    (row("a", ["5"]), "its label is a list"),
    ({"label": "1"}, "no prompt"),
    (row([]), "no prompt"),
    (row([said("user", "a")]), "its prompt is a list; all have to be texts"),
    ("5", "it is no JSON object"),
    *((row("a") | {"rate": rate}, f"its pass rate is {rate!r}; write a number in [0, 1], or successes/attempts")
      for rate in ("1.5", "9/8", "0/0", "often")),
    (row("a") | {"rate": 0.5}, "its pass rate has no number of attempts; give --data.pass_rate_attempts"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "fault"), REFUSED)
def test_a_bad_row_is_refused_with_its_line(load, tmp_path, bad, fault):
    options = {"pass_rate_key": "rate"} if "rate" in bad else {}
    with pytest.raises(UsageError) as refused:
        load(GOOD | {"rate": "1/2"}, "", bad, row("other") | {"rate": "1/2"}, **options)
    start = (
        f"--data.prompt_dataset {tmp_path}/data.jsonl: 1 of 3 rows cannot be used: line 3: {fault}"
    )
    assert str(refused.value).startswith(start)


NUMBERS = ["5", "5.0", "-3.0", "2.50", "1e-5", "12345678901234567890123", "1E+400"]


def test_labels_are_the_text_of_the_file_and_other_columns_may_hold_anything(load, tmp_path):
    metas = enumerate(["1", "[]", "null", "1", "1", "1", "1"])
    lines = [
        f'{{"input": "{at}", "label": {label}, "meta": {meta}}}'
        for label, (at, meta) in zip(NUMBERS, metas, strict=True)
    ]
    assert load(*lines, drop_duplicates=True)["label"][:] == NUMBERS
    texts = [*NUMBERS, "007", "TRUE", "None", "NA", '"a, ""b"""']
    (tmp_path / "data.csv").write_text(
        "\ufeffinput,label\r\n" + "".join(f"{i},{t}\r\n" for i, t in enumerate(texts))
    )
    assert check(tmp_path / "data.csv")["label"][:] == [*texts[:-1], 'a, "b"']
    assert load(row("a"), row("b") | {"datasource": "sums"})["datasource"][:] == [None, "sums"]


def test_a_float_of_parquet_is_the_shortest_decimal_and_a_key_with_dots_reaches_into_it(tmp_path):
    from datasets import Dataset

    columns = {
        "input": list("abcde"),
        "label": [1e-05, 2.5, 0.1, 7.0, -0.001],
        "model": [{"truth": 7}] * 5,
    }
    Dataset.from_dict(columns).to_parquet(tmp_path / "data.parquet")
    assert check(tmp_path / "data.parquet")["label"][:] == ["0.00001", "2.5", "0.1", "7", "-0.001"]
    rows = check(tmp_path / "data.parquet", label_key="model.truth", drop_duplicates=True)
    assert rows["model.truth"][:] == ["7"] * 5


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (
            "a.csv",
            "input,label\na,1,2\nb,1\n",
            "1 of 2 rows cannot be used: row 1: .*more fields than the header",
        ),
        (
            "a.csv",
            "input,label\na\nb,1\nc,\n",
            "2 of 3 rows cannot be used: row 1: no label; row 3: no label",
        ),
        ("a.csv", 'input,label\n"a,1\n', "cannot be read: unexpected end of data"),
        ("a.csv", "input,label\n\xff,1\n", "cannot be read: 'utf-8' codec can't decode"),
        (
            "a.jsonl",
            '\n{"input": "a", label: 1}',
            "cannot be read: line 2: broken JSON: Expecting property name",
        ),
        ("a.csv", "", "has no rows"),
        ("a.json", None, "cannot be read: .*No such file"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, name, content, fault):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=f"{name}:? {fault}"):
        check(tmp_path / name)


def test_several_files_are_one_data_set_and_only_the_samples_that_are_used_are_checked(tmp_path):
    # One list
    (tmp_path / "a.json").write_text(
        json.dumps([row("0", 0.5), row("1", 1), row("2", None)], indent=1)
    )
    (tmp_path / "b.csv").write_text("input,label\n3,3\n4,4\n5\n")
    files = tmp_path / "a.json", tmp_path / "b.csv"
    assert [check(file, max_samples=2)["label"][:] for file in files] == [["0.5", "1"], ["3", "4"]]
    (tmp_path / "a.json").write_text(json.dumps(row("0", 0)))
    (tmp_path / "b.csv").write_text("input,label\n3,3\n")
    assert check(*files)["label"][:] == ["0", "3"]
    assert set(check(*files, prompt_probs="0.5,0.5", drop_duplicates=True)["label"][:]) == {
        "0",
        "3",
    }


@pytest.mark.parametrize("drop", [False, True])
def test_one_prompt_with_different_labels_is_refused(load, drop):
    rows = [row("a", "4"), row("b"), row("a", " 4"), row("a", "5"), row("c"), row("c")]
    with pytest.raises(
        UsageError,
        match=r"1 of 6 rows .*row 4: .*'5', .*row 1",
    ):
        load(*rows, drop_duplicates=drop)
    del rows[3]
    assert load(*rows, drop_duplicates=drop)["label"][:] == ["4", "1", " 4", "1", "1"]


def test_a_missing_column_or_label_key_is_named(load):
    missing = r"data.jsonl has no column 'label.gold' \(--data.label_key\); it has input, label"
    with pytest.raises(UsageError, match=missing):
        load(row("a"), row("b"), label_key="label.gold")
    with pytest.raises(UsageError, match=r"--data.label_key is missing: name"):
        load(GOOD, label_key=None, reward=MATH_FILE)


def test_every_label_of_the_reward_earns_itself(load):
    pytest.importorskip("math_verify")
    with pytest.raises(UsageError, match=r"row 2: .*'3 of 4 is right'"):
        load(row("a", "5"), row("b", "3 of 4 is right"), reward=MATH_FILE)


@pytest.fixture
def choose(load, tmp_path):
    """Function: the chosen prompts of a JSONL file with these rows."""

    def run(*rows, **options):
        args = arguments(tmp_path / "data.jsonl", **options)
        return data.choose(load(*rows, **options), args, strategy(args), Words())

    return run


def test_duplicates_are_counted_and_dropped_on_request_and_labels_may_be_missing(choose):
    rows = [row("a"), row("b"), row("a"), row("a"), row("c")]
    kept = choose(*rows, label_key=None)
    assert (kept.texts, kept.labels) == (["a", "b", "a", "a", "c"], [""] * 5)
    assert kept.report.startswith("5 of 5 prompts; 2 duplicates kept")
    assert "; no labels: a reward function gets empty ones" in kept.report
    dropped = choose(*rows, drop_duplicates=True)
    assert (dropped.texts, dropped.labels, dropped.rows) == (
        ["a", "b", "c"],
        ["1", "1", "1"],
        [0, 1, 4],
    )
    assert dropped.report == "3 of 5 prompts; 2 duplicates dropped"


def test_held_out_problems_of_a_task_are_not_trained_on():
    pytest.importorskip("reasoning_gym")
    args = arguments("reasoning_gym:chain_sum?size=60&max_digits=1&max_terms=2&seed=1", max_len=64)
    args.data.task_instruction = ""
    args.eval.dataset = args.data.prompt_dataset.replace("seed=1", "seed=2")
    loaded = data.load(args, strategy(args), data.TRAINING)
    held_out = data.load(args, strategy(args), data.HELD_OUT)
    both = [text for text in loaded["input"] if text in held_out["input"]]
    kept = data.choose(loaded, args, strategy(args), Words(), held_out)
    assert kept.texts == [text for text in loaded["input"] if text not in held_out["input"]]
    assert f"; {len(both)} in --eval.dataset dropped" in kept.report


def test_rows_that_a_file_names_are_left_out(choose, tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text(
        '{"prompt": "b", "label": "1", "why": "never"}\n{"prompt": "c", "label": "other"}\n'
    )
    kept = choose(row("a"), row("b"), row("c"), leave_out=str(file))
    assert (kept.texts, kept.rows) == (["a", "c"], [0, 2])
    assert kept.report == "2 of 3 prompts; 1 left out by --data.leave_out"
    file.write_text('{"prompt": "z", "label": ""}')
    with pytest.raises(UsageError, match="none of its 1 prompts, as the model sees them, is"):
        choose(row("a"), row("b"), leave_out=str(file))
    file.write_text("")  # a run without bad rows
    assert choose(row("a"), row("b"), leave_out=str(file)).texts == ["a", "b"]


def test_long_prompts_and_those_without_a_token_are_dropped(choose):
    long = " ".join(["w"] * 25)  # 25 tokens; a prompt may have 32 - 8 = 24
    kept = choose(row("a"), row(long), row("\u200b"), row("b"))
    assert kept.texts == ["a", "b"]
    counts, *dropped = kept.report.split("; ")
    assert counts == "2 of 4 prompts"
    assert re.search(r"^1 of more than 24 tokens .*--data.max_len 32", dropped[0])
    assert dropped[1].startswith("1 without a token")
    [warning] = kept.warnings
    assert re.search(r"1 prompts have more than 24 tokens; raise --data.max_len 32", warning)
    many = [row(f"{at}") for at in range(10)]
    assert choose(*many, row(long)).warnings == []  # fewer than a tenth
    with pytest.raises(
        UsageError,
        match=r"1 of 2 prompts.*--rollout.batch_size 2; 1 .* raise --data.max_len 32",
    ):
        choose(row("a"), row(long))
    with pytest.raises(UsageError, match=r"tokenizer of some/model .*; put its files"):
        choose(row("\u200b"), row("\u200b\u200b"))


def test_dapo_math_17k_is_read_by_its_schema(choose):
    rows = [
        {"data_source": "math_dapo", "prompt": [said("user", f"What is {i}+{i}?")], "ability": "MATH",
         "reward_model": {"ground_truth": str(2 * i), "style": "rule"}, "extra_info": {"index": f"id{i}"}}
        for i in (1, 2, 1, 2, 3)
    ]  # fmt: skip
    columns = {
        "input_key": "prompt",
        "label_key": "reward_model.ground_truth",
        "drop_duplicates": True,
    }
    with pytest.raises(
        UsageError, match=r"the prompts are messages; give --data.apply_chat_template"
    ):
        choose(*rows, **columns)
    kept = choose(*rows, **columns, apply_chat_template=True)
    assert kept.texts == ["What is 1+1? Answer:", "What is 2+2? Answer:", "What is 3+3? Answer:"]
    assert kept.labels == ["2", "4", "6"]


def test_messages_that_a_model_cannot_answer_are_refused_with_their_row(load):
    fine = [said("system", ""), said("user", "a"), said("assistant", "b"), said("user", "c")]
    last = fine[:3]
    parts = [said("user", [{"type": "image"}, {"type": "text", "text": "a"}])]
    with pytest.raises(UsageError) as refused:
        load(row(fine), row(last), row(["a"]), row(parts))
    assert re.search(r"3 of 4 rows .*line 2: .*role assistant; end", str(refused.value))
    assert str(refused.value).count("its message 1 has no texts as role and content") == 2


def test_the_digest_depends_on_text_label_and_order():
    columns = ["ab", "11"], ["ba", "11"], ["ab", "12"], [["ab", ""], "11"], ["ab", "11"]
    first, *others, again = [dataset_digest(list(texts), list(labels)) for texts, labels in columns]
    assert len({first, *others}) == 4
    assert again == first


def test_pass_rates_are_successes_and_attempts(load):
    lines = [
        row(f"p{at}") | {"rate": rate} for at, rate in enumerate(["5/8", None, "", "0/4", 0.25, 1])
    ]
    rows = load(*lines, pass_rate_key="rate", pass_rate_attempts=4)
    unknown = [math.nan, math.nan]
    np.testing.assert_array_equal(
        rows[RATE][:], [[2.5, 4], unknown, unknown, [0, 4], [1, 4], [4, 4]]
    )
    texts = load(*lines[:4], pass_rate_key="rate")  # each counts for its own attempts
    np.testing.assert_array_equal(texts[RATE][:], [[5, 8], unknown, unknown, [0, 4]])


def test_the_columns_of_rates_and_groups_have_to_be_there_and_may_be_one(choose):
    for key in ("pass_rate_key", "group_key"):
        with pytest.raises(UsageError, match=rf"'hard' \(--data.{key}\); it has input, label"):
            choose(GOOD, row("other"), **{key: "hard"})
    too_long = row("b " * 25) | {"hard": "1/8"}
    kept = choose(
        row("a") | {"hard": "5/8"}, too_long, row("c"), pass_rate_key="hard", group_key="hard"
    )
    assert (kept.rows, kept.sources, kept.pass_rates[0]) == ([0, 2], ["5/8", "None"], [5, 8])
    assert math.isnan(kept.pass_rates[1][0])
    assert kept.report.endswith("; 1 with a pass rate")


def test_control_tokens_in_questions_are_counted_with_their_first_row():
    token = SimpleNamespace(
        added_tokens_decoder={1: AddedToken("<end>", special=True), 2: AddedToken("<b>")}
    )
    form = [f"<user>{text}<end>" for text in ("a", "b")]
    [warning] = data.control_tokens("f", ["a<b>", *form, [said("user", "x<end>")]], token, False)
    assert re.search(r"^f: 3 of 4 prompts .*'<end>', first row 2", warning)
    assert data.control_tokens("f", form, token, False) == []  # their own template
    assert data.control_tokens("f", form, token, True)[0].startswith("f: 2 of 2 prompts")
