"""The study's CSV files: number format, whole files, added and merged rows, files that cannot be used."""

import math
import re

import pytest

from openrlhf_dbb.errors import UsageError
from study import files
from study.data import ErrorRow, GradientRow, RunRow

HEADER = ",".join(RunRow._fields)


def row(seed, draw, cosine):
    return GradientRow(seed, 8, "exact", 0, draw, cosine, 1e-9, math.nan)


def run_line(experiment, arm, seed):
    """A line of runs.csv whose other fields are empty."""
    return f"r,{experiment},{arm},2,{seed}" + "," * (len(RunRow._fields) - 5) + "\n"


def test_numbers_have_six_digits_and_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("something much longer than the new content\n")
    rows = [{"a": 1 / 3, "b": 12345678}, {"a": math.nan, "b": None}, {"a": 1234567.8, "c": "not in the header"}]
    files.write(path, ("a", "b"), rows)
    assert path.read_text() == "a,b\n0.333333,12345678\n,\n1.23457e+06,\n"
    assert [file.name for file in tmp_path.iterdir()] == ["numbers.csv"]


def test_appended_rows_are_read_back(tmp_path):
    path = tmp_path / "gradients.csv"
    assert files.read(path, GradientRow) == ()
    files.append(path, [row(3, 1, 0.123456789)])
    files.append(path, [row(3, 2, 0.5)])
    assert path.read_text() == (
        "seed,n,estimator,batch,draw,cosine,cosine_normalised,mse\n3,8,exact,0,1,0.123457,1e-09,\n3,8,exact,0,2,0.5,1e-09,\n"
    )
    first, second = files.read(path, GradientRow)
    assert first[:7] == (3, 8, "exact", 0, 1, 0.123457, 1e-9) and math.isnan(first.mse)
    assert second[4:6] == (2, 0.5)


def test_merged_rows_replace_those_with_the_same_key(tmp_path, capsys):
    source, into = tmp_path / "source.csv", tmp_path / "into.csv"
    files.merge(source, into, ("seed",))  # nothing to merge
    assert not into.exists()
    files.append(into, [row(1, 0, 0.1), row(1, 1, 0.2), row(2, 0, 0.3)])
    files.append(source, [row(1, 0, 0.9), row(3, 0, 0.4)])
    files.merge(source, into, ("seed",))
    assert [(each.seed, each.cosine) for each in files.read(into, GradientRow)] == [(2, 0.3), (1, 0.9), (3, 0.4)]
    assert capsys.readouterr().out == f"{into}: 3 rows\n"


def test_a_file_with_other_columns_is_not_changed(tmp_path):
    path = tmp_path / "mse.csv"
    files.append(path, [row(1, 0, 0.1)])
    before = path.read_text()
    with pytest.raises(UsageError, match=r"mse\.csv has other columns than this version writes; move it away"):
        files.append(path, [ErrorRow("r", 2, 1, "dbb", 0.5, 0.1, 0.2)])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run,experiment\n", "runs.csv: no column arm, n, seed"),
        (f"{HEADER}\n" + run_line("n2", "grpo", "one"), "seed is 'one', not a number"),
        (f"{HEADER}\n" + run_line("n2", "other", 1), "run r has the unknown arm 'other'; arms are grpo,"),
        (f"{HEADER}\n" + 2 * run_line("n2", "grpo", 1), "n2 has seed 1 of grpo 2 times"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        files.load(tmp_path)


def test_a_folder_without_a_study(tmp_path):
    with pytest.raises(UsageError, match=r"none of runs.csv, epochs.csv, gradients.csv, mse.csv exists"):
        files.load(tmp_path)
