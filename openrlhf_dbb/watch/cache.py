"""Keep answers, and make each of them once however many threads ask for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

_MOST_ANSWERS = 100


class Cache:
    """The answers that were asked for last, each with its version. Any number of threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()

    def get(self, key: Hashable, version: Hashable, make: Callable[[], Any], *, rest: float = 0.0) -> Any:
        """Return the answer of this version: the kept one, or a new one that ``make`` returns.

        Args:
            rest: an answer of an older version is still returned until this multiple of its making time has passed.
                It keeps an answer that takes long from being made without a break while a run grows.

        Raises:
            Exception: the exception of ``make``; the next call tries again.
        """
        with self._lock:
            answer = self._answers.get(key)
            makes = answer is None or (answer.version != version and time.monotonic() >= answer.rests_until)
            if answer is None or makes:
                answer = self._answers[key] = _Answer(version)
            self._answers.move_to_end(key)
            while len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)
        if makes:
            self._make(key, answer, make, rest)
        return answer.content.result()

    def _make(self, key: Hashable, answer: _Answer, make: Callable[[], Any], rest: float) -> None:
        began = time.monotonic()
        try:
            content = make()
        # Interrupts as well: threads that wait for this answer would otherwise wait for ever.
        except BaseException as error:
            with self._lock:
                if self._answers.get(key) is answer:
                    del self._answers[key]
            answer.content.set_exception(error)
        else:
            ended = time.monotonic()
            answer.rests_until = ended + rest * (ended - began)
            answer.content.set_result(content)


class _Answer:
    def __init__(self, version: Hashable) -> None:
        self.version = version
        self.content: Future[Any] = Future()
        self.rests_until = 0.0
