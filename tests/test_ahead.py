"""Batches made ahead of the training: order, how far ahead, what an update of the policy waits for, errors."""

import threading
import time
from types import SimpleNamespace

import pytest
from trainings import until

pytest.importorskip("openrlhf")
from openrlhf_dbb.actors.generation_ahead import GenerationAhead

WAIT = 10.0


class Training:
    """A training of one batch a step, in place of its generator. A batch is its step, and the policy that made it.

    ``go`` has, by step, the event that a batch waits for. It is its own filler, too.
    """

    def __init__(self, steps, *, size, max_lag=None):
        train = SimpleNamespace(
            async_queue_size=size, max_lag=max_lag, partial_rollout_enable=False, num_episodes=1
        )
        self.train = train
        self.steps = steps
        self.begun = []
        self.go = {}
        self.vllm_engines = []
        self.oldest = []
        self.drop_stale = self.oldest.append
        self.filler = self
        self.ahead = GenerationAhead(self, SimpleNamespace(train=train), 0, 0)

    def generate_samples(self):
        version = self.version
        step = len(self.begun) + 1
        self.begun.append(step)
        if step in self.go:
            assert self.go[step].wait(WAIT)
        return (step, version), None, 1, step == self.steps

    def take(self):
        return self.ahead.generate_samples()[0]

    def update(self):
        with self.ahead.updating():
            pass


def stays(condition):
    """Give the threads time to do something wrong that they do not undo."""
    time.sleep(0.1)
    assert condition()


@pytest.mark.parametrize(
    ("steps", "size", "max_lag"), [(20, 1, None), (20, 2, None), (20, 5, None), (4, 9, 1)]
)
def test_batches_come_in_order_and_are_as_late_as_the_queue_is_long_or_as_fresh_as_asked(
    steps, size, max_lag
):
    training = Training(steps, size=size, max_lag=max_lag)
    latest = max_lag or size
    for step in range(1, steps + 1):
        taken, version = training.take()
        # A batch is begun when the one `latest` before has been taken, here before the update that follows.
        assert (taken, taken - 1 - version) == (step, min(step - 1, latest))
        for wait in (until, stays) if max_lag else (until,):  # the longer queue has room for more
            wait(lambda begun=step + latest: len(training.begun) == min(begun, steps))
        training.update()
    assert not training.take()
    assert not training.take()  # the end stays the end
    # Groups that have waited since an older policy are left out.
    assert training.oldest == ([-1, 0, 1, 2] if max_lag else [])


def test_the_policy_changes_between_batches_and_before_the_next_one():
    training = Training(5, size=1)
    second = training.go[2] = threading.Event()
    assert training.take() == (1, 0)
    until(lambda: training.begun == [1, 2])
    update = threading.Thread(target=training.update)
    update.start()
    stays(update.is_alive)  # the second batch is still being made by version 0
    second.set()
    assert training.take() == (2, 0)
    update.join(WAIT)
    assert training.take() == (
        3,
        1,
    )  # the update came before it, although it could have been begun at once


def test_a_pass_that_fills_no_batch_costs_no_place_and_no_step(monkeypatch):
    training = Training(9, size=1)
    results = [
        ((), None, 0, True),
        ((1, 0), None, 1, False),
        ((), None, 0, True),
        ((2, 0), None, 1, True),
    ]
    training.train.num_episodes = 3
    made = iter(results)
    monkeypatch.setattr(training, "generate_samples", lambda: next(made))
    assert [training.ahead.generate_samples() for _ in results] == results
    assert not training.take()


def test_an_error_is_raised_after_the_batches_before_it(monkeypatch):
    def broken():
        if len(training.begun) == 2:
            raise ArithmeticError("the reward function failed")
        return Training.generate_samples(training)

    training = Training(9, size=5)
    monkeypatch.setattr(training, "generate_samples", broken)
    assert [training.take()[0], training.take()[0]] == [1, 2]
    training.update()  # does not wait for a thread that has ended
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="the reward function failed"):
            training.take()


def test_no_batch_is_begun_once_closed():
    training = Training(9, size=1)
    assert training.take() == (1, 0)
    until(lambda: training.begun == [1, 2])
    training.ahead.close()
    assert training.take()[0] == 2
    assert not training.take()
    assert training.begun == [1, 2]
