"""A prefill and a decode worker, and a gateway's stream to the second: what tests of pairs begin
with, whether the workers are in this process or are children of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.metrics import PREFILL_FAILURES
from isthmus.common.types import Request
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, make_request, wait_idle
from tests.support.local_cluster import LocalCluster, LocalWorker, local_config

PROMPT = make_prompt(60)
LONG_PROMPT = make_prompt(160)
"""Its first write has failed long before there is a token to go on from."""


class Worker(Protocol):
    info: InstanceInfo | None


ClusterT = TypeVar("ClusterT")
WorkerT = TypeVar("WorkerT", bound=Worker)


@dataclass
class WorkerPair(Generic[ClusterT, WorkerT]):
    """``prompt`` is what is asked unless a test says otherwise; ``defaults`` are of every request
    (see ``make_request``)."""

    cluster: ClusterT
    prefill: WorkerT
    decode: WorkerT
    stream: GatewayStub
    prompt: tuple[int, ...] = PROMPT
    defaults: dict[str, object] = field(default_factory=dict)

    @property
    def prefill_info(self) -> InstanceInfo:
        assert self.prefill.info is not None
        return self.prefill.info

    @property
    def decode_info(self) -> InstanceInfo:
        assert self.decode.info is not None
        return self.decode.info

    @property
    def block_bytes(self) -> int:
        """Of the decode worker, which is what a transfer moves."""
        return self.decode_info.kv_layout.block_bytes

    def request(self, tokens: Sequence[int] | None = None, **changes: object) -> Request:
        asked = self.prompt if tokens is None else tuple(tokens)
        return make_request(asked, **{**self.defaults, **changes})  # type: ignore[arg-type]

    async def submit(self, tokens: Sequence[int] | None = None, **changes: object) -> Answer:
        return await self.stream.submit(self.request(tokens, **changes), self.prefill_info)

    async def run(self, tokens: Sequence[int] | None = None, **changes: object) -> Answer:
        return await (await self.submit(tokens, **changes)).end()

    async def local(self, tokens: Sequence[int] | None = None, **changes: object) -> Answer:
        """The same, all of it by the decode worker over KV of its own: what an answer has to be."""
        return await self.stream.run(self.request(tokens, cache_salt="alone", **changes), None)

    async def alone(self, tokens: Sequence[int] | None = None, **changes: object) -> list[int]:
        answer = await self.local(tokens, **changes)
        assert answer.failed is None, answer.failed
        return answer.tokens

    async def wait_idle(self) -> None:
        await wait_idle(self.prefill_info, self.decode_info)


LocalPair = WorkerPair[LocalCluster, LocalWorker]


@asynccontextmanager
async def local_pair(
    prefill: ClusterConfig | None = None,
    decode: ClusterConfig | None = None,
    *,
    seed: int = 0,
    windows: tuple[int, ...] = (),
    prompt: tuple[int, ...] = PROMPT,
    **defaults: object,
) -> AsyncIterator[LocalPair]:
    """Both in this process. ``decode`` None: configured like the prefill worker, whose weights come
    from ``seed``."""
    async with LocalCluster(prefill) as cluster:
        source = await cluster.start(Role.PREFILL, "prefill-0", seed=seed, windows=windows)
        target = await cluster.start(Role.DECODE, "decode-0", decode, windows=windows)
        assert target.info is not None
        async with GatewayStub(target.info) as stream:
            yield WorkerPair(cluster, source, target, stream, prompt, defaults)


def faulty(script: str, **transfer: object) -> ClusterConfig:
    return local_config(
        transfer={
            "connector": "fake",
            "fault_script": script,
            "quarantine_ms": 200,
            **transfer,
        }
    )


def assert_fell_back(answer: Answer, expected: Answer) -> None:
    assert answer.failed is None, answer.failed
    assert answer.finished is not None
    assert answer.tokens == expected.tokens
    assert answer.finished.local_reason == "prefill_failed"


async def run_with_alternate(
    pair: LocalPair, alternate_script: str, **sampling: object
) -> tuple[Answer, InstanceInfo]:
    config = faulty(alternate_script)
    alternate = (await pair.cluster.start(Role.PREFILL, "prefill-1", config)).info
    assert alternate is not None
    request = make_request(pair.prompt, max_tokens=9, **sampling)
    answer = await pair.stream.run(request, pair.prefill_info, alternate)
    return answer, alternate


def remedies(reason: str, policy: str = "reprefill") -> dict[str, float]:
    return {
        remedy: PREFILL_FAILURES.labels("decode", "decode-0", policy, remedy, reason)._value.get()
        for remedy in ("fail", "reprefill", "recompute")
    }
