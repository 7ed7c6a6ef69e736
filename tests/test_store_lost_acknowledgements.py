"""The server has committed but its acknowledgement is lost: the transaction is repeated and counts once."""

import itertools
import logging
import re
import socket
import tempfile
import threading

import numpy as np
import pytest

from storage import GroupRows, open_store
from storage.invariants import check
from storage.retention import prune


class Proxy:
    """Between client and server; passes on the ``armed``-th COMMIT from now on, and loses its acknowledgement."""

    def __init__(self, server_folder, folder):
        self._target = f"{server_folder}/.s.PGSQL.5432"
        self.armed, self.lost = 0, 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.5432")
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            lose = threading.Event()
            threading.Thread(target=self._pass, args=(client, server, lose, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, lose, False), daemon=True).start()

    def _pass(self, source, target, lose, to_server):
        while True:
            try:
                data = source.recv(65536)
                if to_server and b"COMMIT" in data:
                    self.armed -= 1
                    if self.armed == 0:
                        lose.set()
                if not data or (lose.is_set() and not to_server):
                    self.lost += lose.is_set() and bool(data)
                    break
                target.sendall(data)
            except OSError:
                break
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self):
        self._listener.close()


@pytest.fixture
def proxied(own_postgres):
    """(function: URL of a fresh database by way of a proxy, the proxy)."""
    with tempfile.TemporaryDirectory(prefix="dbb_px_") as folder:
        proxy = Proxy(own_postgres.socket_folder, folder)
        yield lambda: own_postgres.new_url().replace(str(own_postgres.socket_folder), folder), proxy
        proxy.close()


def _step(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.step(run, 1, ids, [4, 1, 0])
    rows = fill.rows(run, ids, [2, 2, 2])
    return lambda: (run.record_step(2, rows), run.record.last_step)


def _checkpoint(store, fill):
    run = fill.run(store)
    return lambda: run.record_checkpoint(0, "tag")


def _roll_back(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.step(run, 1, ids, [4, 1, 0])
    return lambda: (run.roll_back(0), run.record.last_step)


def _groups(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    rows = GroupRows(np.array([1, 2]), np.array([0, 0]), ids[:2], np.array([4, 4]), 0.0)
    return lambda: (run.record_groups(rows), run.last_ordinal())


def _step_with_groups(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.groups(run, ids)
    rows = fill.rows(run, ids[:2], [4, 1], fates={"trained": np.array([1, 2]), "stale": np.array([3])})
    return lambda: (run.record_step(1, rows), run.record.last_step)


def _roll_back_to_the_same_step(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.groups(run, ids)
    fill.step(run, 1, ids, [4, 1, 0], fates={"trained": np.array([1, 2, 3])})
    fill.groups(run, ids)
    return lambda: (run.roll_back(1), run.last_ordinal())


def _warm_start(store, fill):
    source, run = fill.run(store, "source"), fill.run(store)
    ids = fill.prompts(store, 3)
    fill.step(source, 1, ids, [4, 1, 0])
    return lambda: (run.warm_start(store, source.record, ids).matched, run.record.parent["step"])


def _create(store, fill):
    return lambda: fill.run(store, "created").record.name


def _claim(store, fill):
    run_id = fill.run(store).record.run_id
    return lambda: store.claim_run(run_id).record.name


def _release(store, fill):
    return fill.run(store).release


def _discard(store, fill):
    return fill.run(store).discard


def _finish(store, fill):
    run = fill.run(store)
    fill.groups(run, fill.prompts(store, 3))
    return run.finish


def _prune(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.step(run, 1, ids, [4, 1, 0])
    fill.step(run, 2, ids, [4, 1, 0])
    run.record_checkpoint(2, "two")
    return lambda: prune(store, run.record, keep_last=1)


def _evaluation(store, fill):
    run, ids = fill.run(store), fill.prompts(store, 3)
    rows = [fill.evaluation(ids, [4, 1, 0])]
    return lambda: (
        run.record_evaluation(0, "training", rows, model="tiny", config={}),
        store.record_evaluation("by itself", rows, model="tiny", config={}),
    )


def _prompts(store, fill):
    return lambda: fill.prompts(store, 3).tolist()


@pytest.mark.parametrize(
    "prepare",
    [
        _step, _checkpoint, _roll_back, _warm_start, _create, _claim, _release,
        _discard, _finish, _prompts, _prune, _evaluation, _groups, _step_with_groups, _roll_back_to_the_same_step,
    ],
)  # fmt: skip
def test_a_commit_whose_acknowledgement_is_lost_counts_once(proxied, open_new, fill, dump, caplog, prepare):
    new_url, proxy = proxied
    caplog.set_level(logging.WARNING, logger="storage")
    undisturbed = open_new("postgresql")
    expected = prepare(undisturbed, fill)()
    for number in itertools.count(1):
        caplog.clear()
        proxy.lost = 0
        with open_store(new_url()) as store:
            action = prepare(store, fill)
            proxy.armed = number
            assert action() == expected
            proxy.armed = 0
            assert len(caplog.records) == proxy.lost  # the one warning of an outage
            assert _comparable(dump(store)) == _comparable(dump(undisturbed))
            assert check(store) == []
        if not proxy.lost:  # the action has fewer commits
            break
    assert number > 1


def _comparable(tables):
    """Without times, tokens and places."""
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z|[0-9a-f]{32}|postgresql://[^\"']*", "-", repr(tables))
