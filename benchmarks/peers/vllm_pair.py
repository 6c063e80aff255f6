"""A vLLM prefill/decode pair over its own NIXL connector, behind the smallest proxy that works.

Started by ``benchmarks/pair.py``; also by hand: ``python -m benchmarks.peers.vllm_pair --help``.
The proxy sends a prompt to the prefill server with one output token, takes the transfer parameters
from its answer and streams the decode server's answer on: what vLLM's own examples do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

TRANSFER = (
    '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu",'
    '"kv_load_failure_policy":"fail"}'
)


def start_server(
    venv: Path, model: Path, port: int, side_port: int, core: int, log: Path, dtype: str
) -> subprocess.Popen[bytes]:
    """One vLLM server bound to one core."""
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "UCX_TLS": "all",
        "UCX_MODULES": "^ib",
    }
    command = [
        str(venv / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", dtype, "--max-model-len", "4096",
        "--served-model-name", "bench", "--kv-transfer-config", TRANSFER,
    ]  # fmt: skip
    with log.open("wb") as out:
        # Not in the repository: its folder `kernels` would hide the package of that name.
        return subprocess.Popen(
            command, env=env, stdout=out, stderr=out, start_new_session=True, cwd=log.parent
        )


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the workers of its own session."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    except ProcessLookupError:
        return


def wait_ready(port: int, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server on port {port} ended with code {process.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise TimeoutError(f"no /health on port {port} within {timeout_s:.0f} s")


def create_proxy(prefill_port: int, decode_port: int) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    client = httpx.AsyncClient(timeout=600, limits=limits, trust_env=False)

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = body | {
            "stream": False, "max_tokens": 1, "min_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                "remote_block_ids": None, "remote_host": None, "remote_port": None,
            },
        }  # fmt: skip
        first.pop("stream_options", None)
        answer = await client.post(
            f"http://127.0.0.1:{prefill_port}/v1/completions", json=first, headers=headers
        )
        answer.raise_for_status()
        second = body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}

        async def stream():
            async with client.stream(
                "POST", f"http://127.0.0.1:{decode_port}/v1/completions",
                json=second, headers=headers,
            ) as response:  # fmt: skip
                async for piece in response.aiter_bytes():
                    yield piece

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def serve_proxy(port: int, prefill_port: int, decode_port: int) -> None:
    app = create_proxy(prefill_port, decode_port)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    args = parser.parse_args()
    asyncio.run(serve_proxy(args.port, args.prefill_port, args.decode_port))


if __name__ == "__main__":
    main()
