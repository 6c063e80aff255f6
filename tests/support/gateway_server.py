"""The gateway's application on a real loopback port, with fake decode instances behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import openai

from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig
from isthmus.common.model_files import locate_model
from isthmus.gateway.app import ModelIdentity, build_gateway, create_app
from isthmus.gateway.context import Gateway
from isthmus.gateway.decider import Decider, EmbeddedDecider
from isthmus.gateway.server import HttpServer, bind_socket
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer
from isthmus.router.driver import RouterDriver
from isthmus.router.router import Router
from tests.support.fake_decode import FakeDecode
from tests.support.poll import poll_until
from tests.support.tiny_tokenizer import write_tiny_model

REPORT_PERIOD_S = 0.2  # much more often than a router begins to doubt who is silent


@dataclass
class RunningGateway:
    url: str
    gateway: Gateway
    router: Router
    tokenizer: TextTokenizer
    server: HttpServer
    joined: list[FakeDecode] = field(default_factory=list)

    def openai(self, api_key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=max_retries
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    async def join(self, fake: FakeDecode) -> None:
        """Registers the instance and waits until its stream is open."""
        self.router.state.registered(fake.info)
        self.router.state.reported(fake.load_report())
        self.joined.append(fake)
        self.gateway.decode_client.follow(self.gateway.router.decode_refs())
        await poll_until(lambda: self.gateway.decode_client.is_live(fake.info.instance_id))

    async def report_on(self) -> None:
        """What a feed would bring of whoever has joined and lives."""
        for seq in count(2):
            await asyncio.sleep(REPORT_PERIOD_S)
            for fake in self.joined:
                if fake.is_up:
                    self.router.state.reported(fake.load_report(seq))


@asynccontextmanager
async def running_gateway(
    folder: Path, fakes: Sequence[FakeDecode] = (), config: ClusterConfig | None = None
) -> AsyncIterator[RunningGateway]:
    """Starts the fakes too. At the end nothing may be in flight any more."""
    config = config or ClusterConfig()
    router = Router(config.router, SystemClock())
    driver = RouterDriver(router, SystemClock())
    decider = EmbeddedDecider(router, driver)
    try:
        async with served(folder, config, router, decider) as running:
            for fake in fakes:
                await fake.start()
                await running.join(fake)
            reporting = asyncio.create_task(running.report_on())
            try:
                yield running
            finally:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting
            await poll_until(lambda: running.gateway.limiter.num_inflight == 0)
            assert running.gateway.decode_client.num_requests() == 0
            assert router.snapshot().num_reservations == 0
    finally:
        driver.close()
        for fake in fakes:
            await fake.kill()


@asynccontextmanager
async def served(
    folder: Path, config: ClusterConfig, router: Router, decider: Decider
) -> AsyncIterator[RunningGateway]:
    """A gateway over what its caller owns, listening."""
    tokenizer = load_tokenizer(locate_model(str(write_tiny_model(folder / "tiny"))))
    model = ModelIdentity(tokenizer, "tiny")
    gateway = build_gateway(config, model, router, decider, SystemClock())
    listener = bind_socket("127.0.0.1", 0, 60_000)
    port = listener.getsockname()[1]
    server = HttpServer(create_app(gateway), drain_s=1)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await poll_until(lambda: server.started or serving.done())
        yield RunningGateway(f"http://127.0.0.1:{port}", gateway, router, tokenizer, server)
    finally:
        server.should_exit = True
        await serving
        await gateway.close()
        # The clients of a test resolve names in the loop's own threads.
        await asyncio.get_running_loop().shutdown_default_executor()
