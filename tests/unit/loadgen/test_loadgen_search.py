"""The search finds the rate at which attainment crosses the line, wherever it starts."""

from __future__ import annotations

import pytest

from isthmus.loadgen import search_goodput


class Server:
    """Attains everything up to its capacity, and less and less beyond."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []

    async def attained(self, rate: float) -> float:
        self.rates.append(rate)
        return min(1.0, 0.9 * self.capacity / rate)


@pytest.mark.asyncio
@pytest.mark.parametrize("start", [0.1, 3.0, 64.0])
async def test_the_rate_found_is_within_the_tolerance(start: float) -> None:
    server = Server(7.0)
    found = await search_goodput(server.attained, start=start, tolerance=0.05)
    assert 7.0 / 1.05 <= found.rate <= 7.0
    assert len(server.rates) <= 14
    assert [probe.rate for probe in found.probes] == server.rates


@pytest.mark.asyncio
async def test_a_server_that_attains_nothing_has_no_rate() -> None:
    found = await search_goodput(Server(1e-9).attained, start=1.0, lowest=0.1)
    assert found.rate == 0.0
    assert not found.is_capped


@pytest.mark.asyncio
async def test_a_server_that_attains_all_is_capped() -> None:
    found = await search_goodput(Server(1e9).attained, start=1.0, highest=50.0)
    assert found.rate == 50.0
    assert found.is_capped


@pytest.mark.asyncio
async def test_a_start_outside_the_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="must start between"):
        await search_goodput(Server(1.0).attained, start=2.0, highest=1.0)
