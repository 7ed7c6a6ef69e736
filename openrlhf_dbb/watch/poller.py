"""Keeps the answers of a server up to date: one thread polls the store for all clients, one reads histories."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime

from openrlhf_dbb.watch.answers import Answers
from openrlhf_dbb.watch.cache import Cache
from openrlhf_dbb.watch.numbers import encoded
from openrlhf_dbb.watch.runs import Followed
from storage import StoreError
from storage.retry import impatient

EVERY_S = 0.5
"""Between two polls."""

IDLE_S = 5.0
"""After so long without a client the store is left alone."""

_FRESH_S = 1.0
_FIRST_WAIT_S = 2.0
_PART_S = 0.2
_PAUSE_S = 1.0
_log = logging.getLogger("openrlhf_dbb")
_READS_HISTORY = ("posteriors", "prompts")


class Poller:
    """Answers that are at most ``EVERY_S`` behind the store while somebody asks."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._cache = Cache()
        self._asked = self._polled = -float("inf")  # moments of time.monotonic
        self._turn = threading.Condition()
        self._wanted: dict[str, tuple[Followed, bool]] = {}  # by uuid: whose history is to be read, or only probes
        self._stopped = False
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._keep_polling, self._keep_reading)
        ]

    def start(self) -> None:
        """Poll once, so that an unusable store is found, then go on behind the server.

        Raises:
            StoreError: the store cannot be read.
        """
        with impatient():
            self._answers.runs.poll()
        for run in self._answers.runs.in_order[:1]:  # will be asked for first
            self._wanted[run.record.uuid] = (run, False)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def ask(self, path: str, query: dict[str, str]) -> bytes:
        """An answer as JSON, as of the last poll; see :meth:`Answers.answer`."""
        self._wake()
        parts = path.split("/")
        answers, version = self._answers, self._answers.version(path)
        key = (path, tuple(sorted(query.items())), version if version else self._polled)

        def make() -> bytes:
            with impatient():
                return encoded(answers.answer(path, query))

        found = self._cache.get(key, make)
        if len(parts) == 3 and parts[2] in ("series", *_READS_HISTORY):
            self._want(parts[1], parts[2] in _READS_HISTORY)
        return found

    def _wake(self) -> None:
        """Note that somebody asks; wait a moment for the first poll after a time in which nobody did."""
        with self._turn:
            before, self._asked = self._asked, time.monotonic()
            if self._asked - before > IDLE_S:
                self._turn.notify_all()
            until = self._asked + _FIRST_WAIT_S
            while self._polled < self._asked - IDLE_S and time.monotonic() < until and not self._stopped:
                self._turn.wait(_FIRST_WAIT_S)

    def _keep_polling(self) -> None:
        with impatient():
            while not self._stopped:
                with self._turn:
                    while time.monotonic() - self._asked > IDLE_S and not self._stopped:
                        self._turn.wait()
                began = time.monotonic()
                complete = self._poll()
                with self._turn:
                    self._polled = time.monotonic()
                    self._turn.notify_all()
                time.sleep(0.02 if not complete else max(EVERY_S - (self._polled - began), 0.1))

    def _poll(self) -> bool:
        answers = self._answers
        try:
            complete = answers.runs.poll()
        except Exception as error:
            if answers.error is None:
                now = datetime.now().astimezone().strftime("%H:%M:%S")
                what = (
                    "cannot be reached"
                    if isinstance(error, StoreError)
                    else f"is not understood, {type(error).__name__}"
                )
                answers.error = f"the store {what} since {now} ({error}), trying again"
                if not isinstance(error, StoreError):  # a fault of ours, or rows that are not
                    _log.exception("polling %s", self._answers.location)
            return True
        answers.error = None
        return complete

    def _want(self, number: str, history: bool) -> None:
        run = self._answers.runs.find(int(number))
        if run is None:
            return
        with self._turn:
            history |= self._wanted.get(run.record.uuid, (run, False))[1]
            self._wanted[run.record.uuid] = (run, history)
            self._turn.notify_all()

    def _keep_reading(self) -> None:
        with impatient():
            while not self._stopped:
                with self._turn:
                    while not self._wanted and not self._stopped:
                        self._turn.wait()
                    wanted = list(self._wanted.items())
                for uuid, (run, history) in wanted:
                    if self._stopped:
                        return
                    if self._read(run, history):
                        with self._turn:
                            if self._wanted.get(uuid) == (run, history):
                                del self._wanted[uuid]

    def _read(self, run: Followed, history: bool) -> bool:
        """Read on in a run; whether all of it is read."""
        try:
            complete = self._answers.read_probes(run, _PART_S)
            complete &= not history or self._answers.read_history(run, _PART_S)
        except StoreError:
            time.sleep(_PAUSE_S)  # the poll says what is wrong
            return False
        except Exception:
            _log.exception("reading run %s of %s", run.record.name, self._answers.location)
            return True
        time.sleep(0.01)  # whoever waits for the same run has its turn
        return complete
