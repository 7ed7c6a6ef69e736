"""The command serve: a live page about all runs, in the browser."""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import threading
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_store
from openrlhf_dbb.terminal import shown
from storage import open_store
from storage.retry import impatient

PORT = 8642
TOKEN_VARIABLE = "OPENRLHF_DBB_TOKEN"

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_GRACE_S = 1  # for answers under way when the server is to end


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("serve", serve, opens_store=False)
    add_store(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address or name to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 is any free one (default: {PORT})")
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help=f"let other hosts in who know the printed token (or ${TOKEN_VARIABLE}); traffic is not encrypted",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def serve(arguments: argparse.Namespace) -> int:
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise UsageError(f"serve needs {module}; run: pip install 'openrlhf-dbb[serve]'")
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port: {arguments.port} is not in 0 to 65535")
    family, address = _resolved(arguments.host)
    local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not (local or arguments.allow_remote):
        raise UsageError(
            f"--host: {shown(arguments.host)} can be reached from other hosts; add --allow-remote to let in those who "
            "know the token, or use 127.0.0.1 with ssh -L"
        )
    token = (os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)) if arguments.allow_remote else ""
    with (
        impatient(),
        open_store(arguments.store_url, create=False, read_only=True) as store,
        _listening(family, arguments.host, address, arguments.port) as listener,
    ):
        _run(store, listener, arguments, token)
    return 0


def _run(store: Any, listener: socket.socket, arguments: argparse.Namespace, token: str) -> None:
    import uvicorn

    from openrlhf_dbb.watch.answers import Answers
    from openrlhf_dbb.watch.server import application

    answers, port = Answers(store, live=True), listener.getsockname()[1]
    answers.refresh()  # A store that cannot be read is an error now, not a page that shows nothing.
    hosts = () if arguments.allow_remote else (*_LOCAL_NAMES, arguments.host)
    app = application(answers, hosts=hosts, token=token, cookie=f"openrlhf_dbb_{port}")
    url = f"http://{_printed_host(arguments.host)}:{port}/" + (f"?token={quote(token)}" if token else "")
    print(f"{shown(store.location, width=None)} is shown at {url} (Ctrl-C ends it)", flush=True)
    if arguments.open:
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
        uvicorn.Server(config).run(sockets=[listener])


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the first address of a host.

    Raises:
        UsageError: it has none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UsageError(
            f"--host: {shown(host)} is no address of this host and no name that can be looked up; try 127.0.0.1"
        ) from None
    return family, str(address[0])


def _listening(family: socket.AddressFamily, host: str, address: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        UsageError: it cannot.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {shown(host)} is taken; give another with --port, or any free one with --port 0"
            ) from None
        raise UsageError(f"port {port} of {shown(host)} cannot be used: {error.strerror}; try --port 0") from None
    return listener


def _printed_host(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
