"""The leader's side of an instance of several ranks: starts its followers, and hears of their end.

::

    launch ─ accept ─ set up ─ load (all ranks at once) ─ every follower ready ─ steps … ─ stop
       └───────────────┬────────────┴──────────────────────────┬─────────────────┘
       ``failed`` has the error of a start that cannot succeed; later, of a rank that is lost

An instance lives and dies as one: whatever happens to a follower ends the leader, which comes back
with a new epoch and new followers. The event loop owns this; the engine's thread calls ``tell``.
Each follower has a second connection, for transfers, which becomes a RemotePort.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import select
import threading
from typing import Any

from isthmus.common.addresses import listen_on
from isthmus.common.clock import Clock
from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.engine.core import EngineCore
from isthmus.engine.models.loader import load_model
from isthmus.engine.tp_group import LEADER, open_group, serve_store
from isthmus.engine.tp_steps import LeaderModel, common_num_blocks
from isthmus.kvtransfer.rank_port import RankPort
from isthmus.kvtransfer.remote_port import RemotePort
from isthmus.worker.rank_launcher import RankLauncher
from isthmus.worker.rank_link import FrameKind, Hello, Invitation, Outcome, RankLink, Setup
from isthmus.worker.role import WorkerArgs
from isthmus.worker.threads import run_in_thread
from isthmus.worker.transfers import staging_bytes_of

_ACCEPT_POLL_S = 0.2
_HELLO_TIMEOUT_S = 5.0
_REASON_TIMEOUT_S = 1.0
_TOKEN_BYTES = 32

log = get_logger("ranks")


class Ranks:
    """See the module docstring."""

    def __init__(self, args: WorkerArgs, launcher: RankLauncher) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never has a result; its error is why this instance cannot go on."""
        self.failed.add_done_callback(asyncio.Future.exception)  # known, whoever asks for it
        self._loop = asyncio.get_running_loop()
        self._args = args
        self._launcher = launcher
        self._engine = args.config.pool(args.role).engine
        self._start_s = args.config.lifecycle.ready_timeout_ms / 1000
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._listener = listen_on(args.config.host)
        self._links: dict[int, RankLink] = {}
        self._transfer_links: dict[int, RankLink] = {}
        self._pids: dict[int, int] = {LEADER: os.getpid()}
        self._ready = threading.Semaphore(0)
        self._weight_bytes: dict[int, int] = {}
        self._is_closed = threading.Event()
        self._admission = threading.Lock()  # nobody is let in once it is closed
        self._watcher: threading.Thread | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks, in their order; complete once the engine is built."""
        return tuple(pid for _, pid in sorted(self._pids.items()))

    @property
    def weight_bytes(self) -> tuple[int, ...]:
        """Of all ranks, in their order; complete once the engine is built."""
        return tuple(size for _, size in sorted(self._weight_bytes.items()))

    def launch(self) -> None:
        """Starts the followers; on the event loop, whose thread lives as long as they may."""
        for rank in range(1, self._engine.tp_size):
            self._launcher.launch(
                Invitation(
                    host=self._args.config.host,
                    port=self._listener.getsockname()[1],
                    rank=rank,
                    token=self._token,
                    device=self._engine.device,
                )
            )

    async def start(self, clock: Clock) -> EngineCore:
        """Loads the model on all ranks. Raises ModelError, ConfigError, InstanceLostError: what is
        wrong with a follower, where that is the cause."""
        building = asyncio.ensure_future(run_in_thread(lambda: self._build_engine(clock)))
        try:
            waits: list[asyncio.Future[Any]] = [building, self.failed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if building.done() and isinstance(building.exception(), InstanceLostError):
                await asyncio.wait({self.failed}, timeout=_REASON_TIMEOUT_S)
            if self.failed.done():
                self.failed.result()
            return building.result()
        finally:
            building.cancel()

    def _build_engine(self, clock: Clock) -> EngineCore:
        size, host = self._engine.tp_size, self._args.config.host
        store = serve_store(host, size, self._start_s)
        self._accept_all(clock)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        for link in self._links.values():
            link.send_message(
                Setup(
                    config_json=self._args.config.model_dump_json(),
                    role=self._args.role.value,
                    instance_id=self._args.instance_id,
                    store_port=store.port,
                )
            )
        self._watcher.start()
        group = open_group(
            store,
            LEADER,
            size,
            device=self._engine.device,
            host=host,
            timeout_s=self._start_s,
        )
        model = load_model(
            self._args.config.model,
            self._engine.device,
            self._engine.num_threads,
            group,
            kernels_by_op=self._engine.kernels,
        )
        num_blocks = common_num_blocks(self._engine, model.spec, group)
        for _ in self._links:
            if not self._ready.acquire(timeout=self._start_s):
                raise InstanceLostError("a rank did not become ready in time", stage="start")
        self._weight_bytes[LEADER] = model.spec.weight_bytes
        log.info("ranks are ready", pids=self.pids, weight_bytes=self.weight_bytes)
        group.set_timeout(self._engine.tp_timeout_ms / 1000)
        return EngineCore(
            LeaderModel(model, self.tell, self._engine.device),
            self._engine.model_copy(update={"num_blocks": num_blocks}),
            clock,
            self._args.config.model.max_model_len,
            staging_bytes=staging_bytes_of(self._args.config, self._args.role),
        )

    async def open_ports(self, me: InstanceRef, clock: Clock) -> list[RankPort]:
        """Every follower's part in transfers, in the order of ranks; once. Raises what a follower
        says that cannot make its connector, and InstanceLostError."""
        silence_s = self._engine.tp_timeout_ms / 1000
        ports = []
        try:
            for rank in sorted(self._transfer_links):
                connection = self._transfer_links.pop(rank).detach()
                reader, writer = await asyncio.open_connection(sock=connection)
                ports.append(RemotePort(rank, reader, writer, clock, silence_s))
            return list(await asyncio.gather(*(port.open(me) for port in ports)))
        except BaseException:
            await asyncio.gather(*(port.close(0.0) for port in ports), return_exceptions=True)
            raise

    def tell(self, payload: bytes) -> None:
        """Sends one step to every follower. Raises InstanceLostError."""
        for link in self._links.values():
            link.send(FrameKind.STEP, payload)

    def close(self) -> None:
        """Tells the followers to end and returns when they have; blocks. Idempotent."""
        if self._is_closed.is_set():
            return
        with self._admission:
            self._is_closed.set()
            links = list(self._links.values())
            unused = list(self._transfer_links.values())
        self._listener.close()
        for link in links:
            try:
                link.send(FrameKind.STOP)
            except IsthmusError as error:
                log.debug("a rank is gone already", problem=error.message)
            link.hang_up()
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.join()
        for link in links + unused:
            link.close()
        self._launcher.close()

    # --- the start ---

    def _accept_all(self, clock: Clock) -> None:
        deadline_ns = clock.monotonic_ns() + int(self._start_s * 1e9)
        self._listener.settimeout(_ACCEPT_POLL_S)
        while len(self._links) + len(self._transfer_links) < 2 * (self._engine.tp_size - 1):
            problem = self._launcher.problem()
            if self._is_closed.is_set() or problem or clock.monotonic_ns() > deadline_ns:
                reason = problem or "a rank did not come in time"
                raise InstanceLostError(reason, stage="start")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise InstanceLostError(f"cannot accept ranks: {error}", stage="start") from error
            self._admit(RankLink(connection))

    def _admit(self, link: RankLink) -> None:
        """Whoever does not know the token is somebody else, and is sent away."""
        link.set_timeout(_HELLO_TIMEOUT_S)
        try:
            hello = link.receive_message(Hello)
        except IsthmusError as error:
            log.warning("a stranger came", problem=error.message)
            link.close()
            return
        links = self._transfer_links if hello.is_for_transfers else self._links
        is_known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not is_known or hello.rank in links or not 0 < hello.rank < self._engine.tp_size:
            log.warning("a stranger came", rank=hello.rank, pid=hello.pid)
            link.close()
            return
        link.set_timeout(self._engine.tp_timeout_ms / 1000)
        with self._admission:
            if self._is_closed.is_set():
                link.close()
                return
            links[hello.rank] = link
            self._pids[hello.rank] = hello.pid

    # --- the watcher ---

    def _watch(self) -> None:
        """Reads what followers say: Ready once each, and after that nothing but their end."""
        poller = select.poll()
        rank_of = {link.fileno(): rank for rank, link in self._links.items()}
        for descriptor in rank_of:
            poller.register(descriptor, select.POLLIN)
        while not self._is_closed.is_set():
            for descriptor, _ in poller.poll():
                if self._is_closed.is_set():
                    return
                error = self._hear(rank_of[descriptor])
                if error is not None:
                    self._report(error)
                    return

    def _hear(self, rank: int) -> IsthmusError | None:
        """None when the follower is ready."""
        try:
            outcome = self._links[rank].receive_message(Outcome)
        except InstanceLostError:
            text = f"rank {rank} (pid {self._pids[rank]}) ended"
            return InstanceLostError(text, stage="rank", instance_id=self._args.instance_id)
        except InternalError as error:
            return error
        if outcome.failure is not None:
            return outcome.failure.to_error()
        self._weight_bytes[rank] = outcome.weight_bytes
        self._ready.release()
        return None

    def _report(self, error: IsthmusError) -> None:
        def fail() -> None:
            if not self.failed.done():
                self.failed.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(fail)
        except RuntimeError:  # the loop has closed: the process is ending anyway
            log.debug("nobody is left to hear of a lost rank")
