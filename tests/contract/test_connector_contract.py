"""What every connector promises, held against each: nixl and ucx between two processes, the others
in one (``test_connector_faults`` has the ends that are killed or stopped)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from isthmus.common.errors import HandshakeError, TransferError
from isthmus.kvtransfer.connectors.local import LocalFabric
from isthmus.kvtransfer.interface import CopyOp, PeerName, WriteState
from tests.support.connector_process import (
    ConnectorEnd,
    ConnectorProcess,
    drive_until,
    make_end,
)
from tests.support.optional_packages import needs_ucxx

BLOCK = 4096
SOURCE_BLOCKS, TARGET_BLOCKS = 64, 96

End = ConnectorEnd | ConnectorProcess


@dataclass
class Pair:
    source: End
    target: End
    to_target: PeerName
    from_source: PeerName
    early: list[tuple[PeerName, bytes]] = field(default_factory=list)  # came while writing

    def write(self, ops: list[CopyOp], notification: bytes) -> WriteState:
        """Posts, drives both ends until the write has ended, and gives the handle back."""
        handle = self.source.post_write(self.to_target, ops, notification)
        state = WriteState.IN_PROGRESS

        def ended() -> bool:
            nonlocal state
            self.early.extend(self.target.take_notifications())
            state = self.source.poll(handle)
            return state is not WriteState.IN_PROGRESS

        drive_until(ended)
        self.source.release(handle)
        return state

    def notifications(self, count: int) -> list[tuple[PeerName, bytes]]:
        arrived = list(self.early)
        self.early = []

        def enough() -> bool:
            arrived.extend(self.target.take_notifications())
            return len(arrived) >= count

        drive_until(enough)
        return arrived


def connect(source: End, target: End) -> Pair:
    return Pair(
        source, target, source.add_peer(*target.introduce()), target.add_peer(*source.introduce())
    )


CMA = pytest.param("nixl", marks=pytest.mark.nixl)
TCP = pytest.param("nixl-tcp", marks=pytest.mark.nixl)
IN_PROCESSES = frozenset({"nixl", "ucx"})
KINDS = [
    "local",
    "fake",
    "shm",
    "collective",
    CMA,
    TCP,
    pytest.param("ucx", marks=needs_ucxx),
    pytest.param("ucx-tcp", marks=needs_ucxx),
]


def start_end(
    kind: str, name: str, num_blocks: int, seed: int, fabric: LocalFabric | None = None
) -> End:
    connector, _, tls = kind.partition("-")
    if connector in IN_PROCESSES:
        return ConnectorProcess(connector, name, num_blocks * BLOCK, seed, BLOCK, tls)
    return make_end(kind, name, num_blocks * BLOCK, seed, BLOCK, fabric)


def make_pair(kind: str) -> Pair:
    fabric = LocalFabric()
    return connect(
        start_end(kind, "source", SOURCE_BLOCKS, 1, fabric),
        start_end(kind, "target", TARGET_BLOCKS, 2, fabric),
    )


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = make_pair(request.param)
    yield pair
    pair.source.close()
    pair.target.close()


def apply(model: np.ndarray, source: bytes, ops: list[CopyOp]) -> None:
    for op in ops:
        model[op.target_offset : op.target_offset + op.num_bytes] = np.frombuffer(
            source, np.uint8, op.num_bytes, op.source_offset
        )


def scattered_blocks(count: int, seed: int) -> list[CopyOp]:
    random = np.random.default_rng(seed)
    sources = random.permutation(SOURCE_BLOCKS)[:count]
    targets = random.permutation(TARGET_BLOCKS)[:count]
    return [
        CopyOp(int(s) * BLOCK, int(t) * BLOCK, BLOCK) for s, t in zip(sources, targets, strict=True)
    ]


def thousands_of_pieces(seed: int) -> list[CopyOp]:
    size, count = 64, 4096
    random = np.random.default_rng(seed)
    sources = random.permutation(SOURCE_BLOCKS * BLOCK // size)[:count]
    targets = random.permutation(TARGET_BLOCKS * BLOCK // size)[:count]
    return [
        CopyOp(s * size, t * size, size)
        for s, t in zip(sources.tolist(), targets.tolist(), strict=True)
    ]


def unlike_offsets(seed: int) -> list[CopyOp]:
    """Copies of odd sizes at odd places; the targets do not overlap."""
    random = np.random.default_rng(seed)
    ops = []
    for slot in random.permutation(TARGET_BLOCKS)[:12]:
        size = int(random.integers(1, BLOCK // 2))
        source = int(random.integers(0, SOURCE_BLOCKS * BLOCK - size))
        target = int(slot) * BLOCK + int(random.integers(0, BLOCK // 2))
        ops.append(CopyOp(source, target, size))
    return ops


@pytest.mark.parametrize(
    "plan",
    [
        lambda: [CopyOp(0, 0, BLOCK)],
        lambda: [CopyOp(3 * BLOCK, 90 * BLOCK, 6 * BLOCK)],
        lambda: scattered_blocks(SOURCE_BLOCKS, seed=3),
        lambda: thousands_of_pieces(seed=5),
        lambda: unlike_offsets(seed=4),
    ],
    ids=["one block", "run of blocks", "all blocks scattered", "thousands", "unlike offsets"],
)
def test_write_lands_exactly_where_asked(pair: Pair, plan: Callable[[], list[CopyOp]]) -> None:
    ops = plan()
    source, model = pair.source.read(), np.frombuffer(pair.target.read(), np.uint8).copy()
    assert pair.write(ops, b"there") is WriteState.DONE
    apply(model, source, ops)
    assert pair.target.read() == model.tobytes()
    assert pair.source.read() == source
    assert pair.notifications(1) == [(pair.from_source, b"there")]


def test_notification_comes_after_its_data(pair: Pair) -> None:
    """Looked at in the moment of arrival, over many writes."""
    source = pair.source.read()
    for number in range(20):
        ops = scattered_blocks(32, seed=100 + number)
        model = np.frombuffer(pair.target.read(), np.uint8).copy()
        handle = pair.source.post_write(pair.to_target, ops, b"%d" % number)
        arrived: list[tuple[PeerName, bytes]] = []

        def has_arrived(handle=handle, arrived=arrived) -> bool:
            arrived += pair.target.take_notifications()
            if not arrived:
                pair.source.poll(handle)
            return bool(arrived)

        drive_until(has_arrived)
        apply(model, source, ops)
        assert pair.target.read() == model.tobytes()
        assert arrived == [(pair.from_source, b"%d" % number)]
        drive_until(lambda handle=handle: pair.source.poll(handle) is WriteState.DONE)
        pair.source.release(handle)


def test_every_notification_of_many_writes_comes_once(pair: Pair) -> None:
    for number in range(40):
        assert pair.write([CopyOp(0, number * BLOCK, BLOCK)], b"n%d" % number) is WriteState.DONE
        assert pair.notifications(1) == [(pair.from_source, b"n%d" % number)]
    assert pair.target.take_notifications() == []


def test_notification_without_data(pair: Pair) -> None:
    before = pair.target.read()
    assert pair.write([], b"only words") is WriteState.DONE
    assert pair.notifications(1) == [(pair.from_source, b"only words")]
    assert pair.target.read() == before


def test_data_without_notification(pair: Pair) -> None:
    assert pair.write([CopyOp(BLOCK, 0, BLOCK)], b"") is WriteState.DONE
    assert pair.write([], b"next") is WriteState.DONE
    assert pair.notifications(1) == [(pair.from_source, b"next")]
    assert pair.target.read()[:BLOCK] == pair.source.read()[BLOCK : 2 * BLOCK]


@pytest.mark.parametrize(
    "op",
    [
        CopyOp(0, TARGET_BLOCKS * BLOCK - 1, 2),
        CopyOp(SOURCE_BLOCKS * BLOCK, 0, BLOCK),
        CopyOp(-BLOCK, 0, BLOCK),
        CopyOp(0, 0, 0),
    ],
    ids=["beyond the target", "beyond the source", "before the source", "empty"],
)
def test_copy_outside_a_region_starts_nothing(pair: Pair, op: CopyOp) -> None:
    before = pair.target.read()
    with pytest.raises(TransferError):
        pair.source.post_write(pair.to_target, [CopyOp(0, 0, BLOCK), op], b"never")
    assert pair.write([], b"sentinel") is WriteState.DONE
    assert pair.notifications(1) == [(pair.from_source, b"sentinel")]
    assert pair.target.read() == before


def test_unknown_peer_is_refused_and_forgetting_it_is_harmless(pair: Pair) -> None:
    with pytest.raises(TransferError):
        pair.source.post_write(PeerName("nobody"), [CopyOp(0, 0, BLOCK)], b"x")
    pair.source.remove_peer(PeerName("nobody"))


def test_foreign_metadata_is_refused(pair: Pair) -> None:
    with pytest.raises(HandshakeError):
        pair.source.add_peer(b"not metadata at all", pair.target.introduce()[1])


@pytest.mark.parametrize("kind", KINDS)
class TestPeerChanges:
    def test_removed_peer_is_refused_and_can_come_back(self, kind: str) -> None:
        pair = make_pair(kind)
        try:
            assert pair.write([CopyOp(0, 0, BLOCK)], b"1") is WriteState.DONE
            pair.notifications(1)
            pair.source.remove_peer(pair.to_target)
            with pytest.raises(TransferError):
                pair.source.post_write(pair.to_target, [CopyOp(0, 0, BLOCK)], b"x")
            assert pair.source.add_peer(*pair.target.introduce()) == pair.to_target
            assert pair.write([CopyOp(BLOCK, 0, BLOCK)], b"2") is WriteState.DONE
            assert pair.notifications(1) == [(pair.from_source, b"2")]
            assert pair.target.read()[:BLOCK] == pair.source.read()[BLOCK : 2 * BLOCK]
        finally:
            pair.source.close()
            pair.target.close()

    def test_new_epoch_of_a_peer_is_another_peer(self, kind: str) -> None:
        """The target restarts: its successor has another name, other memory, other keys."""
        fabric = LocalFabric()

        def end(name: str, num_blocks: int, seed: int) -> End:
            return start_end(kind, name, num_blocks, seed, fabric)

        ends = [end("source@1", SOURCE_BLOCKS, 1), end("target@1", TARGET_BLOCKS, 2)]
        try:
            old = connect(*ends)
            assert old.write([CopyOp(0, 0, BLOCK)], b"old") is WriteState.DONE
            old.notifications(1)
            old.target.close()
            ends.append(end("target@2", 2 * TARGET_BLOCKS, 3))
            old.source.remove_peer(old.to_target)
            new = connect(old.source, ends[2])
            assert new.to_target != old.to_target
            ops = scattered_blocks(16, seed=9)
            model = np.frombuffer(new.target.read(), np.uint8).copy()
            assert new.write(ops, b"new") is WriteState.DONE
            apply(model, new.source.read(), ops)
            assert new.target.read() == model.tobytes()
            assert new.notifications(1) == [(new.from_source, b"new")]
        finally:
            for each in ends:
                each.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (CMA, TCP)])
def test_notification_of_a_done_write_comes_though_its_writer_has_closed(kind: str) -> None:
    """Of NIXL, which sends it after the data and asks no further, this is not known."""
    pair = make_pair(kind)
    try:
        assert pair.write([CopyOp(0, 0, 16 * BLOCK)], b"last words") is WriteState.DONE
        pair.source.close()
        assert pair.notifications(1) == [(pair.from_source, b"last words")]
    finally:
        pair.source.close()
        pair.target.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not CMA])
class TestSeveralEnds:
    """Not over CMA, which differs from TCP below the connector alone: a process for each end."""

    def test_two_peers_at_once_get_each_its_own(self, kind: str) -> None:
        fabric = LocalFabric()
        source = start_end(kind, "source", SOURCE_BLOCKS, 1, fabric)
        targets = [start_end(kind, f"target-{n}", TARGET_BLOCKS, 2 + n, fabric) for n in range(2)]
        try:
            pairs = [connect(source, target) for target in targets]
            plans = [scattered_blocks(SOURCE_BLOCKS, seed=20 + n) for n in range(2)]
            models = [np.frombuffer(target.read(), np.uint8).copy() for target in targets]
            handles = [
                source.post_write(pair.to_target, plan, b"%d" % number)
                for number, (pair, plan) in enumerate(zip(pairs, plans, strict=True))
            ]

            def all_done() -> bool:
                for pair in pairs:
                    pair.early += pair.target.take_notifications()
                states = [source.poll(handle) for handle in handles]
                return states == [WriteState.DONE] * len(handles)

            drive_until(all_done)
            for number, (pair, plan, model) in enumerate(zip(pairs, plans, models, strict=True)):
                source.release(handles[number])
                assert pair.notifications(1) == [(pair.from_source, b"%d" % number)]
                apply(model, source.read(), plan)
                assert pair.target.read() == model.tobytes()
        finally:
            for end in (source, *targets):
                end.close()

    def test_closing_while_a_write_is_open_ends_it_for_good(self, kind: str) -> None:
        """Whatever of it has landed at that time, nothing lands later, and the target goes on."""
        fabric = LocalFabric()
        pair = connect(
            start_end(kind, "source@1", SOURCE_BLOCKS, 1, fabric),
            start_end(kind, "target", TARGET_BLOCKS, 2, fabric),
        )
        other = start_end(kind, "source@2", SOURCE_BLOCKS, 3, fabric)
        try:
            assert pair.write([CopyOp(0, 0, BLOCK)], b"1") is WriteState.DONE
            pair.notifications(1)
            pair.source.post_write(
                pair.to_target, [CopyOp(0, 0, SOURCE_BLOCKS * BLOCK)], b"never awaited"
            )
            pair.source.close()
            successor = connect(other, pair.target)
            assert successor.write(scattered_blocks(8, seed=30), b"2") is WriteState.DONE
            arrived: list[bytes] = []

            def has_come() -> bool:
                arrived.extend(payload for _, payload in pair.target.take_notifications())
                return b"2" in arrived

            arrived.extend(payload for _, payload in successor.early)
            drive_until(has_come)
            before = pair.target.read()
            pair.target.take_notifications()
            assert pair.target.read() == before
        finally:
            for end in (pair.source, pair.target, other):
                end.close()
