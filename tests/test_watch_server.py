"""The live page: a real server of the command, who it lets in, what it refuses, how fast and how steady it is."""

import json
import socket
import sqlite3
import sys
import threading
from pathlib import Path

import pytest

from openrlhf_dbb.cli.main import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[1]
LONGEST_S = 30


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
    for path in ("", "api/state", "nothing"):
        headers = server.get(path)[1]
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert headers["Cache-Control"] == "no-store" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert server.ask()["runs"][0]["step"] == 3 and server.ask()["live"]
    assert server.ask(f"runs/{number}/series")["curves"]["step"] == [1, 2, 3]
    assert server.ask(f"runs/{number}/posteriors")["last"] == 3
    assert len(server.ask(f"runs/{number}/prompts")["columns"]["id"]) == 3
    for path, status, line in (
        ("nothing", 404, "Not Found; the page about the runs is at /"),
        ("api/runs/99/series", 404, f"there is no run '99' in {store.location}; state lists them"),
        (f"api/runs/{number}/prompts/99", 404, "run 'run' has no prompt '99'"),
    ):
        assert (server.get(path)[0], json.loads(server.get(path)[2])) == (status, {"error": line})
    for method in ("POST", "PUT", "DELETE"):
        found = server.get("api/state", method=method)
        assert found[0] == 405 and "error" in json.loads(found[2])


def test_a_page_of_another_site_is_not_answered(store, running, serve):
    server = serve(store.url)
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example"):
        status, _, body = server.get(Host=host)
        assert status == 403 and "this server is not called" in body
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:1", "LOCALHOST:99"):
        assert server.get(Host=host)[0] == 200


def test_a_new_step_is_there_within_two_seconds(store, running, fill, serve):
    (run, ids), server = running, serve(store.url)
    number = run.record.run_id
    server.ask(f"runs/{number}/posteriors")
    for step in (4, 5):
        fill.train(run, ids, [step])
        state, took = server.until(lambda answer, step=step: answer["runs"][0]["step"] == step)
        assert took < 2
        assert server.ask(f"runs/{number}/series")["curves"]["step"] == list(range(1, step + 1))
        assert server.ask(f"runs/{number}/posteriors")["epochs"]["epoch"] == list(range(1, step + 1))
        assert server.ask(f"runs/{number}/prompts")["last"] == step
    before = state["runs"][0]["version"]
    run.record_metrics(5, {"loss": 2.0})
    server.until(lambda answer: answer["runs"][0]["version"] != before, within=2)
    assert server.ask(f"runs/{number}/series")["curves"]["m:loss"][3:] == [None, 2]
    fill.run(store, "another")
    assert server.until(lambda answer: len(answer["runs"]) == 2, within=2)[0]["runs"][0]["name"] == "another"


def test_many_ask_at_once_while_steps_are_written(store, running, fill, serve):
    (run, ids), server = running, serve(store.url)
    number, wrong, done = run.record.run_id, [], threading.Event()

    def client():
        while not done.is_set():
            for path in ("state", f"runs/{number}/series", f"runs/{number}/posteriors", f"runs/{number}/prompts"):
                status, _, body = server.get(f"api/{path}")
                if status != 200 or not json.loads(body):
                    wrong.append(body)

    clients = [threading.Thread(target=client) for _ in range(6)]
    for each in clients:
        each.start()
    fill.train(run, ids, range(4, 40))
    done.set()
    for each in clients:
        each.join()
    assert wrong == []
    server.until(lambda answer: answer["runs"][0]["step"] == 39)
    found = server.ask(f"runs/{number}/posteriors")
    assert found["epochs"]["prompts"] == [3] * 39
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


@pytest.fixture
def refused(capsys):
    """Function: what serving refuses in one line."""

    def serve(*arguments):
        assert main(["serve", *arguments]) == 2
        out, errors = capsys.readouterr()
        assert out == "" and errors.count("\n") == 1
        return errors.strip()

    return serve


def test_what_is_wrong_is_said_in_one_line(store, fill, refused):
    fill.run(store)
    url = ("--store.url", store.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in refused(*url, "--port", str(port))
    assert "--port 70000" in refused(*url, "--port", "70000")
    assert "192.0.2.1" in refused(*url, "--host", "192.0.2.1")


def test_a_store_that_cannot_be_served(tmp_path, refused):
    assert f"there is no store at {tmp_path}/none.db" in refused("--store.url", f"sqlite:///{tmp_path}/none.db")
    assert not list(tmp_path.iterdir())
    sqlite3.connect(tmp_path / "empty.db").close()
    assert "holds no posteriors" in refused("--store.url", f"sqlite:///{tmp_path}/empty.db")


def test_what_is_missing_is_named(store, fill, refused, monkeypatch):
    fill.run(store)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused("--store.url", store.url) == "error: serve needs uvicorn; run: pip install 'openrlhf-dbb[serve]'"
