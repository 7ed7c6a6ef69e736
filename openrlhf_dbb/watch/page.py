import base64
import hashlib
import html
import json
import math
import re
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from openrlhf_dbb.terminal import shown

# After "page."
_SCRIPTS = ("base.js", "charts.js", "curves.js", "pool.js", "run.js", "rollouts.js", "prompts.js", "js")


def render(title: str, data: dict[str, Any]) -> str:
    """Return the page; ``data``: ``{"live": True}``, or ``{"answers": {path: answer}}`` for a file without a server."""
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


def encoded(answer: Any) -> bytes:
    """Return an answer as JSON in UTF-8.

    Fractions have six significant digits. NaN and infinite numbers, which JSON does not have, become null.

    Example:
        >>> encoded({"mean": np.array([0.123456789, 1234567.0, np.nan])})
        b'{"mean":[0.123457,1234567,null]}'
    """
    return json.dumps(_plain(answer), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    # A count that went through an array of floats stays exact.
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def _script() -> str:
    return "\n".join(_asset(f"page.{name}") for name in _SCRIPTS)


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.watch") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
