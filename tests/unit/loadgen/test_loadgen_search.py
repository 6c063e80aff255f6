"""The search finds the rate at which attainment crosses the line, wherever it starts."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.loadgen import Search, search_goodput
from isthmus.workload.search import LASTING, Outcome

NUM_CALLS = 100


class Server:
    """Attains everything up to its capacity, and less and less beyond."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []
        self.spans_s: list[float] = []

    async def run(self, rate: float, copies: int) -> Outcome:
        self.rates.append(rate)
        self.spans_s.append(copies * NUM_CALLS / rate)
        return Outcome(min(1.0, 0.9 * self.capacity / rate), call_s=0.01, overlapping=1.0)

    async def search(self, **more: Any) -> Search:
        return await search_goodput(self.run, num_calls=NUM_CALLS, wait_s=0.1, **more)


@pytest.mark.asyncio
@pytest.mark.parametrize("start", [0.1, 3.0, 64.0])
async def test_the_rate_found_is_within_the_tolerance(start: float) -> None:
    server = Server(7.0)
    found = await server.search(start=start, tolerance=0.05)
    assert 7.0 / 1.05 <= found.rate <= 7.0
    assert len(server.rates) <= 14
    assert [probe.rate for probe in found.probes] == server.rates


@pytest.mark.asyncio
async def test_every_rate_is_tried_for_long_enough() -> None:
    server = Server(3_000.0)
    found = await server.search(start=1.0)
    assert 2_700 <= found.rate <= 3_000
    assert min(server.spans_s) >= LASTING * 0.1 * (1 - 1e-6)


@pytest.mark.asyncio
async def test_a_server_that_attains_nothing_has_no_rate() -> None:
    found = await Server(1e-9).search(start=1.0, lowest=0.1)
    assert found.rate == 0.0
    assert not found.is_capped


@pytest.mark.asyncio
async def test_a_server_that_attains_all_is_capped() -> None:
    found = await Server(1e9).search(start=1.0, highest=50.0)
    assert found.rate == 50.0
    assert found.is_capped


@pytest.mark.asyncio
async def test_a_start_outside_the_bounds_begins_at_the_nearer() -> None:
    found = await Server(1e9).search(start=2.0, highest=1.0)
    assert [probe.rate for probe in found.probes] == [1.0]
