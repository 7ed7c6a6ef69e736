"""evaluate compare on files: what is read, refused and noted; every number of a small comparison worked by hand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import results

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROOT = Path(__file__).parents[1]

# Two runs of three prompts, two samples each; accuracies of the prompts over both runs: 0.5, 0.5, 0 and 0.75, 1, 0.25.
FIRST = [[[1, 0], [1, 1], [0, 0]], [[0, 1], [0, 0], [0, 0]]]
SECOND = [[[1, 1], [1, 1], [0, 0]], [[1, 0], [1, 1], [0, 1]]]


def write_benchmark(folder, name, scores, **columns):
    """The Parquet file of a benchmark: scores (R, P, N), None is missing; any column may be given instead."""
    runs, count, samples = np.shape(scores)
    places = [str(place) for place in range(count)] * runs
    values = {"run": np.repeat(range(runs), count), "index": list(range(count)) * runs}
    values |= dict.fromkeys(("id", "prompt", "label"), places) | {"scores": [row for run in scores for row in run]}
    same = {"answers": "7", "responses": "so 7", "tokens": 10, "truncated": False}
    values |= {column: [[value] * samples] * len(places) for column, value in same.items()}
    arrays = {field.name: pa.array(values[field.name], field.type) for field in results.schema()}
    arrays |= {column: pa.array(given) for column, given in columns.items()}
    parquet.write_table(pa.table(arrays), folder / f"{name}.parquet")


def write_evaluation(name, benchmarks, *, titles=None, **manifest):
    """An evaluation under evaluations/ whose benchmarks have these scores; its folder."""
    folder = Path("evaluations") / name
    folder.mkdir(parents=True)
    scores = next(iter(benchmarks.values()))
    values = {"model": f"org/{name}", "status": "finished", "sampling": {"temperature": 0.6}}
    values |= {"runs": np.shape(scores)[0], "n": np.shape(scores)[2]}
    values["benchmarks"] = {
        each: {"title": each.upper(), "group": ""} | (titles or {}).get(each, {}) for each in benchmarks
    }
    (folder / results.MANIFEST).write_text(json.dumps(values | manifest))
    for benchmark, scores in benchmarks.items():
        write_benchmark(folder, benchmark, scores)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(*argv):
    """Run the command with these arguments."""
    assert main(["evaluate", "compare", *argv]) == 0


def refusal(capsys, *argv):
    """The one line with which the command refuses these arguments."""
    capsys.readouterr()
    assert main(["evaluate", "compare", *argv]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    (line,) = error.splitlines()
    return line.removeprefix("error: ")


def as_json(capsys, *argv):
    """What the command prints with --json."""
    capsys.readouterr()
    command(*argv, "--json")
    return json.loads(capsys.readouterr().out)


def differences(capsys, *argv):
    """The differences of --json by (model, baseline, benchmark), without those that do not exist."""
    return {
        (row["model"], row["baseline"], row["benchmark"]): {k: v for k, v in row.items() if v is not None}
        for row in as_json(capsys, *argv)["differences"]
    }


def test_read():
    folder = write_evaluation("first", {"sums": [[[1, None], [0, 0.5]]]})
    answers = [[["7", None], [None, "8"]]]
    write_benchmark(folder, "sums", [[[1, None], [0, 0.5]]], id=["a", "b"], label=["7", "9"], answers=answers[0])
    (sums,) = results.read_evaluation(folder).results.values()
    assert (sums.benchmark, sums.ids, sums.labels, sums.shape) == ("sums", ["a", "b"], ["7", "9"], (1, 2, 2))
    np.testing.assert_array_equal(sums.scores_R_P_N, [[[1, np.nan], [0, 0.5]]])
    assert sums.answers_R_P_N.tolist() == answers
    assert sums.tokens_R_P_N.tolist() == [[[10, 10], [10, 10]]]
    assert not sums.truncated_R_P_N.any()


def test_runs_and_prompts_are_not_mixed_up():
    scores = np.arange(12).reshape(2, 3, 2).tolist()
    found = results.read_evaluation(write_evaluation("first", {"sums": scores})).results["sums"]
    np.testing.assert_array_equal(found.scores_R_P_N, scores)


def test_no_evaluation_and_an_unfinished_one():
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=r"^empty: not an evaluation, it has no evaluation\.json; name a folder"):
        results.read_evaluation(Path("empty"))
    folder = write_evaluation("first", {"sums": FIRST}, status="running")
    with pytest.raises(UsageError, match=r"status is 'running', not 'finished'; run the evaluate command .* again"):
        results.read_evaluation(folder)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "model, n, runs, benchmarks, status missing"),
        ('{"model": "m", "n": 2, "runs": 2, "status": "finished"}', "benchmarks missing"),
        (
            '{"model": "m", "n": 2, "runs": 0, "status": "finished", "benchmarks": {}}',
            "runs must be an integer of at least 1, got 0",
        ),
    ],
)
def test_wrong_manifests(manifest, message):
    folder = write_evaluation("first", {"sums": FIRST})
    (folder / results.MANIFEST).write_text(manifest)
    with pytest.raises(UsageError, match=message):
        results.read_evaluation(folder)


def test_files_that_do_not_fit():
    folder = write_evaluation("first", {"sums": FIRST})
    path = folder / "sums.parquet"

    def misfit():
        with pytest.raises(UsageError) as caught:
            results.read_evaluation(folder)
        start = f"{path}: "
        assert str(caught.value).startswith(start)
        return str(caught.value)[len(start) :].split(";")[0]

    write_benchmark(folder, "sums", FIRST, run=[0, 0, 0, 1, 1, 0])
    assert misfit() == "rows are not ordered by run (0 to 1), then index (0 to 2)"
    write_benchmark(folder, "sums", FIRST, label=["0", "1", "2", "0", "1", "3"])
    assert misfit() == "label differs between runs"
    write_benchmark(folder, "sums", FIRST, answers=[["7"]] * 6)
    assert misfit() == "answers has lists of 1 entries instead of n = 2"
    write_benchmark(folder, "sums", FIRST, tokens=[[1, None]] * 6)
    assert misfit() == "tokens has nulls"
    write_benchmark(folder, "sums", FIRST, tokens=[["a", "b"]] * 6)
    assert "as a scalar of type int32" in misfit()
    write_benchmark(folder, "sums", [FIRST[0]])
    assert misfit() == "3 rows cannot be divided into 2 runs"
    parquet.write_table(pa.table({"run": [0]}), path)
    assert misfit() == "missing columns: answers, id, index, label, prompt, scores, tokens, truncated"
    path.write_bytes(b"PAR1 no more")
    assert "Parquet" in misfit()
    path.unlink()
    assert misfit() == "there is no such file"


def test_all_numbers_of_a_comparison(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"sums": SECOND})
    (found,) = differences(capsys, "first", "second").values()
    # Runs of second: (1 + 1 + 0) / 3 and (1/2 + 1 + 1/2) / 3; of first: (1/2 + 1) / 3 and (1/2) / 3.
    assert found["model accuracy"] == pytest.approx(2 / 3)
    assert found["model std"] == 0
    assert found["baseline accuracy"] == pytest.approx(1 / 3)
    assert found["baseline std"] == pytest.approx(1 / 3 / np.sqrt(2))
    # Differences of the prompts 0.25, 0.5, 0.25: s^2 = 1 / 48, error sqrt(1 / 144); t = 4 with 2 degrees of freedom.
    assert found["difference"] == pytest.approx(1 / 3)
    assert found["standard error"] == pytest.approx(1 / 12)
    assert (found["t"], found["degrees of freedom"]) == (pytest.approx(4), 2)
    assert found["p"] == pytest.approx((1 - np.sqrt(16 / 18)) / 2)
    assert found["p Holm"] == found["p"]
    assert (found["better"], found["worse"], found["prompts"], found["prompts left out"]) == (3, 0, 3, 0)
    # t of 2 degrees of freedom is 4.30265 at 0.975.
    assert found["interval low"] == pytest.approx(1 / 3 - 4.30265 / 12, abs=1e-5)
    assert found["interval high"] == pytest.approx(1 / 3 + 4.30265 / 12, abs=1e-5)
    # t of 2 degrees of freedom is 2.91999 at 0.95 and 1.06066 at 0.8.
    assert found["detectable"] == pytest.approx((2.91999 + 1.06066) / 12, abs=1e-5)


def test_a_model_and_itself(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("again", {"sums": FIRST})
    (found,) = differences(capsys, "first", "again").values()
    assert (found["difference"], found["p"]) == (0, 1)
    assert "t" not in found and "detectable" not in found


def test_holm_is_over_all_benchmarks_and_pairs(capsys):
    write_evaluation("first", {"sums": FIRST, "products": SECOND})
    write_evaluation("second", {"sums": SECOND, "products": SECOND})
    write_evaluation("third", {"sums": SECOND, "products": FIRST})
    found = differences(capsys, "first", "second", "third")
    p = (1 - np.sqrt(16 / 18)) / 2  # as above
    assert found["second", "first", "sums"]["p Holm"] == pytest.approx(4 * p)
    assert found["third", "first", "sums"]["p Holm"] == pytest.approx(4 * p)
    assert found["second", "first", "products"]["p Holm"] == 1
    assert found["third", "first", "products"]["p"] == pytest.approx(1 - p)


def test_the_average_counts_benchmarks_alike(capsys):
    """One of three prompts, one of six; differences 1/3 and 0."""
    write_evaluation("first", {"sums": FIRST, "products": [run * 2 for run in FIRST]})
    write_evaluation("second", {"sums": SECOND, "products": [run * 2 for run in FIRST]})
    found = differences(capsys, "first", "second")
    average = found["second", "first", "Avg."]
    assert average["difference"] == pytest.approx(1 / 6)
    assert average["baseline accuracy"] == pytest.approx(1 / 3)
    assert average["standard error"] == pytest.approx(1 / 24)
    assert average["prompts"] == 9
    assert average["p Holm"] == average["p"]
    # products has no variance, so that t = 4 with 2 degrees of freedom again
    assert average["p"] == pytest.approx(found["second", "first", "sums"]["p"])


def test_averages_are_within_groups(capsys):
    titles = {"sums": {"group": "ID"}, "products": {"group": "ID"}, "proofs": {"group": "OOD"}}
    for name, scores in (("first", FIRST), ("second", SECOND)):
        write_evaluation(name, dict.fromkeys(("sums", "proofs", "products"), scores), titles=titles)
    found = differences(capsys, "first", "second")
    assert [benchmark for *_, benchmark in found] == ["sums", "products", "Avg. ID", "proofs"]


def test_missing_samples_and_prompts_are_left_out_and_said(capsys):
    missing = [[[1, 0], [1, None], [None, None]], [[0, 1], [0, 0], [None, None]]]
    write_evaluation("first", {"sums": missing})
    write_evaluation("second", {"sums": SECOND})
    (found,) = differences(capsys, "first", "second").values()
    assert (found["prompts"], found["prompts left out"]) == (2, 1)
    # first: runs (1/2 + 1) / 2 and (1/2 + 0) / 2; second without its third prompt: 1 and 3/4
    assert (found["baseline accuracy"], found["model accuracy"]) == (pytest.approx(0.5), pytest.approx(0.875))
    assert found["difference"] == pytest.approx(0.375)
    command("first", "second")
    out = capsys.readouterr().out
    assert "note: SUMS: 1 of 3 prompts left out: some model has no verified sample\n" in out
    assert "note: SUMS: 12.5% of the samples of first could not be verified\n" in out  # of those left


def test_a_benchmark_without_common_prompts(capsys):
    write_evaluation("first", {"sums": [[[1], [None]]]})
    write_evaluation("second", {"sums": [[[None], [1]]]})
    found = "sums: no prompt has a verified sample of every model; leave it out with --benchmarks"
    assert refusal(capsys, "first", "second") == found


def test_pairs(capsys):
    for name in ("first", "second", "third"):
        write_evaluation(name, {"sums": SECOND if name == "second" else FIRST})
    names = ("first", "second", "third")
    for flags, pairs in (
        ((), [("second", "first"), ("third", "first")]),
        (("--against", "second"), [("first", "second"), ("third", "second")]),
        (("--of", "evaluations/second"), [("second", "first"), ("second", "third")]),
    ):
        assert [found[:2] for found in differences(capsys, *names, *flags)] == pairs


def test_other_prompts_are_refused(capsys):
    write_evaluation("first", {"sums": FIRST})
    other = write_evaluation("second", {"sums": SECOND})
    do = "; evaluate both on the same data, or choose other benchmarks with --benchmarks"
    write_benchmark(other, "sums", SECOND, label=["0", "5", "2"] * 2)
    found = "sums: labels differ, first at prompt 1: '1' in first, '5' in second"
    assert refusal(capsys, "first", "second") == found + do
    write_benchmark(other, "sums", SECOND, id=["0", "1", "x"] * 2)
    found = "sums: ids differ, first at prompt 2: '2' in first, 'x' in second"
    assert refusal(capsys, "first", "second") == found + do
    write_benchmark(other, "sums", [run[:2] for run in SECOND])
    assert refusal(capsys, "first", "second") == "sums: 3 prompts in first, 2 in second" + do


def test_what_differs_without_being_refused_is_noted(capsys):
    titles = {"sums": {"max_new_tokens": 4096, "verifier": "math"}}
    write_evaluation("first", {"sums": FIRST, "proofs": FIRST}, titles=titles)
    titles = {"sums": {"max_new_tokens": 8192, "verifier": "math"}}
    other = write_evaluation("second", {"sums": [[[1], [0], [1]]]}, titles=titles, sampling={"temperature": 1.0})
    write_benchmark(other, "sums", [[[1], [0], [1]]], prompt=["other", "1", "2"])
    command("first", "second")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: proofs is left out: not in second",
        "note: samples per prompt differ (Best@n and majority@n grow with n; accuracy does not): "
        "2 in first, 1 in second",
        "note: runs differ: 2 in first, 1 in second",
        'note: sampling differs: {"temperature": 0.6} in first, {"temperature": 1.0} in second',
        "note: SUMS: limits on response length differ: 4096 in first, 8192 in second",
        "note: SUMS: models saw different texts (questions, prompt template or chat template)",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("first", "nothing to compare first with; name at least two evaluations"),
        (
            "first nosuch",
            "no evaluation 'nosuch': neither nosuch nor evaluations/nosuch holds evaluation.json; "
            "evaluations/ has first, second",
        ),
        ("first evaluations/first", "two evaluations are named 'first'; rename the folder of one"),
        ("first second --of third", "--of third is not one of the evaluations: first, second"),
        ("first second --against x", "--against x is not one of the evaluations: first, second"),
        (
            "first second --benchmarks sums,x",
            "benchmark 'x' is not in every evaluation: first has sums, proofs; second has sums",
        ),
    ],
)
def test_wrong_arguments(argv, message, capsys):
    write_evaluation("first", {"sums": FIRST, "proofs": FIRST})
    write_evaluation("second", {"sums": SECOND})
    assert refusal(capsys, *argv.split()) == message


def test_no_benchmark_in_common(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"proofs": FIRST})
    found = "no benchmark is in every evaluation: first has sums; second has proofs"
    assert refusal(capsys, "first", "second") == found


def test_text(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"sums": SECOND})
    command("first", "second")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "accuracy (Acc@2 in %, mean \u00b1 standard deviation over 2 runs)" in lines
    assert "SUMS 3 33.33 \u00b1 23.57 66.67 \u00b1 0.00" in lines
    # Best@2: 2/3 and 1/3 of the prompts in the two runs of first. All answers are the same: majority is the accuracy.
    assert "SUMS first 2 10 50.00 33.33 0.00 0.00" in lines
    assert "second - first (Acc@2)" in lines
    (row,) = [line for line in lines if line.startswith("SUMS 3 +33.33 ")]
    assert row.endswith(" 0.0286 0.0286 3 0 33.17")


def test_json_has_every_measure_of_every_model(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"sums": SECOND})
    printed = as_json(capsys, "first", "second")
    assert printed.keys() == {"differences", "measures", "notes"}
    mean = {(row["model"], row["measure"]): row["mean"] for row in printed["measures"]}
    # Best@2: 2/3 and 1/3 of the prompts in the two runs of first; all three and two of three have one in second.
    assert mean["first", "pass@2"] == mean["first", "Best@2"] == pytest.approx(0.5)
    assert mean["second", "Best@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert {row["runs"] for row in printed["measures"]} == {2}


def test_comparing_loads_nothing_heavy():
    code = (
        "import openrlhf_dbb.evaluation.compare, sys;"
        "heavy = {'torch', 'ray', 'vllm', 'openrlhf', 'matplotlib', 'scipy', 'pyarrow'};"
        "print(*heavy & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
