"""The evaluate command end to end on the tiny model: whole, killed at random moments, continued, stored.

``OPENRLHF_DBB_KILLS`` sets how often it is killed (1 here, to keep the suite short).
"""

import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time

import psutil
import pytest
from pyarrow import parquet

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.journal import Journal, Key, Row
from openrlhf_dbb.evaluation.results import read_evaluation
from openrlhf_dbb.tiny import default_folder, prepare
from storage import open_store

pytestmark = pytest.mark.e2e

KILLS = int(os.environ.get("OPENRLHF_DBB_KILLS", "1"))
SEED = int(os.environ.get("OPENRLHF_DBB_KILL_SEED", "1"))


@pytest.fixture(scope="module")
def tiny():
    """The tiny preset's files."""
    return prepare(default_folder())


class Evaluating:
    """The command on the tiny model, in a folder."""

    def __init__(self, folder, tiny):
        self.folder = folder
        self._command = [
            sys.executable, "-m", "openrlhf_dbb", "evaluate", "--model", str(tiny.model), "--name", "mine",
            "--max_new_tokens", "10", "--temperature", "1", "--top_p", "1",
        ]  # fmt: skip
        self.place = folder / "evaluations" / "mine"

    def run(self, *flags):
        """To the end; the completed process."""
        done = subprocess.run(
            [*self._command, *flags], cwd=self.folder, text=True, capture_output=True, timeout=400, check=False
        )
        assert done.returncode in (0, 2), done.stderr[-4000:]
        return done

    def kill(self, *flags, rows, delay):
        """SIGKILL to the command, Ray and every engine, ``delay`` seconds after ``rows`` rows are in the journal."""
        process = subprocess.Popen(
            [*self._command, *flags], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 300
        while len(self.journal()) < rows:
            assert process.poll() is None, "ended by itself"
            assert time.monotonic() < deadline, "too slow"
            time.sleep(0.02)
        time.sleep(delay)
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()

    def journal(self):
        """Whole lines of the journal, parsed."""
        path = self.place / "journal.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def manifest(self):
        return json.loads((self.place / "evaluation.json").read_text())

    def rows(self, benchmark):
        return parquet.read_table(self.place / f"{benchmark}.parquet").to_pylist()


def data(path, count):
    """The first rows of a data file."""
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


def check_rows(rows, asked, runs, samples):
    """Every prompt once a run, in order, with N verified responses."""
    assert [(each["run"], each["index"]) for each in rows] == [(r, i) for r in range(runs) for i in range(len(asked))]
    seen = []
    for each in rows:
        question = asked[each["index"]]
        assert (each["prompt"], each["label"]) == (question["input"], question["label"])
        assert len(each["responses"]) == samples
        plain = [
            re.fullmatch(r"0|[1-9]\d*", response) for response in each["responses"]
        ]  # such answers need no mathematics
        right = [response == question["label"] for response in each["responses"]]
        assert all(score == hit for score, hit, digits in zip(each["scores"], right, plain, strict=True) if digits)
        seen += map(bool, plain)
    assert statistics.mean(seen) > 0.8
    # A token is a character, and the end of sequence is one more; seldom a special token is sampled within.
    lengths = [
        (tokens, len(response) + (not cut))
        for each in rows
        for tokens, response, cut in zip(each["tokens"], each["responses"], each["truncated"], strict=True)
    ]
    assert all(shown <= tokens <= 10 for tokens, shown in lengths)
    assert statistics.mean(shown == tokens for tokens, shown in lengths) > 0.95


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory):
    """Two benchmarks, two engines, 4 samples, 2 runs, to the end."""
    evaluating = Evaluating(tmp_path_factory.mktemp("evaluated"), tiny)
    benchmarks = f"heldout={tiny.heldout},train={tiny.train}"
    evaluating.flags = ["--benchmarks", benchmarks, "--limit", "20", "--n", "4", "--runs", "2", "--engines", "2"]
    done = evaluating.run(*evaluating.flags)
    assert done.returncode == 0, done.stderr
    return evaluating, done


def test_an_evaluation_is_written_whole(evaluated, tiny):
    evaluating, _ = evaluated
    for name, path in (("heldout", tiny.heldout), ("train", tiny.train)):
        check_rows(evaluating.rows(name), data(path, 20), runs=2, samples=4)
    manifest = evaluating.manifest()
    assert (manifest["status"], manifest["n"], manifest["runs"]) == ("finished", 4, 2)
    assert manifest["engine_seeds"] == [0, 1]
    assert not (evaluating.place / "journal.jsonl").exists()
    assert read_evaluation(evaluating.place).results["heldout"].shape == (2, 20, 4)


def test_the_summary_is_what_the_files_say(evaluated):
    evaluating, done = evaluated
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line[:1].isalpha()}
    means = {}
    for name in ("heldout", "train"):
        rows = evaluating.rows(name)
        by_run = [[each["scores"] for each in rows if each["run"] == run] for run in (0, 1)]
        measures = {
            "acc": [statistics.mean(score for scores in run for score in scores) for run in by_run],
            "best": [statistics.mean(max(scores) for scores in run) for run in by_run],
        }
        for values in measures.values():
            cell = f"{100 * statistics.mean(values):.2f} \u00b1 {100 * statistics.stdev(values):.2f}"
            assert cell in lines[name]
        means[name] = statistics.mean(measures["acc"])
        tokens = statistics.mean(tokens for each in rows for tokens in each["tokens"])
        assert re.search(rf" {tokens:.0f} +0\.\d% +0\.0%$", lines[name])
    assert f"{100 * statistics.mean(means.values()):.2f} \u00b1" in lines["average"]


def test_a_finished_evaluation_called_again_prints_its_summary(evaluated):
    evaluating, done = evaluated
    again = evaluating.run(*evaluating.flags)
    assert again.returncode == 0
    assert "all 320 responses are done" in again.stdout
    assert again.stdout.splitlines()[-6:] == done.stdout.splitlines()[-6:]
    assert evaluating.manifest()["engine_seeds"] == [0, 1]  # no engine was started


def test_a_finished_evaluation_is_stored_with_its_run(evaluated, fill):
    evaluating, _ = evaluated
    url = f"sqlite:///{evaluating.folder}/store.db"
    with open_store(url) as store:
        fill.run(store, "first")
        refused = evaluating.run(*evaluating.flags, "--store.url", url, "--run", "second")
        assert (refused.returncode, "second" in refused.stderr) == (2, True)
        evaluating.run(*evaluating.flags, "--store.url", url, "--run", "first")
        [rows] = store.query("SELECT count(*), sum(samples), sum(successes) FROM evaluation_results")
    scores = [score for name in ("heldout", "train") for each in evaluating.rows(name) for score in each["scores"]]
    assert rows == (2 * 2 * 20, len(scores), sum(scores))


def test_an_evaluation_killed_while_its_files_were_written_needs_no_engine(evaluated, tiny, tmp_path):
    """As left by a process killed after the first file, in the middle of the second."""
    before, _ = evaluated
    evaluating = Evaluating(tmp_path, tiny)
    shutil.copytree(before.place, evaluating.place)
    lists = ("scores", "answers", "responses", "tokens", "truncated")
    journal = Journal(evaluating.place / "journal.jsonl")
    for name in ("heldout", "train"):
        for each in evaluating.rows(name):
            journal.append(Row(Key(name, each["run"], each["index"]), **{key: each[key] for key in lists}))
    (evaluating.place / "train.parquet").rename(evaluating.place / ".train.parquet.building")
    manifest = evaluating.manifest() | {"status": "running"}
    (evaluating.place / "evaluation.json").write_text(json.dumps(manifest))

    assert evaluating.run(*before.flags).returncode == 0
    assert evaluating.manifest() == before.manifest()
    assert [evaluating.rows(name) for name in ("heldout", "train")] == [before.rows(n) for n in ("heldout", "train")]
    assert sorted(path.name for path in evaluating.place.glob("*")) == sorted(p.name for p in before.place.glob("*"))


def test_other_settings_under_the_same_name_are_refused(evaluated):
    evaluating, _ = evaluated
    refused = evaluating.run(*evaluating.flags, "--temperature", "0.6")
    assert refused.returncode == 2
    assert "--temperature 1.0, not 0.6; give another --name" in refused.stderr


@pytest.mark.long  # what a kill between two writes leaves is tested above
def test_a_killed_evaluation_continues_and_more_runs_are_added(tiny, tmp_path):
    moments = random.Random(SEED)
    evaluating = Evaluating(tmp_path, tiny)
    asked = ["--benchmarks", f"heldout={tiny.heldout},train={tiny.train}", "--n", "8"]
    flags = [*asked, "--runs", "4"]
    total = 4 * (128 + 512)
    journaled = {}
    for kill in range(KILLS):
        evaluating.kill(
            *flags, rows=math.ceil(total * (kill + moments.random()) / (KILLS + 1)), delay=moments.random() / 4
        )
        rows = evaluating.journal()
        keys = [(each["benchmark"], each["run"], each["index"]) for each in rows]
        assert len(set(keys)) == len(keys)
        by_key = dict(zip(keys, rows, strict=True))
        assert journaled.items() <= by_key.items()
        journaled = by_key
    assert evaluating.manifest()["status"] == "running"
    with pytest.raises(UsageError, match="not 'finished'; run the evaluate command that started it again"):
        read_evaluation(evaluating.place)

    done = evaluating.run(*flags)
    assert f"continuing; {8 * len(journaled)} of {8 * total} responses are done" in done.stdout
    check_rows(evaluating.rows("heldout"), data(tiny.heldout, None), runs=4, samples=8)
    check_rows(evaluating.rows("train"), data(tiny.train, None), runs=4, samples=8)
    ended = {
        (name, each["run"], each["index"]): each for name in ("heldout", "train") for each in evaluating.rows(name)
    }
    for key, each in journaled.items():
        assert each["responses"] == ended[key]["responses"]

    assert evaluating.run(*asked, "--runs", "5").returncode == 0
    later = evaluating.rows("heldout")
    check_rows(later, data(tiny.heldout, None), runs=5, samples=8)
    assert later[: 4 * 128] == [each for key, each in ended.items() if key[0] == "heldout"]
    assert len(set(evaluating.manifest()["engine_seeds"])) == KILLS + 2
    by_run = [[each["responses"] for each in later if each["run"] == run] for run in range(5)]
    assert all(one != other for one, other in itertools.pairwise([*by_run, by_run[0]]))  # no run is drawn again
