"""The decode role: who is being served, and on which stream.

Each request is one ``Generation`` in one task. The engine's updates are handed to it directly, in
the event-loop callback of the step, and land in its stream's outbox: all that a step produced for a
gateway leaves in one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from isthmus.common.errors import DrainingError, InternalError, InvalidRequestError, IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.logging import get_logger
from isthmus.common.types import Request, RouteDecision
from isthmus.decode_worker.canary import Canary
from isthmus.decode_worker.events import Failed, Outbox
from isthmus.decode_worker.generation import Generation
from isthmus.decode_worker.prefill_client import PrefillClient
from isthmus.decode_worker.reservations import Reservations
from isthmus.engine.types import StepLaunch, StepOutput
from isthmus.worker.load_reporter import OutsideLoad
from isthmus.worker.role import WorkerRuntime

_CLOSE_TIMEOUT_S = 2.0

log = get_logger("decode")


class DecodeWorker:
    """Implements ``RoleWorker``, for the roles DECODE and MIXED."""

    def __init__(self, runtime: WorkerRuntime, max_waiting: int) -> None:
        self._runtime = runtime
        self._client = PrefillClient(
            runtime.transfers, runtime.config.transfer.handshake_timeout_ms
        )
        self._reservations = Reservations(runtime, self._client, max_waiting)
        self._generations: dict[RequestId, Generation] = {}
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._canary = Canary(runtime)

    # --- for the service -------------------------------------------------------------------------

    def submit(
        self, request: Request, decision: RouteDecision, outbox: Outbox
    ) -> asyncio.Task[None] | None:
        """Starts a request; None when it is refused, which the outbox tells."""
        request_id = request.request_id
        try:
            self._runtime.lifecycle.check_accepting()
            if request_id in self._tasks:
                raise InvalidRequestError(
                    f"request {request_id} is being served here already", stage="admit"
                )
        except IsthmusError as error:
            outbox.put(Failed(request_id, error))
            return None
        self._canary.make_way()
        generation = Generation(
            self._runtime, self._client, self._reservations, request, decision, outbox
        )
        task = asyncio.create_task(generation.run(), name=f"request {request_id}")
        self._generations[request_id] = generation
        self._tasks[request_id] = task
        task.add_done_callback(lambda ended: self._ended(generation, ended))
        self._runtime.load.changed()
        return task

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Unknown ids are those that have just ended: nothing to do."""
        for request_id in request_ids:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()

    def _ended(self, generation: Generation, task: asyncio.Task[None]) -> None:
        request_id = generation.request.request_id
        del self._generations[request_id]
        del self._tasks[request_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a request ended with a bug", request_id=request_id, exc_info=error)
            generation.fail(InternalError(f"unexpected {error!r}", stage=generation.state.value))
        self._runtime.cache_changed()
        self._reservations.serve_line()
        self._canary.served(generation.served_from_elsewhere)
        if not self._tasks:
            self._canary.start_if_idle()

    # --- RoleWorker ------------------------------------------------------------------------------

    def start(self) -> None:
        """Nothing runs without a request."""

    def on_launch(self, launch: StepLaunch) -> None:
        """Nobody waits for the KV that is computed here."""

    def on_step(self, output: StepOutput) -> None:
        for update in output.updates:
            generation = self._generations.get(update.request_id)
            if generation is not None:
                generation.on_update(update)
            else:
                self._canary.on_update(update)
        self._reservations.serve_line()

    def outside_load(self) -> OutsideLoad:
        return self._reservations.waiting()

    def num_running(self) -> int:
        return len(self._tasks)

    def num_held(self) -> int:
        return self._reservations.num_quarantined

    def idle_peers(self) -> set[InstanceId]:
        return self._client.idle_peers()

    async def forget(self, instance_id: InstanceId) -> None:
        await self._client.forget(instance_id)

    async def close(self) -> None:
        """What still runs is told to go elsewhere: the gateway resumes it on another instance."""
        self._canary.close()
        for generation in list(self._generations.values()):
            generation.fail(
                DrainingError(
                    "the decode instance stops",
                    stage=generation.state.value,
                    instance_id=self._runtime.me.instance_id,
                )
            )
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
        await self._reservations.close(_CLOSE_TIMEOUT_S)
        await self._client.close()
