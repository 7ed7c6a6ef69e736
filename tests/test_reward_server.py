"""A reward server is tried before a training; what it says instead of a reward is in the error."""

import asyncio
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import reward_server
from openrlhf_dbb.rewards.reward_file import RewardError

PROMPTS = ["1+1=", "2+2="]
LABELS = ["2", "4"]


class Server:
    """A reward server that answers with one status, type and body; it keeps what it was asked."""

    def __init__(self):
        self.status = 200
        self.kind = "application/json"
        self.body = lambda asked: {"rewards": [1.0]}
        self.asked = []
        self.wait_s = 0.0
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answers.asked.append(asked)
                time.sleep(answers.wait_s)
                body = answers.body(asked)
                body = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(answers.status)
                self.send_header("Content-Type", answers.kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # nobody waited for it
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score?key=hunter2"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def says(self, body, status=200, kind="application/json"):
        self.body = lambda asked: body
        self.status = status
        self.kind = kind


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(reward_server, "_PAUSE_S", 0.0)
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def check(url, estimator="dbb"):
    return reward_server.check(url, PROMPTS, LABELS, estimators.build(estimator))


def test_a_server_gets_the_question_the_label_and_nothing_and_its_scores_are_printed(server):
    server.body = lambda asked: {"rewards": [float(asked["query"] == ["1+1=2"])]}
    [line] = check(server.url)
    assert "gave 6 scores from 0 to 1, and 0 None, on 2 prompts" in line and "hunter2" not in line
    queries = [asked["query"][0] for asked in server.asked]
    assert sorted(queries) == ["1+1=", "1+1=1+1=", "1+1=2", "2+2=", "2+2=2+2=", "2+2=4"]
    assert {(asked["prompts"][0], asked["labels"][0]) for asked in server.asked} == {
        ("1+1=", "2"),
        ("2+2=", "4"),
    }


def test_a_server_that_pays_for_the_question_is_warned_about(server):
    _, warning = check(server.url)
    assert (
        warning.startswith("warning: the reward server http://127.0.0.1:")
        and "scores 100% of 2" in warning
    )


LONG = "x" * 1000


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        (
            "boom\nnow",
            500,
            "text/plain",
            r"answered 500 Internal Server Error \(text/plain\): boom now; start it",
        ),
        (
            "<html>login</html>",
            200,
            "text/html",
            r"answered 200 OK \(text/html\): <html>login</html>;",
        ),
        (LONG, 404, "text/html", "answered 404 Not Found .*: x{197}[.]{3};"),
        ("", 503, "text/plain", "answered 503 .*: nothing;"),
        ("token=hunter2", 401, "text/plain", r"answered 401 .*: token=\*\*\*;"),
        ("{broken", 200, "application/json", r"answered 200 OK \(application/json\): \{broken;"),
        ([1.0], 200, "application/json", r"returned \[1.0\]; return"),
        ({"scores": [1.0]}, 200, "application/json", "returned .*; return"),
        ({"rewards": []}, 200, "application/json", r"returned \{'rewards': \[\]\}; return"),
        ({"rewards": [1.0, 1.0]}, 200, "application/json", "returned .*; return"),
        ({"rewards": ["1"]}, 200, "application/json", "returned .*; return"),
        ('{"rewards": [NaN]}', 200, "application/json", r"returned \{'rewards': \[nan\]\}; return"),
        ({"rewards": [None]}, 200, "application/json", "returned None for all"),
        ({"rewards": [0.5]}, 200, "application/json", "score 0.5"),
    ],
)
def test_a_server_that_gives_no_rewards_is_refused_with_what_it_said(
    server, body, status, kind, said
):
    server.says(body, status, kind)
    with pytest.raises(UsageError, match=said) as refused:
        check(server.url)
    assert "\n" not in str(refused.value) and "hunter2" not in str(refused.value)
    assert "the reward server http://127.0.0.1:" in str(refused.value)


def test_a_server_that_is_down_or_hangs_is_refused(server, monkeypatch):
    with pytest.raises(
        UsageError, match=r"server http://127\.0\.0\.1:1/x gave no answer: .*; start"
    ):
        check("http://127.0.0.1:1/x")
    with pytest.raises(UsageError, match="gave no answer: "):
        check("localhost:1/x")
    server.wait_s = 1.0
    monkeypatch.setattr(reward_server, "TRIAL_S", 0.2)
    with pytest.raises(UsageError, match=r"did not answer within 0\.2 s; start it"):
        check(server.url)


def test_a_slow_server_is_tried_on_fewer_prompts(server, monkeypatch):
    server.wait_s = 0.1
    monkeypatch.setattr(reward_server, "TRIAL_S", 0.15)
    prompts = [str(number) for number in range(16)]
    labels = ["0"] * 16
    [line, _] = reward_server.check(server.url, prompts, labels, estimators.build("dbb"))
    assert len(server.asked) < 48 and "gave" in line


def test_during_a_training_a_server_is_asked_again_and_then_said_what_it_said(server):
    def busy_at_first(asked):
        is_busy = len(server.asked) == 1
        server.kind = "text/html" if is_busy else "application/json"
        return "<html>busy</html>" if is_busy else {"rewards": [0.5]}

    server.body = busy_at_first
    assert asyncio.run(reward_server.ask(server.url, "1+1=2", "1+1=", "2")) == {"rewards": [0.5]}
    server.says("<html>login</html>", kind="text/html")
    server.asked.clear()
    with pytest.raises(RewardError, match=r"answered 200 OK .*<html>login</html>"):
        asyncio.run(reward_server.ask(server.url, "1+1=2", "1+1=", "2"))
    assert len(server.asked) == 5
