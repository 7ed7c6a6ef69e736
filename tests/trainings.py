"""What the tests of trainings share: actors, flags of a small run, and readers of what it has left behind."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filler import check

from openrlhf_dbb import Posteriors, estimators
from openrlhf_dbb.storage import open_store

FORMS = estimators.FORMS
EACH = []
"""Every estimator, and every advantage form, once."""
for _estimator in estimators.available():
    EACH.append((_estimator, "group_norm"))
for _form in FORMS.available():
    EACH.append(("dbb", _form))


# 32 prompts, 16 a step: 2 steps an epoch; 8 rollouts a prompt, 2 optimizer steps a step.
SMALL = [
    "--preset", "tiny", "--data.max_samples", "32", "--rollout.batch_size", "16", "--train.batch_size", "64",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32",
]  # fmt: skip
DISCOUNT = 0.5  # of the preset
ROOT = Path(__file__).parents[1]


def until(condition):
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kill_tree(process):
    """SIGKILL to the driver, Ray's daemons, every actor: all at once, as an out-of-memory machine would."""
    import psutil

    root = psutil.Process(process.pid)
    for member in [root, *root.children(recursive=True)]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def rows(folder, sql, database="openrlhf_dbb.db"):
    """The rows of a query to the run's SQLite database."""
    with sqlite3.connect(f"file:{folder}/{database}?mode=ro", uri=True, timeout=10) as connection:
        return connection.execute(sql).fetchall()


def last_step(folder, database="openrlhf_dbb.db"):
    """The last step that is stored; 0 where the database or its tables are still being made."""
    try:
        [(step,)] = rows(folder, "SELECT max(last_step) FROM dbb_run", database)
    except sqlite3.OperationalError:
        return 0
    return step or 0


def wait_for_step(folder, step, process, database="openrlhf_dbb.db", wait_s=600):
    """Wait until a run has stored a step. Its process, which writes into the folder's ``log``, must not end before."""
    deadline = time.monotonic() + wait_s
    while last_step(folder, database) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"no step {step}: {(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.02)


def change(folder, *statements):
    """Run statements on the run's SQLite database."""
    with sqlite3.connect(folder / "openrlhf_dbb.db") as connection:
        for statement in statements:
            connection.execute(statement)


def unfinish(folder):
    """Make a finished run look like one whose process was killed after the last step, before it saved the model."""
    change(
        folder,
        "UPDATE dbb_run SET status = 'running', owner_host = '', owner_pid = 0, owner_started = NULL",
    )


def logged(folder):
    """Each tag in a folder of TensorBoard, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    values = {}
    for tag in events.Tags()["scalars"]:
        values[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return values


def check_store(folder):
    """The tables agree, and a posterior of DBB is what Algorithm 1 makes of the one before."""
    with open_store(f"sqlite:///{folder}/openrlhf_dbb.db", create=False) as store:
        assert check(store) == []


def check_posteriors(folder, steps):
    """Steps 1 to ``steps`` are whole."""
    check_store(folder)
    groups = rows(
        folder, "SELECT step, count(*) FROM posterior_history GROUP BY step ORDER BY step"
    )
    assert groups == [(step, 16) for step in range(1, steps + 1)]


class Lane:
    """Trains command lines one after another in one process and the same actors: ``python -m study lane``.

    Only for runs that agree in vLLM's engine flags and the number of ranks, and that leave the actors alive.
    """

    def __init__(self, log):
        self.folder = log.parent
        self._log = log
        self._process = None

    def train(self, folder, *argv, timeout=1800):
        """Train as the command would in this folder; ``error`` in one line or None, and ``output``, all printed."""
        if self._process is None:
            self._start()
        runs = f"{folder}/runs/{{run}}"
        places = [
            f"--store.url=sqlite:///{folder}/openrlhf_dbb.db",
            f"--ckpt.path={runs}/checkpoints",
            f"--ckpt.output_dir={runs}/model",
            f"--logger.tensorboard_dir={runs}/tensorboard",
        ]
        printed = self._log.stat().st_size
        answer = self._answer([*places, *argv], timeout)
        output = self._log.read_bytes()[printed:].decode()
        if not answer:
            status = self._process.wait()
            self._process = None
            pytest.fail(f"the lane ended with exit status {status}: {output[-4000:]}")
        return SimpleNamespace(error=json.loads(answer)["error"], output=output)

    def _answer(self, command_line, timeout):
        """The lane's line about a command line; empty if it ended or was killed after ``timeout`` seconds."""
        alarm = threading.Timer(timeout, self._process.kill)
        alarm.start()
        self._process.stdin.write(json.dumps(command_line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        alarm.cancel()
        return answer

    def _start(self):
        environment = dict(os.environ)
        environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment["WANDB_MODE"] = "offline"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "study", "lane"],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self):
        """End the process, which stops the actors."""
        if self._process is not None:
            _, _ = self._process.communicate(timeout=300)
            assert self._process.returncode == 0, self._log.read_text()[-4000:]


def in_ones_own_loop(folder, estimator, form, prompts, labels, rewards, tokens):
    """The advantages of a first step, whitened by hand where the form is."""
    url = f"sqlite:///{folder}/loop.db"
    with Posteriors.create(url, "loop", prompts, labels, estimator=estimator) as posteriors:
        advantages = posteriors.observe(1, prompts, labels, rewards, form=form).advantages
    if not FORMS.get(form).whitened:
        return advantages
    by_token = np.repeat(advantages, tokens)
    return (advantages - by_token.mean()) / by_token.std()


def check_questions(folder, capsys, run, prompt, advantages, database="openrlhf_dbb.db"):
    """``explain`` tells the arithmetic of each advantage of a prompt's first visit; the page holds its visits."""
    from openrlhf_dbb.cli.main import main

    url = f"sqlite:///{folder}/{database}"
    capsys.readouterr()
    assert main(["explain", run, "1", prompt, "--json", "--store.url", url]) == 0
    explained = json.loads(capsys.readouterr().out)
    again = [
        row["weight"] * (row["reward"] - row["baseline"]) / row["scale"]
        for row in explained["rollouts"]
    ]
    assert again == pytest.approx(list(advantages), abs=1e-6)
    page = folder / "page.html"
    assert main(["report", run, "-o", str(page), "--store.url", url]) == 0
    answers = page_data(page)["answers"]
    address = f"prompts/{explained['prompt_id']}"
    [shown] = [answer for path, answer in answers.items() if path.endswith(address)]
    assert shown["text"] == explained["prompt"]
    assert shown["label"] == explained["label"]
    assert len(shown["visits"]["step"]) == 1


def page_data(page):
    """What the file of a report holds for its script."""
    after = page.read_text(encoding="utf-8").split('<script id="data" type="application/json">')[1]
    return json.loads(after.split("</script>")[0])
