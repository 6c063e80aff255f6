"""KV of a prompt's first tokens, brought from the decode instance before the prompt is computed.

As ``prefill_worker.prefix_fetch`` does: a prefill instance that lacks enough of what the decode
instance's reservation holds sets blocks aside, waits for them, puts them into its prefix cache and
only then takes the prompt into its line::

    reserved on d ─▶ FETCHING on p ─▶ there ───────────┬─▶ WAITING on p
                         └───────────▶ not in time ────┘

Whatever goes wrong, the prompt is computed as if nobody had asked. That what is given up may still
be written to for a while, so that its blocks rest, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from isthmus.common.clock import NS_PER_MS
from isthmus.sim.events import EventQueue
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.links import Links, Transfer
from isthmus.sim.sequence import SimSequence
from isthmus.sim.sequence_blocks import give_back, publish
from isthmus.sim.spec import InstanceSpec


class FetchLine:
    """The sequences of one instance that wait for a prefix. Takes their blocks and gives them back.

    ``num_tokens``: that are left to compute when the prefixes have come.
    """

    def __init__(self, pool: KvPool, least: int) -> None:
        """``least``: tokens to be saved, below which nothing is fetched; 0 = never."""
        self.num_tokens = 0
        self._pool = pool
        self._least = least
        self._waiting: dict[SimSequence, int] = {}  # with what it will have to compute

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SimSequence]:
        return iter(self._waiting)

    @property
    def num_prompts(self) -> int:
        return sum([sequence.is_prompt for sequence in self._waiting])

    def try_enter(self, sequence: SimSequence, num_held: int, keep_free: int) -> int:
        """Tokens to be sent by a peer that has the first ``num_held``; 0 = none, and it does not
        wait: they are too few, or there is no room for them."""
        pool, size = self._pool, self._pool.block_size
        # Whole blocks; one token at least is left to compute.
        num_blocks = min(num_held, sequence.num_tokens - 1) // size
        num_blocks = min(num_blocks, len(sequence.hashes))
        here = pool.match(sequence.hashes, num_blocks)
        missing = (num_blocks - here) * size
        if not self._least or missing < self._least:
            return 0
        prefix = list(sequence.hashes[:here])
        if not pool.try_take(prefix, num_blocks, keep_free):
            return 0
        sequence.refs, sequence.num_blocks = prefix, num_blocks
        self._waiting[sequence] = left = sequence.num_tokens - num_blocks * size
        self.num_tokens += left
        return missing

    def arrived(self, sequence: SimSequence) -> None:
        """Its blocks enter the prefix cache, where it finds them when its turn comes."""
        sequence.num_computed = sequence.num_blocks * self._pool.block_size
        publish(self._pool, sequence)
        sequence.num_computed = 0
        self.leave(sequence)

    def leave(self, sequence: SimSequence) -> None:
        self.num_tokens -= self._waiting.pop(sequence)
        give_back(self._pool, sequence)

    def clear(self) -> None:
        """The instance died."""
        self._waiting.clear()
        self.num_tokens = 0

    def check_integrity(self) -> None:
        """AssertionError when the sum is not that of who waits."""
        assert self.num_tokens == sum(self._waiting.values())


class FetchingInstance(Protocol):
    """Whose prompts wait for prefixes."""

    spec: InstanceSpec

    def prefix_ended(self, sequence: SimSequence, *, has_arrived: bool) -> None: ...


@dataclass(eq=False, slots=True)
class Fetch:
    """Of the prompt of one attempt to serve a request."""

    transfer: Transfer | None = None
    is_over: bool = False


class PrefixFetches:
    """Those under way in a cluster."""

    def __init__(
        self, queue: EventQueue, links: Links, setup_ms: float, patience_ms: float
    ) -> None:
        self.num_bytes = 0.0  # asked for
        self._queue = queue
        self._links = links
        self._setup_ns = round(setup_ms * NS_PER_MS)
        self._patience_ns = round(patience_ms * NS_PER_MS)

    def begin(
        self, prompt: SimSequence, num_tokens: int, holder: InstanceSpec, owner: FetchingInstance
    ) -> Fetch:
        """``owner`` has set blocks aside for so many tokens, which ``holder`` has."""
        fetch = Fetch()
        num_bytes = num_tokens * max(holder.kv_token_bytes, owner.spec.kv_token_bytes)
        self.num_bytes += num_bytes
        route = holder.instance_id, owner.spec.instance_id

        def end(*, has_arrived: bool) -> None:
            if not fetch.is_over:
                self.cancel(fetch)
                owner.prefix_ended(prompt, has_arrived=has_arrived)

        def send(_: None) -> None:
            if not fetch.is_over:
                fetch.transfer = self._links.send(*route, num_bytes, lambda: end(has_arrived=True))

        self._queue.after(self._setup_ns, send)
        self._queue.after(self._patience_ns, lambda _: end(has_arrived=False))
        return fetch

    def cancel(self, fetch: Fetch | None) -> None:
        """Nobody is told; whoever waited for it is ended by who cancels. One that is over is none
        any more."""
        if fetch is not None and not fetch.is_over:
            fetch.is_over = True
            if fetch.transfer is not None:
                self._links.cancel(fetch.transfer)
