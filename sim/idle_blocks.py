"""The cached blocks of a simulated instance that nobody references: who is the first to go.

Prompts have thousands of blocks and give them back at once, so their order is kept by chains, not
by blocks: what a chain's blocks cost is one pass of a dictionary. A block that is woken stays in
its chain's list and is passed over there, since it is not idle any more, or idle since a later
time; when most of what is in the lists is such, they are made anew.

Invariant: each idle block is once in the list of the time since which it is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from isthmus.common.ids import BlockHash

MIN_PASSED_OVER = 1_024


class IdleBlocks:
    """Of one pool. Least recently used first; the last of a chain before the others of it.

    ``since``: all of them, each with the number of the chain that it came with. To be read only.
    """

    def __init__(self) -> None:
        self.since: dict[BlockHash, int] = {}
        self._chains: deque[tuple[int, list[BlockHash]]] = deque()  # oldest first
        self._num_chains = 0
        self._num_passed_over = 0

    @property
    def num_listed(self) -> int:
        """In the lists, idle or passed over."""
        return sum(len(chain) for _, chain in self._chains)

    def add(self, chain: list[BlockHash]) -> None:
        """None of them is idle yet. The list is not the caller's any more."""
        self._num_chains += 1
        self.since.update(dict.fromkeys(chain, self._num_chains))
        self._chains.append((self._num_chains, chain))

    def wake(self, hashes: Sequence[BlockHash]) -> None:
        """All of them are idle."""
        since = self.since
        for block_hash in hashes:
            del since[block_hash]
        self._num_passed_over += len(hashes)
        if self._num_passed_over > MIN_PASSED_OVER + len(since):
            self._make_anew()

    def take(self, count: int) -> list[BlockHash]:
        """The first ones to go; there must be as many."""
        since, chains = self.since, self._chains
        taken: list[BlockHash] = []
        while len(taken) < count:
            number, chain = chains[0]
            while chain and len(taken) < count:
                block_hash = chain.pop()
                if since.get(block_hash) == number:
                    del since[block_hash]
                    taken.append(block_hash)
                else:
                    self._num_passed_over -= 1
            if not chain:
                chains.popleft()
        return taken

    def clear(self) -> None:
        self.since.clear()
        self._chains.clear()
        self._num_passed_over = 0

    def check_integrity(self) -> None:
        """AssertionError when the lists are not those of the blocks that are idle."""
        listed = [(block, number) for number, chain in self._chains for block in chain]
        idle = [item for item in listed if self.since.get(item[0]) == item[1]]
        assert len(idle) == len(set(idle)) == len(self.since)
        assert len(listed) - len(idle) == self._num_passed_over

    def _make_anew(self) -> None:
        since = self.since
        kept = (
            (number, [block_hash for block_hash in chain if since.get(block_hash) == number])
            for number, chain in self._chains
        )
        self._chains = deque((number, chain) for number, chain in kept if chain)
        self._num_passed_over = 0
