"""The command serve: a live page about all runs, in the browser."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_store
from openrlhf_dbb.terminal import shown
from storage import PosteriorStore, open_store

PORT = 8642
TOKEN_VARIABLE = "OPENRLHF_DBB_TOKEN"

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_GRACE_S = 1  # for answers under way when the server is to end


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is the function of ``cli.main``."""
    parser = add("serve", serve, opens_store=False)
    add_store(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address or name to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 is any free one (default: {PORT})")
    text = f"let other hosts in who know the printed token (or ${TOKEN_VARIABLE}); traffic is not encrypted"
    parser.add_argument("--allow-remote", action="store_true", help=text)


def serve(arguments: argparse.Namespace) -> int:
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise UsageError(f"serve needs {module}; run: pip install 'openrlhf-dbb[serve]'")
    if arguments.host not in _LOCAL_NAMES and not arguments.allow_remote:
        raise UsageError(
            f"--host: {shown(arguments.host)} may be reached from other hosts; add --allow-remote to let in those who "
            "know the token, or use 127.0.0.1 with ssh -L"
        )
    token = (os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)) if arguments.allow_remote else ""
    with (
        open_store(arguments.store_url, create=False, read_only=True) as store,
        _listening(arguments.host, arguments.port) as listener,
    ):
        _run(store, listener, arguments.host, token)
    return 0


def _run(store: PosteriorStore, listener: socket.socket, host: str, token: str) -> None:
    import uvicorn

    from openrlhf_dbb.watch.api import Api
    from openrlhf_dbb.watch.server import application

    api, port = Api(store, live=True), listener.getsockname()[1]
    api.refresh()  # A store that cannot be read is an error now, not a page that shows nothing.
    app = application(api, hosts=() if token else _LOCAL_NAMES, token=token, cookie=f"openrlhf_dbb_{port}")
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")
    print(f"{shown(store.location, width=None)} is shown at {url} (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
        uvicorn.Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        UsageError: it cannot.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(
            f"--host {shown(host)}, --port {port}: {error}; give another port, or any free one with --port 0"
        ) from None
