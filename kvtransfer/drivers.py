"""The connectors of one instance: all are offered, one driver runs for each that has had a peer.

To the manager they are one: a write goes to its peer's connector, and a sweep is a sweep of all
drivers. A connector that no pair has chosen has its memory registered and its metadata in the
offer; no driver runs for it and it is never polled. (The doorman of ``shm`` is a thread of the
connector's own, which sleeps until a peer calls.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from isthmus.common.clock import Clock
from isthmus.common.errors import TransferError
from isthmus.common.logging import get_logger
from isthmus.common.transfer import ConnectorOffer
from isthmus.kvtransfer.driver import ConnectorDriver
from isthmus.kvtransfer.interface import Connector, MemoryRegion, PeerName
from isthmus.kvtransfer.writes import Sweep, Write

T = TypeVar("T")
_log = get_logger("kvtransfer")


class Drivers:
    """Everything but the constructor runs on one event loop."""

    def __init__(
        self,
        connectors: Sequence[Connector],
        region: MemoryRegion,
        clock: Clock,
        must_have_all: bool = True,
    ) -> None:
        """Registers ``region`` with each connector and blocks until that is done. Those that cannot
        are closed, and left out where not all ``must_have`` it. Raises TransferError when one that
        must cannot, or none can; all are closed then."""
        self._clock = clock
        self._connectors = {connector.name: connector for connector in connectors}
        self._drivers: dict[str, ConnectorDriver] = {}
        self._by_peer: dict[PeerName, ConnectorDriver] = {}
        self._woken = asyncio.Event()
        try:
            self.offers = tuple(self._register(region, must_have_all))
        except BaseException:
            for connector in self._connectors.values():
                connector.close()
            raise

    @property
    def num_open_writes(self) -> int:
        """Submitted and not yet reported as ended."""
        return sum(driver.num_open_writes for driver in self._drivers.values())

    @property
    def open_bytes(self) -> int:
        return sum(driver.open_bytes for driver in self._drivers.values())

    def bytes_per_s(self, peer: PeerName) -> float | None:
        """What the link to ``peer`` was measured to carry; None while that is not known."""
        driver = self._by_peer.get(peer)
        return driver.bytes_per_s(peer) if driver is not None else None

    def max_write_bytes(self, peer: PeerName) -> int:
        """How large a write should be at most."""
        return self._by_peer[peer].max_write_bytes(peer)

    def check_in_time(self, peer: PeerName, num_bytes: int, deadline_ns: int) -> None:
        """Raises TransferHopelessError when so many bytes surely cannot be at ``peer`` by
        ``deadline_ns`` (monotonic)."""
        self._by_peer[peer].check_in_time(peer, num_bytes, deadline_ns)

    def submit(self, write: Write) -> None:
        """Of one to a peer that has been removed the owner hears that it was not posted."""
        driver = self._by_peer.get(write.peer) or next(iter(self._drivers.values()))
        driver.submit(write)

    def wake(self) -> None:
        """There may be something to see: a patient sweep looks once more and returns."""
        self._woken.set()
        for driver in self._drivers.values():
            driver.wake()

    async def sweep(self, patience_s: float = 0.0) -> Sweep:
        """One sweep of every driver, over as soon as one of them has seen something."""
        drivers = list(self._drivers.values())
        if len(drivers) == 1:
            return await drivers[0].sweep(patience_s)
        if not drivers:
            return await self._sweep_of_none(patience_s)
        sweeps = [asyncio.ensure_future(driver.sweep(patience_s)) for driver in drivers]
        try:
            await asyncio.wait(sweeps, return_when=asyncio.FIRST_COMPLETED)
            for driver in drivers:
                driver.wake()
            return _merged(await asyncio.gather(*sweeps))
        finally:
            for sweep in sweeps:
                sweep.cancel()

    async def run(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on a connector's thread, of which there is one once there is a peer.
        Raises what it raises."""
        driver = next(iter(self._drivers.values()))
        return await driver.run(function)

    async def add_peer(
        self, offer: ConnectorOffer, region: MemoryRegion, timeout_s: float
    ) -> PeerName:
        """Raises HandshakeError from the connector and TimeoutError when it takes too long."""
        driver = self._drivers.get(offer.name)
        if driver is None:
            driver = ConnectorDriver(self._connectors[offer.name], self._clock)
            self._drivers[offer.name] = driver
            self.wake()  # a sweep that is under way knows nothing of it
        peer = await driver.add_peer(offer.metadata, region, timeout_s)
        self._by_peer[peer] = driver
        return peer

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None:
        """Comes back after ``timeout_s`` at the latest: the connector then does it when it can. How
        its writes end is still reported."""
        driver = self._by_peer.pop(peer, None)
        if driver is not None:
            await driver.remove_peer(peer, timeout_s)

    async def close(self, timeout_s: float) -> bool:
        """False when a connector did not close in time; its thread is then left behind."""
        for name, connector in self._connectors.items():
            if name not in self._drivers:
                connector.close()
        closings = [driver.close(timeout_s) for driver in self._drivers.values()]
        return all(await asyncio.gather(*closings))

    def _register(self, region: MemoryRegion, must_have_all: bool) -> Iterator[ConnectorOffer]:
        obstacles = []
        for name, connector in list(self._connectors.items()):
            try:
                offer = _offer(connector, region)
            except TransferError as error:
                if must_have_all:
                    raise
                obstacles.append(f"{name}: {error.message}")
                _log.warning("a connector is left out", connector=name, problem=error.message)
                self._connectors.pop(name).close()
            else:
                yield offer
        if not self._connectors:
            raise TransferError(
                f"nothing can move KV here: {'; '.join(obstacles)}", stage="register"
            )

    async def _sweep_of_none(self, patience_s: float) -> Sweep:
        sweep = Sweep(self._clock.monotonic_ns())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._woken.wait()
        self._woken.clear()
        return sweep


def _offer(connector: Connector, region: MemoryRegion) -> ConnectorOffer:
    connector.register(region)
    return ConnectorOffer(
        connector.name, connector.metadata(), connector.domain, connector.is_direct
    )


def _merged(sweeps: Sequence[Sweep]) -> Sweep:
    """``started_ns`` is the earliest: each driver has looked since then."""
    merged = Sweep(min(sweep.started_ns for sweep in sweeps))
    for sweep in sweeps:
        merged.ended += sweep.ended
        merged.notifications += sweep.notifications
        merged.num_posted += sweep.num_posted
        merged.error = merged.error or sweep.error
    return merged
