"""The short way to the two routes that generate: past the framework.

FastAPI keeps these routes for its documents and for what is not a POST to exactly these paths. Its
own way to an endpoint leads through layers that do nothing for these two, and each of which every
part of a stream passes again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.common.errors import IsthmusError
from isthmus.gateway.context import id_headers
from isthmus.gateway.error_response import error_response
from isthmus.gateway.unexpected import UnexpectedErrors

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """An ASGI application in front of the framework's. ``posts``: path → endpoint."""

    def __init__(self, app: FastAPI, posts: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posts: dict[str, ASGIApp] = {
            path: UnexpectedErrors(_DirectRoute(app, endpoint)) for path, endpoint in posts.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._posts.get(scope["path"]) if is_post else None
        if route is None:
            route = self._app
        await route(scope, receive, send)


class _DirectRoute:
    def __init__(self, app: FastAPI, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._app  # as the framework does: requests find the gateway by it
        request = Request(scope, receive)
        try:
            response = await self._endpoint(request)
        except IsthmusError as error:
            response = error_response(error, id_headers(request))
        await response(scope, receive, send)
