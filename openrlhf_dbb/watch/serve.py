import argparse
import contextlib
import re
import socket
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_store
from openrlhf_dbb.storage import open_store
from openrlhf_dbb.terminal import shown

PORT = 8642

_LOCAL = r"localhost|127\.0\.0\.1|\[::1\]"
_ADDRESSES = r"[0-9.]+|\[[0-9a-f:.]+\]"  # no other site can make these its own
_GRACE_S = 1  # for answers under way when the server is to end


def add_commands(add: Any) -> None:
    parser = add("serve", serve, opens_store=False)
    add_store(parser)
    text = "address to listen at; whoever reaches it can read all runs (default: 127.0.0.1, this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=int, default=PORT, help=f"0 is any free one (default: {PORT})")


def serve(arguments: argparse.Namespace) -> None:
    try:
        import uvicorn

        from openrlhf_dbb.watch.api import Api
        from openrlhf_dbb.watch.server import application
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs {error.name}; run: pip install '.[serve]' in the repository") from None
    with open_store(arguments.store_url, create=False, read_only=True) as store:
        host, port = arguments.host, arguments.port
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError, UnicodeError) as error:
            raise UsageError(
                f"--host {shown(host)}, --port {port}: {error}; give another port, or any free one with --port 0"
            ) from None
        with listener:
            api = Api(store)
            api.refresh()  # A store that cannot be read is an error now, not a page that shows nothing.
            machine = socket.gethostname()
            name = machine if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            url = f"http://{name}:{listener.getsockname()[1]}/"
            print(f"{shown(store.location, width=None)} is shown at {url} (Ctrl-C ends it)", flush=True)
            everywhere = f"{_LOCAL}|{_ADDRESSES}|{re.escape(machine)}|{re.escape(name)}"
            hosts = _LOCAL if re.fullmatch(_LOCAL, name, re.IGNORECASE) else everywhere
            app = application(api, re.compile(f"({hosts})(:[0-9]+)?", re.IGNORECASE))  # a tunnel may change the port
            config = uvicorn.Config(
                app, http="h11", ws="none", log_level="warning", access_log=False, lifespan="off",
                timeout_graceful_shutdown=_GRACE_S, server_header=False,
            )  # fmt: skip
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end.
                uvicorn.Server(config).run(sockets=[listener])
