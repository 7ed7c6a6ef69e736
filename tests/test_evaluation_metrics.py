"""Measures of sampled answers, paired tests, and ``evaluate compare``: by hand, by enumeration, against scipy."""

import json
import re
from contextlib import closing
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.results import SETTINGS, Responses, Results, Row
from openrlhf_dbb.saved.checkpoints import write_json

NAN = np.nan


def test_a_missing_sample_is_left_out_not_counted_as_wrong():
    scores = np.array([[1, NAN, 0, 1], [NAN, NAN, NAN, NAN], [0, 0, 0.75, NAN]])
    np.testing.assert_array_equal(metrics.accuracy(scores), [2 / 3, NAN, 0.25])
    np.testing.assert_array_equal(metrics.best(scores), [1, NAN, 0.75])


@settings(deadline=None)  # the first call imports scipy
@given(some.lists(some.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=7), some.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(scores, data):
    k = data.draw(some.integers(1, len(scores)))
    verified = [score for score in scores if score == score]
    draws = [max(draw) for draw in combinations(verified, k)]
    expected = np.mean(draws) if draws else NAN  # fewer than k verified samples
    assert metrics.pass_at_k(len(verified), sum(verified), k) == pytest.approx(
        expected, nan_ok=True
    )


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    assert metrics.pass_at_k(2000, 1, 1000) == pytest.approx(0.5, rel=1e-12)  # one right: k / n


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([1, 1, 0, 0, 0], ["7", "7", "8", "9", None], 1),
        # 7 and 8 tie with two votes each: right half of the time, whichever comes first
        ([1, 1, 0, 0, 0], ["7", "7", "8", "8", "9"], 0.5),
        # the missing sample has no vote, so that 8 wins
        ([1, NAN, 0, 0], ["7", "7", "8", "8"], 0),
        # a verifier that reads more than the answer: 7 is right in 2 of 3 responses
        ([1, 1, 0, 0], ["7", "7", "7", "8"], 2 / 3),
        # responses without an answer are no vote for anything
        ([0, 0, 0, 1], [None, None, None, "7"], 1),
    ],
)
def test_the_majority_is_right_where_the_most_frequent_answer_is(scores, answers, expected):
    assert metrics.majority(
        np.array([scores], float), np.array([answers], object)
    ) == pytest.approx([expected])


def test_a_group_without_votes_has_no_majority():
    scores = np.array([[0.0, 0.0], [NAN, NAN], [1.0, 0.0]])
    answers = np.array([[None, None], ["7", "7"], ["7", None]], dtype=object)
    np.testing.assert_array_equal(metrics.majority(scores, answers), [0, NAN, 1])
    # a verifier that gives no answer to any prompt has no majority
    assert np.isnan(metrics.majority(scores, np.full((3, 2), None))).all()


def test_fractions_have_no_pass_at_k_and_responses_without_answers_no_majority():
    def measured(scores, answers):
        shape = (1, 1, 3)
        rest = {"tokens_R_P_N": np.full(shape, 10), "truncated_R_P_N": np.zeros(shape, dtype=bool)}
        scores = np.array([[scores]], float)
        answers = np.array([[answers]], object)
        return metrics.measures(Results("sums", ["0"], scores, answers, ["0"], **rest))

    found = measured([0.5, 1, 1], [None] * 3)
    assert found.keys() == {"mean@3", "best@3", "missing", "truncated_rate", "response_length_mean"}
    powers = measured([0, 1, 1], ["7", None, None])
    assert [name for name in powers if name.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]


def test_test_and_interval_are_scipys():
    difference_P = np.random.default_rng(0).normal(0.02, 0.1, 60)
    scipys = stats.ttest_1samp(difference_P, 0)
    one_sided = metrics.stratified_t([difference_P])
    assert metrics.stratified_t([difference_P], two_sided=True).p == pytest.approx(
        scipys.pvalue, rel=1e-9
    )
    assert one_sided.p == pytest.approx(
        stats.ttest_1samp(difference_P, 0, alternative="greater").pvalue, rel=1e-9
    )
    assert (one_sided.low, one_sided.high) == pytest.approx(scipys.confidence_interval())


def test_differences_without_variance_and_one_prompt_test_nothing():
    base = np.array([0.1, 0.3, 0.7])
    same = metrics.stratified_t([base + 0.25 - base])  # 0.1 + 0.25 - 0.1 is not 0.25 in binary
    np.testing.assert_array_equal(same, [0.25, 0.25, 0.25, NAN])
    np.testing.assert_array_equal(metrics.stratified_t([np.array([0.5])]), [0.5, NAN, NAN, NAN])


def test_the_average_difference_of_two_benchmarks_and_its_interval_by_hand():
    # Means 0.2 and 0.6; variances of the means 0.04 / 2 = 0.02 and 0.12 / 3 = 0.04.
    # Error sqrt(0.06) / 2; degrees 0.06^2 / (0.02^2 / 1 + 0.04^2 / 2) = 0.0036 / 0.0012 = 3.
    first = np.array([0.2 - np.sqrt(0.02), 0.2 + np.sqrt(0.02)])
    second = 0.6 + np.sqrt(0.12) * np.array([-1, 0, 1])
    test = metrics.stratified_t([first, second])
    half = 3.182446 * np.sqrt(0.06) / 2  # t of 3 degrees of freedom at 0.975
    assert test == pytest.approx(
        (0.4, 0.4 - half, 0.4 + half, stats.t.sf(0.8 / np.sqrt(0.06), 3)), rel=1e-5
    )


def test_p_values_corrected_by_holm_by_hand():
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 = 0.06 is not below the one before; 0.5 x 1
    assert metrics.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert metrics.holm([0.6, 0.7]) == pytest.approx([1, 1])
    np.testing.assert_allclose(metrics.holm([NAN, 0.01, 0.02]), [NAN, 0.02, 0.02])
    assert len(metrics.holm([])) == 0


# Two runs of three prompts, two samples each; accuracies of the prompts over both runs: 0.5, 0.5, 0 and 0.75, 1, 0.25.
FIRST = [[[1, 0], [1, 1], [0, 0]], [[0, 1], [0, 0], [0, 0]]]
SECOND = [[[1, 1], [1, 1], [0, 0]], [[1, 0], [1, 1], [0, 1]]]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function: write an evaluation under evaluations/ whose benchmarks have these scores (R, P, N); None is missing.

    ``about``: settings of benchmarks, by name.
    """
    monkeypatch.chdir(tmp_path)

    def make(name, benchmarks, *, about=None, labels="012", **settings):
        runs, _, samples = np.shape(next(iter(benchmarks.values())))
        values = {
            "model": f"org/{name}",
            "n": samples,
            "runs": runs,
            "temperature": 0.6,
            "top_p": 0.95,
        } | settings
        same = {
            "group": "",
            "verifier": "math",
            "max_new_tokens": 64,
            "chat_template": False,
            "digest": "d",
        }
        values["benchmarks"] = {
            each: {
                "title": each.upper(),
                "prompts": np.shape(scores)[1],
                **same,
                **(about or {}).get(each, {}),
            }
            for each, scores in benchmarks.items()
        }
        folder = Path("evaluations") / name
        with closing(Responses(folder)) as responses:
            for benchmark, scores in benchmarks.items():
                for run, place in np.ndindex(np.shape(scores)[:2]):
                    lists = ["7"] * samples, [10] * samples, [False] * samples, ["so 7"] * samples
                    texts = str(place), f"{place}?", labels[place]
                    responses.append(Row(benchmark, run, place, *texts, scores[run][place], *lists))
        write_json(folder / SETTINGS, values)

    return make


@pytest.fixture
def printed(capsys):
    """Function: what the comparison of some evaluations prints."""

    def run(*argv):
        assert main(["evaluate", "compare", *argv]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def first_and_second(write):
    write("first", {"sums": FIRST})
    write("second", {"sums": SECOND})


def test_a_comparison_has_accuracies_differences_intervals_and_tests_by_hand(
    first_and_second, printed
):
    [found] = json.loads(printed("first", "second", "--json"))["differences"]
    # Runs of second: (1 + 1 + 0) / 3 and (1/2 + 1 + 1/2) / 3; of first: (1/2 + 1) / 3 and (1/2) / 3.
    assert found["accuracy"] == pytest.approx([2 / 3, 2 / 3])
    assert found["baseline_accuracy"] == pytest.approx([1 / 2, 1 / 6])
    # Differences of the prompts 0.25, 0.5, 0.25: s^2 = 1 / 48, error sqrt(1 / 144); t = 4 with 2 degrees of freedom.
    assert found["difference"] == pytest.approx(1 / 3)
    assert found["p"] == found["p_holm"] == pytest.approx((1 - np.sqrt(16 / 18)) / 2)
    assert (found["better"], found["worse"], found["prompts"]) == (3, 0, 3)
    # t of 2 degrees of freedom is 4.30265 at 0.975.
    interval = (1 / 3 - 4.30265 / 12, 1 / 3 + 4.30265 / 12)
    assert (found["low"], found["high"]) == pytest.approx(interval, abs=1e-5)


def test_a_comparison_is_printed_in_points(first_and_second, printed):
    title, header, row = printed("first", "second").splitlines()[:3]
    assert title.split() == ["second", "-", "first"]
    columns = re.split(r"\s{2,}", header.strip())
    cells = re.split(r"\s{2,}", row.strip())
    assert cells[0] == "SUMS"
    assert dict(zip(columns, cells[1:], strict=True)) == {
        "prompts": "3",
        "second": "66.67 \u00b1 0.00",
        "first": "33.33 \u00b1 23.57",
        "difference": "+33.33",
        "95 % interval": "-2.52 to +69.19",
        "p": "0.0286",
        "p (Holm)": "0.0286",
        "better": "3",
        "worse": "0",
    }


def test_averages_are_within_groups_and_holm_is_over_all_benchmarks_and_pairs(write, printed):
    groups = {"sums": {"group": "ID"}, "proofs": {"group": "OOD"}, "products": {"group": "ID"}}
    for name, scores in (("first", FIRST), ("second", SECOND), ("third", SECOND)):
        write(name, dict.fromkeys(groups, scores), about=groups)
    rows = json.loads(printed("first", "second", "third", "--json"))["differences"]
    assert [row["benchmark"] for row in rows] == ["SUMS", "PRODUCTS", "PROOFS", "Avg. ID"] * 2
    p = (1 - np.sqrt(16 / 18)) / 2  # as above
    assert [row["p_holm"] for row in rows if row["benchmark"] != "Avg. ID"] == pytest.approx(
        [6 * p] * 6
    )


def test_missing_samples_and_prompts_are_left_out_and_said(write, printed):
    missing = [[[1, 0], [1, None], [None, None]], [[0, 1], [0, 0], [None, None]]]
    write("first", {"sums": missing})
    write("second", {"sums": SECOND})
    [found] = json.loads(printed("first", "second", "--json"))["differences"]
    # first: runs (1/2 + 1) / 2 and (1/2 + 0) / 2; second without its third prompt: 1 and 3/4
    assert (found["prompts"], found["baseline_accuracy"], found["accuracy"]) == (
        2,
        [0.75, 0.25],
        [1, 0.75],
    )
    assert found["difference"] == pytest.approx(0.375)
    unverified, left_out = printed("first", "second").splitlines()[-2:]
    assert re.match(r"note: SUMS: 41\.7% .*\bfirst\b.* not verified$", unverified)
    assert re.match(r"note: SUMS: 1 prompts left out\b", left_out)


def test_different_settings_are_noted(write, printed):
    write("first", {"sums": FIRST})
    write(
        "second",
        {"sums": [[[1], [0], [1]]]},
        about={"sums": {"max_new_tokens": 8192}},
        temperature=1,
    )
    notes = re.findall(r"^note: different (.*): (\S+) in first, (\S+) in second$",
                       printed("first", "second"), re.MULTILINE)  # fmt: skip
    assert notes == [
        ("n", "2", "1"),
        ("runs", "2", "1"),
        ("temperature", "0.6", "1"),
        ("max_new_tokens of SUMS", "64", "8192"),
    ]


def test_what_cannot_be_compared_is_refused_in_one_line(write, capsys):
    write("first", {"sums": FIRST})
    write("sorts", {"sorts": SECOND})
    write("lost", {"sums": [[[None, None]] * 3] * 2})
    write("other", {"sums": SECOND}, labels="092")
    write("unfinished", {"sums": SECOND}, runs=3)
    for second, message in {
        "nosuch": "'nosuch'; .* first, lost, other, sorts, unfinished",
        "sorts": "first has sums; sorts has sorts",
        "lost": "sums: no prompt .*verified",
        "other": "sums: first and other .*different prompts; evaluate both",
        "unfinished": "unfinished .* 6 of 9 rows of sums; repeat",
    }.items():
        assert main(["evaluate", "compare", "first", second]) == 2
        out, error = capsys.readouterr()
        [line] = error.splitlines()
        assert out == ""
        assert re.search(message, line), line
