"""What a link is believed to carry, and for how long."""

from __future__ import annotations

import pytest

from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.kvtransfer.link import (
    INITIAL_WINDOW_BYTES,
    LEAST_SAMPLE_BYTES,
    LEAST_WINDOW_BYTES,
    LinkEstimate,
)

MIB = 2**20


class Link:
    """An estimate and a clock."""

    def __init__(self) -> None:
        self.estimate = LinkEstimate()
        self.now_ns = 10**12

    def send(self, num_bytes: int, elapsed_ms: float) -> None:
        departure = self.estimate.departs(self.now_ns)
        self.now_ns += int(elapsed_ms * NS_PER_MS)
        self.estimate.arrived(departure, num_bytes, self.now_ns)

    def stall(self, num_bytes: int, milliseconds: int, step_ms: int = 10) -> None:
        """Bytes are in flight and do not arrive, while the driver looks."""
        self.estimate.looked(num_bytes, self.now_ns)
        for _ in range(milliseconds // step_ms):
            self.now_ns += step_ms * NS_PER_MS
            self.estimate.looked(num_bytes, self.now_ns)

    def is_too_slow(self, num_bytes: int, seconds: float = 1.0) -> bool:
        return self.estimate.is_too_slow(num_bytes, self.now_ns, self.now_ns + int(seconds * 10**9))


def test_nothing_is_known_before_the_first_large_write() -> None:
    link = Link()
    assert link.estimate.bytes_per_s is None
    assert link.estimate.window_bytes == INITIAL_WINDOW_BYTES
    assert not link.is_too_slow(10**15)
    link.send(1000, elapsed_ms=5)
    assert link.estimate.bytes_per_s is None
    assert not link.is_too_slow(10**15)
    link.send(MIB, elapsed_ms=10)
    assert link.estimate.bytes_per_s == pytest.approx(100 * MIB)


def test_samples_are_averaged_and_small_ones_only_raise() -> None:
    link = Link()
    link.send(MIB, elapsed_ms=10)
    link.send(1000, elapsed_ms=10)
    assert link.estimate.bytes_per_s == pytest.approx(100 * MIB)
    link.send(MIB, elapsed_ms=20)
    assert 50 * MIB < (link.estimate.bytes_per_s or 0) < 100 * MIB
    link.send(LEAST_SAMPLE_BYTES - 1, elapsed_ms=1)
    assert link.estimate.bytes_per_s == pytest.approx((LEAST_SAMPLE_BYTES - 1) * 1000)


def test_writes_side_by_side_share_what_was_delivered() -> None:
    link = Link()
    departures = [link.estimate.departs(link.now_ns) for _ in range(4)]
    for departure in departures:
        link.now_ns += 10 * NS_PER_MS
        link.estimate.arrived(departure, MIB, link.now_ns)
    assert link.estimate.bytes_per_s == pytest.approx(100 * MIB)


def test_an_instant_write_tells_nothing() -> None:
    link = Link()
    link.send(MIB, elapsed_ms=0)
    assert link.estimate.bytes_per_s is None


@pytest.mark.parametrize(("elapsed_ms", "too_slow"), [(10, False), (100, True)])
def test_in_vain_is_what_takes_twice_the_time(elapsed_ms: float, too_slow: bool) -> None:
    link = Link()
    link.send(MIB, elapsed_ms)
    assert link.is_too_slow(30 * MIB) is too_slow
    assert link.is_too_slow(1, seconds=0)


def test_while_nothing_arrives_the_link_is_no_faster_than_that() -> None:
    link = Link()
    link.send(MIB, elapsed_ms=1)
    fast = link.estimate.window_bytes
    assert not link.is_too_slow(100 * MIB)
    link.stall(MIB, milliseconds=1_000)
    assert link.is_too_slow(100 * MIB)
    assert link.estimate.window_bytes == LEAST_WINDOW_BYTES < fast
    link.send(MIB, elapsed_ms=1)  # it moves again
    link.estimate.looked(0, link.now_ns)
    assert not link.is_too_slow(100 * MIB)


def test_time_in_which_nobody_looked_is_no_stall() -> None:
    """This process was stopped: what has arrived meanwhile has only to be seen."""
    link = Link()
    link.send(MIB, elapsed_ms=1)
    link.stall(MIB, milliseconds=60_000, step_ms=60_000)
    assert not link.is_too_slow(15 * MIB)


def test_an_old_estimate_judges_nobody() -> None:
    link = Link()
    link.send(MIB, elapsed_ms=1_000)
    assert link.is_too_slow(10 * MIB)
    link.now_ns += 11 * NS_PER_S
    assert not link.is_too_slow(10 * MIB)
