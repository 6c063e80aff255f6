"""The cluster as columns: one row an instance, so that a decision is arithmetic over whole pools.

A copy of what views and ledger say (``columns``), refreshed row by row when they change
(``RouterState.dirty``) and rebuilt when somebody comes or goes. Nothing else writes here, and
nothing here is the truth.
Instances that may hand KV to each other share one ``PairTable``: its prefill instances are the
rows of the matrices that the policy makes, its decode and mixed instances the columns. Times are
milliseconds; instants are the router's monotonic clock in milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.router.blocks import Holders
from isthmus.router.cluster_view import InstanceView
from isthmus.router.columns import DecodeColumns, Floats, PromptColumns
from isthmus.router.links import Links
from isthmus.router.pairing import CompatKey
from isthmus.router.pending import PendingLoad

PendingOf = Callable[[InstanceId], PendingLoad]
SlotOf = Callable[[InstanceId], int]  # in the prefix index


class PairTable:
    """Decode and mixed instances of one compatibility key, and the prefill instances that KV may
    come from.

    ``prompts`` has an entry for each of them, first the prefill instances (``prefills``), then
    those that decode (``local``), which compute prompts too. ``rates``: bytes/ms of the links,
    [prefills, decodes]. ``rate`` and ``budget`` (tokens of a prefill step): where they are the same
    for all. ``fetch_min``: tokens that a prefill instance lacks and a decode instance has, from
    which on it fetches their KV, infinite where it never does.
    """

    def __init__(
        self,
        key: CompatKey,
        prefills: list[InstanceView],
        decodes: list[InstanceView],
        slot_of: SlotOf,
    ) -> None:
        self.key = key
        count, everybody = len(prefills), [*prefills, *decodes]
        self.num_prefills = count
        block = np.zeros((PromptColumns.NUM_COLUMNS, len(everybody)))
        sides = slice(count), slice(count, None)
        self.prompts = PromptColumns(everybody, block, sides)
        self.prefills = PromptColumns(prefills, block[:, :count])
        self.local = PromptColumns(decodes, block[:, count:])
        self.decodes = DecodeColumns(decodes)
        self.row_of = {view.instance_id: row for row, view in enumerate(everybody)}
        self._slots = np.array([slot_of(name) for name in self.row_of], np.intp)
        self._blocks: Floats = np.zeros(len(everybody))  # of the last query
        self._blocks_at = self._blocks.ctypes.data
        self.block_sizes: Floats = np.array([view.block_size for view in everybody], np.float64)
        sizes = {view.block_size for view in everybody}
        self.block_size: float | Floats = float(sizes.pop())  # of all, or of each
        if sizes:
            self.block_size = self.block_sizes
        budgets = {view.info.max_num_batched_tokens for view in prefills}
        self.budget = float(budgets.pop()) if len(budgets) == 1 else None
        self.rates: Floats = np.zeros((count, len(decodes)))
        self.rate: float | None = None
        self.nowhere: Floats = np.full(len(decodes), np.inf)  # costs of what is impossible
        self.nowhere.flags.writeable = False
        self._usable: set[int] = set()
        self._strange: set[int] = set()
        fetch_min = [view.fetch_min_tokens(key) for view in prefills]
        self.fetch_min: Floats = np.array(fetch_min, np.float64)
        self.has_fetches = bool(np.isfinite(self.fetch_min).any())
        self.prefill_blocks: Floats = np.array([view.block_size for view in prefills], np.float64)
        self.scratch = [np.empty_like(self.rates) for _ in range(3)]  # for costs of pairs
        # Of the compiled policy, which makes them when it is first asked (``native``).
        self.parts: array[int] | None = None
        self.workspace: Floats | None = None

    @property
    def model(self) -> str:
        return self.key[0]

    @property
    def speed(self) -> Floats:
        """[prefills]: beside the fastest one's, at most 1."""
        token = self.prefills.token
        if not token.size:
            return np.ones(0)
        speed: Floats = token.item(token.argmin()) / np.maximum(token, 1e-9)
        return speed

    @property
    def quickest(self) -> int:
        """Row of the usable prefill instance that is, with no prompt too long for it."""
        token = self.prefills.token
        return int((token + self.prefills.barred).argmin()) if token.size else 0

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

    def link(self, links: Links) -> None:
        """Takes over what is known of the links."""
        sources = [view.info for view in self.prefills.views]
        targets = [view.info for view in self.local.views]
        self.rates[:] = links.rates(sources, targets)
        is_same = self.rates.size and bool((self.rates == self.rates[0, 0]).all())
        self.rate = float(self.rates[0, 0]) if is_same else None

    def cached_blocks(self, holders: Holders) -> Floats:
        """Leading blocks of a prompt, as a column of ``prompts``."""
        # Whoever has no slot is nobody: the last entry.
        blocks: Floats = np.frombuffer(holders).take(self._slots, mode="clip")
        return blocks

    def blocks_at(self, holders: Holders) -> int:
        """As ``cached_blocks``: where that column lies, until it is asked for again."""
        np.frombuffer(holders).take(self._slots, out=self._blocks, mode="clip")
        return self._blocks_at


class ClusterTable:
    """Owns the tables. ``refresh`` before reading."""

    def __init__(self, links: Links, slot_of: SlotOf) -> None:
        self._links = links
        self._slot_of = slot_of
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
            table = self._tables[key] = PairTable(key, prefills, decodes, self._slot_of)
            for instance_id in table.row_of:
                self._tables_of.setdefault(instance_id, []).append(table)
        self.is_outdated, self._links_seen = False, -1
