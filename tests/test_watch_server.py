"""The live page: a real server of the command, who it lets in, what it refuses, how fast and how steady it is."""

import json
import socket
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf_dbb.cli.main import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture
def running(store, fill):
    """A run with three steps."""
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, range(1, 4))
    return run, ids


def test_the_page_its_answers_and_what_is_refused(store, running, serve):
    server, number = serve(store.url), running[0].record.run_id
    assert server.said == f"{store.location} is shown at {server.url} (Ctrl-C ends it)\n"
    assert server.url == f"http://127.0.0.1:{server.port}/"
    status, headers, page = server.get("")
    assert status == 200 and '<script id="data" type="application/json">{"live":true}</script>' in page
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert headers["Content-Security-Policy"].endswith("connect-src 'self'; frame-ancestors 'none'")
    for path in ("api/state", "nothing"):
        headers = server.get(path)[1]
        assert headers["Cache-Control"] == "no-store" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert server.ask()["runs"][0]["step"] == 3 and server.ask()["live"]
    assert server.ask(f"runs/{number}/series")["curves"]["step"] == [1, 2, 3]
    assert server.ask(f"runs/{number}/posteriors")["last"] == 3
    assert len(server.ask(f"runs/{number}/prompts")["columns"]["id"]) == 3
    assert server.get("nothing")[0] == 404
    for path in ("api/runs/99/series", f"api/runs/{number}/prompts/99"):
        status, _, body = server.get(path)
        assert status == 404 and "error" in json.loads(body)
    assert server.get("api/state", method="POST")[0] == 405
    # a page of another site is not answered
    for host in (f"evil.example:{server.port}", "127.0.0.1.evil.example"):
        status, _, body = server.get(Host=host)
        assert status == 403 and "this server is not called" in body
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:1"):
        assert server.get(Host=host)[0] == 200


def test_many_ask_at_once_while_steps_are_written(store, running, fill, serve):
    (run, ids), server = running, serve(store.url)
    done = threading.Event()
    paths = [f"runs/{run.record.run_id}/{name}" for name in ("series", "posteriors", "prompts")]

    def client():
        while not done.is_set():
            for path in paths:
                server.ask(path)  # the status is 200

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client) for _ in range(6)]
        try:
            fill.train(run, ids, range(4, 40))
        finally:
            done.set()
    for ended in clients:
        ended.result()
    before = server.until(lambda answer: answer["runs"][0]["step"] == 39)[0]["runs"][0]["version"]
    assert server.ask(paths[1])["epochs"]["prompts"] == [3] * 39
    run.record_metrics(39, {"loss": 2.0})
    server.until(lambda answer: answer["runs"][0]["version"] != before)
    assert server.ask(paths[0])["curves"]["m:loss"][-2:] == [None, 2]
    fill.check_trained(store, run, ids, 39)


def test_it_ends_at_once_and_quietly(store, running, serve):
    server = serve(store.url)
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    for client in clients:  # kept open
        client.sendall(b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    code, errors, took = server.end()
    assert (code, errors) == (0, "") and took < 2
    for client in clients:
        client.close()


def test_nothing_is_written_and_a_writer_is_not_held_up(open_new, fill, serve):
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, range(1, 4))
    server, number = serve(store.url), run.record.run_id
    with sqlite3.connect(store.location) as other:
        before = list(other.iterdump())
        for name in ("series", "posteriors", "prompts", "about", "rollouts/latest", f"prompts/{ids[0]}"):
            server.ask(f"runs/{number}/{name}")
        assert list(other.iterdump()) == before
        # no reader is left behind: the log of changes can be emptied
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_what_cannot_be_served_is_said_in_one_line(store, fill, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    missing = tmp_path / "none.db"
    assert f"there is no store at {missing}" in refused("--store.url", f"sqlite:///{missing}")
    assert not missing.exists()
    fill.run(store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in refused("--store.url", store.url, "--port", port)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert (
        refused("--store.url", store.url)
        == "error: serve needs uvicorn; run: pip install '.[serve]' in the repository\n"
    )
