"""The live page: a real server of the command, who it lets in, what it refuses, how steady it is."""

import json
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf_dbb.cli.main import main


@pytest.fixture
def store(open_new):
    return open_new("sqlite")  # the database does not matter


@pytest.fixture
def running(store, fill):
    """A run with three steps."""
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, range(1, 4))
    return run, ids


def test_the_page_its_answers_and_a_quick_and_quiet_end(store, running, serve):
    (run, ids), server = running, serve(store.url)
    assert server.said == f"{store.location} is shown at http://127.0.0.1:{server.port}/ (Ctrl-C ends it)\n"
    status, headers, page = server.get("")
    assert status == 200 and '<script id="data" type="application/json">{"live":true}</script>' in page
    assert """content="default-src 'none'; style-src 'sha256-""" in page and "connect-src 'self'" in page
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    number = run.record.run_id
    with sqlite3.connect(store.location) as other:
        before = list(other.iterdump())
        for name in ("series", "pool", "prompts", "about", "rollouts/latest", f"prompts/{ids[0]}"):
            server.ask(f"runs/{number}/{name}")
        assert list(other.iterdump()) == before
        # no reader is left behind: the log of changes can be emptied
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    for path in ("nothing", "api/runs/99/series", f"api/runs/{number}/prompts/99", f"api/runs/{number}/prompts/x"):
        status, _, body = server.get(path)
        assert status == 404 and "error" in json.loads(body)
    with socket.create_connection(("127.0.0.1", server.port)):  # a client that asks nothing
        code, errors, took = server.end()
    assert (code, errors) == (0, "") and took < 2


# A tunnel may change the port.
LOCAL = ("localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:1")
FOREIGN = (
    "evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil.example",
    "evil{x.example", "", ":8642", "localhost:x", "localhost/", "localhost,evil.example",
    "[::1].evil.example", "7.evil.example", "localhost\xff",
)  # fmt: skip
ADDRESSES = ("192.0.2.7:8642", "127.1", "0177.0.0.1", "[2001:db8::7]")


@pytest.mark.parametrize(
    ("arguments", "own", "refused"),
    [
        ((), LOCAL, (*FOREIGN, *ADDRESSES)),
        (("--host", "0.0.0.0"), (*LOCAL, *ADDRESSES, socket.gethostname()), FOREIGN),
    ],
)
def test_a_page_of_another_site_is_not_answered(store, running, serve, arguments, own, refused):
    server = serve(store.url, *arguments)

    def status(*headers, target="/api/state"):
        lines = (f"GET {target} HTTP/1.1", *headers, "", "")
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall("\r\n".join(lines).encode("latin-1"))
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.0 200") == (b'"runs"' in answer)
        return int(answer.split()[1])

    assert {host: status(f"Host: {host}") for host in own} == dict.fromkeys(own, 200)
    assert {host: status(f"Host: {host}") for host in refused} == dict.fromkeys(refused, 403)
    foreign, here = "Host: evil.example", "Host: localhost"
    assert status(foreign, "X-Forwarded-Host: localhost", "Forwarded: host=localhost") == 403
    assert status(foreign, target="http://localhost/api/state") == 403
    assert status(here, target="http://evil.example/api/state") == 404
    assert status() == status(here, here) == status(here, foreign) == 403


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
    assert [sum(states) for states in server.ask(paths[1])["states"]] == [3] * 39
    run.record_metrics(39, {"loss": 2.0})
    server.until(lambda answer: answer["runs"][0]["version"] != before)
    assert server.ask(paths[0])["curves"]["m:loss"][-2:] == [None, 2]
    fill.check_trained(store, run, ids, 39)


def test_what_cannot_be_served_is_said_in_one_line(store, tmp_path, capsys):
    def refused(*arguments):
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    missing = tmp_path / "none.db"
    assert f"there is no store at {missing}" in refused("--store.url", f"sqlite:///{missing}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in refused("--store.url", store.url, "--port", port)
