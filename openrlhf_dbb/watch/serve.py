"""The command serve: a page about all runs, which asks for news every second."""

import argparse
import contextlib
import io
import ipaddress
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_store
from openrlhf_dbb.storage import StoreError, open_store
from openrlhf_dbb.terminal import shown

if TYPE_CHECKING:  # the help does not wait for numpy
    from openrlhf_dbb.watch.api import Api

PORT = 8642
CONNECTIONS = 256  # open at once, each with a thread
REQUEST_S = 10.0  # for a request line and its headers to come
ANSWER_S = 60.0  # for an answer to be taken

_LOCAL = r"localhost|127\.0\.0\.1|\[::1\]"
_IPV6 = r"\[[0-9a-f:.]+\]"
_ADDRESSES = rf"[0-9.]+|{_IPV6}"  # no other site can make these its own
_LABEL = "[a-z0-9_-]+"
_FULL_PAUSE_S = 0.02  # between two tries to accept a connection that there is no room for

_log = logging.getLogger(__package__)


def add_commands(add: Any) -> None:
    """Declare the command serve by ``cli.main``'s function."""
    parser = add("serve", serve, opens_store=False)
    add_store(parser)
    text = "address to listen at; whoever reaches it can read all runs (default: 127.0.0.1, this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"0 is any free one (default: {PORT})"
    )
    text = "names by which a browser may call the page, such as a proxy's; .NAME is all that end so"
    names = parser.add_argument("--allowed_hosts", metavar="NAME", nargs="+", default=[], help=text)
    names.type = allowed_host


def allowed_host(text: str) -> str:
    """Return a pattern of the names that ``NAME`` allows; ``.NAME`` and ``*.NAME``: all below it.

    Raises:
        argparse.ArgumentTypeError: ``text`` is neither.
    """
    match = re.fullmatch(rf"(\*?\.)?({_LABEL}(\.{_LABEL})*|{_IPV6})", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{shown(text)!r} is no host name; write NAME, or .NAME for all names that end so, "
            "without http://, port and path, and spaces between several"
        )
    below = rf"({_LABEL}\.)+" if match[1] else ""
    return below + re.escape(match[2])


def serve(arguments: argparse.Namespace) -> None:
    """Serve the page of a store until Ctrl-C.

    Raises:
        UsageError: nothing can listen at host and port.
        StoreError: the store cannot be read.
    """
    from openrlhf_dbb.watch.api import Api

    with open_store(arguments.store_url, create=False, read_only=True) as store:
        host = arguments.host.strip("[]")
        port = arguments.port
        api = Api(store)
        api.refresh()  # A store that cannot be read is an error now, not a page that shows nothing.
        try:
            server = _Server(host, port, api, arguments.allowed_hosts)
        except (OSError, OverflowError, UnicodeError) as error:
            raise UsageError(
                f"--host {shown(host)}, --port {port}: {error}; give another port, or any free one with --port 0"
            ) from None
        hint = "Ctrl-C ends it"
        if server.is_everywhere and not arguments.allowed_hosts:
            hint += "; behind a proxy, add --allowed_hosts and the name that it has there"
        with server, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
            url = f"http://{shown(server.name)}:{server.server_address[1]}/"
            print(f"{shown(store.location, width=None)} is shown at {url} ({hint})", flush=True)
            server.serve_forever()


class _Server(ThreadingTCPServer):
    """Listens at an address, and answers in a bounded number of threads.

    Raises OSError, OverflowError or UnicodeError if it cannot listen at this host and port.
    """

    # Not HTTPServer, which looks its own name up at the start, for seconds where there is no name server.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, api: "Api", allowed: Sequence[str] = ()) -> None:
        from openrlhf_dbb.watch.report import render

        self.api = api
        self.page = render("openrlhf-dbb", None).encode()
        self._room = threading.Semaphore(CONNECTIONS)
        self._waiting: dict[socket.socket, None] = {}  # asked nothing yet, oldest first
        stream = socket.SOCK_STREAM
        found = socket.getaddrinfo(host or None, None, type=stream, flags=socket.AI_PASSIVE)
        # IPv4 if the name has both: not every machine with a localhost ::1 can listen there.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        self.address_family = found[0][0]
        address = found[0][4]
        super().__init__((address[0], port, *address[2:]), _Handler)
        listening = ipaddress.ip_address(address[0])
        machine = socket.gethostname()
        self.is_everywhere = listening.is_unspecified
        self.name = machine if self.is_everywhere else host
        if ":" in self.name:
            self.name = f"[{self.name}]"
        names = [_LOCAL, re.escape(self.name), *allowed]
        if not listening.is_loopback:
            names += [_ADDRESSES, re.escape(machine)]
        # The Host headers by which a browser may call it. A tunnel may change the port.
        self.hosts = re.compile(f"({'|'.join(names)})(:[0-9]+)?", re.IGNORECASE)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is IPv4 too
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # such as too many open files: the connection stays in the queue
            self._end_oldest_wait()
            time.sleep(_FULL_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._room.acquire(blocking=False):
            self._end_oldest_wait()
            time.sleep(_FULL_PAUSE_S)
        self._waiting[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.has_asked(request)
        super().shutdown_request(request)
        self._room.release()

    def has_asked(self, request: Any) -> None:
        """Note that the request of a connection has come."""
        self._waiting.pop(request, None)

    def _end_oldest_wait(self) -> None:
        for connection in list(self._waiting)[:1]:
            self.has_asked(connection)
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line why a connection was not answered; nothing of one that Ctrl-C has closed."""
        if request.fileno() == -1:
            return
        _log.error("%s", _in_one_line("a connection", sys.exc_info()[1]))


class _Request(io.RawIOBase):
    """Reads from a connection; TimeoutError after ``REQUEST_S``, however slowly bytes come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        self.server.has_asked(self.connection)
        status, content = self._answer()
        self.connection.settimeout(ANSWER_S)
        kind = "text/html; charset=utf-8" if content is self.server.page else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        # A page cannot say this itself.
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")  # a response may hold HTML
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _answer(self) -> tuple[int, bytes]:
        """Return status and content of the answer."""
        from openrlhf_dbb.watch.api import NoSuchAnswer

        sent = self.headers.get_all("Host", [])
        # A page of another site that makes its own name resolve to this host calls it by that name.
        if len(sent) != 1 or not self.server.hosts.fullmatch(sent[0]):
            return 403, _problem(
                f"this server is not called {', '.join(sent)!r}; open the address that it "
                "printed, or add --allowed_hosts NAME to serve"
            )
        if self.path == "/":
            return 200, self.server.page
        try:
            return 200, self.server.api.ask(self.path.removeprefix("/api/"))
        except NoSuchAnswer as error:
            return 404, _problem(error)
        except StoreError as error:
            return 503, _problem(error)
        except Exception as error:
            line = _in_one_line(self.path, error)
            _log.error("%s", line)
            return 500, _problem(line)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a browser that has left
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


def _problem(text: object) -> bytes:
    from openrlhf_dbb.watch.api import encoded

    return encoded({"error": shown(text, width=None)})


def _in_one_line(what: str, error: BaseException | None) -> str:
    return shown(f"{what} cannot be answered: {type(error).__name__}: {error}", width=None)
