"""Whose turn it is on a link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from isthmus.kvtransfer.send_queue import PATIENCE_NS, SendQueue


@dataclass(eq=False)
class Item:
    owner: str
    expires_ns: int
    queued_ns: int = 0
    num_bytes: int = 1


def drain(queue: SendQueue[Item], now_ns: int = 0) -> list[Item]:
    order = []
    while (item := queue.next(now_ns)) is not None:
        queue.pop(item, now_ns)
        order.append(item)
    assert not queue
    return order


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.integers(0, 2)), max_size=30),
    st.sampled_from([0, PATIENCE_NS, 3 * PATIENCE_NS]),
)
def test_every_item_goes_once_and_a_session_in_order(
    made: list[tuple[str, int, int]], now_ns: int
) -> None:
    queue: SendQueue[Item] = SendQueue()
    deadlines = {"a": 40, "b": 30, "c": 20, "d": 10}
    items = [
        Item(owner, deadlines[owner], submitted * PATIENCE_NS // 2, num_bytes)
        for owner, num_bytes, submitted in made
    ]
    for item in items:
        queue.add(item)
    order = drain(queue, now_ns)
    for owner in deadlines:
        mine = [item for item in items if item.owner == owner]
        assert [item for item in order if item.owner == owner] == mine


def test_the_nearest_deadline_goes_first_and_words_before_bytes() -> None:
    queue: SendQueue[Item] = SendQueue()
    far, near, word = Item("a", 100), Item("b", 50), Item("c", 200, num_bytes=0)
    for item in (far, near, word):
        queue.add(item)
    assert drain(queue) == [word, near, far]


def test_who_waits_long_gets_every_other_turn_however_near_others_are() -> None:
    queue: SendQueue[Item] = SendQueue()
    patient = deque(Item("far", 10**15) for _ in range(4))
    for item in patient:
        queue.add(item)
    now_ns = PATIENCE_NS
    order = []
    for turn in range(8):
        queue.add(Item(f"near{turn}", now_ns + 10, queued_ns=now_ns))
        item = queue.next(now_ns)
        assert item is not None
        queue.pop(item, now_ns)
        order.append(item.owner)
    assert [owner == "far" for owner in order] == [True, False] * 4


def test_what_is_not_wanted_leaves_and_the_rest_keeps_its_order() -> None:
    queue: SendQueue[Item] = SendQueue()
    items = [Item("a", 5), Item("b", 1), Item("a", 5, num_bytes=7), Item("b", 1, num_bytes=7)]
    for item in items:
        queue.add(item)
    assert queue.drop(lambda item: item.num_bytes == 7) == [items[2], items[3]]
    assert [(head, size) for head, size in queue.lines()] == [(items[1], 1), (items[0], 1)]
    assert queue.drop(lambda item: item.owner == "a") == [items[0]]
    assert drain(queue) == [items[1]]
