from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.hashing import block_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)
BLOCK_SIZE = st.integers(1, 17)
ROOT = root_hash("model", "")


@given(TOKENS, BLOCK_SIZE)
def test_only_full_blocks_have_a_hash(tokens: list[int], block_size: int) -> None:
    hashes = block_hashes(tokens, block_size, ROOT)
    assert len(hashes) == len(tokens) // block_size
    assert all(len(item) == 16 for item in hashes)


@given(TOKENS, TOKENS, BLOCK_SIZE)
def test_common_prefix_is_exactly_what_is_shared(
    first: list[int], second: list[int], block_size: int
) -> None:
    left, right = (block_hashes(item, block_size, ROOT) for item in (first, second))
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    shared = sum(a == b for a, b in zip(left, right, strict=False))
    assert shared == min(same // block_size, len(left), len(right))
    assert left[:shared] == right[:shared]


@given(TOKENS, BLOCK_SIZE, st.integers(0, 80))
def test_chain_continued_is_the_chain(tokens: list[int], block_size: int, cut: int) -> None:
    whole = block_hashes(tokens, block_size, ROOT)
    first = min(cut, len(whole))
    parent = whole[first - 1] if first else ROOT
    assert block_hashes(tokens, block_size, parent, first=first) == whole[first:]


@given(TOKENS.filter(bool), st.text(max_size=4), st.text(max_size=4))
def test_salts_and_models_share_nothing(tokens: list[int], one: str, other: str) -> None:
    if one == other:
        return
    by_salt = [block_hashes(tokens, 1, root_hash("m", salt)) for salt in (one, other)]
    by_model = [block_hashes(tokens, 1, root_hash(model)) for model in (one, other)]
    assert not set(by_salt[0]) & set(by_salt[1])
    assert not set(by_model[0]) & set(by_model[1])


def test_every_process_computes_the_same() -> None:
    code = (
        "from isthmus.common.hashing import *; "
        "print(b''.join(block_hashes([1, 2, 3, 4], 2, root_hash('m', 's'))).hex())"
    )
    here = b"".join(block_hashes([1, 2, 3, 4], 2, root_hash("m", "s"))).hex()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here
