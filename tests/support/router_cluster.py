"""Instances, reports and queries for router tests: made up, but of the types of the real thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isthmus.common.clock import VirtualClock
from isthmus.common.cluster import InstanceInfo, InstanceState, LatencyModel, LoadReport, Role
from isthmus.common.config import RouterConfig
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import BlockHash, InstanceId, RequestId
from isthmus.common.kv_events import BlocksStored, KvEventBatch
from isthmus.common.kv_layout import KvLayout
from isthmus.router import RouteQuery, Router

BLOCK_SIZE = 16
LAYOUT = KvLayout("fingerprint", 4, 2, 16, BLOCK_SIZE, "float32")
LATENCY = LatencyModel(
    prefill_base=5, prefill_token=1, decode_base=20, decode_seq=1, decode_context=0.001
)


def make_info(name: str, role: Role, **changes: Any) -> InstanceInfo:
    info = InstanceInfo(
        instance_id=InstanceId(name),
        role=role,
        state=InstanceState.READY,
        epoch=1,
        address="127.0.0.1:1",
        metrics_address="",
        model="m",
        model_path="",
        kv_layout=LAYOUT,
        num_blocks=1_000,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        max_model_len=4_096,
        connector="fake",
        latency=LATENCY,
        version="0.1.0",
    )
    return replace(info, **changes)


def make_report(name: str, seq: int = 1, **changes: Any) -> LoadReport:
    report = LoadReport(
        InstanceId(name), epoch=1, seq=seq, at_ns=0, num_blocks=1_000, free_blocks=1_000
    )
    return replace(report, **changes)


def hashes_of(token_ids: list[int]) -> tuple[BlockHash, ...]:
    return tuple(block_hashes(token_ids, BLOCK_SIZE, root_hash("fingerprint")))


def make_query(num_tokens: int = 320, name: str = "r", **changes: Any) -> RouteQuery:
    query = RouteQuery(
        RequestId(name),
        "m",
        num_tokens,
        (hashes_of(list(range(num_tokens))),),
        max_output_tokens=64,
    )
    return replace(query, **changes)


class Cluster:
    """A router with instances p0…, d0…, m0…, all ready and idle, on a virtual clock."""

    def __init__(self, prefills: int = 0, decodes: int = 0, mixed: int = 0, **config: Any) -> None:
        self.clock = VirtualClock(1_000_000_000)
        self.router = Router(RouterConfig(**config), self.clock)
        self._seq: dict[str, int] = {}
        for prefix, role, count in (
            ("p", Role.PREFILL, prefills),
            ("d", Role.DECODE, decodes),
            ("m", Role.MIXED, mixed),
        ):
            for index in range(count):
                self.join(f"{prefix}{index}", role)

    def join(self, name: str, role: Role, **changes: Any) -> InstanceInfo:
        info = make_info(name, role, **changes)
        self.router.state.registered(info)
        self.report(name, epoch=info.epoch)
        return info

    def report(self, name: str, **changes: Any) -> None:
        self._seq[name] = self._seq.get(name, 0) + 1
        self.router.state.reported(make_report(name, seq=self._seq[name], **changes))
        self.clock.advance_ms(0.001)  # what is decided next comes after the report

    def store(self, name: str, hashes: tuple[BlockHash, ...], epoch: int = 1) -> None:
        """The instance tells that it holds exactly these blocks."""
        first = self.router.state.index.next_seq(InstanceId(name), epoch)
        batch = KvEventBatch(
            InstanceId(name), epoch, first, (BlocksStored(hashes),), is_snapshot=True
        )
        self.router.state.kv_events(batch)

    def check(self) -> None:
        self.router.state.ledger.check_integrity()
        self.router.state.index.check_integrity()
