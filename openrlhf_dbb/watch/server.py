"""The web server's application: the page, its answers, and who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import page
from openrlhf_dbb.watch.answers import Answers, BadRequest, NoSuchAnswer
from storage import StoreError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(answers: Answers, *, hosts: Collection[str] = (), token: str = "", cookie: str = "dbb") -> Any:
    """Return the ASGI application.

    Args:
        hosts: names by which a browser may call this server; none: any, since a token is asked for.
        token: what a client must know; "": nothing is asked for.
        cookie: name of the cookie that keeps the token.
    """
    html = page.render("openrlhf-dbb", {"live": True})
    policy = f"{page.policy(live=True)}; frame-ancestors 'none'"

    def show_page(request: Request) -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    def answer(request: Request) -> Response:
        try:
            content = answers.ask(request.path_params["path"], dict(request.query_params))
        except NoSuchAnswer as problem:
            return refusal(404, str(problem))
        except BadRequest as problem:
            return refusal(400, str(problem))
        except StoreError as problem:
            return refusal(503, str(problem))
        return Response(content, media_type="application/json")

    routes = [Route("/", show_page, methods=["GET"]), Route("/api/{path:path}", answer, methods=["GET"])]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})
    return Guard(inner, hosts=hosts, token=token, cookie=cookie)


def refusal(status: int, text: str) -> Response:
    """Return a response that says in one line why there is no answer."""
    return JSONResponse({"error": shown(text, width=None)}, status_code=status)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        404: "there is no such page; the page about the runs is at /",
        405: "only GET is answered; nothing is written",
    }
    return refusal(error.status_code, said.get(error.status_code, str(error.detail)))


def _failed(request: Request, error: Exception) -> Response:
    return refusal(500, f"a fault of the server, {type(error).__name__}; its terminal says more")


class Guard:
    """Refuses clients that do not call the server by its name or do not know its token; adds ``HEADERS``.

    A page of another site may have its own name point to this host; the browser then calls it by that name.
    """

    def __init__(self, inner: Any, *, hosts: Collection[str], token: str, cookie: str) -> None:
        self._inner = inner
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                added = [header for header in more if header[0] not in present]
                message = message | {"headers": [*message["headers"], *added]}
            await send(message)

        refused = self._refused(scope)
        await (refused or self._inner)(scope, receive, send_with_headers)

    def _refused(self, scope: Any) -> Response | None:
        """Return the refusal; None if the client may ask."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = _host_name(headers.get("host", ""))
        if self._hosts and name not in self._hosts:
            return refusal(403, f"this server is not called {name!r}; open the address that it printed")
        if not self._token:
            return None
        token = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("token")
        if token is not None and self._is_token(token):
            return self._let_in(scope["path"])
        kept = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if (kept is not None and self._is_token(kept.value)) or (kind.lower() == "bearer" and self._is_token(bearer)):
            return None
        return refusal(403, "the token is missing or wrong; open the address that openrlhf-dbb serve printed")

    def _is_token(self, text: str) -> bool:
        # Takes the same time wherever the first difference is, so that no client can find the token letter by letter.
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _let_in(self, path: str) -> Response:
        """Redirect to the address without the token, which then is in no history and no log."""
        response = RedirectResponse(
            path if path.startswith("/") and not path.startswith("//") else "/", status_code=303
        )
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
