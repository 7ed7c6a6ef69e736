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


ANY_STORE = pytest.mark.parametrize("kind", ["sqlite"])  # the database does not matter


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
    assert server.ask()["runs"][0]["step"] == 3
    assert server.ask(f"runs/{number}/series")["curves"]["step"] == [1, 2, 3]
    assert server.ask(f"runs/{number}/pool")["last"] == 3
    assert len(server.ask(f"runs/{number}/prompts")["columns"]["id"]) == 3
    assert server.get("nothing")[0] == 404
    for path in ("api/runs/99/series", f"api/runs/{number}/prompts/99"):
        status, _, body = server.get(path)
        assert status == 404 and "error" in json.loads(body)
    assert server.get("api/state", method="POST")[0] == 405


# A tunnel may change the port.
LOCAL = ("localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:1")
FOREIGN = (
    "evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example",
    "evil{x.example", "", ":8642", "localhost:x", "localhost:1:2", "localhost/", "localhost,evil.example", "::1",
    "[::1].evil.example", "7.evil.example", "localhost\xff",
)  # fmt: skip
ADDRESSES = ("192.0.2.7:8642", "127.1", "0177.0.0.1", "[2001:db8::7]", "[::ffff:7f00:1]")


@ANY_STORE
@pytest.mark.parametrize(
    ("arguments", "own", "refused"),
    [
        ((), LOCAL, (*FOREIGN, *ADDRESSES)),
        (("--host", "0.0.0.0"), (*LOCAL, *ADDRESSES, socket.gethostname()), FOREIGN),
    ],
)
def test_a_page_of_another_site_is_not_answered(store, running, serve, arguments, own, refused):
    server = serve(store.url, *arguments)

    def status(*headers, target="/api/state", version="1.1"):
        lines = (f"GET {target} HTTP/{version}", *headers, "Connection: close", "", "")
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall("\r\n".join(lines).encode("latin-1"))
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200") == (b'"runs"' in answer)
        return int(answer.split()[1])

    assert {host: status(f"Host: {host}") for host in own} == dict.fromkeys(own, 200)
    assert {host: status(f"Host: {host}") for host in refused} == dict.fromkeys(refused, 403)
    foreign, here = "Host: evil.example", "Host: localhost"
    upgrade = "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 24}"
    assert status(foreign, "X-Forwarded-Host: localhost", "Forwarded: host=localhost") == 403
    assert status(foreign, target="http://localhost/api/state") == 403
    assert status(here, target="http://evil.example/api/state") == 404
    assert status(foreign, *upgrade) == 403
    assert status(version="1.0") == 403
    assert status() == status(here, here) == status(here, foreign) == 400  # before our code


def test_many_ask_at_once_while_steps_are_written(store, running, fill, serve):
    (run, ids), server = running, serve(store.url)
    done = threading.Event()
    paths = [f"runs/{run.record.run_id}/{name}" for name in ("series", "pool", "prompts")]

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
    before = server.until(lambda answer: answer["runs"][0]["step"] == 39)["runs"][0]["version"]
    # the state of the prompts may rest a moment on a busy machine
    server.until(lambda answer: [sum(states) for states in answer["states"]] == [3] * 39, paths[1])
    run.record_metrics(39, {"loss": 2.0})
    server.until(lambda answer: answer["runs"][0]["version"] != before)
    assert server.ask(paths[0])["curves"]["m:loss"][-2:] == [None, 2]
    fill.check_trained(store, run, ids, 39)


@ANY_STORE
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


@ANY_STORE
def test_nothing_is_written_and_a_writer_is_not_held_up(store, running, serve):
    run, ids = running
    server, number = serve(store.url), run.record.run_id
    with sqlite3.connect(store.location) as other:
        before = list(other.iterdump())
        for name in ("series", "pool", "prompts", "about", "rollouts/latest", f"prompts/{ids[0]}"):
            server.ask(f"runs/{number}/{name}")
        assert list(other.iterdump()) == before
        # no reader is left behind: the log of changes can be emptied
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


@ANY_STORE
def test_what_cannot_be_served_is_said_in_one_line(store, running, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    missing = tmp_path / "none.db"
    assert f"there is no store at {missing}" in refused("--store.url", f"sqlite:///{missing}")
    assert not missing.exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in refused("--store.url", store.url, "--port", port)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused("--store.url", store.url).startswith("error: serve needs uvicorn; run: pip install '.[serve]'")
