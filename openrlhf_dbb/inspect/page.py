"""One self-contained HTML file out of page.html, page.css and page.js; it opens offline and asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from openrlhf_dbb.inspect.text import shown


def render(title: str, data: dict[str, Any]) -> str:
    """The page.

    Args:
        title: shown in the browser's tab.
        data: see ``report.gather``; the page's script reads it as JSON.
    """
    style, script = _asset("page.css"), _asset("page.js")
    parts = {
        "TITLE": html.escape(shown(title)),
        # Nothing but these two may style the page or run in it, and nothing at all is fetched.
        "POLICY": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _embedded(data),
    }
    # In one pass: what is filled in may hold such marks itself.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no text in it can end early: inside a script element only ``<`` has a meaning."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.inspect") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
