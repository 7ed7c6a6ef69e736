"""The command serve: a page about all runs, which asks for news every second."""

import argparse
import contextlib
import re
import socket
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_store
from openrlhf_dbb.storage import StoreError, open_store
from openrlhf_dbb.terminal import shown

PORT = 8642

_LOCAL = r"localhost|127\.0\.0\.1|\[::1\]"
_ADDRESSES = r"[0-9.]+|\[[0-9a-f:.]+\]"  # no other site can make these its own


def add_commands(add: Any) -> None:
    parser = add("serve", serve, opens_store=False)
    add_store(parser)
    text = "address to listen at; whoever reaches it can read all runs (default: 127.0.0.1, this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=int, default=PORT, help=f"0 is any free one (default: {PORT})")


def serve(arguments: argparse.Namespace) -> None:
    from openrlhf_dbb.watch.api import Api

    with open_store(arguments.store_url, create=False, read_only=True) as store:
        host, port = arguments.host, arguments.port
        api = Api(store)
        api.refresh()  # A store that cannot be read is an error now, not a page that shows nothing.
        machine = socket.gethostname()
        name = machine if host in ("", "0.0.0.0") else host
        everywhere = f"{_LOCAL}|{_ADDRESSES}|{re.escape(machine)}|{re.escape(name)}"
        hosts = _LOCAL if re.fullmatch(_LOCAL, name, re.IGNORECASE) else everywhere
        pattern = re.compile(f"({hosts})(:[0-9]+)?", re.IGNORECASE)  # a tunnel may change the port
        try:
            server = _Server((host, port), _handler(api, pattern))
        except (OSError, OverflowError, UnicodeError) as error:
            raise UsageError(
                f"--host {shown(host)}, --port {port}: {error}; give another port, or any free one with --port 0"
            ) from None
        with server, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
            url = f"http://{name}:{server.server_address[1]}/"
            print(f"{shown(store.location, width=None)} is shown at {url} (Ctrl-C ends it)", flush=True)
            server.serve_forever()


class _Server(ThreadingTCPServer):
    # Not HTTPServer, which looks its own name up at the start, for seconds where there is no name server.
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128


def _handler(api: Any, hosts: re.Pattern[str]) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers a request; ``hosts`` matches the Host headers by which a browser may call it."""
    from openrlhf_dbb.watch.api import NoSuchAnswer, encoded
    from openrlhf_dbb.watch.report import render

    page = render("openrlhf-dbb", {"live": True}).encode()

    def respond(path: str, sent: list[str]) -> tuple[int, bytes]:
        # A page of another site that makes its own name resolve to this host calls it by that name.
        if len(sent) != 1 or not hosts.fullmatch(sent[0]):
            said = f"this server is not called {', '.join(sent)!r}; open the address that it printed"
            return 403, encoded({"error": shown(said, width=None)})
        if path == "/":
            return 200, page
        try:
            return 200, api.ask(path.removeprefix("/api/"))
        except StoreError as problem:
            status = 404 if isinstance(problem, NoSuchAnswer) else 503
            return status, encoded({"error": shown(problem, width=None)})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = respond(self.path, self.headers.get_all("Host", []))
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8" if content is page else "application/json")
            self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # which a page cannot say itself
            self.send_header("X-Content-Type-Options", "nosniff")  # a response may hold HTML
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a browser that has left
                super().handle()

        def log_message(self, *_: Any) -> None:
            """Say nothing of each request."""

    return Handler
