"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from isthmus.common.clock import NS_PER_S
from isthmus.gateway.context import Gateway, admit, gateway_of, id_headers

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    admit(request)
    content = {"object": "list", "data": [_describe(gateway_of(request))]}
    return JSONResponse(content, headers=id_headers(request))


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> JSONResponse:
    admit(request)
    gateway = gateway_of(request)
    gateway.pipeline.check_model(model)
    return JSONResponse(_describe(gateway), headers=id_headers(request))


def _describe(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.pipeline.model_name,
        "object": "model",
        "created": gateway.started_ns // NS_PER_S,
        "owned_by": "isthmus",
        "max_model_len": gateway.router.max_model_len(),
    }
