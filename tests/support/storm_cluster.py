"""A cluster for storms: faulty transfers, control connections through proxies, workers that are
killed and stopped; and what its logs say of every fault that was injected.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.common.cluster import Role
from tests.support.fault_proxy import FaultProxy
from tests.support.poll import poll_until
from tests.support.proxied_registry import ProxiedRegistry
from tests.support.serving import START_S, Oracle, Serving, serving_config
from tests.support.worker_process import WorkerCluster, WorkerProcess

ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
# Of a connector's writes 1 % fail and about 2 % arrive with a flipped byte.
FAULTS = "nixl|37%100:fail, 11%53:flip"
STOPPED_S = (1.0, 4.0)
Act = Callable[[], Awaitable[None]]


class StormCluster:
    """Use ``storm_cluster``."""

    def __init__(self, running: Serving, proxied: ProxiedRegistry, seed: int) -> None:
        self.running = running
        self.proxied = proxied
        self.done: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._resuming: dict[asyncio.Task[None], WorkerProcess] = {}

    # --- what is done to it ----------------------------------------------------------------------

    def kill(self, role: Role) -> Act:
        async def act() -> None:
            worker = await self._some_worker(role)
            worker.signal(signal.SIGKILL)
            self.done["SIGKILL"] += 1

        return act

    def stop(self, role: Role) -> Act:
        """SIGSTOP, and SIGCONT some seconds later; longer than a lease, at times."""

        async def act() -> None:
            worker = await self._some_worker(role)
            worker.signal(signal.SIGSTOP)
            self.done["SIGSTOP"] += 1
            task = asyncio.create_task(self._resume(worker))
            self._resuming[task] = worker
            task.add_done_callback(self._resuming.pop)

        return act

    async def _resume(self, worker: WorkerProcess) -> None:
        await asyncio.sleep(self._chance.uniform(*STOPPED_S))
        if worker.exit_code is None:
            worker.signal(signal.SIGCONT)

    async def _some_worker(self, role: Role) -> WorkerProcess:
        """One that lives and runs: waits for it where all are dead or stopped just now."""

        def well() -> list[WorkerProcess]:
            stopped = set(self._resuming.values())
            workers = [w for w in self.running.workers.values() if w.role is role]
            return [w for w in workers if w.exit_code is None and w not in stopped]

        await poll_until(lambda: bool(well()), START_S)
        return self._chance.choice(well())

    async def cut(self) -> None:
        """Resets every connection to one instance."""
        self._some_proxy("cut").cut()

    async def corrupt(self) -> None:
        """Garbles the next frame on every connection to one instance."""
        self._some_proxy("corrupt").corrupt()

    def _some_proxy(self, what: str) -> FaultProxy:
        self.done[what] += 1
        newest = {key[0]: key for key in self.proxied.proxies}
        return self.proxied.proxies[self._chance.choice(sorted(newest.values()))]

    def schedule(self, num_requests: int, num_signals: int, num_cuts: int) -> dict[int, Act]:
        """Acts by the number of the request at whose start they happen, spread over the storm.

        Signals take turns: killed, stopped; a prefill instance, a decode instance.
        """
        acts: list[Act] = []
        for number in range(num_signals):
            role = (Role.PREFILL, Role.DECODE)[number // 2 % 2]
            acts.append(self.stop(role) if number % 2 else self.kill(role))
        acts += [self.corrupt if number % 2 else self.cut for number in range(num_cuts)]
        self._chance.shuffle(acts)
        step = num_requests // (len(acts) + 2)
        return {step * (place + 1): act for place, act in enumerate(acts)}

    async def calm(self) -> None:
        """Returns when every stopped worker goes on and every dead one is back."""
        await self.resume_all()
        await self.running.wait_serving()

    async def resume_all(self) -> None:
        """Returns when no worker is stopped any more; none is for long."""
        await asyncio.gather(*self._resuming, return_exceptions=True)

    # --- what became of injected faults ----------------------------------------------------------

    def faults(self) -> Faults:
        return Faults.of(self._log_lines())

    def _log_lines(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self.running.cluster.folder.glob("*.log")):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("{"):
                    with suppress(json.JSONDecodeError):  # its process was killed
                        yield json.loads(line)


@dataclass(frozen=True, slots=True)
class Faults:
    """``(transfer, chunk)`` of injected flips, and what the receiving side said of them."""

    num_failed_writes: int
    flipped: frozenset[tuple[str, int]]
    caught: frozenset[tuple[str, int]]
    completed: frozenset[str]

    @classmethod
    def of(cls, lines: Iterator[dict[str, Any]]) -> Faults:
        num_failed, flipped, caught, completed = 0, set(), set(), set()
        for line in lines:
            match line:
                case {"event": "fault", "kind": "flip", "head": str(head)}:
                    note = bytes.fromhex(head)
                    flipped.add((note[8:24].hex(), int.from_bytes(note[24:28], "little")))
                case {"event": "fault", "kind": "fail"}:
                    num_failed += 1
                case {"event": "corrupt blocks", "transfer": transfer, "chunk": chunk}:
                    caught.add((transfer, chunk))
                case {"event": "transfer ended", "side": "receive", "state": "complete"}:
                    completed.add(line["transfer"])
        return cls(num_failed, frozenset(flipped), frozenset(caught), frozenset(completed))

    @property
    def missed(self) -> set[tuple[str, int]]:
        """Flips in transfers that were taken for complete."""
        return {flip for flip in self.flipped if flip[0] in self.completed}

    @property
    def unjudged(self) -> frozenset[tuple[str, int]]:
        """Flips in transfers that ended before anybody looked: cancelled, killed, failed."""
        return self.flipped - self.caught


@asynccontextmanager
async def storm_cluster(
    model: Path, oracle: Oracle | None, folder: Path, seed: int = 7, **sections: dict[str, Any]
) -> AsyncIterator[StormCluster]:
    """Two prefill and two decode instances, ready; the gateway reaches them through proxies."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults: dict[str, dict[str, Any]] = {
        "transfer": {
            "connector": "fake",
            "fault_script": FAULTS,
            "quarantine_ms": 500,
            "deadline_ms": 5_000,
            "checksum": "xxh3",
        },
        "router": {"policy": "least_predicted_load", "min_remote_tokens": 16},
        "logging": {"level": "debug", "format": "json"},
    }
    config = serving_config(model, **{**defaults, **sections})
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(WorkerCluster(config, folder))
        source = cluster.registry.registry
        proxied = await stack.enter_async_context(ProxiedRegistry(source, config.name))
        cluster.gateway_registry = proxied.address
        running = Serving(cluster, oracle)
        stack.push_async_callback(running.close)
        counts = dict.fromkeys(Role, 0)
        specs = []
        for role in ROLES:
            specs.append((role, f"{role.value}-{counts[role]}"))
            counts[role] += 1
        await running.start(*specs)
        storm = StormCluster(running, proxied, seed)
        stack.push_async_callback(storm.resume_all)
        yield storm
