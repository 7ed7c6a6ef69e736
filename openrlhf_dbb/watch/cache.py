"""Answers that are made once, however many ask for them at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

_MOST_ANSWERS = 256
_MOST_BYTES = 128_000_000


class Cache:
    """The answers asked for last, as bytes. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, Future[bytes]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The answer with this key; made if it is not there, waited for if another thread is making it.

        Raises:
            Exception: what ``make`` raised; it is tried again next time.
        """
        with self._lock:
            answer = self._answers.get(key)
            mine = answer is None
            if answer is None:
                answer = self._answers[key] = Future()
            self._answers.move_to_end(key)
        if mine:
            try:
                answer.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._answers.pop(key, None)
                answer.set_exception(error)
            else:
                self._forget_oldest()
        return answer.result()

    def _forget_oldest(self) -> None:
        with self._lock:
            size = sum(len(each.result()) for each in self._answers.values() if each.done())
            while len(self._answers) > 1 and (len(self._answers) > _MOST_ANSWERS or size > _MOST_BYTES):
                _, oldest = self._answers.popitem(last=False)
                size -= len(oldest.result()) if oldest.done() else 0
