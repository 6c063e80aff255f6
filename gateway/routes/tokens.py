"""POST /tokenize and /detokenize: the gateway's own view of text and ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from isthmus.gateway.context import admit, gateway_of, request_id_of
from isthmus.gateway.formats import token_bytes
from isthmus.gateway.limits import read_body
from isthmus.gateway.schemas import DetokenizeBody, TokenizeBody, parse_body
from starlette.requests import Request
from starlette.responses import JSONResponse

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    admit(request)
    gateway = gateway_of(request)
    body = parse_body(TokenizeBody, await read_body(request, gateway.config))
    pipeline = gateway.pipeline
    pipeline.check_model(body.model)
    if body.messages is not None:
        text = pipeline.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        ids = await pipeline.tokenise(text, add_special_tokens=False)
    else:
        ids = await pipeline.tokenise(body.prompt or "", add_special_tokens=body.add_special_tokens)
    content: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": gateway.router.max_model_len(),
        "tokens": ids,
    }
    if body.return_token_strs:
        tokenizer = pipeline.tokenizer
        texts = [token_bytes(tokenizer, token_id).decode(errors="replace") for token_id in ids]
        content["token_strs"] = texts
    return JSONResponse(content, headers={"x-request-id": request_id_of(request)})


@router.post("/detokenize")
async def detokenize(request: Request) -> JSONResponse:
    admit(request)
    gateway = gateway_of(request)
    body = parse_body(DetokenizeBody, await read_body(request, gateway.config))
    gateway.pipeline.check_model(body.model)
    tokenizer = gateway.pipeline.tokenizer
    tokenizer.check_ids(body.tokens, "tokens")
    text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return JSONResponse({"prompt": text}, headers={"x-request-id": request_id_of(request)})
