"""Content-defined identity of KV blocks.

A full block's hash covers its parent's hash and its token ids; the chain starts at a root that
covers the model and the cache salt. Nothing depends on the process (no ``hash()``, no seed), so
every process computes the same identity for the same prefix.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

from isthmus.common.ids import BlockHash


def root_hash(model_fingerprint: str, cache_salt: str = "") -> BlockHash:
    return BlockHash(xxhash.xxh3_128_digest(f"{model_fingerprint}\x00{cache_salt}".encode()))


def child_hash(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """``token_bytes`` = the block's token ids as little-endian uint32."""
    return BlockHash(xxhash.xxh3_128_digest(parent + token_bytes))


def block_hashes(
    token_ids: Sequence[int], block_size: int, root: BlockHash, first: int = 0
) -> list[BlockHash]:
    """Hashes of the full blocks of ``token_ids`` from block ``first`` on.

    ``root`` is the parent of block ``first`` (the chain's root when ``first`` is 0).
    """
    num_full = len(token_ids) // block_size
    words = array("I", token_ids[first * block_size : num_full * block_size])
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    width = 4 * block_size
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(data), width):
        parent = child_hash(parent, data[start : start + width])
        hashes.append(parent)
    return hashes
