"""Who may come in, and how much of it: keys, number of requests in flight, size of a body.

All of it is decided before a body is parsed or a prompt tokenised. A client's cache salt only ever
narrows the identity that its key gives it, so no tenant can name another's cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.config import GatewayConfig
from isthmus.common.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    RateLimitedError,
    RequestTooLargeError,
)

_BEARER = "bearer "
RETRY_AFTER_MS = 1_000


@dataclass(frozen=True, slots=True)
class Identity:
    """``tenant`` is a digest of the key, safe to log; empty when no keys are configured."""

    tenant: str = ""

    def cache_salt(self, from_client: str | None) -> str:
        if not self.tenant and not from_client:
            return ""
        parts = f"{len(self.tenant)}:{self.tenant}:{from_client or ''}"
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


class KeyRing:
    """The configured API keys, compared in constant time; no keys = everybody is anonymous."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._identities = {key.encode(): Identity(_digest(key)) for key in keys}

    def identify(self, headers: Mapping[str, str]) -> Identity:
        """Raises AuthenticationError without a known key in ``Authorization: Bearer …``."""
        if not self._identities:
            return Identity()
        header = headers.get("authorization", "")
        text = header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""
        given = text.encode("latin-1", "replace")  # as the bytes of a header were read
        found = None
        for key, identity in self._identities.items():
            if hmac.compare_digest(key, given):
                found = identity
        if found is None:
            said = "a wrong API key" if given else "no API key"
            raise AuthenticationError(f"{said} was given", stage="authenticate")
        return found


class Slot:
    """One request in flight; ``release`` may be called more than once."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: InflightLimiter) -> None:
        self._limiter: InflightLimiter | None = limiter

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._limiter is not None:
            self._limiter.num_inflight -= 1
            self._limiter = None


class InflightLimiter:
    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self.num_inflight = 0

    def acquire(self) -> Slot:
        """Raises RateLimitedError when enough requests are being served."""
        if self.num_inflight >= self._max_inflight:
            message = f"{self._max_inflight} requests are being served: try again"
            raise RateLimitedError(message, stage="admission", retry_after_ms=RETRY_AFTER_MS)
        self.num_inflight += 1
        return Slot(self)


async def read_body(request: Request, config: GatewayConfig) -> bytes:
    """Raises RequestTooLargeError as soon as the limit is passed, before the rest arrives;
    CancelledError when the client leaves, DeadlineError when it takes too long."""
    limit = config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(config.request_timeout_ms * NS_PER_MS / NS_PER_S):
            return await _read_at_most(request, limit)
    except ClientDisconnect as error:
        metrics.CANCELS.labels(stage="receive").inc()
        raise CancelledError("the client went away", stage="receive") from error
    except TimeoutError as error:
        raise DeadlineError("the body did not arrive in time", stage="receive") from error


async def _read_at_most(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {limit} bytes", stage="receive")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
