"""The live page: a real server of the command, who it lets in, what it refuses, how steady it is."""

import contextlib
import http.client
import json
import os
import resource
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.watch import serve as serving


@pytest.fixture
def store(open_new):
    return open_new("sqlite")  # the database does not matter


@pytest.fixture
def running(store, fill):
    """A run with three steps."""
    run = fill.run(store)
    ids = fill.prompts(store, 3)
    fill.train(run, ids, range(1, 4))
    return run, ids


def test_a_server_says_its_address_and_ends_quickly_and_quietly(store, running, serve):
    server = serve(store.url)
    assert f"{store.location} " in server.said
    assert f" http://127.0.0.1:{server.port}/ " in server.said
    with socket.create_connection(("127.0.0.1", server.port)):  # a client that asks nothing
        code, errors, took = server.end()
    assert (code, errors) == (0, "")
    assert took < 2


def test_the_page_may_load_nothing_from_elsewhere(store, running, serve):
    status, headers, page = serve(store.url).get("")
    assert status == 200
    assert '<script id="data" type="application/json">{"live":true}</script>' in page
    assert """content="default-src 'none'; style-src 'sha256-""" in page
    assert "connect-src 'self'" in page
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_answers_change_nothing_and_leave_no_reader_behind(store, running, serve):
    run, ids = running
    server = serve(store.url)
    with sqlite3.connect(store.location) as other:
        before = list(other.iterdump())
        for name in ("series", "pool", "prompts", "about", "rollouts/latest", f"prompts/{ids[0]}"):
            server.ask(f"runs/{run.record.run_id}/{name}")
        assert list(other.iterdump()) == before
        # no reader is left behind: the log of changes can be emptied
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_what_is_not_there_is_answered_by_404_and_an_error(store, running, serve):
    run, _ = running
    server = serve(store.url)
    number = run.record.run_id
    for path in (
        "nothing",
        "api/runs/99/series",
        f"api/runs/{number}/prompts/99",
        f"api/runs/{number}/prompts/x",
    ):
        status, _, body = server.get(path)
        assert status == 404
        assert "error" in json.loads(body)


# A tunnel may change the port.
LOCAL = ("localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:1")
FOREIGN = (
    "evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil.example",
    "evil{x.example", "", ":8642", "localhost:x", "localhost/", "localhost,evil.example",
    "[::1].evil.example", "7.evil.example", "localhost\xff",
)  # fmt: skip
ADDRESSES = ("192.0.2.7:8642", "127.1", "0177.0.0.1", "[2001:db8::7]")


PROXY = ("abc-8656.proxy.runpod.net", "A.B.proxy.runpod.net:443", "my_service")
NOT_PROXY = (
    "proxy.runpod.net", "xproxy.runpod.net", "a.proxy.runpod.net.evil.example", ".proxy.runpod.net",
    "my-service",
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "own", "refused"),
    [
        ((), LOCAL, (*FOREIGN, *ADDRESSES, *PROXY)),
        (("--host", "0.0.0.0"), (*LOCAL, *ADDRESSES, socket.gethostname()), FOREIGN),
        (("--host", "127.0.0.2"), (*LOCAL, "127.0.0.2:1"), (*FOREIGN, *ADDRESSES)),
        (
            ("--allowed_hosts", ".proxy.runpod.net", "my_service"),
            (*LOCAL, *PROXY),
            (*FOREIGN, *ADDRESSES, *NOT_PROXY),
        ),
        (("--allowed_hosts", "*.proxy.runpod.net"), PROXY[:2], NOT_PROXY),
    ],
)
def test_a_page_of_another_site_is_not_answered(store, running, serve, arguments, own, refused):
    server = serve(store.url, *arguments)
    host = "127.0.0.2" if "127.0.0.2" in arguments else "127.0.0.1"

    def status(*headers, target="/api/state"):
        lines = (f"GET {target} HTTP/1.1", *headers, "", "")
        with socket.create_connection((host, server.port), timeout=120) as client:
            client.sendall("\r\n".join(lines).encode("latin-1"))
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.0 200") == (b'"runs"' in answer)
        return int(answer.split()[1])

    assert {host: status(f"Host: {host}") for host in own} == dict.fromkeys(own, 200)
    assert {host: status(f"Host: {host}") for host in refused} == dict.fromkeys(refused, 403)
    foreign = "Host: evil.example"
    here = "Host: localhost"
    assert status(foreign, "X-Forwarded-Host: localhost", "Forwarded: host=localhost") == 403
    assert status(foreign, target="http://localhost/api/state") == 403
    assert status(here, target="http://evil.example/api/state") == 404
    assert status() == status(here, here) == status(here, foreign) == 403


def test_a_refused_name_is_told_how_it_is_allowed(store, serve):
    server = serve(store.url, "--host", "0.0.0.0")
    assert "--allowed_hosts" in server.said
    named = serve(store.url, "--host", "0.0.0.0", "--allowed_hosts", "a")
    assert "--allowed_hosts" not in named.said
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    client.request("GET", "/", headers={"Host": "abc.proxy.runpod.net"})
    answer = client.getresponse()
    told = json.loads(answer.read())["error"]
    assert answer.status == 403 and "abc.proxy.runpod.net" in told and "--allowed_hosts" in told


@pytest.mark.parametrize(
    "name", ["*", "", "https://a.example", "a.b:443", "a.b/x", "a,b", "a..b", "*a"]
)
def test_what_is_no_host_name_is_refused(store, capsys, name):
    assert main(["serve", "--store.url", store.url, "--allowed_hosts", name]) == 2
    assert "--allowed_hosts" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "api/state", "api/nothing"])
def test_a_head_has_the_headers_of_the_answer(store, running, serve, path):
    server = serve(store.url)
    answers = []
    for method in ("GET", "HEAD"):
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        client.request(method, f"/{path}")
        answers.append(client.getresponse())
    got, head = answers
    content = got.read()
    assert head.status == got.status and head.read() == b""
    assert head.headers.keys() == got.headers.keys()
    assert head.headers["Content-Type"] == got.headers["Content-Type"]
    assert got.headers["Content-Length"] == str(len(content))


@pytest.mark.parametrize(
    ("host", "reached", "refused"),
    [("::1", ["::1"], ["127.0.0.1"]), ("[::1]", ["::1"], []), ("::", ["::1", "127.0.0.1"], [])],
)
def test_a_server_answers_at_the_addresses_of_ipv6_that_its_host_covers(
    store, running, serve, host, reached, refused
):
    server = serve(store.url, "--host", host)
    assert (f"http://[::1]:{server.port}/" in server.said) == (host != "::")
    for address in reached:
        client = http.client.HTTPConnection(address, server.port, timeout=120)
        client.request("GET", "/api/state")
        assert client.getresponse().status == 200
    for address in refused:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, server.port), timeout=120)


class Unanswering:
    """An api each of whose answers fails."""

    def ask(self, path):
        raise ZeroDivisionError("\x1b[31m")


@pytest.fixture
def answering():
    """Function: the port of a server in this process."""
    with contextlib.ExitStack() as stack:

        def start(host="127.0.0.1"):
            server = stack.enter_context(serving._Server(host, 0, Unanswering()))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield start


def test_a_name_that_has_an_address_of_ipv6_alone_is_served_there(answering, monkeypatch):
    entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert answering("localhost").server_address[0] == "::1"


def test_an_answer_that_fails_is_one_line_for_the_page_and_the_log(answering, caplog):
    client = http.client.HTTPConnection("127.0.0.1", answering().server_address[1], timeout=120)
    client.request("GET", "/api/state")
    answer = client.getresponse()
    told = json.loads(answer.read())["error"]
    assert answer.status == 500 and "ZeroDivisionError: \\x1b[31m" in told and "/api/state" in told
    assert caplog.messages == [told]


def test_a_request_that_comes_too_slowly_is_ended(answering, monkeypatch):
    monkeypatch.setattr(serving, "REQUEST_S", 0.3)
    port = answering().server_address[1]
    client = socket.create_connection(("127.0.0.1", port), timeout=120)
    with client, contextlib.suppress(ConnectionError):
        for _ in range(300):  # a byte now and then, for at most 15 s
            client.sendall(b"G")
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                assert client.recv(1) == b""
                break
        else:
            pytest.fail("it was never ended")


def seconds_of(process):
    """CPU time that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("files", [64, 1024])  # fewer than the connections that are kept, and more
def test_idle_connections_keep_nobody_out(store, running, serve, files):
    server = serve(store.url)
    server.ask()  # its files are open
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files, files))
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=120))
        assert len(server.ask()["runs"]) == 1
        threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
        assert threads < serving.CONNECTIONS + 20
        before = seconds_of(server.process)
        time.sleep(1)
        assert seconds_of(server.process) - before < 0.5  # it does not spin
        assert len(server.ask()["runs"]) == 1
    code, errors, _ = server.end()
    assert (code, errors) == (0, "")


def test_a_damaged_run_is_an_error_of_its_own_answers(store, running, fill, serve):
    run, _ = running
    other = fill.run(store, "other")
    with store.database.transaction(write=True) as connection:
        connection.exec_driver_sql("UPDATE dbb_step SET created_at = 'yesterday', metrics = 'x'")
    server = serve(store.url)
    listed = {each["name"]: each for each in server.ask()["runs"]}
    assert "error" in listed["run"] and "error" not in listed["other"]
    status, _, body = server.get(f"api/runs/{run.record.run_id}/series")
    told = json.loads(body)["error"]
    assert status == 503 and "run 'run'" in told and "step 1" in told
    server.ask(f"runs/{other.record.run_id}/series")
    assert server.end()[:2] == (0, "")


def test_many_ask_at_once_while_steps_are_written(store, running, fill, serve):
    run, ids = running
    server = serve(store.url)
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
