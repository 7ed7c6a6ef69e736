"""Batches made ahead of the training: order, how far ahead, what an update of the policy waits for, errors."""

import threading
import time

import pytest
from trainings import until

from openrlhf_dbb.core.ahead import Ahead

WAIT = 10.0


class Training:
    """A training whose batches are the pair of step and policy version that made them.

    ``version`` counts the training steps; ``go`` has, by step, the event that a batch waits for.
    """

    def __init__(self, steps, *, make=None, **options):
        self.version, self.steps, self.go = 0, steps, {}
        self.begun = []
        self.ahead = Ahead(make or self.make, step=0, version=lambda: self.version, **options)

    def make(self, step):
        self.begun.append(step)
        if step > self.steps:
            return None
        version = self.version
        assert self.go.get(step, _OPEN).wait(WAIT)
        return (step, version), True

    def train(self):
        """One step; the batch, or None at the end."""
        taken = self.ahead.take()
        if taken is not None:
            with self.ahead.updating():
                self.version += 1
        return taken


_OPEN = threading.Event()
_OPEN.set()


def stays(condition):
    """Give the threads time to do something wrong that they do not undo."""
    time.sleep(0.1)
    assert condition()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_batches_come_in_order_and_are_as_late_as_the_queue_is_long(size):
    training = Training(20, size=size)
    taken = []
    while True:
        until(lambda: len(training.begun) == min(len(taken) + size, 21))  # as far ahead as it may be, and no further
        made = training.train()
        if made is None:
            break
        taken.append(made)
    assert [step for step, _ in taken] == list(range(1, 21))
    lags = [step - 1 - version for step, version in taken]
    # The first batches are all begun under the first policy; a later one when the one `size` before has been taken,
    # which may be before or after the update that follows.
    assert lags[:size] == list(range(size))
    assert set(lags[size:]) <= {size, size - 1}
    assert training.ahead.take() is None  # the end stays the end


def test_a_batch_is_not_begun_before_it_can_be_as_fresh_as_asked():
    on_policy = Training(3, size=3, max_lag=0)
    until(lambda: on_policy.begun == [1])
    stays(lambda: on_policy.begun == [1])
    assert [on_policy.train() for _ in range(4)] == [(1, 0), (2, 1), (3, 2), None]
    one_late = Training(4, size=9, max_lag=1)
    until(lambda: one_late.begun == [1, 2])
    stays(lambda: one_late.begun == [1, 2])
    taken = [one_late.train() for _ in range(4)]
    assert [step for step, _ in taken] == [1, 2, 3, 4]
    assert max(step - 1 - version for step, version in taken) == 1


def test_the_policy_changes_between_batches_and_before_the_next_one():
    training = Training(5, size=1)
    second = training.go[2] = threading.Event()
    assert training.ahead.take() == (1, 0)
    until(lambda: training.begun == [1, 2])
    updated = threading.Event()

    def update():
        with training.ahead.updating():
            training.version += 1
        updated.set()

    threading.Thread(target=update).start()
    stays(lambda: not updated.is_set())  # the second batch is still being made by version 0
    second.set()
    assert training.ahead.take() == (2, 0)
    assert updated.wait(WAIT)
    assert training.ahead.take() == (3, 1)  # the update came before it, although it could have been begun at once


def test_the_policy_may_change_while_a_batch_is_made_if_they_overlap():
    training = Training(2, size=1, overlap=True)
    assert training.ahead.take() == (1, 0)
    training.go[2] = threading.Event()
    with training.ahead.updating():
        training.version += 1
    training.go[2].set()
    assert training.ahead.take()[0] == 2


def test_a_pass_that_fills_no_batch_costs_no_place_and_no_step():
    made = iter([("empty", False), ("empty", False), ("first", True), ("empty", False), ("second", True), None])
    asked = []

    def make(step):
        asked.append(step)
        return next(made)

    training = Training(0, make=make, size=1)
    assert [training.train() for _ in range(6)] == ["empty", "empty", "first", "empty", "second", None]
    assert asked == [1, 1, 1, 2, 2, 3]


def test_an_error_is_raised_after_the_batches_before_it():
    def make(step):
        if step == 3:
            raise ArithmeticError("the reward function failed")
        return step, True

    training = Training(0, make=make, size=5)
    assert [training.train(), training.train()] == [1, 2]
    with training.ahead.updating():  # does not wait for a thread that has ended
        training.version += 1
    with pytest.raises(ArithmeticError, match="the reward function failed"):
        training.train()


def test_no_batch_is_begun_once_closed():
    training = Training(9, size=1)
    assert training.train() == (1, 0)
    until(lambda: training.begun == [1, 2])
    training.ahead.close()
    assert training.ahead.take()[0] == 2
    assert training.ahead.take() is None
    assert training.begun == [1, 2]
