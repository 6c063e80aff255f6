"""Identity, salts, and the count of requests in flight."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from isthmus.common.config import GatewayConfig
from isthmus.common.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    QuotaError,
    RateLimitedError,
)
from isthmus.gateway.limits import Identity, InflightLimiter, KeyRing, read_body


def test_without_keys_everybody_is_anonymous() -> None:
    assert KeyRing([]).identify({}) == Identity()
    assert Identity().cache_salt(None) == ""


def test_a_key_gives_its_own_identity_and_hides_itself() -> None:
    ring = KeyRing(["alpha", "beta"])
    alpha = ring.identify({"authorization": "Bearer alpha"})
    beta = ring.identify({"authorization": "bearer beta"})
    assert alpha != beta
    assert "alpha" not in alpha.tenant


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer gamma", "alpha", "Basic alpha"])
def test_without_a_known_key_nobody_comes_in(header: str) -> None:
    with pytest.raises(AuthenticationError):
        KeyRing(["alpha"]).identify({"authorization": header})


def test_a_clients_salt_never_reaches_anothers_cache() -> None:
    """Not even with a salt that spells out the other's derivation."""
    a, b = Identity("aaaa"), Identity("bbbb")
    target = b.cache_salt("s")
    guesses = ["s", target, "bbbb", "4:bbbb:s", ":4:bbbb:s", None]
    assert target not in {a.cache_salt(guess) for guess in guesses}
    assert target not in {Identity().cache_salt(guess) for guess in guesses}
    assert a.cache_salt("s") == a.cache_salt("s")


def test_slots_are_given_back_once() -> None:
    limiter = InflightLimiter(1)
    slot = limiter.acquire(Identity())
    with pytest.raises(RateLimitedError) as caught:
        limiter.acquire(Identity())
    assert caught.value.retry_after_ms > 0
    slot.release()
    slot.release()
    assert limiter.num_inflight == 0
    limiter.acquire(Identity()).release()


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_it_sends_is_a_cancel_not_a_crash() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(CancelledError):
        await read_body(request, GatewayConfig())


@pytest.mark.asyncio
async def test_a_body_that_never_arrives_ends_at_the_deadline() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(DeadlineError):
        await read_body(request, GatewayConfig(request_timeout_ms=10))


def test_a_key_beyond_ascii_is_compared_by_its_bytes() -> None:
    """Clients send UTF-8; the server reads the bytes of a header as Latin-1."""
    sent = f"Bearer {'clé'.encode().decode('latin-1')}"
    assert KeyRing(["clé"]).identify({"authorization": sent}).tenant
    with pytest.raises(AuthenticationError):
        KeyRing(["clé"]).identify({"authorization": "Bearer cl\u2603"})


def test_who_is_refused_for_a_full_house_is_told_how_long_requests_take() -> None:
    limiter = InflightLimiter(1)
    limiter.acquire(Identity()).release()
    limiter.acquire(Identity())
    limiter.leave("", 40.0)
    limiter.acquire(Identity())
    for _ in range(50):  # requests of 40 s
        limiter.leave("", 40.0)
        limiter.acquire(Identity())
    with pytest.raises(RateLimitedError) as caught:
        limiter.acquire(Identity())
    assert 30_000 < caught.value.retry_after_ms < 50_000
    narrow = Identity("t", max_inflight=1)
    roomy = InflightLimiter(9)
    roomy.acquire(narrow)
    roomy.leave("t", 20.0)
    roomy.acquire(narrow)
    with pytest.raises(QuotaError) as quota:
        roomy.acquire(narrow)
    assert 15_000 < quota.value.retry_after_ms < 25_000
