"""The line that the training command prints during a training, and the summary at its end."""

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
from scipy import stats

pytest.importorskip("openrlhf")

from openrlhf_dbb.actors.progress import EVALUATING, GENERATING, TRAINING, Progress
from openrlhf_dbb.driver import progress_line
from openrlhf_dbb.driver import summary as at_the_end
from openrlhf_dbb.driver.progress_line import ProgressLine
from openrlhf_dbb.terminal import print_error, say

NAN = math.nan


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def summary(store, run, progress):
    start = SimpleNamespace(run=run.record, store_url=store.url, location=store.location)
    return at_the_end.summary(start, progress, 61)


# Successes of 4 rollouts of 4 prompts, in five steps.
STEPS = [[0, 0, 4, 4], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
# And of 4 samples in evaluations, by step.
EVALUATIONS = {0: [0, 1, 2, 4], 2: [4, 4, 4, 4], 5: [2, 2, 2, 4]}


@pytest.fixture
def told(store, fill):
    """The lines of a run's summary by their first word."""
    run = fill.run(store)
    ids = fill.prompts(store, 4)
    for step, successes in enumerate(STEPS, start=1):
        fill.step(run, step, ids, successes)
    for step, successes in EVALUATIONS.items():
        run.record_evaluation(
            step, "training", [fill.evaluation(ids, successes)], model="", config={}
        )
    run.finish(unused_rollouts=3)
    progress = Progress(step=5, accuracy={0: 7 / 16, 2: 1.0, 5: 10 / 16})
    lines = summary(store, run, progress).splitlines()
    return dict(line[2:].split(maxsplit=1) for line in lines[2:])


def test_the_summary_has_the_change_of_accuracy_with_its_interval(told):
    low, high = stats.ttest_1samp([2 / 4, 1 / 4, 0, 0], 0).confidence_interval()
    assert re.search(r"43\.8% before, 62\.5% after", told["accuracy"])
    interval = re.escape(f"95 % interval {100 * low:+.1f} to {100 * high:+.1f}")
    assert re.search(rf"\+18\.8 points, {interval} .*4 prompts x 4 samples", told["accuracy"])


def test_the_summary_counts_the_rollouts(told):
    # 5 steps of 4 groups of 4; each prompt is skipped each time
    for number in ("83 generated", "80 trained on", "3 left over", "20 prompts skipped"):
        assert number in told["rollouts"]


def test_the_summary_has_the_shares_of_groups_with_equal_rewards(told):
    # Zero variance where all or none of 4 rollouts are right: 4, 1, 1, 1 and 2 of the 4 groups, 9 of 20. A quarter of
    # 5 steps are 2 steps: 5 of 8 groups and 3 of 8.
    assert re.search(r"^45% of 20 .*first quarter 62%, last 38%", told["groups"])


def test_the_summary_follows_one_prompt_and_names_the_next_command(store, told):
    elsewhere = re.escape(f"--store.url {store.location}")
    # 4.5 / 5 after 4 of 4; then four times 0 of 4 with discount 0.5: 2.25 / 6.5, 1.125 / 7.25, ...
    means = r"prompt 3 .*\b0\.90, 0\.35, 0\.16, 0\.07, 0\.04 after steps 1, 2, 3, 4, 5"
    prompt_id = fourth_prompt(store)
    assert re.search(rf"{means}: openrlhf-dbb history {prompt_id} {elsewhere}$", told["one"])
    assert re.search(rf"^openrlhf-dbb serve {elsewhere}", told["next"])


def fourth_prompt(store):
    [(prompt_id,)] = store.query("SELECT prompt_id FROM prompts WHERE prompt = 'prompt 3'")
    return prompt_id


@pytest.mark.parametrize(("successes", "advised"), [([0, 0, 4, 1], True), ([0, 0, 1, 1], False)])
def test_where_three_quarters_of_the_groups_are_equal_the_next_run_is_advised_to_draw(
    store, fill, successes, advised
):
    run = fill.run(store)
    ids = fill.prompts(store, 4)
    fill.step(run, 1, ids, successes)
    text = summary(store, run, Progress(step=1))
    assert ("--method draws --warm_start run" in text) == advised


def examples(*problems):
    prompts, before, after = zip(*problems, strict=True)
    return [line.strip() for line in at_the_end.examples(prompts, before, after)]


SAME = ("kept", ("5", 1.0), ("6", 1.0))
UNKNOWN = ("unknown", ("5", NAN), ("6", 1.0))
UP = ("up", ("5", 0.0), ("6", 1.0))
DOWN = ("down", ("5", 1.0), ("", 0.0))
GRADED = ("graded", ("a", 0), ("b", 0.5))


def test_the_examples_are_of_both_directions_and_counted_apart():
    heading, *lines = examples(SAME, DOWN, UNKNOWN, DOWN, UP, UP, UP)
    assert re.search(r"\b7 .*\b3 scored higher, 2 lower", heading)
    up = ["up", "before  wrong  5", "after   right  6"]
    down = ["down", "before  right  5", "after   wrong  (empty)"]
    assert lines == up + up + down


def test_an_example_shows_a_score_between_0_and_1_as_a_number():
    heading, *lines = examples(DOWN, DOWN, GRADED)
    assert "1 scored higher, 2 lower" in heading
    assert lines[0::3] == ["graded", "down", "down"]
    assert lines[1:3] == ["before  wrong  a", "after   score 0.5  b"]


def test_an_example_without_a_score_is_called_unverified_and_counted_in_no_direction():
    heading, *lines = examples(UNKNOWN, SAME)
    assert "0 scored higher, 0 lower" in heading
    assert lines[:3] == ["unknown", "before  unverified  5", "after   right  6"]


def test_an_example_fits_the_terminal_and_shows_the_question_and_the_result():
    def chat(question):
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{question}\nAnswer with \\box."},
        ]

    long = "so that " * 9 + "it is \\box{4}\n"
    _, first, before, after, second, *_ = examples(
        (chat("What is 2 + 2?"), (long, 0.0), ("First,\x1b[31m\n4", 1.0)),
        (chat("What is the sum of all odd numbers below 10?"), ("25", 1.0), ("5", 0.0)),
    )
    assert (first, after) == ("What is 2 + 2?", "after   right  First,\\x1b[31m 4")
    assert second == "What is the sum of all odd numb..."
    assert before == "before  wrong  ...at it is \\box{4}" and len(before) == 40 - 6
    assert examples(("a\x1b[31mb", ("\x07", 0.0), ("1", 1.0)))[1:3] == [
        "a\\x1b[31mb",
        "before  wrong  \\x07",
    ]


def training(step=1, ends=(0.0, 74.0), **more):
    progress = Progress(step=step, total=24, since=80.0, **more)
    progress.ends = list(ends)
    return progress


@pytest.mark.parametrize(
    ("progress", "done", "fields"),
    [
        # before the first step is whole, nothing is said about the pace
        (training(0, [0.0], phase=GENERATING, size=64), 41, ["step 1 of 24", "generating 41/64"]),
        # 23 steps of 74 s are left, less the 11 s of the present one: 1691 s
        (
            training(phase=TRAINING, size=16),
            3,
            ["step 2 of 24", "training 3/16", "74 s a step", "28 min left"],
        ),
        # long responses all end at the same time: the count stands still, the time does not
        (
            Progress(total=24, phase=GENERATING, size=64, since=60.0),
            0,
            ["step 1 of 24", "generating 0/64 25 s"],
        ),
        (training(24, phase="finished"), None, ["finished 24 of 24 steps", "74 s a step"]),
    ],
)
def test_the_line_names_step_phase_count_pace_and_time_left(progress, done, fields):
    said = progress_line.progress_text(progress, done, now=85.0)
    assert said.split(" \u00b7 ") == fields


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_is_rewritten_and_warnings_above_it():
    stream = Terminal()
    line = ProgressLine(stream)
    line.show("step 1")
    line.show("step 1")
    line.warn("careful")
    line.show("step 2")
    line.show("finished", last=True)
    written = (
        "\rstep 1\x1b[K" + "\r\x1b[Kwarning: careful\n" + "\rstep 2\x1b[K" + "\rfinished\x1b[K\n"
    )
    assert stream.getvalue() == written


@pytest.mark.parametrize(("columns", "fields"), [(40, 2), (80, 5), (200, 7)])
def test_a_narrow_terminal_leaves_out_the_last_fields_and_cuts_none(monkeypatch, columns, fields):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = training(
        phase=EVALUATING, size=512, reward=0.25, zero_variance=0.5, accuracy={0: 0.02, 8: 0.125}
    )
    whole = ["step 2 of 24", "held-out 12.5 %", "evaluating 12/512", "reward 0.250", "74 s a step", "28 min left",
             "zero variance 50 %"]  # fmt: skip
    stream = Terminal()
    ProgressLine(stream).show(progress_line.progress_text(progress, 12, now=85.0), last=True)
    assert stream.getvalue() == f"\r{' · '.join(whole[:fields])}\x1b[K\n"


def test_a_log_gets_a_line_every_ten_seconds_and_the_last(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)
    stream = io.StringIO()
    line = ProgressLine(stream)
    for second in range(31):
        now = 100.0 + second
        line.show(f"second {second}")
    line.show("finished", last=True)
    assert stream.getvalue().split("\n") == [
        "second 0",
        "second 10",
        "second 20",
        "second 30",
        "finished",
        "",
    ]


def test_an_output_that_takes_nothing_does_not_end_a_training(monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("the plan")
        say("the summary")  # said once
        line = ProgressLine(full)
        line.show("step 1 of 2", last=True)
        line.warn("token=hunter2")
    assert re.fullmatch("warning: .*No space left on device\n", capfd.readouterr().err)
    with open("/dev/full", "w") as full:
        ProgressLine(full).warn("few are right")
        monkeypatch.setattr(sys, "stderr", full)
        print_error("error: lost")


def test_a_warning_beside_the_progress_line_is_masked():
    stream = io.StringIO()
    ProgressLine(stream).warn("http://u:hunter2@h/x is slow")
    assert stream.getvalue() == "warning: http://***@h/x is slow\n"
