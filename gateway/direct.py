"""The short way to the two routes that generate: past the framework's routing and dependencies.

FastAPI keeps these routes for its documents and for what is not a POST to exactly these paths. Its
own way to an endpoint costs a request about as much as everything else that is done before the
prompt is sent to an instance.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.common.errors import IsthmusError
from isthmus.gateway.context import id_headers
from isthmus.gateway.error_response import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """ASGI middleware. ``posts``: path → endpoint."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._posts.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except IsthmusError as error:
            response = error_response(error, id_headers(request))
        await response(scope, receive, send)
