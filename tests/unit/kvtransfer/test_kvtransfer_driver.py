"""The connector's thread: windows, refusals, connectors that raise or hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import IsthmusError, TransferHopelessError, TransferTimeoutError
from isthmus.kvtransfer import link
from isthmus.kvtransfer.driver import ConnectorDriver
from isthmus.kvtransfer.interface import (
    CopyOp,
    MemoryRegion,
    PeerName,
    Reached,
    WriteHandle,
    WriteState,
)
from isthmus.kvtransfer.link import LEAST_SAMPLE_BYTES
from isthmus.kvtransfer.writes import Outcome, Write
from tests.support.poll import poll_until

pytestmark = pytest.mark.asyncio

SIZE = 100
PEER, OTHER = PeerName("peer"), PeerName("other")


class ScriptedConnector:
    """States are set by the test; remembers what it was asked."""

    name = "scripted"
    domain = ""
    is_direct = False

    def __init__(self) -> None:
        self.posted: list[PeerName] = []
        self.states: dict[WriteHandle, WriteState] = {}
        self.removed: list[PeerName] = []
        self.threads: set[int] = set()
        self.raises: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def _called(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        if name in self.raises:
            raise RuntimeError(f"bug in {name}")

    def register(self, region: MemoryRegion) -> None:
        self._called("register")

    def metadata(self) -> bytes:
        return b"md"

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        self._called("add_peer")
        self.gate.wait()
        return PEER

    def remove_peer(self, peer: PeerName) -> None:
        self._called("remove_peer")
        self.removed.append(peer)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        self._called("post_write")
        self.posted.append(peer)
        handle = WriteHandle(len(self.posted))
        self.states[handle] = WriteState.IN_PROGRESS
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        self._called("poll")
        return self.states[handle]

    def release(self, handle: WriteHandle) -> None:
        self._called("release")
        del self.states[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        self._called("take_notifications")
        return []

    def close(self) -> None:
        self._called("close")
        self.gate.wait()

    def finish(self, state: WriteState = WriteState.DONE) -> None:
        self.states = dict.fromkeys(self.states, state)


class Owner:
    def __init__(self) -> None:
        self.is_open = True
        self.num_bytes_left = 0

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None:
        raise AssertionError("telling the owner is the manager's part")


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
        monkeypatch.setattr("isthmus.kvtransfer.link.INITIAL_WINDOW_BYTES", window)
        self.clock = VirtualClock(0)
        self.connector = ScriptedConnector()
        self.driver = ConnectorDriver(self.connector, self.clock)
        self.owner = Owner()

    def submit(
        self,
        peer: PeerName = PEER,
        expires_ns: int = 10**9,
        size: int = SIZE,
        owner: Owner | None = None,
    ) -> Write:
        ops = (CopyOp(0, 0, size),) if size else ()
        write = Write(peer, ops, b"n", expires_ns, owner or self.owner)
        self.driver.submit(write)
        return write

    async def measure(self, bytes_per_ms: int) -> None:
        """Lets one large write tell how fast the link to PEER, which is there, is."""
        await self.driver.add_peer(b"", MemoryRegion(0, 1), 5)
        size = max(LEAST_SAMPLE_BYTES, bytes_per_ms)
        self.submit(size=size, expires_ns=10**15)
        await self.driver.sweep()
        self.clock.advance_ms(size / bytes_per_ms)
        self.connector.finish()
        await self.driver.sweep()

    async def ended(self) -> list[tuple[Write, Outcome]]:
        sweep = await self.driver.sweep()
        return [(write, outcome) for write, outcome, _ in sweep.ended]


async def test_window_bounds_what_is_in_flight_to_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=2 * SIZE)
    writes = [rig.submit() for _ in range(5)]
    rig.submit(OTHER)
    assert await rig.ended() == []
    assert rig.connector.posted == [PEER, PEER, OTHER]
    await rig.driver.sweep()
    assert len(rig.connector.posted) == 3
    rig.connector.finish()
    ended = await rig.ended()
    assert [write for write, _ in ended[:2]] == writes[:2]
    assert {outcome for _, outcome in ended} == {Outcome.DONE}
    assert rig.connector.posted[3:] == [PEER, PEER]
    assert rig.driver.open_bytes == 3 * SIZE
    assert rig.driver.num_open_writes == 3
    assert await rig.driver.close(5)


async def test_session_that_ends_while_its_notification_is_made_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)

    def ends_meanwhile() -> bytes:
        rig.owner.is_open = False
        return b"n"

    write = Write(PEER, (CopyOp(0, 0, SIZE),), ends_meanwhile, 10**9, rig.owner)
    rig.driver.submit(write)
    assert await rig.ended() == [(write, Outcome.NOT_POSTED)]
    assert rig.connector.posted == []
    assert await rig.driver.close(5)


def unready(rig: Rig, is_ready: Callable[[], bool], expires_ns: int = 10**9) -> Write:
    write = Write(PEER, (CopyOp(0, 0, SIZE),), b"n", expires_ns, rig.owner, is_ready)
    rig.driver.submit(write)
    return write


async def test_a_write_waits_for_what_it_is_to_bring_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    computed: list[bool] = []
    write = unready(rig, lambda: bool(computed))
    plain = rig.submit()
    await rig.ended()
    rig.connector.finish()
    assert await rig.ended() == [(plain, Outcome.DONE)]
    assert rig.connector.posted == [PEER]
    assert rig.driver.num_open_writes == 1
    computed.append(True)
    await rig.ended()
    assert rig.connector.posted == [PEER, PEER]
    rig.connector.finish()
    assert await rig.ended() == [(write, Outcome.DONE)]
    assert await rig.driver.close(5)


async def test_a_step_is_looked_at_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over sweeps that see nothing: else each of six would look some ten times."""
    rig = Rig(monkeypatch, window=SIZE)
    looks: list[None] = []

    def is_ready() -> bool:
        looks.append(None)
        return False

    unready(rig, is_ready)
    await rig.driver.sweep()
    for _ in range(6):
        await rig.driver.sweep(patience_s=0.05)
    assert len(looks) <= 40
    assert await rig.driver.close(5)


async def test_what_is_never_computed_is_never_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)

    def breaks() -> bool:
        raise RuntimeError("the device is lost")

    broken = unready(rig, breaks)
    late = unready(rig, lambda: False, expires_ns=5)
    unwanted = unready(rig, lambda: False)
    assert await rig.ended() == [(broken, Outcome.NOT_POSTED)]
    rig.clock.advance_ms(1)
    assert await rig.ended() == [(late, Outcome.NOT_POSTED)]
    rig.owner.is_open = False
    assert await rig.ended() == [(unwanted, Outcome.NOT_POSTED)]
    assert rig.connector.posted == []
    assert rig.driver.num_open_writes == rig.driver.open_bytes == 0
    assert await rig.driver.close(5)


async def test_write_larger_than_the_window_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    rig.submit(size=3 * SIZE)
    rig.submit()
    await rig.ended()
    assert len(rig.connector.posted) == 1
    rig.connector.finish()
    await rig.ended()
    assert len(rig.connector.posted) == 2
    assert await rig.driver.close(5)


async def test_waiting_write_is_dropped_at_its_deadline_or_when_unwanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    rig.submit()
    late = rig.submit(expires_ns=5)
    await rig.ended()
    rig.clock.advance_ms(1)
    sweep = await rig.driver.sweep()
    assert [(write, outcome) for write, outcome, _ in sweep.ended] == [(late, Outcome.NOT_POSTED)]
    assert isinstance(sweep.ended[0][2], TransferTimeoutError)
    unwanted = rig.submit()
    rig.owner.is_open = False
    assert await rig.ended() == [(unwanted, Outcome.NOT_POSTED)]
    assert len(rig.connector.posted) == 1
    assert await rig.driver.close(5)


async def test_the_nearest_deadline_goes_first_and_a_session_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    far, near = Owner(), Owner()
    first = rig.submit(owner=far)
    await rig.ended()
    waiting = [rig.submit(expires_ns=9 * 10**8, owner=far) for _ in range(2)]
    urgent = [rig.submit(expires_ns=5 * 10**8, owner=near) for _ in range(2)]
    word = rig.submit(size=0)
    order: list[Write] = []
    while rig.driver.num_open_writes:
        rig.connector.finish()
        order += [write for write, _ in await rig.ended()]
    assert order == [first, word, *urgent, *waiting]
    assert await rig.driver.close(5)


async def test_a_slow_link_has_a_small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be in flight lands within half a second."""
    rig = Rig(monkeypatch, window=SIZE)
    await rig.measure(bytes_per_ms=4 * 2**20)
    assert rig.driver.bytes_per_s(PEER) == pytest.approx(4 * 2**20 * 1000)
    assert rig.driver.max_write_bytes(PEER) == link.MOST_WINDOW_BYTES // link.WRITES_IN_WINDOW
    for _ in range(60):
        await rig.measure(bytes_per_ms=4_000)
    window = rig.driver.max_write_bytes(PEER) * link.WRITES_IN_WINDOW
    assert window == pytest.approx(4_000 * 500, rel=0.01)
    rig.connector.posted.clear()
    for _ in range(8):
        rig.submit(size=500_000, expires_ns=10**15)
    await rig.ended()
    assert len(rig.connector.posted) == 4
    assert rig.driver.bytes_per_s(OTHER) is None
    assert await rig.driver.close(5)


async def test_what_cannot_arrive_in_time_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    await rig.measure(bytes_per_ms=10_000)
    rig.connector.posted.clear()
    deadline_ns = rig.clock.monotonic_ns() + 10**9  # time for ten megabytes, or for twenty at best
    in_vain, fine = Owner(), Owner()
    in_vain.num_bytes_left = 21_000_000
    fine.num_bytes_left = 9_000_000
    dropped = rig.submit(expires_ns=deadline_ns, owner=in_vain)
    rig.submit(expires_ns=deadline_ns, owner=fine)
    sweep = await rig.driver.sweep()
    assert [(write, outcome) for write, outcome, _ in sweep.ended] == [
        (dropped, Outcome.NOT_POSTED)
    ]
    assert isinstance(sweep.ended[0][2], TransferHopelessError)
    assert rig.connector.posted == [PEER]
    rig.driver.check_in_time(PEER, 19_000_000, deadline_ns)
    with pytest.raises(TransferHopelessError):
        rig.driver.check_in_time(PEER, 21_000_000, deadline_ns)
    assert await rig.driver.close(5)


async def test_what_is_ahead_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions that would each be in time alone: the one that comes second is given up."""
    rig = Rig(monkeypatch, window=SIZE)
    await rig.measure(bytes_per_ms=1_000)
    now_ns = rig.clock.monotonic_ns()
    near, far = Owner(), Owner()
    rig.submit(size=1_500_000, expires_ns=now_ns + 10**9, owner=near)
    second = rig.submit(size=1_500_000, expires_ns=now_ns + 10**9 + 1, owner=far)
    assert [write for write, _ in await rig.ended()] == [second]
    assert await rig.driver.close(5)


async def test_the_estimate_goes_with_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    await rig.measure(bytes_per_ms=10_000)
    await rig.driver.remove_peer(PEER, 5)
    await rig.driver.sweep()
    assert rig.driver.bytes_per_s(PEER) is None
    assert await rig.driver.close(5)


async def test_a_write_that_comes_after_its_peer_has_gone_leaves_no_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    await rig.measure(bytes_per_ms=10_000)
    computed: list[bool] = []
    unready(rig, lambda: bool(computed))
    await rig.driver.sweep()
    await rig.driver.remove_peer(PEER, 5)
    await rig.driver.sweep()
    computed.append(True)
    await rig.driver.sweep()
    rig.connector.finish()
    assert [outcome for _, outcome in await rig.ended()] == [Outcome.DONE]
    assert rig.driver._lanes == {}
    assert await rig.driver.close(5)


@pytest.mark.parametrize("call", ["post_write", "poll", "release"])
async def test_connector_that_raises_fails_the_write_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rig = Rig(monkeypatch, window=10 * SIZE)
    rig.connector.raises = {call}
    broken = rig.submit()
    await_first = await rig.ended()
    rig.connector.finish()
    ended = await_first or await rig.ended()
    assert ended == [(broken, Outcome.FAILED)]
    rig.connector.raises = set()
    fine = rig.submit()
    await rig.ended()
    rig.connector.finish()
    assert await rig.ended() == [(fine, Outcome.DONE)]
    assert rig.driver.num_open_writes == rig.driver.open_bytes == 0
    assert await rig.driver.close(5)


async def test_failing_notifications_lose_no_ended_write(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    write = rig.submit()
    await rig.ended()
    rig.connector.finish()
    rig.connector.raises = {"take_notifications"}
    sweep = await rig.driver.sweep()
    assert [ended for ended, _, _ in sweep.ended] == [write]
    assert isinstance(sweep.error, RuntimeError)
    assert await rig.driver.close(5)


async def test_every_call_is_on_one_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    rig.submit()
    await rig.ended()
    await rig.driver.add_peer(b"", MemoryRegion(0, 1), 5)
    await rig.driver.remove_peer(PEER, 5)
    assert await rig.driver.close(5)
    assert len(rig.connector.threads) == 1
    assert threading.get_ident() not in rig.connector.threads


async def test_peer_that_comes_too_late_is_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    rig.connector.gate.clear()
    adding = asyncio.ensure_future(rig.driver.add_peer(b"", MemoryRegion(0, 1), 20))
    await poll_until(lambda: bool(rig.connector.threads))  # it is being added: no way back
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    rig.connector.gate.set()
    await rig.driver.sweep()
    assert rig.connector.removed == [PEER]
    assert await rig.driver.close(5)


async def test_peer_whose_time_is_up_before_its_turn_is_not_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    begun, turn = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return turn.wait()

    busy = asyncio.ensure_future(rig.driver.run(occupy))
    await poll_until(begun.is_set)
    with pytest.raises(TimeoutError):
        await rig.driver.add_peer(b"", MemoryRegion(0, 1), 0.01)
    turn.set()
    assert await busy
    await rig.driver.run(lambda: None)
    assert not rig.connector.threads
    assert await rig.driver.close(5)


class ReachingConnector(ScriptedConnector):
    """Peers answer when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_dropped = 0
        self.num_admitted = 0

    def reach(self, metadata: bytes, region: MemoryRegion) -> Reached:
        self.gate.wait()
        return Reached(self._admit, self._drop)

    def _admit(self) -> PeerName:
        self._called("admit")
        self.num_admitted += 1
        return PEER

    def _drop(self) -> None:
        self.num_dropped += 1


async def test_peer_that_does_not_answer_keeps_no_other_waiting() -> None:
    connector = ReachingConnector()
    connector.gate.clear()
    driver = ConnectorDriver(connector, VirtualClock(0))
    adding = asyncio.ensure_future(driver.add_peer(b"", MemoryRegion(0, 1), 20))
    driver.submit(Write(OTHER, (CopyOp(0, 0, SIZE),), b"n", 10**9, Owner()))
    await asyncio.wait_for(driver.sweep(), 20)
    assert connector.posted == [OTHER]
    connector.gate.set()
    assert await adding == PEER
    assert await driver.close(20)
    assert len(connector.threads) == 1


async def test_peer_that_answers_too_late_is_never_admitted() -> None:
    """It could take the place of the same peer, met again meanwhile."""
    connector = ReachingConnector()
    connector.gate.clear()
    driver = ConnectorDriver(connector, VirtualClock(0))
    with pytest.raises(TimeoutError):
        await driver.add_peer(b"", MemoryRegion(0, 1), 0.01)
    connector.gate.set()
    await poll_until(lambda: connector.num_dropped == 1)
    assert connector.num_admitted == 0
    assert connector.removed == []
    assert await driver.close(20)


async def test_hanging_connector_does_not_hang_close(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, window=SIZE)
    rig.connector.gate.clear()
    assert not await rig.driver.close(0.05)
    rig.connector.gate.set()
    await poll_until(lambda: not rig.driver._thread.is_alive())
