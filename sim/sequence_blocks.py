"""The blocks of one simulated sequence: taken on entry, shared when computed, given back."""

from __future__ import annotations

from isthmus.sim.kv_pool import KvPool
from isthmus.sim.sequence import SimSequence


def try_take(pool: KvPool, sequence: SimSequence, keep_free: int) -> bool:
    """All blocks of its tokens, the cached prefix first; False = too few."""
    num_tokens = sequence.num_tokens
    hits = pool.match(sequence.hashes, (num_tokens - 1) // pool.block_size)
    prefix = list(sequence.hashes[:hits])
    needed = pool.blocks_for(num_tokens)
    if not pool.try_take(prefix, needed, keep_free):
        return False
    sequence.refs = prefix
    sequence.num_blocks = needed
    sequence.num_computed = hits * pool.block_size
    if not sequence.num_generated:
        sequence.num_cached = sequence.num_computed
    return True


def publish(pool: KvPool, sequence: SimSequence) -> None:
    """Full blocks that are computed enter the prefix cache."""
    full = sequence.num_computed // pool.block_size
    known = len(sequence.refs)
    if sequence.hashes and full > known:
        sequence.refs += pool.publish(sequence.hashes[known:full])


def give_back(pool: KvPool, sequence: SimSequence) -> None:
    if sequence.num_blocks:
        pool.release(sequence.refs, sequence.num_blocks - len(sequence.refs))
        sequence.refs = []
        sequence.num_blocks = 0
