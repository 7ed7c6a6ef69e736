"""The same data through every door: train, TRL, verl, import and evaluate read and refuse them alike."""

import bz2
import gzip
import json
import lzma
import math
import re
import sys
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from test_data import Words, arguments, strategy

from openrlhf_dbb import Posteriors, data
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.core.prompt_columns import pass_rate
from openrlhf_dbb.core.texts import label_text, number_of, prompt_text
from openrlhf_dbb.data.files import label_fault
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import loading
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.storage import open_store


class Refused(Exception):
    """A door refuses the data with this line."""


def by_train(file, **options):
    args = arguments(file, **{"input_key": "prompt"} | options)
    try:
        loaded = data.load(args, strategy(args), data.TRAINING)
        chosen = data.choose(loaded, args, strategy(args), Words())
    except UsageError as error:
        raise Refused(str(error)) from None
    return set(zip(chosen.texts, chosen.labels, strict=True))


def by_evaluate(file):
    benchmark = Benchmark("own", "own", file=str(file), question="prompt", verifier="exact_match")
    try:
        loaded = loading.load(benchmark)
    except UsageError as error:
        raise Refused(str(error)) from None
    return set(zip(loaded.texts, loaded.labels, strict=True))


def by_import(file, capsys):
    url = f"sqlite:///{file}.db"
    code = main(
        ["import", str(file), "--run_name", "log", "--store.url", url, "--step_key", "step"]
    )
    said = capsys.readouterr().err
    if code:
        raise Refused(said)
    with open_store(url) as store:
        return {(row[0], row[1]) for row in store.query("SELECT prompt, label FROM prompts")}


def by_verl(file):
    integration = pytest.importorskip("openrlhf_dbb.integrations.verl", reason="needs verl")
    columns = parquet.read_table(file).to_pydict()
    rows = zip(columns["prompt"], columns["label"], strict=True)
    return set(
        integration.keys_of(
            [
                {"raw_prompt": prompt, "reward_model": {"ground_truth": label}}
                for prompt, label in rows
            ]
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that has learnt nothing."""
    from openrlhf_dbb.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def by_trl(file, model):
    from datasets import Dataset

    with pytest.MonkeyPatch.context() as without_vllm:
        without_vllm.setitem(sys.modules, "vllm", None)  # as where it is not installed
        pytest.importorskip("trl", reason="needs TRL")
        from openrlhf_dbb.integrations.trl import PosteriorGRPOConfig, PosteriorGRPOTrainer

    def reward(completions, **columns):
        return [0.0] * len(completions)

    args = PosteriorGRPOConfig(
        output_dir=str(file) + ".out",
        per_device_train_batch_size=4,
        num_generations=2,
        remove_unused_columns=False,
        report_to=[],
        max_grad_norm=math.inf,
        use_cpu=True,
    )
    options = {"label_column": "label", "store": f"sqlite:///{file}.trl.db", "estimator": "point"}
    try:
        trainer = PosteriorGRPOTrainer(
            model, reward, args=args, train_dataset=Dataset.from_parquet(str(file)), **options
        )
    except ValueError as error:
        raise Refused(str(error)) from None
    with trainer.posteriors as posteriors:
        assert posteriors.run.record.config["max_grad_norm"] == "inf"
        return set(posteriors.prompt_ids)


@pytest.fixture
def door(request, capsys, model):
    """Function: the prompts and labels of a Parquet file by the door of the test."""
    by_name = {
        "train": by_train,
        "evaluate": by_evaluate,
        "import": lambda file: by_import(file, capsys),
        "TRL": lambda file: by_trl(file, model),
        "verl": by_verl,
    }
    return by_name[request.param]


every_door = pytest.mark.parametrize(
    "door", ["train", "evaluate", "import", "TRL", "verl"], indirect=True
)


def table(folder, prompts, labels):
    """A Parquet file with these columns, and the step and rewards of a log."""
    rows = {
        "prompt": prompts,
        "label": labels,
        "step": [1] * len(prompts),
        "reward": [1.0, 0.0] * (len(prompts) // 2),
    }
    file = folder / "data.parquet"
    parquet.write_table(pa.table(rows), file)
    return file


COLUMNS = [
    ([7, 12], ["7", "12"]),
    ([7.0, 1e-5], ["7", "0.00001"]),
    ([Decimal("2.50"), Decimal("7.00")], ["2.50", "7.00"]),
    ([b"12", "ä".encode()], ["12", "ä"]),
    (["007", " 2.50 "], ["007", " 2.50 "]),
    ([date(2026, 11, 28)] * 2, ["2026-11-28"] * 2),
    ([-0.0, 7.0], ["0", "7"]),
    ([b"\xef\xbb\xbf7", b"8"], ["7", "8"]),
]


@every_door
@pytest.mark.parametrize(("labels", "texts"), COLUMNS, ids=lambda column: str(column[0]))
def test_a_label_is_the_same_text(door, tmp_path, labels, texts):
    assert door(table(tmp_path, ["a", "b"], labels)) == set(zip("ab", texts, strict=True))


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (7, "7"), (7.0, "7"), ("7", "7"), (0.00001, "0.00001"), (-3.25, "-3.25"), (1e22, "1" + 22 * "0"),
        (np.int64(7), "7"), (np.float64(7), "7"), (np.float32(0.1), "0.1"), (np.bool_(True), "true"),
        (torch.tensor(7), "7"), (torch.tensor(7.0), "7"), (torch.tensor(0.1), "0.1"),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), "0.5"),
        (True, "true"), (["7", 1.5], '["7", 1.5]'), ({"b": None, "a": np.arange(2)}, '{"a": [0, 1], "b": null}'),
        (None, ""), (math.nan, ""), (np.float32("nan"), ""), (Decimal("NaN"), ""), (Decimal("1E+2"), "100"),
        (np.float16(0.1), "0.1"), (np.float16(1e-7), "0.0000001"), (np.float16(2048), "2048"),
        (torch.tensor(0.1, dtype=torch.bfloat16), "0.1"), (torch.tensor(0.3, dtype=torch.float16), "0.3"),
        (torch.tensor(3.140625, dtype=torch.bfloat16), "3.14"), (torch.tensor(256.0, dtype=torch.bfloat16), "256"),
        (b"12", "12"), (np.bytes_(b"12"), "12"), (np.str_("x"), "x"), (" 7 ", " 7 "),
    ],
)  # fmt: skip
def test_the_text_of_a_label(label, text):
    assert label_text(label) == text


def test_missing_values_of_pandas_are_no_label():
    pandas = pytest.importorskip("pandas")
    assert label_text(pandas.NA) == label_text(pandas.NaT) == ""


def test_binary_columns_of_prompts_rates_and_sources_are_texts(tmp_path):
    columns = {
        "prompt": [b"a", b"b"],
        "label": [b"1", b"2"],
        "rate": [b"1/2", b"3/4"],
        "of": [b"x", b"y"],
    }
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet")
    args = arguments(
        tmp_path / "data.parquet", input_key="prompt", pass_rate_key="rate", group_key="of"
    )
    loaded = data.load(args, strategy(args), data.TRAINING)
    chosen = data.choose(loaded, args, strategy(args), Words())
    assert (chosen.texts, chosen.labels, chosen.sources) == (["a", "b"], ["1", "2"], ["x", "y"])
    assert chosen.pass_rates == [[1, 2], [3, 4]]


@every_door
def test_bytes_that_are_no_text_are_refused(door, tmp_path):
    with pytest.raises(
        (Refused, ValueError), match=r"label is the bytes b'\\xff', which are not UTF-8"
    ):
        door(table(tmp_path, ["a", "b"], [b"12", b"\xff"]))
    with pytest.raises(
        (Refused, ValueError), match=r"prompt is the bytes b'\\xff', which are not UTF-8"
    ):
        door(table(tmp_path, [b"a", b"\xff"], ["12", "13"]))


@every_door
@pytest.mark.parametrize("label", [["7"], {"x": 1}, True], ids=repr)
def test_a_label_that_no_verifier_can_use_is_refused_by_train_and_stored_as_json_elsewhere(
    door, tmp_path, label, request
):
    file = table(tmp_path, ["a", "b"], [label, label])
    name = request.node.callspec.params["door"]
    if name == "train" or (name == "evaluate" and not isinstance(label, list)):
        with pytest.raises(
            Refused, match=f"its label is a {type(label).__name__}; write it as text"
        ):
            door(file)
    else:
        first_entry = name == "evaluate"  # as the benchmarks of the hub have it
        text = label[0] if first_entry else json.dumps(label)
        assert door(file) == {("a", text), ("b", text)}


def said(content, **other):
    return [{"role": "user", "content": content, **other}]


PARTS = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1"}]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("1 + 1", "1 + 1"),
        (b"1 + 1", "1 + 1"),
        (said("1 + 1"), "1 + 1"),
        (said("1 + 1", name=None), "1 + 1"),
        (said(PARTS), "1 + 1"),
        (said([{**PARTS[0], "image": None}, PARTS[1]]), "1 + 1"),
        (np.array(said(np.array(PARTS))), "1 + 1"),
        (said("a", name="x"), '[{"content": "a", "name": "x", "role": "user"}]'),
        (
            [{"role": "system", "content": "é"}, *said(PARTS)],
            '[{"content": "é", "role": "system"}, {"content": "1 + 1", "role": "user"}]',
        ),
    ],
    ids=lambda case: str(case)[:40],
)
def test_the_text_of_a_prompt(prompt, text):
    assert prompt_text(prompt) == text


@pytest.mark.parametrize(
    "prompt", [None, 7, math.nan, {"role": "user"}, ["a"], said([{"image": b"x"}]), b"\xff"]
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match=r"^a prompt"):
        prompt_text(prompt)


@every_door
def test_text_parts_of_a_message_are_its_text(door, tmp_path, request):
    file = table(tmp_path, [said(PARTS), said([PARTS[0]])], ["2", "1"])
    name = request.node.callspec.params["door"]
    if name == "train":
        with pytest.raises(
            Refused, match=r"the prompts are messages; give --data.apply_chat_template"
        ):
            door(file)
        expected = {("1 + 1 Answer:", "2"), ("1 + Answer:", "1")}
        assert by_train(file, apply_chat_template=True) == expected
    elif name == "evaluate":
        with pytest.raises(Refused, match="has no text in column 'prompt'"):
            door(file)
    else:
        assert door(file) == {("1 + 1", "2"), ("1 +", "1")}


@pytest.mark.parametrize("door", ["train", "evaluate", "import", "TRL"], indirect=True)
def test_a_prompt_with_two_labels_is_refused_and_blanks_make_no_other_label(door, tmp_path):
    file = table(tmp_path, ["a", "b", "a", "a"], ["1", "2", " 1", "3"])
    with pytest.raises(
        Refused,
        match=r"1 of 4 rows .*row 4: .*'3', .*row 1 has '1'",
    ):
        door(file)
    assert len(door(table(tmp_path, ["a", "b", "a", "b"], ["1", "2", " 1", "2"]))) == 3


@pytest.mark.parametrize("door", ["train", "evaluate", "import", "TRL"], indirect=True)
def test_the_rows_of_two_labels_are_counted_among_all_rows(door, tmp_path):
    prompts = ["a", "a", "a", "a", "b", "c", "d", "e"]
    labels = ["12", "99", "12", "98", "1", "2", "3", "4"]
    with pytest.raises(
        Refused,
        match=r"2 of 8 rows cannot be used: .*row 2: .*'99', .*row 1 has '12'; .*row 4: .*'98'",
    ):
        door(table(tmp_path, prompts, labels))


def test_equal_pairs_are_one_prompt_of_an_own_loop_too(tmp_path):
    with Posteriors.create(
        f"{tmp_path}/a.db", "own", ["a", "b", "a"], ["1", "2", "1"]
    ) as posteriors:
        assert set(posteriors.prompt_ids) == {("a", "1"), ("b", "2")}


# ---- Files

LOG = [
    {"prompt": prompt, "label": "7.0", "step": 1, "reward": reward}
    for prompt, reward in (("a", 1), ("b", 0))
]
LINES = "".join(json.dumps(row) + "\n" for row in LOG)
TABLE = "prompt,label,step,reward\na,7.0,1,1\nb,7.0,1,0\n"
FILES = {
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "A.JSONL": LINES.encode(),
    "a.JSON.GZ": gzip.compress(json.dumps(LOG).encode()),
    "a.ndjson": LINES.encode(),
    "a.tsv": TABLE.replace(",", "\t").encode(),
    "A.CSV": TABLE.encode(),
    "a.csv.gz": gzip.compress(TABLE.encode()),
    "a,b.jsonl": LINES.encode(),
    "packed.jsonl": gzip.compress(LINES.encode()),  # whatever its name says
    "a.jsonl.bz2": bz2.compress(LINES.encode()),
    "a.csv.xz": lzma.compress(TABLE.encode()),
    "b.jsonl": lzma.compress(LINES.encode()),
}
BROKEN = {
    "semicolon.csv": (
        TABLE.replace(",", ";").encode(),
        "its header has no ',', but ';'; save it with commas",
    ),
    "excel.csv": (f"sep=;\n{TABLE.replace(',', ';')}".encode(), "has no ',', but ';'"),
    "tab.csv": (TABLE.replace(",", "\t").encode(), r"but '.+t'; name the file .tsv"),
    "comma.tsv": (TABLE.encode(), "but ','; name the file .csv"),
    "cut.jsonl.xz": (lzma.compress(LINES.encode())[:-9], "end-of-stream|ended before"),
    "cut.jsonl.bz2": (bz2.compress(LINES.encode())[:-9], "end-of-stream|ended before"),
    "broken.jsonl.xz": (lzma.compress(LINES.encode())[:20] + b"x" * 60, "broken.jsonl.xz"),
    "a.zip.jsonl": (b"PK\x03\x04123", "it is packed by zip; unpack it"),
    "utf16.csv": (TABLE.encode("utf-16"), "it is in UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    "latin.csv": (
        TABLE.replace("a,", "é,").encode("latin-1"),
        "can't decode byte 0xe9 .* convert it to UTF-8",
    ),
    "zstd.jsonl": (b"(\xb5/\xfd123", "it is packed by zstd; unpack it"),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-9], "end-of-stream|ended before"),
}
readers = pytest.mark.parametrize("door", ["train", "evaluate", "import"], indirect=True)


@readers
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_whatever_its_suffix_and_packing(door, tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert door(tmp_path / name) == {("a", "7.0"), ("b", "7.0")}


@readers
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_says_why(door, tmp_path, name):
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=reason):
        door(tmp_path / name)


@readers
def test_a_long_field_of_a_csv_file_is_read(door, tmp_path):
    long = "1+" * 100_000
    (tmp_path / "a.csv").write_text(TABLE.replace("\nb", f"\n{long}"))
    assert door(tmp_path / "a.csv") == {("a", "7.0"), (long, "7.0")}


@pytest.mark.parametrize("door", ["train", "evaluate"], indirect=True)
def test_names_of_columns_with_blanks_are_quoted(door, tmp_path):
    (tmp_path / "a.csv").write_text("prompt , label\na,1\n")
    with pytest.raises(Refused, match=r"it has ' label', 'prompt '|it has 'prompt ', ' label'"):
        door(tmp_path / "a.csv")


def test_files_of_other_kinds_and_folders_with_commas_are_named(tmp_path):
    (tmp_path / "notes.txt").write_text(LINES)
    with pytest.raises(Refused, match=r"notes.txt: .*; give .json, .jsonl"):
        by_train(tmp_path / "notes.txt")
    (tmp_path / "a,b").mkdir()
    with pytest.raises(Refused, match="a comma parts data sets; rename the folder"):
        by_train(tmp_path / "a,b")


# ---- Training and held-out prompts


def chosen(folder, training, held_out):
    for name, rows in (("train", training), ("held", held_out)):
        lines = [json.dumps({"input": prompt, "label": label}) for prompt, label in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    args = arguments(folder / "train.jsonl")
    args.eval.dataset = str(folder / "held.jsonl")
    loaded = [data.load(args, strategy(args), flag) for flag in (data.TRAINING, data.HELD_OUT)]
    return data.choose(loaded[0], args, strategy(args), Words(), loaded[1])


def test_prompts_that_are_held_out_too_are_a_warning(tmp_path):
    training = [("a", "1"), ("b", "2"), ("c", "3")]
    [warning] = chosen(tmp_path, training, [("b", "2"), ("c", "3"), ("d", "4")]).warnings
    assert "2 of 3 prompts are in --eval.dataset, too" in warning
    assert chosen(tmp_path, training, [("d", "4"), ("d", "4")]).warnings == []


def test_a_held_out_prompt_with_two_labels_is_a_warning(tmp_path):
    [warning] = chosen(tmp_path, [("a", "1"), ("b", "2")], [("d", "4"), ("d", "5")]).warnings
    assert re.search(r"row 2: .*'5', .*row 1 has '4'", warning)


TWICE = [
    (
        "a.jsonl",
        '{"prompt": "a", "label": "1", "label": "2", "step": 1, "reward": 1}\n',
        "line 1.*'label' is there twice",
    ),
    (
        "a.json",
        '[{"prompt": "a", "prompt": "b", "label": "1", "step": 1, "reward": 1}]',
        "'prompt' is there twice",
    ),
    ("a.csv", "prompt,label,label,step,reward\na,1,2,1,1\n", "'label' is there twice"),
]


@pytest.mark.parametrize("door", ["train", "evaluate", "import"], indirect=True)
@pytest.mark.parametrize(("name", "content", "reason"), TWICE, ids=lambda part: str(part)[:8])
def test_a_column_that_is_there_twice_is_refused(door, tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(Refused, match=rf"{name}.*cannot be read: .*{reason}"):
        door(tmp_path / name)


@pytest.mark.parametrize("door", ["train", "evaluate", "import"], indirect=True)
def test_a_parquet_file_with_a_column_twice_or_no_rows_is_refused_in_one_line(door, tmp_path):
    names = ["prompt", "label", "label", "step", "reward"]
    parquet.write_table(
        pa.table([["a"], ["1"], ["2"], [1], [1.0]], names=names), tmp_path / "twice.parquet"
    )
    with pytest.raises(Refused, match=r"'label' is there twice") as refused:
        door(tmp_path / "twice.parquet")
    assert "\n" not in str(refused.value).strip()
    with pytest.raises(Refused, match="no rows"):
        door(table(tmp_path, pa.array([], pa.string()), pa.array([], pa.string())))


@pytest.mark.parametrize("door", ["train", "evaluate", "import"], indirect=True)
def test_json_that_is_nested_too_deeply_is_refused(door, tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(Refused, match="cannot be read"):
        door(tmp_path / "a.jsonl")


def test_missing_times_are_no_label():
    assert [label_text(np.datetime64("NaT")), label_text(np.timedelta64("NaT"))] == ["", ""]


@pytest.mark.parametrize("label", [math.inf, -math.inf, Decimal("Infinity")])
def test_an_infinite_label_is_refused_by_train(label):
    assert "infinit" in label_fault(label)
    assert label_fault("Infinity") is None  # as it is written


def test_an_infinite_label_of_a_file_is_refused_by_evaluate(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "label": 7}\n{"prompt": "b", "label": Infinity}\n')
    with pytest.raises(
        Refused, match=r"row 2 cannot be used: its label is infinite, .*; write it as text"
    ):
        by_evaluate(file)


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_message_without_a_text_is_refused_as_a_prompt_without_one(tmp_path, content):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    file = table(tmp_path, [messages, messages[1:]], ["1", "2"])
    with pytest.raises(Refused, match=r"2 of 2 rows .*its last message is empty"):
        by_train(file, apply_chat_template=True)


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl"])
def test_an_empty_column_is_named_as_empty(tmp_path, name):
    table(tmp_path, ["a", "b"], [None, None])
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "a", "label": null}\n{"prompt": "b", "label": null}\n'
    )
    with pytest.raises(Refused, match=r"column 'label' \(--data.label_key\) is empty"):
        by_train(tmp_path / name)


@pytest.mark.parametrize("door", ["train", "evaluate", "import", "TRL"], indirect=True)
def test_a_number_of_32_bits_is_its_shortest_decimal(door, tmp_path):
    file = table(
        tmp_path, ["a", "b", "c", "d"], pa.array([0.1, 7.0, 1e-7, 33554432.0], pa.float32())
    )
    assert door(file) == {("a", "0.1"), ("b", "7"), ("c", "0.0000001"), ("d", "33554432")}


@pytest.mark.parametrize("door", ["train", "evaluate", "import", "TRL"], indirect=True)
def test_a_number_of_16_bits_is_its_shortest_decimal(door, tmp_path):
    labels = np.array([0.1, 7.0, 0.3, 2048.0], dtype=np.float16)
    file = table(tmp_path, ["a", "b", "c", "d"], pa.array(labels))
    assert door(file) == {("a", "0.1"), ("b", "7"), ("c", "0.3"), ("d", "2048")}


@pytest.mark.parametrize("number", ["1_0", "\u0663", "0x10", "1,5", "1e", "--1", "1 0", "one", [1]])
def test_what_python_alone_reads_as_a_number_is_none(number, tmp_path, capsys):
    with pytest.raises(ValueError):
        number_of(number)
    for column in ("reward", "step"):
        row = json.dumps({"prompt": "a", "label": "1", "step": 1, "reward": 1} | {column: number})
        (tmp_path / "log.jsonl").write_text(row)
        with pytest.raises(Refused, match=rf"line 1: {column} .*; write a number in the digits"):
            by_import(tmp_path / "log.jsonl", capsys)
    assert isinstance(pass_rate(f"{number}/2000", None, ""), str)


@pytest.mark.parametrize("number", ["inf", "-Infinity", "1e400", "9" * 400])
def test_an_infinite_number_is_refused(number, tmp_path, capsys):
    row = {"prompt": "a", "label": "1", "step": 1, "reward": number}
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    with pytest.raises(Refused, match=r"line 1: reward .* is not finite"):
        by_import(tmp_path / "log.jsonl", capsys)
    assert isinstance(pass_rate(f"1/{number}", None, ""), str)


@pytest.mark.parametrize(
    ("number", "value"), [(" 7 ", 7), ("+.5e1", 5), ("1e-400", 0), (True, 1), (b"2", 2), ("3.", 3)]
)
def test_a_decimal_is_a_number_with_blanks_around_it_too(number, value):
    assert number_of(number) == value


@pytest.mark.parametrize("step", [True, "true", "nan", "1.5", "-1", 10**400])
def test_what_is_no_whole_number_is_no_step(step, tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(
        json.dumps({"prompt": "a", "label": "1", "step": step, "reward": 1})
    )
    with pytest.raises(Refused, match=r"line 1: step .*is not"):
        by_import(tmp_path / "log.jsonl", capsys)
