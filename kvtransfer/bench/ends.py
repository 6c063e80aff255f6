"""The two processes of one way, which live through a whole measurement and work when told to.

Between its turns a process waits on its pipe, so ways that are not measured cost nothing. UCX reads
its environment once: another transport is another pair of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from isthmus.common.errors import IsthmusError, TransferError
from isthmus.common.shared_memory import create_shared_memory
from isthmus.kvtransfer.bench.cases import Case
from isthmus.kvtransfer.bench.ways import MEMCPY, Introduction, Way, make_way, split_name
from isthmus.kvtransfer.interface import MemoryRegion

_START_S = 60.0
_ROUND_S = 120.0
_PAUSE_S = 0.00005


@dataclass(frozen=True, slots=True)
class Spec:
    way: str
    pool_bytes: int
    is_writer: bool
    cases: tuple[Case, ...]


class End:
    """The parent's handle on one process. Every call has a deadline."""

    def __init__(self, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")
        self._way = spec.way
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, spec), daemon=True
        )
        with _environment("UCX_TLS", split_name(spec.way)[1]):
            self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any, timeout_s: float = _START_S) -> Any:
        self.tell(method, *arguments)
        return self.answer(timeout_s)

    def tell(self, method: str, *arguments: Any) -> None:
        """Raises TransferError when the process has ended."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise TransferError(f"{self._way}: its process has ended", stage="bench") from error

    def answer(self, timeout_s: float = _ROUND_S) -> Any:
        """Raises TransferError: what the process raised, or that it did not answer."""
        if not self._pipe.poll(timeout_s):
            raise TransferError(f"{self._way}: no answer in {timeout_s:.0f} s", stage="bench")
        try:
            result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise TransferError(f"{self._way}: its process has ended", stage="bench") from error
        if isinstance(result, str):
            raise TransferError(f"{self._way}: {result}", stage="bench")
        return result

    def close(self) -> None:
        try:
            self._pipe.send(("close", ()))
            self._process.join(10)
        except OSError:
            pass  # it has ended already
        finally:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
            self._pipe.close()


class Pair:
    """Writer and target of one way."""

    def __init__(self, way: str, pool_bytes: int, cases: tuple[Case, ...]) -> None:
        """Raises TransferError when the way cannot be had here."""
        self.way = way
        roles = (True,) if way == MEMCPY else (True, False)
        self._ends = [End(Spec(way, pool_bytes, is_writer, cases)) for is_writer in roles]
        try:
            for end in self._ends:
                end.answer(_START_S)
        except TransferError:
            self.close()
            raise

    def measure(self, case: Case, num_writes: int) -> list[float]:
        """Seconds of each write, from the call until all of it is in the target's memory."""
        writer, *targets = self._ends
        for target in targets:
            writer.call("meet", case, target.call("introduce", case))
            target.call("meet", case, writer.call("introduce", case))
            target.tell("serve", case)
        try:
            seconds: list[float] = writer.call("write", case, num_writes, timeout_s=_ROUND_S)
        finally:
            for target in targets:
                target.tell("stop")
                target.answer()
        return seconds

    def close(self) -> None:
        for end in self._ends:
            end.close()


class _Child:
    """What a process does. For each size of piece it makes a way of its own, once."""

    def __init__(self, pipe: Connection, spec: Spec) -> None:
        self._pipe = pipe
        self._spec = spec
        mapping, self._fd = create_shared_memory(spec.pool_bytes * (2 if self._is_memcpy else 1))
        self._pool = np.frombuffer(mapping, dtype=np.uint8)
        self._pool[:] = np.arange(self._pool.size, dtype=np.uint8) if spec.is_writer else 0
        self._region = MemoryRegion(self._pool.ctypes.data, self._pool.size, fd=self._fd)
        self._ways = {size: self._make(size) for size in {c.piece_bytes for c in spec.cases}}
        self._met: set[int] = set()
        self._warm: set[int] = set()
        self._plans = {case: case.plans(spec.pool_bytes) for case in spec.cases}

    @property
    def _is_memcpy(self) -> bool:
        return self._spec.way == MEMCPY

    def introduce(self, case: Case) -> Introduction:
        return self._ways[case.piece_bytes].introduce()

    def meet(self, case: Case, introduction: Introduction) -> None:
        if case.piece_bytes not in self._met:
            self._ways[case.piece_bytes].meet(introduction)
            self._met.add(case.piece_bytes)

    def write(self, case: Case, num_writes: int) -> list[float]:
        """One write more than asked for, whose time does not count; before the first ones the whole
        pool is written, so that no page is met for the first time in what is timed."""
        way = self._ways[case.piece_bytes]
        if case.piece_bytes not in self._warm:
            self._warm.add(case.piece_bytes)
            way.prepare(case.everything(self._spec.pool_bytes))()
        seconds = []
        for plan in islice(self._plans[case], num_writes + 1):
            write = way.prepare(plan)
            started = time.perf_counter()
            write()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]

    def serve(self, case: Case) -> None:
        """Until the parent says something; a spinning target may share a core with the writer."""
        way = self._ways[case.piece_bytes]
        while not self._pipe.poll(_PAUSE_S):
            way.serve()

    def stop(self) -> None:
        pass

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        os.close(self._fd)

    def _make(self, piece_bytes: int) -> Way:
        role = "writer" if self._spec.is_writer else "target"
        name, _ = split_name(self._spec.way)
        return make_way(name, f"{role}-{piece_bytes}", self._region, piece_bytes)


def _serve(pipe: Connection, spec: Spec) -> None:
    try:
        child = _Child(pipe, spec)
    except (IsthmusError, OSError) as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            child.close()
            return
        result: Any = None
        try:
            result = getattr(child, method)(*arguments)
        except (IsthmusError, OSError) as error:
            result = str(error)
        if method == "close":
            return
        if method != "serve":  # which ends with the next command
            pipe.send(result)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for processes that are started meanwhile; unchanged where ``value`` is empty."""
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
