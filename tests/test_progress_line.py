"""The line that says what a training is doing, on a terminal and in a log."""

import io

import pytest

pytest.importorskip("ray")

from openrlhf_dbb.actors.progress import EVALUATING, GENERATING, TRAINING, Progress
from openrlhf_dbb.driver import progress_line
from openrlhf_dbb.driver.progress_line import ProgressLine, text


def training(step=1, ends=(0.0, 74.0), **more):
    progress = Progress(step=step, total=24, since=80.0, **more)
    progress.ends = list(ends)
    return progress


@pytest.mark.parametrize(
    ("progress", "done", "line"),
    [
        # before the first step is whole, nothing is said about the pace
        (training(0, [0.0], phase=GENERATING, size=64), 41, "step 1 of 24 · generating 41/64"),
        # 23 steps of 74 s are left, less the 11 s of the present one: 1691 s
        (training(phase=TRAINING, size=16), 3, "step 2 of 24 · training 3/16 · 74 s a step · 28 min left"),
        # long responses all end at the same time: the count stands still, the time does not
        (Progress(total=24, phase=GENERATING, size=64, since=60.0), 0, "step 1 of 24 · generating 0/64 25 s"),
        (
            training(phase=EVALUATING, size=512, reward=0.25, zero_variance=0.5, accuracy={0: 0.02, 8: 0.125}),
            12,
            "step 2 of 24 · held-out 12.5 % · evaluating 12/512 · reward 0.250 · 74 s a step · 28 min left · "
            "zero variance 50 %",
        ),
        (training(24, phase="finished"), None, "finished 24 of 24 steps · 74 s a step"),
    ],
)
def test_the_line_names_step_phase_count_pace_and_time_left(progress, done, line):
    assert text(progress, done, now=85.0) == line


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
    written = "\rstep 1\x1b[K" + "\r\x1b[Kwarning: careful\n" + "\rstep 2\x1b[K" + "\rfinished\x1b[K\n"
    assert stream.getvalue() == written


@pytest.mark.parametrize(("columns", "fields"), [(40, 2), (80, 5)])
def test_a_narrow_terminal_leaves_out_the_last_fields_and_cuts_none(monkeypatch, columns, fields):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = training(phase=EVALUATING, size=512, reward=0.25, zero_variance=0.5, accuracy={0: 0.02, 8: 0.125})
    whole = ["step 2 of 24", "held-out 12.5 %", "evaluating 12/512", "reward 0.250", "74 s a step", "28 min left",
             "zero variance 50 %"]  # fmt: skip
    stream = Terminal()
    ProgressLine(stream).show(text(progress, 12, now=85.0), last=True)
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
    assert stream.getvalue().split("\n") == ["second 0", "second 10", "second 20", "second 30", "finished", ""]
