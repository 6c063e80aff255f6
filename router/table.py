"""The cluster as columns: one row an instance, so that a decision is arithmetic over whole pools.

A copy of what views and ledger say, refreshed row by row when they change (``RouterState.dirty``)
and rebuilt when somebody comes or goes. Nothing else writes here and nothing here is the truth.
Instances that may hand KV to each other share one ``PairTable``: its prefill instances are the
rows of the matrices that the policy makes, its decode and mixed instances the columns. Times are
milliseconds; instants are the router's monotonic clock in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import PROMPT_MEMORY_MS, CompatKey, InstanceView
from isthmus.router.ledger import PendingLoad
from isthmus.router.links import Links

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PendingOf = Callable[[InstanceId], PendingLoad]
NEVER_HEARD = float("inf")
AHEAD_MS = 25.0
"""Work that waits at an instance, so that it need not wait for the next prompt …"""
AHEAD_BASES = 4.0
"""… and can compute short ones together, where a step costs much whatever is in it."""
NO_LIMIT = float("inf")


class PromptColumns:
    """How prompts fare on some instances, one entry each: prefill, decode or mixed ones."""

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        count = len(views)
        self.is_usable: Bools = np.zeros(count, dtype=np.bool_)
        self.longest: Floats = np.zeros(count)  # prompt, tokens
        self.base: Floats = np.zeros(count)  # prefill coefficients, with the instance's factor
        self.token: Floats = np.zeros(count)
        self.pair: Floats = np.zeros(count)
        self.factor: Floats = np.ones(count)
        self.budget: Floats = np.ones(count)
        self.speed: Floats = np.ones(count)  # beside the fastest, at most 1
        self.work: Floats = np.zeros(count)  # prefill work in the last report
        self.heard_at: Floats = np.full(count, NEVER_HEARD)
        self.pending: Floats = np.zeros(count)  # prefill work sent since
        self.ahead: Floats = np.zeros(count)  # how much may wait there when more is sent
        self.turn: Floats = np.zeros(count)  # when it was last chosen

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> None:
        view = self.views[row]
        model, factor = view.latency, view.prefill_factor
        budget = view.info.max_num_batched_tokens
        self.is_usable[row] = is_usable(view, now_ns)
        self.longest[row] = view.longest_prompt
        self.base[row] = model.prefill_base * factor
        self.token[row] = model.prefill_token * factor
        self.pair[row] = model.prefill_pair * factor
        self.factor[row] = factor
        self.budget[row] = budget
        self.work[row] = view.reported_work_ms
        self.heard_at[row] = view.load_at_ns / NS_PER_MS if view.load is not None else NEVER_HEARD
        self.pending[row] = load.prefill_ms
        ahead = max(AHEAD_MS, AHEAD_BASES * model.prefill_base)
        self.ahead[row] = min(model.prefill_ms(budget), ahead) * factor
        self.turn[row] = view.last_chosen
        self.speed = self.token.min() / np.maximum(self.token, 1e-9)


class DecodeColumns:
    """What decode and mixed instances have, one entry each."""

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        count = len(views)
        self.is_mixed: Bools = np.array([v.info.role is Role.MIXED for v in views], np.bool_)
        self.base: Floats = np.zeros(count)  # decode coefficients, with the instance's factor
        self.seq: Floats = np.zeros(count)
        self.ctx: Floats = np.zeros(count)
        self.large_batch: Floats = np.full(count, NO_LIMIT)
        self.large_base: Floats = np.zeros(count)
        self.large_seq: Floats = np.zeros(count)
        self.large_ctx: Floats = np.zeros(count)
        self.has_large = False
        self.seqs: Floats = np.zeros(count)  # running, waiting and on their way
        self.context: Floats = np.zeros(count)  # tokens that they attend to
        self.free_blocks: Floats = np.zeros(count)
        self.max_seqs: Floats = np.zeros(count)
        self.block_size: Floats = np.ones(count)
        self.capacity: Floats = np.ones(count)  # tokens
        self.token_bytes: Floats = np.zeros(count)
        self.tightest: Floats = np.full(count, NO_LIMIT)  # TPOT limit of a sequence there
        self.prompt: Floats = np.zeros(count)  # work of prompts beside decodes, as it was …
        self.prompt_at: Floats = np.zeros(count)  # … then

    def refresh(self, row: int, load: PendingLoad) -> None:
        view = self.views[row]
        info, model, factor, report = view.info, view.latency, view.decode_factor, view.load
        seqs, context = load.decode_seqs, load.decode_context_tokens
        free_blocks = info.num_blocks - load.decode_blocks
        if report is not None:
            seqs += report.running_seqs + report.waiting_seqs
            context += report.running_context_tokens + report.waiting_tokens
            free_blocks += report.free_blocks - report.num_blocks
        self.base[row] = model.decode_base * factor
        self.seq[row] = model.decode_seq * factor
        self.ctx[row] = model.decode_context * factor
        if model.large_batch:
            self.has_large = True
            self.large_batch[row] = model.large_batch
            self.large_base[row] = model.large_base * factor
            self.large_seq[row] = model.large_seq * factor
            self.large_ctx[row] = model.large_context * factor
        self.seqs[row] = seqs
        self.context[row] = context
        self.free_blocks[row] = free_blocks
        self.max_seqs[row] = info.max_num_seqs
        self.block_size[row] = view.block_size
        self.capacity[row] = info.num_blocks * view.block_size
        self.token_bytes[row] = view.token_bytes
        self.tightest[row] = load.tightest_tpot_ms
        self.prompt[row] = view.prompt_ms
        self.prompt_at[row] = view.prompt_at_ns / NS_PER_MS

    def prompt_share(self, now_ms: float) -> Floats:
        """Of an instance's time, that prompts have taken from its decodes lately."""
        decayed = self.prompt * np.exp((self.prompt_at - now_ms) / PROMPT_MEMORY_MS)
        share: Floats = decayed / PROMPT_MEMORY_MS
        return share

    def step_ms(self, seqs: Floats, context: Floats) -> Floats:
        """Of so many sequences with so much context, per instance."""
        step: Floats = self.base + self.seq * seqs + self.ctx * context
        if self.has_large:
            large = self.large_base + self.large_seq * seqs + self.large_ctx * context
            step = np.where(seqs >= self.large_batch, large, step)
        return step


@dataclass(slots=True)
class PairTable:
    """Instances of one compatibility key. ``rates``: bytes/ms of the links, [prefills, decodes]."""

    key: CompatKey
    prefills: PromptColumns
    local: PromptColumns  # of the decode and mixed instances, which compute prompts too
    decodes: DecodeColumns
    prefill_row: dict[InstanceId, int]
    decode_row: dict[InstanceId, int]
    rates: Floats

    @property
    def model(self) -> str:
        return self.key[0]

    def refresh(self, instance_id: InstanceId, load: PendingLoad, now_ns: int) -> None:
        row = self.prefill_row.get(instance_id)
        if row is not None:
            self.prefills.refresh(row, load, now_ns)
        else:
            row = self.decode_row[instance_id]
            self.local.refresh(row, load, now_ns)
            self.decodes.refresh(row, load)


class ClusterTable:
    """Owns the tables. ``refresh`` before reading."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._tables: dict[CompatKey, PairTable] = {}
        self._table_of: dict[InstanceId, PairTable] = {}
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
            table = self._table_of.get(instance_id)
            if table is not None:
                table.refresh(instance_id, pending_of(instance_id), now_ns)
        if self._links.version != self._links_seen:
            self._links_seen = self._links.version
            for table in self._tables.values():
                table.rates = self._rates(table)

    def _rebuild(self, views: dict[InstanceId, InstanceView]) -> None:
        by_key: dict[CompatKey, tuple[list[InstanceView], list[InstanceView]]] = {}
        for view in views.values():
            sides = by_key.setdefault(view.key, ([], []))
            sides[0 if view.info.role is Role.PREFILL else 1].append(view)
        self._tables, self._table_of = {}, {}
        for key, (prefills, decodes) in by_key.items():
            table = self._tables[key] = PairTable(
                key,
                PromptColumns(prefills),
                PromptColumns(decodes),
                DecodeColumns(decodes),
                {view.instance_id: row for row, view in enumerate(prefills)},
                {view.instance_id: row for row, view in enumerate(decodes)},
                np.zeros((len(prefills), len(decodes))),
            )
            self._table_of |= dict.fromkeys((*table.prefill_row, *table.decode_row), table)
        self.is_outdated, self._links_seen = False, -1

    def _rates(self, table: PairTable) -> Floats:
        rates = np.empty((len(table.prefills.views), len(table.decodes.views)))
        for row, source in enumerate(table.prefills.views):
            for column, target in enumerate(table.decodes.views):
                rates[row, column] = self._links.bytes_per_ms(source.info, target.info)
        return rates


def is_usable(view: InstanceView, now_ns: int) -> bool:
    """May be chosen, whatever is asked. The rules of ``admission.filter_reason``."""
    return (
        view.info.state is InstanceState.READY
        and not view.is_suspect
        and (view.breaker.is_closed or view.breaker.allows(now_ns))
    )
