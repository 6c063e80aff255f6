"""POST /tokenize and /detokenize: the gateway's own view of text and ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from isthmus.gateway.context import admit, gateway_of, id_headers
from isthmus.gateway.formats import token_bytes
from isthmus.gateway.limits import read_body
from isthmus.gateway.pipeline import Pipeline
from isthmus.gateway.schemas import DetokenizeBody, TokenizeBody

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    identity = admit(request)
    gateway = gateway_of(request)
    with gateway.limiter.acquire(identity):
        body = await gateway.pipeline.parse(TokenizeBody, await read_body(request, gateway.config))
        ids = await _tokenise(gateway.pipeline, body)
    content: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": gateway.router.max_model_len(),
        "tokens": ids,
    }
    if body.return_token_strs:
        tokenizer = gateway.pipeline.tokenizer
        texts = [token_bytes(tokenizer, token_id).decode(errors="replace") for token_id in ids]
        content["token_strs"] = texts
    return JSONResponse(content, headers=id_headers(request))


@router.post("/detokenize")
async def detokenize(request: Request) -> JSONResponse:
    identity = admit(request)
    gateway = gateway_of(request)
    with gateway.limiter.acquire(identity):
        raw = await read_body(request, gateway.config)
        body = await gateway.pipeline.parse(DetokenizeBody, raw)
        gateway.pipeline.check_model(body.model)
        text = await gateway.pipeline.detokenise(
            body.tokens, skip_special_tokens=body.skip_special_tokens
        )
    return JSONResponse({"prompt": text}, headers=id_headers(request))


async def _tokenise(pipeline: Pipeline, body: TokenizeBody) -> list[int]:
    pipeline.check_model(body.model)
    if body.messages is None:
        text, adds_special = body.prompt or "", body.add_special_tokens
    else:
        text = pipeline.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        adds_special = False
    return await pipeline.tokenise(text, add_special_tokens=adds_special)
