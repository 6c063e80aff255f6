"""Who owns KV blocks in one engine, and the moves by which blocks change hands.

::

    reserve ─▶ reserved ─┬─ admit ─▶ sequences ─┬─ hold ─▶ held ─▶ (pool)
                         │  add ──▶  (no blocks │
                         │            at first) └─ finish ───────▶ (pool)
                         ├─ publish ────────────────────────────▶ (pool, cached)
                         ├─ cancel ─────────────────────────────▶ (pool)
                         └─ quarantine ─▶ quarantined ──────────▶ (pool)

Every live block table is in exactly one of these maps. Tables of steps that are being computed are
also *in flight*: whoever lets go of one meanwhile only marks it, and it is freed when the last step
that may write to it ends (``end_flight``). A sequence that ended while the step after its last one
was under way is in that step too: what is computed for it there is void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isthmus.common.clock import Clock
from isthmus.common.errors import InternalError
from isthmus.common.ids import BlockHash, BlockId, RequestId
from isthmus.common.types import FinishReason
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.scheduler import Scheduler
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.types import SequenceMode


@dataclass(frozen=True, slots=True)
class _Reserved:
    table: BlockTable
    tpot_ms: float | None  # of a sequence that will decode on it


class BlockOwners:
    """Not thread-safe: the engine core calls it under its lock."""

    def __init__(self, kv: KvCacheManager, scheduler: Scheduler, clock: Clock) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._clock = clock
        self._sequences: dict[RequestId, Sequence] = {}  # waiting, running, preempted
        self._held: dict[RequestId, Sequence] = {}
        self._reserved: dict[RequestId, _Reserved] = {}
        self._quarantined: dict[RequestId, list[BlockTable]] = {}
        self._in_flight: Counter[BlockTable] = Counter()  # how many steps each is in
        self._free_after_flight: list[BlockTable] = []

    # --- sequences -----------------------------------------------------------------------------

    def check_is_new(self, request_id: RequestId) -> None:
        """Quarantined blocks do not count: a failed transfer's request starts afresh here."""
        known = (self._sequences, self._held, self._reserved)
        if any(request_id in owners for owners in known):
            raise InternalError(f"request {request_id} is in the engine already", stage="admit")

    def add(self, sequence: Sequence) -> None:
        self.check_is_new(sequence.request_id)
        self._sequences[sequence.request_id] = sequence
        self._scheduler.add(sequence)

    def find(self, request_id: RequestId) -> Sequence | None:
        """A sequence that has not ended."""
        return self._sequences.get(request_id)

    def block_ids(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Blocks of a running or held sequence, in order; empty while it has none."""
        sequence = self._sequences.get(request_id) or self._held.get(request_id)
        if sequence is None or sequence.table is None:
            return ()
        return tuple(sequence.table.block_ids)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that has not ended. A PREFILL_ONLY one that owns blocks goes on hold:
        a transfer may be reading them."""
        sequence.finish_reason = reason
        if sequence.mode is SequenceMode.PREFILL_ONLY and sequence.table is not None:
            self.hold(sequence)
            return
        self._leave_queues(sequence)
        sequence.move_to(SeqStatus.FINISHED)
        if sequence.table is not None:
            self._free(sequence.table)

    def _leave_queues(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]

    # --- holds ---------------------------------------------------------------------------------

    def hold(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._leave_queues(sequence)
        sequence.move_to(SeqStatus.HELD)
        sequence.held_at_ns = self._clock.now_ns()
        self._kv.move(sequence.table, TableState.HELD)
        self._held[sequence.request_id] = sequence

    def release_hold(self, request_id: RequestId) -> None:
        """Does nothing when there is no such hold."""
        sequence = self._held.pop(request_id, None)
        if sequence is not None:
            assert sequence.table is not None
            sequence.move_to(SeqStatus.FINISHED)
            self._free(sequence.table)

    def holds_since(self, at_ns: int) -> list[RequestId]:
        """Requests whose blocks have been held since ``at_ns`` or longer."""
        return [s.request_id for s in self._held.values() if s.held_at_ns <= at_ns]

    # --- reservations --------------------------------------------------------------------------

    def add_reservation(
        self, request_id: RequestId, table: BlockTable, tpot_ms: float | None = None
    ) -> None:
        """``tpot_ms``: the target of a sequence that will decode on them."""
        assert table.state is TableState.RESERVED
        self._reserved[request_id] = _Reserved(table, tpot_ms)

    def coming_ms(self) -> Iterator[float]:
        """TPOT targets of the sequences whose KV is on its way."""
        return (r.tpot_ms for r in self._reserved.values() if r.tpot_ms is not None)

    def _take_reservation(self, request_id: RequestId) -> BlockTable | None:
        reserved = self._reserved.pop(request_id, None)
        return reserved.table if reserved is not None else None

    def admit_reservation(self, sequence: Sequence, num_unmoved_tokens: int = 0) -> None:
        """Gives the reserved blocks, by now filled, to the sequence. InternalError if unknown.

        Of the first ``num_unmoved_tokens`` only what was cached here is there for others."""
        table = self._take_reservation(sequence.request_id)
        if table is None:
            raise InternalError(
                f"request {sequence.request_id} has no reservation here", stage="admit"
            )
        self._kv.move(table, TableState.USED)
        table.is_whole = num_unmoved_tokens <= table.num_cached_blocks * self._kv.block_size
        self._kv.publish(table, sequence.block_hashes, len(sequence.block_hashes))
        sequence.table = table
        sequence.num_computed_tokens = len(sequence.request.token_ids)
        sequence.num_cached_tokens = table.num_cached_blocks * self._kv.block_size
        self._sequences[sequence.request_id] = sequence
        self._scheduler.add_with_kv(sequence)

    def publish_reservation(self, request_id: RequestId, hashes: list[BlockHash]) -> None:
        """The reserved blocks, by now filled, enter the prefix cache under ``hashes`` and belong to
        nobody else. InternalError if unknown."""
        table = self._take_reservation(request_id)
        if table is None:
            raise InternalError(f"request {request_id} has no reservation here", stage="fetch")
        self._kv.move(table, TableState.USED)
        self._kv.publish(table, hashes, len(hashes))
        self._kv.free(table)

    def cancel_reservation(
        self, request_id: RequestId, quarantine: bool, keeps_prefix: bool = False
    ) -> None:
        """Does nothing when there is no such reservation."""
        table = self._take_reservation(request_id)
        if table is None:
            return
        if quarantine:
            self._kv.quarantine(table, keeps_prefix=keeps_prefix)
            self._quarantined.setdefault(request_id, []).append(table)
        else:
            self._kv.free(table)

    def release_quarantine(self, request_id: RequestId) -> None:
        for table in self._quarantined.pop(request_id, []):
            self._kv.free(table)

    # --- flight --------------------------------------------------------------------------------

    def begin_flight(self, sequences: Iterable[Sequence]) -> tuple[BlockTable, ...]:
        """The tables that a step may write to from now on; give them to ``end_flight``."""
        tables = tuple(s.table for s in sequences if s.table is not None)
        self._in_flight.update(tables)
        return tables

    def end_flight(self, tables: Iterable[BlockTable]) -> None:
        """A step has ended: frees what was let go of meanwhile and is in no other."""
        for table in tables:
            if self._in_flight[table] == 1:
                del self._in_flight[table]
            else:
                self._in_flight[table] -= 1
        if self._free_after_flight:
            landed = [table for table in self._free_after_flight if table not in self._in_flight]
            for table in landed:
                self._free_after_flight.remove(table)
                self._kv.free(table)

    def _free(self, table: BlockTable) -> None:
        if table in self._in_flight:
            self._free_after_flight.append(table)
        else:
            self._kv.free(table)

    # --- integrity -----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """AssertionError naming blocks that nobody owns, or a sequence that is not queued."""
        self._kv.check_integrity()
        strays = [table.block_ids for table in self._kv.live_tables() ^ set(self._tables())]
        assert not strays, f"blocks without a known owner: {strays}"
        queued = {*self._scheduler.running, *self._scheduler.waiting}
        assert queued == set(self._sequences.values()), "queues and sequences differ"

    def _tables(self) -> Iterator[BlockTable]:
        for sequence in (*self._sequences.values(), *self._held.values()):
            if sequence.table is not None:
                yield sequence.table
        yield from (reserved.table for reserved in self._reserved.values())
        yield from self._free_after_flight
        for tables in self._quarantined.values():
            yield from tables
