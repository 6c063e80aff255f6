"""The load client against servers that answer by script: what counts, and what a budget cuts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.load import Figures, TooSlow, run_load

Answer = Callable[[], AsyncIterator[dict[str, object]]]
TOKEN: dict[str, object] = {"choices": [{"text": "x"}]}


@asynccontextmanager
async def server(answer: Answer, status: str = "200 OK") -> AsyncIterator[str]:
    """A server whose every answer is the stream of events of ``answer``; yields its URL."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
            async for event in answer():
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        listener.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def load(url: str, num_requests: int = 2, budget_s: float | None = None) -> Figures:
    return await run_load(
        url, "m", concurrency=2, num_requests=num_requests, prompt_tokens=3, max_tokens=4,
        vocab=1000, seed=1, budget_s=budget_s,
    )  # fmt: skip


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_the_server_s_own_count_of_tokens_is_what_counts() -> None:
    async def answer() -> AsyncIterator[dict[str, object]]:
        yield TOKEN
        yield {"choices": [], "usage": {"completion_tokens": 4}}

    async with server(answer) as url:
        figures = await load(url, num_requests=3)
    assert (figures.num_errors, figures.is_cut) == (0, False)
    assert figures.tokens_per_s > 0


@pytest.mark.asyncio
async def test_a_cut_load_counts_the_tokens_that_have_arrived() -> None:
    async def answer() -> AsyncIterator[dict[str, object]]:
        for _ in range(3):
            yield TOKEN
        await never()

    async with server(answer) as url:
        figures = await load(url, budget_s=5.0)
    assert figures.is_cut
    assert figures.num_errors == 0
    # 2 requests of 3 tokens, over at least the budget.
    assert 0 < figures.tokens_per_s <= 1.2


@pytest.mark.asyncio
async def test_no_token_within_the_budget_is_said() -> None:
    async def answer() -> AsyncIterator[dict[str, object]]:
        await never()
        yield TOKEN

    async with server(answer) as url:
        with pytest.raises(TooSlow, match="no token within"):
            await load(url, budget_s=0.2)


@pytest.mark.asyncio
async def test_failed_requests_are_counted_and_others_still_measured() -> None:
    answers = iter([True, False])

    async def answer() -> AsyncIterator[dict[str, object]]:
        yield TOKEN if next(answers) else {"error": "out of memory"}

    async with server(answer) as url:
        figures = await load(url)
    assert figures.num_errors == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "reason"), [("500 Oops", "500"), ("200 OK", "empty answer")])
async def test_a_load_of_which_every_request_failed_is_an_error(status: str, reason: str) -> None:
    async def answer() -> AsyncIterator[dict[str, object]]:
        for event in ():
            yield event

    async with server(answer, status) as url:
        with pytest.raises(RuntimeError, match=reason):
            await load(url)
