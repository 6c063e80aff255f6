"""The engine's thread, and the only bridge between it and the event loop.

::

    engine thread   step ─ step ─ step ─ wait_for_work ─ step …
                      │      │      └ call_soon_threadsafe, one a step
    event loop        └──────┴──────▶ on_step(StepOutput)

and, when a step begins that computes what peers wait for, on_launch(StepLaunch) before its on_step.

The thread runs ``EngineCore.step`` and nothing else. An exception from ``step`` is fatal: the state
of the KV pool is unknown, so the process has to end and come back with a new epoch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.logging import get_logger
from isthmus.engine.core import EngineCore
from isthmus.engine.types import StepLaunch, StepOutput
from isthmus.worker.threads import run_in_thread

_IDLE_WAIT_S = 0.5
_STALL_FLOOR_MS = 10_000.0
_STALL_STEPS = 20.0
_HANG_FACTOR = 6.0

log = get_logger("engine_loop")


class EngineLoop:
    """Owns the engine thread. ``on_launch``, ``on_step`` and ``on_fatal`` run on the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        clock: Clock,
        on_step: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        on_launch: Callable[[StepLaunch], None] | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_step = on_step
        self._on_fatal = on_fatal
        if on_launch is not None:
            engine.watch_launches(lambda launch: self._post(on_launch, launch))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._progress_ns = clock.monotonic_ns()
        self._step_began_ns: int | None = None
        self._longest_step_ms = 0.0

    def start(self) -> None:
        """Starts the thread; call it on the event loop that gets the outputs."""
        self._loop = asyncio.get_running_loop()
        self._progress_ns = self._clock.monotonic_ns()
        # A daemon: a step that never returns must not keep a dying process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread after its current step; False when it did not end in time."""
        self._is_stopping.set()
        thread = self._thread
        if thread is None:
            return True
        await run_in_thread(lambda: thread.join(timeout_s))
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._step_began_ns = self._clock.monotonic_ns()
                output = self._engine.step()
                self._note_progress(output)
                if output is not None:
                    self._post(self._on_step, output)
                else:
                    self._engine.wait_for_work(_IDLE_WAIT_S)
        except BaseException as error:
            log.critical("engine step failed", exc_info=error)
            self._post(self._on_fatal, error)

    def _note_progress(self, output: StepOutput | None) -> None:
        now_ns = self._clock.monotonic_ns()
        if output is not None:
            began_ns = self._step_began_ns or now_ns
            self._longest_step_ms = max(self._longest_step_ms, (now_ns - began_ns) / NS_PER_MS)
            self._progress_ns = now_ns
        self._step_began_ns = None

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        loop = self._loop
        if loop is None or self._is_stopping.is_set():
            return
        try:
            loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop closed while a step was running: nobody is left to tell
            self._is_stopping.set()

    # --- forward progress ------------------------------------------------------------------------

    @property
    def stall_after_ms(self) -> float:
        """A step may take as long as many of the longest one seen, and never less than a floor."""
        return max(_STALL_FLOOR_MS, _STALL_STEPS * self._longest_step_ms)

    def is_progressing(self) -> bool:
        """False when there has been work for a long time and no step has ended."""
        load = self._engine.load()
        if load.waiting_seqs + load.running_seqs == 0:
            self._progress_ns = self._clock.monotonic_ns()
            return True
        return (self._clock.monotonic_ns() - self._progress_ns) / NS_PER_MS < self.stall_after_ms

    def is_hung(self) -> bool:
        """True when one step has been under way for so long that it will not end."""
        began_ns = self._step_began_ns
        if began_ns is None:
            return False
        elapsed_ms = (self._clock.monotonic_ns() - began_ns) / NS_PER_MS
        return elapsed_ms > _HANG_FACTOR * self.stall_after_ms
