"""``openrlhf-dbb serve`` as tests start it."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_S = 120


class Serving:
    def __init__(self, url, *arguments):
        command = [
            sys.executable,
            "-m",
            "openrlhf_dbb",
            "serve",
            "--store.url",
            url,
            *("--port", "0"),
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.said = self.process.stdout.readline()
        found = re.search(r"http://[\w.:\[\]-]+:(\d+)/", self.said)
        assert found, self.said + self.process.stderr.read()
        self.url = found[0]
        self.port = int(found[1])

    def get(self, path):
        """Status, headers and body."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST_S)
        client.request("GET", f"/{path}")
        answer = client.getresponse()
        return answer.status, answer.headers, answer.read().decode()

    def ask(self, path="state"):
        status, _, body = self.get(f"api/{path}")
        assert status == 200, body
        return json.loads(body)

    def until(self, holds, path="state"):
        """The answer as soon as it is as wanted."""
        deadline = time.monotonic() + LONGEST_S
        while not holds(answer := self.ask(path)):
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)
        return answer

    def end(self, sent=signal.SIGINT):
        """Exit code, stderr and how long it took."""
        began = time.monotonic()
        self.process.send_signal(sent)
        _, errors = self.process.communicate(timeout=LONGEST_S)
        return self.process.returncode, errors, time.monotonic() - began
