"""evaluate compare on files: every number of a small comparison worked by hand, refusals, and notes."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.core.checkpoints import write_json
from openrlhf_dbb.evaluation import results
from openrlhf_dbb.evaluation.results import Responses, Row

# Two runs of three prompts, two samples each; accuracies of the prompts over both runs: 0.5, 0.5, 0 and 0.75, 1, 0.25.
FIRST = [[[1, 0], [1, 1], [0, 0]], [[0, 1], [0, 0], [0, 0]]]
SECOND = [[[1, 1], [1, 1], [0, 0]], [[1, 0], [1, 1], [0, 1]]]


def write_evaluation(name, benchmarks, *, about=None, labels="012", **settings):
    """Write an evaluation under evaluations/ whose benchmarks have these scores (R, P, N); None is missing.

    ``about``: settings of benchmarks, by name.
    """
    runs, _, samples = np.shape(next(iter(benchmarks.values())))
    values = {"model": f"org/{name}", "n": samples, "runs": runs, "temperature": 0.6, "top_p": 0.95} | settings
    same = {"group": "", "verifier": "math", "max_new_tokens": 64, "chat_template": False, "digest": "d"}
    values["benchmarks"] = {
        each: {"title": each.upper(), "prompts": np.shape(scores)[1], **same, **(about or {}).get(each, {})}
        for each, scores in benchmarks.items()
    }
    folder = Path("evaluations") / name
    with closing(Responses(folder)) as responses:
        for benchmark, scores in benchmarks.items():
            for run, place in np.ndindex(np.shape(scores)[:2]):
                texts = {"id": str(place), "prompt": f"{place}?", "label": labels[place]}
                lists = {"answers": ["7"] * samples, "tokens": [10] * samples, "truncated": [False] * samples}
                lists |= {"scores": scores[run][place], "responses": ["so 7"] * samples}
                responses.append(Row(benchmark, run, place, **texts, **lists))
    write_json(folder / results.SETTINGS, values)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys):
    """Function: what the command prints with these arguments."""

    def run(*argv):
        capsys.readouterr()
        assert main(["evaluate", "compare", *argv]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def differences(printed):
    """Function: the differences of --json by (model, baseline, benchmark)."""

    def run(*argv):
        rows = json.loads(printed(*argv, "--json"))["differences"]
        return {(row["model"], row["baseline"], row["benchmark"]): row for row in rows}

    return run


def test_all_numbers_of_a_comparison(differences, printed):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"sums": SECOND})
    (found,) = differences("first", "second").values()
    # Runs of second: (1 + 1 + 0) / 3 and (1/2 + 1 + 1/2) / 3; of first: (1/2 + 1) / 3 and (1/2) / 3.
    assert found["accuracy"] == pytest.approx([2 / 3, 2 / 3])
    assert found["baseline_accuracy"] == pytest.approx([1 / 2, 1 / 6])
    # Differences of the prompts 0.25, 0.5, 0.25: s^2 = 1 / 48, error sqrt(1 / 144); t = 4 with 2 degrees of freedom.
    assert found["difference"] == pytest.approx(1 / 3)
    assert found["p"] == found["p_holm"] == pytest.approx((1 - np.sqrt(16 / 18)) / 2)
    assert (found["better"], found["worse"], found["prompts"]) == (3, 0, 3)
    # t of 2 degrees of freedom is 4.30265 at 0.975.
    assert (found["low"], found["high"]) == pytest.approx((1 / 3 - 4.30265 / 12, 1 / 3 + 4.30265 / 12), abs=1e-5)
    title, header, row = (" ".join(line.split()) for line in printed("first", "second").splitlines()[:3])
    assert title == "second - first"
    assert header == "prompts second first difference 95 % interval p p (Holm) better worse"
    assert row == "SUMS 3 66.67 \u00b1 0.00 33.33 \u00b1 23.57 +33.33 -2.52 to +69.19 0.0286 0.0286 3 0"


def test_holm_is_over_all_benchmarks_and_pairs(differences):
    for name, scores in (("first", FIRST), ("second", SECOND), ("third", SECOND)):
        write_evaluation(name, {"sums": scores, "products": scores})
    found = differences("first", "second", "third")
    p = (1 - np.sqrt(16 / 18)) / 2  # as above
    tests = [row["p_holm"] for row in found.values() if row["benchmark"] != "Avg."]
    assert tests == pytest.approx([4 * p] * 4)


def test_averages_are_within_groups(differences):
    groups = {"sums": {"group": "ID"}, "proofs": {"group": "OOD"}, "products": {"group": "ID"}}
    for name, scores in (("first", FIRST), ("second", SECOND)):
        write_evaluation(name, dict.fromkeys(groups, scores), about=groups)
    assert [benchmark for *_, benchmark in differences("first", "second")] == ["SUMS", "PRODUCTS", "PROOFS", "Avg. ID"]


def test_missing_samples_and_prompts_are_left_out_and_said(differences, printed):
    missing = [[[1, 0], [1, None], [None, None]], [[0, 1], [0, 0], [None, None]]]
    write_evaluation("first", {"sums": missing})
    write_evaluation("second", {"sums": SECOND})
    (found,) = differences("first", "second").values()
    assert found["prompts"] == 2
    # first: runs (1/2 + 1) / 2 and (1/2 + 0) / 2; second without its third prompt: 1 and 3/4
    assert found["baseline_accuracy"] == [0.75, 0.25]
    assert found["accuracy"] == [1, 0.75]
    assert found["difference"] == pytest.approx(0.375)
    notes = printed("first", "second").splitlines()[-2:]
    assert notes[1] == "note: SUMS: 1 prompts left out, as a model has no verified sample"
    assert notes[0] == "note: SUMS: 41.7% of the samples of first are not verified"


def test_different_settings_are_noted(printed):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("second", {"sums": [[[1], [0], [1]]]}, about={"sums": {"max_new_tokens": 8192}}, temperature=1)
    notes = [line for line in printed("first", "second").splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: different n: 2 in first, 1 in second",
        "note: different runs: 2 in first, 1 in second",
        "note: different temperature: 0.6 in first, 1 in second",
        "note: different max_new_tokens of SUMS: 64 in first, 8192 in second",
    ]


REFUSED = {
    "nosuch": "there is no evaluation 'nosuch'; evaluations/ has first, lost, other, sorts, unfinished",
    "sorts": "no benchmark is in every evaluation: first has sums; sorts has sorts",
    "lost": "sums: no prompt has a verified sample of every model",
    "other": "sums: first and other have different prompts; evaluate both on the same data",
    "unfinished": "unfinished is not finished, it has 6 of 9 rows of sums; repeat the evaluate command",
}


def test_what_cannot_be_compared_is_refused_in_one_line(capsys):
    write_evaluation("first", {"sums": FIRST})
    write_evaluation("sorts", {"sorts": SECOND})
    write_evaluation("lost", {"sums": [[[None, None]] * 3] * 2})
    write_evaluation("other", {"sums": SECOND}, labels="092")
    write_evaluation("unfinished", {"sums": SECOND}, runs=3)
    for second, message in REFUSED.items():
        assert main(["evaluate", "compare", "first", second]) == 2
        out, error = capsys.readouterr()
        (line,) = error.splitlines()
        assert out == "" and message in line
