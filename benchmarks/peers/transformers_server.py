"""/v1/completions over ``transformers``' continuous batching; runs in an environment of its own.

Prompts are token ids, answers are streamed as one event a token without text: what the load client
counts. It imports nothing of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE_SIZE = 128
# For 64 sequences of 384 tokens.
NUM_BLOCKS = 192
# No token has this id: an answer ends at its length only.
NEVER = -1


def start_manager(path: str, dtype: str, threads: int) -> Any:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=NEVER, pad_token_id=0, max_new_tokens=4096
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=2048,
            auto_switch_to_flash=False,
        ),
    )  # fmt: skip
    manager.start()
    warm_up(manager)
    return manager


def warm_up(manager: Any) -> None:
    """The cache is made when the loop has begun: no server is ready before its first answer."""
    manager.add_request([1, 2, 3], request_id="warm-up", max_new_tokens=2, eos_token_id=NEVER)
    while manager.is_running():
        result = manager.get_result(request_id="warm-up", timeout=1)
        if result is not None and result.is_finished():
            return
    raise RuntimeError("the generation loop has ended; the log says why")


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def create_app(manager: Any) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"ok": manager.is_running()}, 200 if manager.is_running() else 503)

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(
            stream(manager, body["prompt"], body["max_tokens"]), media_type="text/event-stream"
        )

    return app


async def stream(manager: Any, prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
    results: asyncio.Queue[Any] = asyncio.Queue()
    request_id = uuid.uuid4().hex
    manager.register_result_handler(request_id, results.put_nowait)
    manager.add_request(
        prompt, request_id=request_id, max_new_tokens=max_tokens, streaming=True, eos_token_id=NEVER
    )
    is_finished = False
    try:
        while not is_finished:
            result = await results.get()
            is_finished = result.is_finished()
            if result.error:
                yield event({"error": str(result.error)})
                return
            yield event({"choices": [{"index": 0, "text": ""}]})
        yield event({"choices": [], "usage": {"completion_tokens": len(result.generated_tokens)}})
        yield "data: [DONE]\n\n"
    finally:
        if not is_finished:
            manager.cancel_request(request_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    manager = start_manager(args.model, args.dtype, args.threads)
    try:
        uvicorn.run(create_app(manager), host="127.0.0.1", port=args.port, log_level="warning")
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)


if __name__ == "__main__":
    main()
