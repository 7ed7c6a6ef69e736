"""The evaluate command end to end on the tiny model: whole, killed, continued, stored."""

import itertools
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import chdir, nullcontext
from subprocess import DEVNULL, PIPE
from unittest import mock

import psutil
import pytest
from trainings import kill_tree

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import command
from openrlhf_dbb.evaluation.results import read_evaluation
from openrlhf_dbb.platform.vllm_requests import Finished
from openrlhf_dbb.storage import open_store
from openrlhf_dbb.tiny import default_folder, prepare

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tiny():
    """The tiny preset's files."""
    return prepare(default_folder())


class Evaluating:
    """The command on the tiny model, in a folder."""

    def __init__(self, folder, tiny):
        self.folder = folder
        self._arguments = [
            "evaluate", "--model", str(tiny.model), "--name", "mine",
            "--benchmarks", f"heldout={tiny.heldout},train={tiny.train}",
            "--max_new_tokens", "10", "--temperature", "1", "--top_p", "1",
        ]  # fmt: skip
        self._command = [sys.executable, "-m", "openrlhf_dbb", *self._arguments]
        self.place = folder / "evaluations" / "mine"

    def run_here(self, *flags):
        """In this process; the exit code."""
        with chdir(self.folder):
            return main([*self._arguments, *flags])

    def run(self, *flags):
        """To the end; what is printed."""
        command = [*self._command, *flags]
        return subprocess.run(
            command, cwd=self.folder, text=True, stdout=PIPE, timeout=1800, check=True
        ).stdout

    def kill(self, *flags, rows):
        """SIGKILL to the command, Ray and every engine when so many rows are written."""
        kill_tree(self._begun(flags, rows))

    def kill_engine(self, *flags, rows):
        """SIGKILL to an engine when so many rows are written; the exit code and the last line on stderr."""
        process = self._begun(flags, rows)
        started = psutil.Process(process.pid).children(recursive=True)
        engine, *_ = [each for each in started if "EngineActor" in each.cmdline()[0]]
        engine.kill()
        _, errors = process.communicate(timeout=300)
        return process.returncode, errors.splitlines()[-1]

    def _begun(self, flags, rows):
        """The process of the command, which has written so many rows."""
        process = subprocess.Popen(
            [*self._command, *flags], cwd=self.folder, text=True, stdout=DEVNULL, stderr=PIPE
        )
        deadline = time.monotonic() + 900
        while len(self.rows()) < rows:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return process

    def rows(self, benchmark=None):
        """Whole lines of the responses, in the order of runs and prompts."""
        path = self.place / "responses.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        rows = [row for row in map(json.loads, lines) if benchmark in (None, row["benchmark"])]
        return sorted(rows, key=lambda row: (row["benchmark"], row["run"], row["place"]))


def check_rows(rows, path, runs, samples, count=None):
    """Each of the first prompts of a data file once a run, with N verified responses."""
    asked = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    places = [(each["run"], each["place"]) for each in rows]
    assert places == list(itertools.product(range(runs), range(len(asked))))
    answers = []
    for row in rows:
        question = asked[row["place"]]
        assert [row["prompt"], row["label"]] == list(question.values())
        assert len(row["responses"]) == samples
        columns = (row[name] for name in ("responses", "scores", "tokens", "truncated"))
        answers += [check_answer(question["label"], *each) for each in zip(*columns, strict=True)]
    plain, whole = zip(*answers, strict=True)
    assert statistics.mean(plain) > 0.8
    assert statistics.mean(whole) > 0.95


def check_answer(label, response, score, tokens, is_cut):
    """Whether a response is a plain number, and whether each of its tokens is a character."""
    # Such answers need no mathematics
    is_plain = re.fullmatch(r"0|[1-9]\d*", response) is not None
    if is_plain:
        assert score == (response == label)
    # A token is a character, and the end of sequence is one more; seldom a special token is sampled within.
    characters = len(response) + (not is_cut)
    assert characters <= tokens <= 10
    return is_plain, characters == tokens


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory):
    """Two benchmarks, two engines, 4 samples, 2 runs, to the end."""
    evaluating = Evaluating(tmp_path_factory.mktemp("evaluated"), tiny)
    evaluating.flags = ["--limit", "20", "--n", "4", "--runs", "2", "--engines", "2"]
    return evaluating, evaluating.run(*evaluating.flags)


def test_an_evaluation_is_written_whole_and_its_summary_is_what_the_file_says(evaluated, tiny):
    evaluating, printed = evaluated
    assert read_evaluation(evaluating.place).results["heldout"].scores_R_P_N.shape == (2, 20, 4)
    lines = {line.split()[0]: line for line in printed.splitlines() if line[:1].isalpha()}
    means = []
    for name, path in (("heldout", tiny.heldout), ("train", tiny.train)):
        check_rows(evaluating.rows(name), path, runs=2, samples=4, count=20)
        means.append(
            statistics.mean(score for row in evaluating.rows(name) for score in row["scores"])
        )
        # test_evaluation_run.py has all numbers
        assert printed_mean(lines[name]) == pytest.approx(100 * means[-1], abs=0.0051)
    assert printed_mean(lines["average"]) == pytest.approx(100 * statistics.mean(means), abs=0.0051)


def printed_mean(line):
    """The number before the first plus-minus sign; it has two digits."""
    return float(re.search(r"([0-9.]+) \u00b1", line)[1])


def test_a_finished_evaluation_called_again_starts_no_engine_and_is_stored_with_its_run(
    evaluated, fill, capsys
):
    evaluating, printed = evaluated
    url = f"sqlite:///{evaluating.folder}/store.db"
    written = (evaluating.place / "responses.jsonl").read_bytes()
    with (
        open_store(url) as store,
        mock.patch.object(command, "ray_started", side_effect=AssertionError),
    ):
        fill.run(store, "first")
        assert evaluating.run_here(*evaluating.flags, "--store.url", url, "--run", "first") == 0
        [rows] = store.query(
            "SELECT count(*), sum(samples), sum(successes) FROM evaluation_results"
        )
    again = capsys.readouterr().out
    assert "80 of 80 prompts are done" in again
    assert printed.splitlines()[-5:] == again.splitlines()[-6:-1]
    assert (evaluating.place / "responses.jsonl").read_bytes() == written
    scores = [score for each in evaluating.rows() for score in each["scores"]]
    assert rows == (2 * 2 * 20, len(scores), sum(scores))


def other_engines(arguments, seeds, sampling, requests):
    """Answer -1 to every request."""
    n = sampling["n"]
    return ([Finished(each.number, ["-1"] * n, [3] * n, [False] * n)] for each in requests)


def test_an_evaluation_cut_off_within_a_line_is_continued(evaluated, tiny, tmp_path, capsys):
    before, _ = evaluated
    evaluating = Evaluating(tmp_path, tiny)
    shutil.copytree(before.place, evaluating.place)
    path = evaluating.place / "responses.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    kept = evaluating.rows()
    with pytest.raises(UsageError, match=r"is not finished, .* repeat the evaluate command"):
        read_evaluation(evaluating.place)
    with mock.patch.multiple(
        command, generate=other_engines, ray_started=lambda *_: nullcontext(1)
    ):
        assert evaluating.run_here(*before.flags) == 0
    assert f"{len(kept)} of 80 prompts are done" in capsys.readouterr().out
    ended = evaluating.rows()
    assert [row for row in ended if row["responses"] != ["-1"] * 4] == kept and 0 < len(kept) < len(
        ended
    ) == 80


@pytest.mark.long  # what a kill leaves is tested above, with other engines
def test_a_killed_evaluation_continues_and_more_runs_are_added(tiny, tmp_path):
    evaluating = Evaluating(tmp_path, tiny)
    total = 4 * (128 + 512)
    code, line = evaluating.kill_engine("--runs", "4", rows=1)
    assert code == 1
    assert line.startswith("error: an engine has died") and "the same command goes on" in line
    kept = evaluating.rows()
    for share in (0, 1 / 3):
        evaluating.kill("--runs", "4", rows=int(total * (share + random.random() / 3)) + 1)
        rows = evaluating.rows()
        assert all(row in rows for row in kept)
        kept = rows
    assert f"{len(kept)} of {total} prompts are done" in evaluating.run("--runs", "4")
    evaluating.run("--runs", "5")
    check_rows(evaluating.rows("heldout"), tiny.heldout, runs=5, samples=8)
    check_rows(evaluating.rows("train"), tiny.train, runs=5, samples=8)
    by_run = [[] for _ in range(5)]
    for row in evaluating.rows("heldout"):
        by_run[row["run"]].append(row["responses"])
    # No run is drawn again
    for one, other in itertools.pairwise([*by_run, by_run[0]]):
        assert one != other
