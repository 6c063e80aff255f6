"""What a decision asks of instances, as columns: one entry an instance.

A copy of what views and ledger say; whoever owns the columns refreshes an entry when that changes.
What the clock does not change is reckoned then, once, and not for each query. Times are
milliseconds; instants are the router's monotonic clock in milliseconds.
"""

from __future__ import annotations

from math import exp
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import Role
from isthmus.router.cluster_view import PROMPT_MEMORY_MS, InstanceView
from isthmus.router.pending import PendingLoad
from isthmus.router.reservation import NO_LIMIT

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NEVER_HEARD = float("inf")
AHEAD_MS = 25.0
"""Work that waits at an instance, so that it need not wait for the next prompt …"""
AHEAD_BASES = 4.0
"""… and can compute short ones together, where a step costs much whatever is in it."""
OVERDUE = 2.0  # of its prediction, from which on a prompt's delay counts as waiting work


class _Entries:
    """Of a block, each across all its columns, written at once. For numpy to make an array of so
    many numbers takes twice as long."""

    def __init__(self, block: Floats) -> None:
        self._entries = list(block.T)
        self._format = Struct(f"@{len(block)}d")
        self._memory = bytearray(self._format.size)
        self._numbers: Floats = np.frombuffer(self._memory)

    def put(self, place: int, numbers: tuple[float, ...]) -> None:
        self._format.pack_into(self._memory, 0, *numbers)
        self._entries[place][:] = self._numbers


class PromptColumns:
    """How prompts fare on some instances, one entry each: prefill, decode or mixed ones.

    A window of a block [columns, entries] that a table's two kinds of instances share, so that one
    operation serves both; each column is contiguous. ``sides``: where each kind is in it.
    """

    NUM_COLUMNS = 14

    def __init__(
        self,
        views: list[InstanceView],
        block: Floats,
        sides: tuple[slice, ...] = (slice(None),),
    ) -> None:
        self.views = views
        self.sides = sides
        self.longest: Floats = np.array([view.longest_prompt for view in views], np.float64)
        self.shortest = float(self.longest.min()) if views else 0.0  # that all of them can take
        self.num_usable = 0  # of a table's two kinds
        self.has_strange = False  # some of the table
        self.rows = block
        self._entries = _Entries(block)
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

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> tuple[bool, bool]:
        """Whether it may be chosen, and whether others have prompts there."""
        view = self.views[row]
        model, report = view.learned.model, view.load
        factor = view.faded(view.prefill_factor, now_ns)
        budget = view.info.max_num_batched_tokens
        strange = 0.0
        if load.num_strange and report is not None:
            num_seqs = report.waiting_seqs + report.running_seqs
            strange = view.reported_work_ms * load.num_strange / num_seqs
        ahead = max(AHEAD_MS, AHEAD_BASES * model.prefill_base)
        may_be_chosen = view.is_usable(now_ns)
        numbers = (
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
        self._entries.put(row, numbers)
        return may_be_chosen, strange > 0.0


class DecodeColumns:
    """What decode and mixed instances have, one entry each."""

    NUM_COLUMNS = 19

    def __init__(self, views: list[InstanceView]) -> None:
        self.views = views
        self.is_mixed: Bools = np.array([v.info.role is Role.MIXED for v in views], np.bool_)
        self.mixed = self.is_mixed.astype(np.float64)  # as a column
        self.has_mixed = bool(self.is_mixed.any())
        self.has_large = False
        self.prompted: set[int] = set()  # rows that have had prompts beside decodes
        self.rows: Floats = np.zeros((self.NUM_COLUMNS, len(views)))
        self._entries = _Entries(self.rows)
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
            self.tightest,  # TPOT limit of a sequence there
            self.prompt,  # work of prompts beside decodes, as it was …
            self.prompt_at,  # … then
            self.factor,
            self.block_size,
        ) = self.rows

    def refresh(self, row: int, load: PendingLoad, now_ns: int) -> None:
        view = self.views[row]
        info, model, report = view.info, view.learned.model, view.load
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
        numbers = (
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
            load.tightest_tpot_ms,
            view.prompt_ms,
            view.prompt_at_ns / NS_PER_MS,
            factor,
            view.block_size,
        )
        self._entries.put(row, numbers)

    def prompt_share(self, now_ms: float) -> Floats:
        """Of an instance's time, that prompts have taken from its decodes lately."""
        ages = (self.prompt_at - now_ms) / PROMPT_MEMORY_MS
        # The C library's: numpy's own differs from it on some processors.
        decayed = self.prompt * np.array([exp(age) for age in ages.tolist()])
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
