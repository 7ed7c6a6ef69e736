"""Put page.html, page.css and the scripts together; nothing but the page's own style and script may run in it."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from importlib.resources import files
from typing import Any

from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch.numbers import encoded

_SCRIPTS = (
    "page.base.js",
    "page.charts.js",
    "page.curves.js",
    "page.run.js",
    "page.rollouts.js",
    "page.prompts.js",
    "page.js",
)


def render(title: str, data: dict[str, Any]) -> str:
    """Return the page.

    Args:
        title: shown in the browser's tab until the page's script has run.
        data: ``{"live": True}``, or ``{"answers": {path: answer}}`` for a file that needs no server.
    """
    parts = {
        "TITLE": html.escape(shown(title)),
        "POLICY": policy(live=bool(data.get("live"))),
        "STYLE": _asset("page.css"),
        "SCRIPT": _script(),
        # No text can close the script element: within it only "<" has a meaning.
        "DATA": encoded(data).decode().replace("<", "\\u003c"),
    }
    # In one pass: a text that is filled in may contain such marks.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


@cache
def policy(*, live: bool) -> str:
    """Return the content security policy: this style, this script; a live page may also ask its own server."""
    only = f"default-src 'none'; style-src {_hash(_asset('page.css'))}; script-src {_hash(_script())}"
    server = "; connect-src 'self'" if live else ""
    return f"{only}; base-uri 'none'; form-action 'none'{server}"


def _script() -> str:
    return "\n".join(map(_asset, _SCRIPTS))


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.watch") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
