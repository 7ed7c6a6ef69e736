"""One self-contained HTML file made of page.html, page.css and the scripts; it opens offline and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.terminal import shown

_SCRIPTS = ("page.charts.js", "page.prompts.js", "page.rollouts.js", "page.js")


def render(title: str, data: dict[str, Any]) -> str:
    """The page.

    Args:
        title: shown in the browser's tab.
        data: see ``report.gather``; the page's script reads it as JSON.
    """
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    parts = {
        "TITLE": html.escape(shown(title)),
        # Only this style and this script may be used, and nothing at all may be fetched.
        "POLICY": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _embedded(data),
    }
    # In one pass: what is filled in may contain such marks.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def packed(values: NDArray[Any]) -> dict[str, str]:
    """An array as base64 of little-endian numbers: integers in as few bytes as they need, others float32."""
    flat = np.ravel(values)
    kind = "f4"
    if np.issubdtype(flat.dtype, np.integer) or flat.dtype == bool:
        top = int(flat.max(initial=0))
        kind = "u1" if top < 2**8 else "u2" if top < 2**16 else "u4"
    return {"type": kind, "data": base64.b64encode(flat.astype("<" + kind).tobytes()).decode()}


def _embedded(data: dict[str, Any]) -> str:
    """JSON in which no text can close the script element: in there only ``<`` has a meaning."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("openrlhf_dbb.inspect") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
