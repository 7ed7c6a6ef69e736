"""A model is fetched from the hub once, before anything starts: tried on a hub of this machine."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

COMMIT = "0" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"other",
    "model.gguf": b"other",
}
FETCH = """
from types import SimpleNamespace
from openrlhf_dbb.driver import hub
from openrlhf_dbb.errors import UsageError
names = dict(actor={name!r}, reward=None, critic="/")
sections = {{section: SimpleNamespace(model_name_or_path=name) for section, name in names.items()}}
try:
    hub.fetch_models(SimpleNamespace(**sections))
except UsageError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        Hub.asked.append((self.command, path))
        file = path.rpartition("/")[2]
        if path.startswith("/api/models/some/model/tree"):
            tree = [
                {"type": "file", "path": name, "size": len(FILES[name]), "oid": "1"}
                for name in FILES
            ]
            self.answer(json.dumps(tree).encode(), "application/json")
        elif path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(
                json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode(),
                "application/json",
            )
        elif path.startswith("/some/model/resolve/") and file in FILES:
            self.answer(FILES[file], "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, content, kind):
        self.send_response(200)
        for name, value in {
            "Content-Type": kind, "Content-Length": len(content), "ETag": '"1"', "X-Repo-Commit": COMMIT,
        }.items():  # fmt: skip
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def fetch(tmp_path):
    """Function: fetch a model from a hub of this machine; what it says, and the files on disk afterwards."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()

    def run(name, **variables):
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", **variables,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", FETCH.format(name=name)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        snapshots = (tmp_path / "hub").glob("models--*/snapshots/*/*")
        return done.stdout.strip(), sorted(path.name for path in snapshots)

    yield run
    server.shutdown()
    server.server_close()


def test_weights_of_one_format_and_small_files_are_fetched_and_not_again(fetch):
    assert fetch("some/model") == ("", ["config.json", "model.safetensors"])
    Hub.asked.clear()
    assert fetch("some/model", HF_HUB_OFFLINE="1") == ("", ["config.json", "model.safetensors"])
    assert Hub.asked == []
    nowhere = "http://127.0.0.1:1"
    assert fetch("some/model", HF_ENDPOINT=nowhere) == ("", ["config.json", "model.safetensors"])


@pytest.mark.parametrize(
    ("name", "variables", "reason"),
    [
        ("no/such", {}, "--actor.model_name_or_path no/such: it is not on this machine"),
        ("some/model", {"HF_HUB_OFFLINE": "1"}, "hf download some/model"),
        (
            "some/model",
            {"HF_ENDPOINT": "http://127.0.0.1:1"},
            "--actor.model_name_or_path some/model",
        ),
        ("not a name/at/all", {}, "--actor.model_name_or_path not a name/at/all"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(fetch, name, variables, reason):
    said, files = fetch(name, **variables)
    assert reason in said
    assert "\n" not in said
    assert files == []
