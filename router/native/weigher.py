"""Asks the compiled policy about one query and one table.

``parts.h`` says what lies where in the three structures: everything takes eight bytes, so that they
are filled in by one ``struct`` format each. A table's is made once; its arrays never move.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np

from isthmus.common.ids import InstanceId
from isthmus.common.types import LocalPrefillReason
from isthmus.router.blocks import Holders
from isthmus.router.decider import local_prefill_reason
from isthmus.router.forecast import NEVER, Ask
from isthmus.router.native.binding import Library, compiled_library
from isthmus.router.policy import Candidate
from isthmus.router.predictor import DecodeOption, PrefillOption
from isthmus.router.prices import Prices
from isthmus.router.quantiles import Residuals
from isthmus.router.table import PairTable
from isthmus.router.types import RouteQuery
from isthmus.router.weighed import (
    DECODE_FULL,
    NO_DECODE_INSTANCE,
    PREFILL_BUSY,
    TPOT,
    TTFT,
    Weighed,
)

OBSTACLES = ("", NO_DECODE_INSTANCE, DECODE_FULL, TPOT, PREFILL_BUSY, TTFT)
MAX_CANDIDATES = 4

_RESIDUALS = "dqq"
_QUERY = struct.Struct("@6d 3d 5d 2d 3q 3q q qq" + 3 * _RESIDUALS + "q")
_PICK = struct.Struct("@q")  # which a query ends with
_CHEAPEST = -1
_ANSWER = struct.Struct("@8d")
_CANDIDATE = struct.Struct("@13d")


class Weigher:
    """``min_remote_tokens``, ``stale_ms``: as ``forecast`` takes them."""

    def __init__(self, compiled: Library, min_remote_tokens: int, stale_ms: float) -> None:
        self._library = compiled
        self._min_remote = min_remote_tokens
        self._stale_ms = stale_ms
        self._query, self._query_at = _buffer(_QUERY.size)
        self._excluded = array("q")  # rows
        self._answer, self._answer_at = _buffer(_ANSWER.size + MAX_CANDIDATES * _CANDIDATE.size)

    @classmethod
    def create(cls, min_remote_tokens: int, stale_ms: float) -> Weigher | None:
        """None where it cannot be compiled: numpy does the same then, slower."""
        compiled = compiled_library()
        return cls(compiled, min_remote_tokens, stale_ms) if compiled is not None else None

    def weigh(
        self,
        table: PairTable,
        query: RouteQuery,
        holders: Holders,
        ask: Ask,
        prices: Prices,
        now_ms: float,
    ) -> Weighed:
        """As ``GoodputPolicy.weigh``."""
        parts = self._parts(table)
        row_of = table.row_of
        rows = [row_of[name] for name in query.exclude if name in row_of]
        excluded = self._excluded = array("q", rows)
        last, quantile, now_ns = ask.last, ask.quantile, ask.now_ns
        last_prefill = last_decode = -1
        if last is not None:
            last_prefill, last_decode = _row(row_of, last.prefill), _row(row_of, last.decode)
        remote, local, tpot = ask.remote, ask.local, ask.tpot
        _QUERY.pack_into(
            self._query,
            0,
            query.num_prompt_tokens,
            ask.output_tokens,
            NEVER if ask.ttft_ms is None else ask.ttft_ms,
            ask.left_ms,
            NEVER if ask.tpot_ms is None else ask.tpot_ms,
            quantile,
            now_ms,
            self._stale_ms,
            self._min_remote,
            prices.prefill,
            prices.decode,
            ask.press.line_ms,
            ask.press.worth_ms,
            last.worth_ms if last is not None else 0.0,
            table.rate or 0.0,
            table.budget or 0.0,
            query.needs_whole_prompt,
            ask.spares_residents,
            table.prompts.has_strange,
            _row(row_of, ask.left_alone),
            last_prefill,
            last_decode,
            table.blocks_at(holders),
            excluded.buffer_info()[0],
            len(excluded),
            *_residuals(remote, quantile, now_ns),
            *_residuals(local, quantile, now_ns),
            *_residuals(tpot, ask.quantile, now_ns),
            _CHEAPEST,
        )
        self._library.weigh(parts.buffer_info()[0], self._query_at, self._answer_at)
        return self._told(table, query)

    def explore(self, table: PairTable, query: RouteQuery, source: random.Random) -> Weighed:
        """``query`` has just been weighed, and there are candidates: any place instead, one as
        likely as another."""
        parts_at = self._parts(table).buffer_info()[0]
        num_places = self._library.num_places(parts_at, self._query_at)
        _PICK.pack_into(self._query, _QUERY.size - _PICK.size, source.randrange(num_places))
        self._library.weigh(parts_at, self._query_at, self._answer_at)
        return self._told(table, query)

    def _parts(self, table: PairTable) -> array[int]:
        """Where the table's columns are. It keeps them, and this with them."""
        if table.parts is not None:
            return table.parts
        count, num_decodes = table.num_prefills, len(table.local.views)
        size = self._library.workspace_size(count, num_decodes)
        table.workspace = np.empty(size)
        columns = (
            table.prompts.rows,
            table.decodes.rows,
            table.prompts.longest,
            table.block_sizes,
            table.decodes.mixed,
            table.rates,
            table.fetch_min,
            table.workspace,
        )
        assert all(column.flags.c_contiguous for column in columns)
        addresses = [column.ctypes.data for column in columns]
        table.parts = array("q", [count, num_decodes, *addresses])
        return table.parts

    def _told(self, table: PairTable, query: RouteQuery) -> Weighed:
        work, floor, ttft, tpot, ready, num_workers, obstacle, count = _ANSWER.unpack_from(
            self._answer
        )
        candidates: Sequence[Candidate] = ()
        if count:
            end = _ANSWER.size + int(count) * _CANDIDATE.size
            numbers = self._answer[_ANSWER.size : end].tobytes()
            candidates = Listed(table, query, self._min_remote, numbers)
        return Weighed(
            candidates, work, floor, ttft, tpot, ready, int(num_workers), OBSTACLES[int(obstacle)]
        )


class Listed(Sequence[Candidate]):
    """Candidates as they were told, made into objects one by one: mostly one or two are asked for,
    and a decision's record keeps them all."""

    __slots__ = ("_decodes", "_has_prefill", "_made", "_min_remote", "_num_tokens", "_numbers",
                 "_prefills")  # fmt: skip

    def __init__(
        self, table: PairTable, query: RouteQuery, min_remote_tokens: int, numbers: bytes
    ) -> None:
        # The views and not the table: this may live long, and a table is large.
        self._prefills, self._decodes = table.prefills.views, table.decodes.views
        self._has_prefill = table.prefills.num_usable > 0
        self._num_tokens = query.num_prompt_tokens
        self._min_remote = min_remote_tokens
        self._numbers = numbers
        self._made: Candidate | None = None  # the first

    def __len__(self) -> int:
        return len(self._numbers) // _CANDIDATE.size

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(place, slice):
            return [self._make(at) for at in range(*place.indices(len(self)))]
        if place:
            return self._make(range(len(self))[place])
        if self._made is None:
            self._made = self._make(0)
        return self._made

    def _make(self, place: int) -> Candidate:
        numbers = _CANDIDATE.unpack_from(self._numbers, place * _CANDIDATE.size)
        row, column, cost, cached, uncached, wait, prefill, ttft, factor = numbers[:9]
        decode_cached, seqs, tpot, is_full = numbers[9:]
        held, view = int(decode_cached), self._decodes[int(column)]
        lacking = self._num_tokens - held
        decode = DecodeOption(view, held, lacking, int(seqs), tpot, 0.0, is_full != 0.0)
        reason = LocalPrefillReason.NONE
        if row >= 0:
            view = self._prefills[int(row)]
        else:
            found = local_prefill_reason(decode, self._has_prefill, self._min_remote)
            reason = found or LocalPrefillReason.POLICY
        option = PrefillOption(view, int(cached), int(uncached), wait, prefill, ttft, factor)
        return Candidate(decode, option, reason, cost)


def _residuals(found: Residuals, quantile: float, now_ns: int) -> tuple[float, int, int]:
    ratio = found.ratio(quantile, now_ns)  # which forgets what is old
    address, count = found.ordered.buffer_info()
    return ratio, address, count


def _row(row_of: dict[InstanceId, int], name: InstanceId | None) -> int:
    return row_of.get(name, -1) if name is not None else -1


def _buffer(size: int) -> tuple[array[int], int]:
    """Memory that stays where it is."""
    memory = array("B", bytes(size))
    return memory, memory.buffer_info()[0]
