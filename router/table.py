"""The cluster as columns: one row an instance, so that a decision is arithmetic over whole pools.

A copy of what views and ledger say, refreshed row by row when they change (``RouterState.dirty``)
and rebuilt when somebody comes or goes. Nothing else writes here and nothing here is the truth.
Instances that may hand KV to each other share one ``PairTable``: its prefill instances are the
rows of the matrices that the policy makes, its decode and mixed instances the columns. Times are
milliseconds; instants are the router's monotonic clock in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import PROMPT_MEMORY_MS, InstanceView
from isthmus.router.ledger import NO_LIMIT, PendingLoad
from isthmus.router.links import Links
from isthmus.router.pairing import CompatKey

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PendingOf = Callable[[InstanceId], PendingLoad]
NEVER_HEARD = float("inf")
AHEAD_MS = 25.0
"""Work that waits at an instance, so that it need not wait for the next prompt …"""
AHEAD_BASES = 4.0
"""… and can compute short ones together, where a step costs much whatever is in it."""


class PromptColumns:
    """How prompts fare on some instances, one entry each: prefill, decode or mixed ones."""

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        count = len(views)
        self.is_usable: Bools = np.zeros(count, dtype=np.bool_)
        self.num_usable = 0
        # One array, so that a row is written at once; its columns are contiguous.
        self._rows: Floats = np.zeros((count, 13), order="F")
        (
            self.longest,  # prompt, tokens
            self.base,  # prefill coefficients, with the instance's factor
            self.token,
            self.pair,
            self.factor,
            self.budget,  # tokens of a step
            self.strange,  # work of others' prompts in the last report
            self.heard_at,
            self.prompts,  # work of prompts without a first token
            self.head,  # of the oldest of them, which is computed …
            self.head_since,  # … since then
            self.ahead,  # how much may wait there when more is sent
            self.turn,  # when it was last chosen
        ) = self._rows.T
        self.speed: Floats = np.ones(count)  # beside the fastest, at most 1
        self.block_size = np.array([view.block_size for view in views], np.float64)

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> None:
        view = self.views[row]
        model, report = view.latency, view.load
        factor = view.faded(view.prefill_factor, now_ns)
        budget = view.info.max_num_batched_tokens
        strange = 0.0
        if load.num_strange and report is not None:
            num_seqs = report.waiting_seqs + report.running_seqs
            strange = view.reported_work_ms * load.num_strange / num_seqs
        ahead = max(AHEAD_MS, AHEAD_BASES * model.prefill_base)
        self.is_usable[row] = is_usable(view, now_ns)
        self._rows[row] = (
            view.longest_prompt,
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
            min(model.prefill_ms(budget), ahead) * factor,
            view.last_chosen,
        )

    def refreshed(self) -> None:
        """After the last row: what rows are beside each other."""
        self.num_usable = int(self.is_usable.sum())
        if len(self.views):
            self.speed = self.token.min() / np.maximum(self.token, 1e-9)

    def cached(
        self, rows: Mapping[InstanceId, int], depths: Mapping[InstanceId, int], num_tokens: int
    ) -> Floats:
        """Prompt tokens that prefix hits of so many blocks save: never the last one."""
        cached: Floats = np.zeros(len(self.views))
        found = [(rows[name], depth) for name, depth in depths.items() if name in rows]
        if found:
            at, depth = np.array(found, dtype=np.intp).T
            size = self.block_size[at]
            cached[at] = np.minimum(depth, (num_tokens - 1) // size) * size
        return cached


class DecodeColumns:
    """What decode and mixed instances have, one entry each."""

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        count = len(views)
        self.is_mixed: Bools = np.array([v.info.role is Role.MIXED for v in views], np.bool_)
        self.has_large = False
        self._rows: Floats = np.zeros((count, 18), order="F")
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
            self.free_blocks,
            self.max_seqs,
            self.block_size,
            self.capacity,  # tokens
            self.token_bytes,
            self.tightest,  # TPOT limit of a sequence there
            self.prompt,  # work of prompts beside decodes, as it was …
            self.prompt_at,  # … then
            self.factor,
        ) = self._rows.T

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
        self.has_large = self.has_large or model.large_batch > 0
        self._rows[row] = (
            model.decode_base * factor,
            model.decode_seq * factor,
            model.decode_context * factor,
            model.large_batch or NO_LIMIT,
            model.large_base * factor,
            model.large_seq * factor,
            model.large_context * factor,
            seqs,
            context,
            free_blocks,
            info.max_num_seqs,
            view.block_size,
            info.num_blocks * view.block_size,
            view.token_bytes,
            load.tightest_tpot_ms,
            view.prompt_ms,
            view.prompt_at_ns / NS_PER_MS,
            factor,
        )

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
    """Decode and mixed instances of one compatibility key, and the prefill instances that KV may
    come from. ``rates``: bytes/ms of the links, [prefills, decodes]."""

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
            self.decodes.refresh(row, load, now_ns)


class ClusterTable:
    """Owns the tables. ``refresh`` before reading."""

    def __init__(self, links: Links) -> None:
        self._links = links
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
            table.prefills.refreshed()
            table.local.refreshed()
        if self._links.version != self._links_seen:
            self._links_seen = self._links.version
            for table in self._tables.values():
                table.rates = self._rates(table)

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
            table = self._tables[key] = PairTable(
                key,
                PromptColumns(prefills),
                PromptColumns(decodes),
                DecodeColumns(decodes),
                {view.instance_id: row for row, view in enumerate(prefills)},
                {view.instance_id: row for row, view in enumerate(decodes)},
                np.zeros((len(prefills), len(decodes))),
            )
            for instance_id in (*table.prefill_row, *table.decode_row):
                self._tables_of.setdefault(instance_id, []).append(table)
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
