"""Trainings that share their actors."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


class Lane:
    """Trains command lines one after another in one process and the same actors: ``python -m study lane``.

    Only for runs that agree in vLLM's engine flags and the number of ranks, and that leave the actors alive.
    """

    def __init__(self, log):
        self.folder, self._log, self._process = log.parent, log, None

    def train(self, folder, *argv, timeout=400):
        """Train as the command would in this folder; ``error`` in one line or None, and ``output``, all printed."""
        if self._process is None:
            self._start()
        runs = f"{folder}/runs/{{run}}"
        places = {
            "store.url": f"sqlite:///{folder}/openrlhf_dbb.db",
            "ckpt.path": f"{runs}/checkpoints",
            "ckpt.output_dir": f"{runs}/model",
            "logger.tensorboard_dir": f"{runs}/tensorboard",
        }
        line = [word for flag, value in places.items() for word in (f"--{flag}", value)] + list(argv)
        printed = self._log.stat().st_size
        alarm = threading.Timer(timeout, self._process.kill)
        alarm.start()
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        alarm.cancel()
        output = self._log.read_bytes()[printed:].decode()
        if not answer:
            status, self._process = self._process.wait(), None
            pytest.fail(f"the lane ended with exit status {status}: {output[-4000:]}")
        return SimpleNamespace(error=json.loads(answer)["error"], output=output)

    def _start(self):
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "study", "lane"],
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "WANDB_MODE": "offline"},
                cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def close(self):
        """End the process, which stops the actors."""
        if self._process is not None:
            _, _ = self._process.communicate(timeout=120)
            assert self._process.returncode == 0, self._log.read_text()[-4000:]
