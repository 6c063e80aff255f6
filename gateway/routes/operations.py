"""GET /health, /ready, /version and /metrics: for operators and probes, without a key."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from isthmus.gateway.context import gateway_of
from isthmus.gateway.readiness import assess

router = APIRouter()


@router.get("/health")
async def health() -> JSONResponse:
    """Alive: the event loop turns. Says nothing of the instances."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Can admit a request now and makes progress on those it has; 503 says why not."""
    gateway = gateway_of(request)
    readiness = assess(gateway.router, gateway.decode_client)
    content = {
        "ready": readiness.is_ready,
        "reasons": readiness.reasons,
        "instances": readiness.instances,
    }
    return JSONResponse(content, status_code=200 if readiness.is_ready else 503)


@router.get("/version")
async def get_version() -> JSONResponse:
    return JSONResponse({"version": version("isthmus")})


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    gateway_of(request).goodput.publish()
    return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST})
