from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from isthmus.common import collection


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_permanent_is_walked_over_no_more_and_later_cycles_still_end() -> None:
    permanent = [[] for _ in range(1_000)]
    collection.settle()
    assert gc.get_threshold() == collection.THRESHOLDS
    assert gc.get_freeze_count() >= len(permanent)
    later = Cycle()
    is_there = weakref.ref(later)
    del later
    gc.collect()
    assert is_there() is None
