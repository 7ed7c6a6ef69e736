import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from openrlhf_dbb.storage import StoreError
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import page
from openrlhf_dbb.watch.api import Api, NoSuchAnswer

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(api: Api, hosts: re.Pattern[str]) -> Any:
    """Return the ASGI application; ``hosts`` matches the Host headers by which a browser may call it."""
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
        sent = request.headers.getlist("host")
        # A page of another site that makes its own name resolve to this host calls it by that name. Starlette's
        # request.url takes a Host that it cannot parse as absent.
        if len(sent) != 1 or not hosts.fullmatch(sent[0]):
            response = _refusal(403, f"this server is not called {', '.join(sent)!r}; open the address that it printed")
        else:
            response = await call(request)
        # The page sets its own policy; every other response gets the strict one.
        for header, value in HEADERS.items():
            response.headers.setdefault(header, value)
        return response

    return Starlette(
        routes=[Route("/", show_page, methods=["GET"]), Route("/api/{path:path}", answer, methods=["GET"])],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
    )


def _refusal(status: int, text: str) -> Response:
    return JSONResponse({"error": shown(text, width=None)}, status_code=status)
