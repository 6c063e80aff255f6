"""The cluster as columns: one row an instance, so that a decision is arithmetic over whole pools.

A copy of what views and ledger say, refreshed row by row when they change (``RouterState.dirty``)
and rebuilt when somebody comes or goes. Nothing else writes here and nothing here is the truth.
Instances that may hand KV to each other share one ``PairTable``: its prefill instances are the
rows of the matrices that the policy makes, its decode and mixed instances the columns. Times are
milliseconds; instants are the router's monotonic clock in milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import PROMPT_MEMORY_MS, InstanceView
from isthmus.router.kv_index import KvIndex, bits_of
from isthmus.router.ledger import NO_LIMIT, PendingLoad
from isthmus.router.links import Links
from isthmus.router.pairing import CompatKey

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PendingOf = Callable[[InstanceId], PendingLoad]
Holders = list[tuple[int, int]]  # masks of the index, and leading blocks that those have
NEVER_HEARD = float("inf")
MAX_MASKS = 4_096
AHEAD_MS = 25.0
"""Work that waits at an instance, so that it need not wait for the next prompt …"""
AHEAD_BASES = 4.0
"""… and can compute short ones together, where a step costs much whatever is in it."""
OVERDUE = 2.0  # of its prediction, from which on a prompt's delay counts as waiting work


class PromptColumns:
    """How prompts fare on some instances, one entry each: prefill, decode or mixed ones.

    A window of a block [columns, entries] that a table's two kinds of instances share, so that one
    operation serves both; each column is contiguous.
    """

    NUM_COLUMNS = 14

    def __init__(self, views: list[InstanceView], block: Floats) -> None:
        self.views = views
        self.longest: Floats = np.array([view.longest_prompt for view in views], np.float64)
        self.shortest = float(self.longest.min()) if views else 0.0  # that all of them can take
        self.num_usable = 0  # of a table's two kinds
        self.has_strange = False  # some of the table
        self._rows = block
        (
            self.base,  # prefill coefficients, with the instance's factor
            self.token,
            self.pair,
            self.factor,
            self.budget,  # tokens of a step
            self.strange,  # work of others' prompts in the last report
            self.heard_at,
            self.prompts,  # work of prompts without a first token
            self.head,  # of the oldest of them, which is computed …
            self.head_since,  # … since then …
            self.head_late,  # … and is late when it has been for longer than this
            self.ahead,  # how much may wait there when more is sent
            self.turn,  # when it was last chosen
            self.barred,  # infinite while it may not be chosen, else 0
        ) = block

    @property
    def is_usable(self) -> Bools:
        usable: Bools = self.barred == 0.0
        return usable

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> tuple[bool, bool]:
        """Whether it may be chosen, and whether others have prompts there."""
        view = self.views[row]
        model, report = view.latency, view.load
        factor = view.faded(view.prefill_factor, now_ns)
        budget = view.info.max_num_batched_tokens
        strange = 0.0
        if load.num_strange and report is not None:
            num_seqs = report.waiting_seqs + report.running_seqs
            strange = view.reported_work_ms * load.num_strange / num_seqs
        ahead = max(AHEAD_MS, AHEAD_BASES * model.prefill_base)
        may_be_chosen = is_usable(view, now_ns)
        self._rows[:, row] = (
            model.prefill_base * factor,
            model.prefill_token * factor,
            model.prefill_pair * factor,
            factor,
            budget,
            strange,
            view.load_at_ns / NS_PER_MS if report is not None else NEVER_HEARD,
            load.prompts_ms,
            load.head_ms,
            load.head_since_ns / NS_PER_MS,
            OVERDUE * load.head_ms if load.head_ms > 0.0 else NO_LIMIT,
            min(model.prefill_ms(budget), ahead) * factor,
            view.last_chosen,
            0.0 if may_be_chosen else NO_LIMIT,
        )
        return may_be_chosen, strange > 0.0


class DecodeColumns:
    """What decode and mixed instances have, one entry each."""

    NUM_COLUMNS = 20

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        self.is_mixed: Bools = np.array([v.info.role is Role.MIXED for v in views], np.bool_)
        self.has_mixed = bool(self.is_mixed.any())
        self.has_large = False
        self.prompted: set[int] = set()  # rows that have had prompts beside decodes
        self._rows: Floats = np.zeros((self.NUM_COLUMNS, len(views)))
        (
            self.base,  # decode coefficients, with the instance's factor
            self.seq,
            self.ctx,
            self.large_batch,
            self.large_base,
            self.large_seq,
            self.large_ctx,
            self.seqs,  # running, waiting and on their way
            self.context,  # tokens that they attend to
            self.step,  # of those
            self.first,  # step of one sequence, without its context
            self.room,  # free blocks; −1 where the batch has no place
            self.capacity,  # tokens
            self.token_bytes,
            self.tightest,  # TPOT limit of a sequence there …
            self.is_free,  # … 1 where none has any
            self.prompt,  # work of prompts beside decodes, as it was …
            self.prompt_at,  # … then
            self.factor,
            self.block_size,
        ) = self._rows

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> None:
        view = self.views[row]
        info, model, report = view.info, view.latency, view.load
        factor = view.faded(view.decode_factor, now_ns)
        seqs, context = load.decode_seqs, load.decode_context_tokens
        free_blocks = info.num_blocks - load.decode_blocks
        if report is not None:
            seqs += report.running_seqs + report.waiting_seqs
            context += report.running_context_tokens + report.waiting_tokens
            free_blocks += report.free_blocks - report.num_blocks
        base, seq = model.decode_base * factor, model.decode_seq * factor
        ctx = model.decode_context * factor
        large_batch: float = NO_LIMIT
        step = base + seq * seqs + ctx * context
        large_base = large_seq = large_ctx = 0.0
        if model.large_batch > 0:
            self.has_large = True
            large_batch = model.large_batch
            large_base, large_seq = model.large_base * factor, model.large_seq * factor
            large_ctx = model.large_context * factor
            if seqs >= large_batch:
                step = large_base + large_seq * seqs + large_ctx * context
        if view.prompt_ms:
            self.prompted.add(row)
        tightest = load.tightest_tpot_ms
        self._rows[:, row] = (
            base,
            seq,
            ctx,
            large_batch,
            large_base,
            large_seq,
            large_ctx,
            seqs,
            context,
            step,
            base + seq,
            free_blocks if seqs < info.max_num_seqs else -1,
            info.num_blocks * view.block_size,
            view.token_bytes,
            tightest,
            1.0 if tightest == NO_LIMIT else 0.0,
            view.prompt_ms,
            view.prompt_at_ns / NS_PER_MS,
            factor,
            view.block_size,
        )

    def prompt_share(self, now_ms: float) -> Floats:
        """Of an instance's time, that prompts have taken from its decodes lately."""
        decayed = self.prompt * np.exp((self.prompt_at - now_ms) / PROMPT_MEMORY_MS)
        share: Floats = decayed / PROMPT_MEMORY_MS
        return share

    def step_ms(self, seqs: Floats, context: Floats) -> Floats:
        """Of so many sequences with so much context, per instance."""
        step: Floats = self.base + self.seq * seqs
        step += self.ctx * context
        if self.has_large:
            large = self.large_base + self.large_seq * seqs + self.large_ctx * context
            step = np.where(seqs >= self.large_batch, large, step)
        return step

    def step_of_one_ms(self, num_tokens: int) -> Floats:
        """Of one sequence with so much context, per instance."""
        step: Floats = self.first + self.ctx * num_tokens
        if self.has_large:
            large = self.large_base + self.large_seq + self.large_ctx * num_tokens
            step = np.where(self.large_batch <= 1.0, large, step)
        return step


class PairTable:
    """Decode and mixed instances of one compatibility key, and the prefill instances that KV may
    come from.

    ``prompts`` has an entry for each of them, first the prefill instances (``prefills``), then
    those that decode (``local``), which compute prompts too. ``rates``: bytes/ms of the links,
    [prefills, decodes]. ``rate`` and ``budget`` (tokens of a prefill step): where they are the same
    for all. ``speed``: a prefill instance's beside the fastest one's, at most 1.
    """

    def __init__(
        self,
        key: CompatKey,
        prefills: list[InstanceView],
        decodes: list[InstanceView],
        index: KvIndex,
    ) -> None:
        self.key = key
        count, everybody = len(prefills), [*prefills, *decodes]
        self.num_prefills = count
        block = np.zeros((PromptColumns.NUM_COLUMNS, len(everybody)))
        self.prompts = PromptColumns(everybody, block)
        self.prefills = PromptColumns(prefills, block[:, :count])
        self.local = PromptColumns(decodes, block[:, count:])
        self.decodes = DecodeColumns(decodes)
        self.row_of = {view.instance_id: row for row, view in enumerate(everybody)}
        self._row_of_bit = {index.bit(name): row for name, row in self.row_of.items()}
        self._rows_of: dict[int, list[int]] = {}  # by mask of the index
        sizes = {view.block_size for view in everybody}
        self.block_size: float | Floats = float(sizes.pop())  # of all, or of each
        if sizes:
            self.block_size = np.array([view.block_size for view in everybody], np.float64)
        budgets = {view.info.max_num_batched_tokens for view in prefills}
        self.budget = float(budgets.pop()) if len(budgets) == 1 else None
        self.speed: Floats = np.ones(count)
        self.quickest = 0  # of the usable prefill instances, with no prompt too long for it
        self.rates: Floats = np.zeros((count, len(decodes)))
        self.rate: float | None = None
        self.nowhere: Floats = np.full(len(decodes), np.inf)  # costs of what is impossible
        self.nowhere.flags.writeable = False
        self._usable: set[int] = set()
        self._strange: set[int] = set()
        self.scratch = [np.empty_like(self.rates) for _ in range(3)]  # for costs of pairs

    @property
    def model(self) -> str:
        return self.key[0]

    def refresh(self, instance_id: InstanceId, load: PendingLoad, now_ns: int) -> None:
        """One row. ``refreshed`` after the last of several."""
        row, count = self.row_of[instance_id], self.num_prefills
        may_be_chosen, has_strange = self.prompts.refresh(row, load, now_ns)
        if row >= count:
            self.decodes.refresh(row - count, load, now_ns)
        if may_be_chosen != (row in self._usable):
            side, change = self.prefills if row < count else self.local, 1 if may_be_chosen else -1
            side.num_usable += change
            self._usable ^= {row}
        if has_strange != (row in self._strange):
            self._strange ^= {row}

    def refreshed(self) -> None:
        """What rows are beside each other."""
        has_strange = bool(self._strange)
        for columns in (self.prompts, self.prefills, self.local):
            columns.has_strange = has_strange
        if self.num_prefills:
            token = self.prefills.token
            self.speed = token.item(token.argmin()) / np.maximum(token, 1e-9)
            self.quickest = int((token + self.prefills.barred).argmin())

    def link(self, links: Links) -> None:
        """Takes over what is known of the links."""
        sources = [view.info for view in self.prefills.views]
        targets = [view.info for view in self.local.views]
        self.rates = links.rates(sources, targets)
        is_same = self.rates.size and bool((self.rates == self.rates[0, 0]).all())
        self.rate = float(self.rates[0, 0]) if is_same else None

    def cached_blocks(self, holders: Holders) -> Floats:
        """Leading blocks of a prompt, as a column of ``prompts``."""
        blocks = array("d", bytes(8 * len(self.row_of)))
        rows_of = self._rows_of
        for mask, depth in holders:
            rows = rows_of.get(mask)
            for row in self._find_rows(mask) if rows is None else rows:
                blocks[row] = depth
        return np.frombuffer(blocks)

    def _find_rows(self, mask: int) -> list[int]:
        """Of those in ``mask``."""
        rows = [self._row_of_bit[bit] for bit in bits_of(mask) if bit in self._row_of_bit]
        if len(self._rows_of) >= MAX_MASKS:
            self._rows_of.clear()
        self._rows_of[mask] = rows
        return rows


class ClusterTable:
    """Owns the tables. ``refresh`` before reading."""

    def __init__(self, links: Links, index: KvIndex) -> None:
        self._links = links
        self._index = index
        self._tables: dict[CompatKey, PairTable] = {}
        # A prefill instance may feed decode instances of several keys.
        self._tables_of: dict[InstanceId, list[PairTable]] = {}
        self._links_seen = -1
        self.is_outdated = True  # somebody came or went

    def of_model(self, model: str) -> list[PairTable]:
        return [table for table in self._tables.values() if table.model == model]

    def refresh(
        self,
        views: dict[InstanceId, InstanceView],
        dirty: Iterable[InstanceId],
        pending_of: PendingOf,
        now_ns: int,
    ) -> None:
        """Brings the rows of ``dirty`` up to date, or everything."""
        if self.is_outdated:
            self._rebuild(views)
            dirty = views
        for instance_id in dirty:
            for table in self._tables_of.get(instance_id, ()):
                table.refresh(instance_id, pending_of(instance_id), now_ns)
        for table in self._tables.values():
            table.refreshed()
        if self._links.version != self._links_seen:
            self._links_seen = self._links.version
            for table in self._tables.values():
                table.link(self._links)

    def _rebuild(self, views: dict[InstanceId, InstanceView]) -> None:
        by_key: dict[CompatKey, tuple[list[InstanceView], list[InstanceView]]] = {}
        prefill_views = [view for view in views.values() if view.info.role is Role.PREFILL]
        for view in views.values():
            if view.info.role is not Role.PREFILL:
                by_key.setdefault(view.key, ([], []))[1].append(view)
        for view in prefill_views:
            for key in view.fed_keys:
                if key in by_key:
                    by_key[key][0].append(view)
        self._tables, self._tables_of = {}, {}
        for key, (prefills, decodes) in by_key.items():
            table = self._tables[key] = PairTable(key, prefills, decodes, self._index)
            for instance_id in table.row_of:
                self._tables_of.setdefault(instance_id, []).append(table)
        self.is_outdated, self._links_seen = False, -1


def is_usable(view: InstanceView, now_ns: int) -> bool:
    """May be chosen, whatever is asked. The rules of ``admission.filter_reason``."""
    return (
        view.info.state is InstanceState.READY
        and not view.is_suspect
        and (view.breaker.is_closed or view.breaker.allows(now_ns))
    )
