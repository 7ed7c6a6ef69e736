"""The web server's application: the page, its answers, and who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import page
from openrlhf_dbb.watch.api import Api, NoSuchAnswer
from storage import StoreError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(api: Api, *, hosts: Collection[str] = (), token: str = "", cookie: str = "dbb") -> Any:
    """Return the ASGI application.

    Args:
        hosts: names by which a browser may call this server; none: any, since a token is asked for.
        token: a client must know it; "": nothing is asked for.
        cookie: name of the cookie that keeps the token.
    """
    html = page.render("openrlhf-dbb", {"live": True})
    policy = f"{page.policy(live=True)}; frame-ancestors 'none'"

    def show_page(request: Request) -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    def answer(request: Request) -> Response:
        try:
            content = api.ask(request.path_params["path"], request.query_params.get("prompt"))
        except NoSuchAnswer as problem:
            return _refusal(404, str(problem))
        except StoreError as problem:
            return _refusal(503, str(problem))
        return Response(content, media_type="application/json")

    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refused(request, hosts, token, cookie) or await call(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refusal(error.status_code, f"{error.detail}; the page about the runs is at /")

    return Starlette(
        routes=[Route("/", show_page, methods=["GET"]), Route("/api/{path:path}", answer, methods=["GET"])],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers={HTTPException: refuse},
    )


def _refusal(status: int, text: str) -> Response:
    return JSONResponse({"error": shown(text, width=None)}, status_code=status)


def _refused(request: Request, hosts: Collection[str], token: str, cookie: str) -> Response | None:
    """Return the refusal, or a redirect that sets the cookie; None if the client may ask."""

    def is_token(text: str) -> bool:
        # Takes the same time wherever the first difference is, so that no client can find the token letter by letter.
        return hmac.compare_digest(text.encode(), token.encode())

    # A page of another site that makes its own name resolve to this host calls it by that name.
    if hosts and request.url.hostname not in hosts:
        return _refusal(403, f"this server is not called {request.url.hostname!r}; open the address that it printed")
    if not token or is_token(request.cookies.get(cookie, "")):
        return None
    if is_token(request.query_params.get("token", "")):
        # The address without the token leaves it out of the browser's history.
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
        return response
    return _refusal(403, "the token is missing or wrong; open the address that openrlhf-dbb serve printed")
