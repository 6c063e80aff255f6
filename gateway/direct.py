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
from starlette.types import Receive, Scope, Send

from isthmus.common.errors import IsthmusError
from isthmus.gateway.context import id_headers, request_id_of
from isthmus.gateway.error_response import error_response
from isthmus.gateway.unexpected import internal_error, log_unexpected

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """An ASGI application in front of the framework's. ``posts``: path → endpoint.

    For these it is the process edge too, as ``UnexpectedErrors`` is for the framework's."""

    def __init__(self, app: FastAPI, posts: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posts = dict(posts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._posts.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app  # as the framework does: requests find the gateway by it
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except IsthmusError as error:
            response = error_response(error, id_headers(request))
        except Exception as error:  # noqa: BLE001 (it costs its own request and nothing else)
            log_unexpected(error, request_id_of(request))
            response = error_response(internal_error(), id_headers(request))
        try:
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001 (an answer that has begun is cut off)
            log_unexpected(error, request_id_of(request))
