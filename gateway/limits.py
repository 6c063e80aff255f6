"""Who may come in, and how much of it: keys, number of requests in flight, size of a body.

All of it is decided before a body is parsed or a prompt tokenised. A client's cache salt only ever
narrows the identity that its key gives it, so no tenant can name another's cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive

from isthmus.common import metrics
from isthmus.common.backoff import SHORT_WAIT_MS, retry_after_ms
from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.config import GatewayConfig
from isthmus.common.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    QuotaError,
    RateLimitedError,
    RequestTooLargeError,
)
from isthmus.common.slo import TenantConfig, hash_key
from isthmus.gateway.headers import headers_of
from isthmus.gateway.plan import ANONYMOUS

_BEARER = "bearer "
MAX_TENANT_LABELS = 100
MS_PER_S = 1000
MEMORY = 0.1  # what the latest request counts in the mean duration
OTHER_TENANTS = "other"


@dataclass(frozen=True, slots=True)
class Identity:
    """``tenant`` is its name, or for a key of ``gateway.api_keys`` a digest of the key, safe to
    log; empty when no keys are configured. ``label`` is what metrics call it. ``default_class``
    and ``max_inflight``: as configured for the tenant, empty and 0 for nothing of its own."""

    tenant: str = ""
    label: str = ANONYMOUS
    default_class: str = ""
    max_inflight: int = 0

    def cache_salt(self, from_client: str | None) -> str:
        if not self.tenant and not from_client:
            return ""
        parts = f"{len(self.tenant)}:{self.tenant}:{from_client or ''}"
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


class KeyRing:
    """The configured API keys; no keys = everybody is anonymous.

    Kept and looked up by their digests: how long that takes tells nothing of a key.
    """

    def __init__(
        self, keys: Sequence[str], tenants: Mapping[str, TenantConfig] | None = None
    ) -> None:
        self._identities: dict[str, Identity] = {}
        named = tenants or {}
        labels = _labels([*named, *(hash_key(key)[:16] for key in keys)])
        for key in keys:
            tenant = hash_key(key)[:16]
            self._identities[hash_key(key)] = Identity(tenant, labels[tenant])
        for name, config in named.items():
            identity = Identity(name, labels[name], config.default_class, config.max_inflight)
            self._identities |= dict.fromkeys(config.all_hashes, identity)

    def identify(self, headers: Mapping[str, str]) -> Identity:
        """Raises AuthenticationError without a known key in ``Authorization: Bearer …``."""
        if not self._identities:
            return Identity()
        header = headers.get("authorization", "")
        text = header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""
        given = text.encode("latin-1", "replace")  # as the bytes of a header were read
        found = self._identities.get(hashlib.sha256(given).hexdigest())
        if found is None:
            said = "a wrong API key" if given else "no API key"
            raise AuthenticationError(f"{said} was given", stage="authenticate")
        return found


def _labels(tenants: Sequence[str]) -> dict[str, str]:
    """The first have a label of their own, so that metrics stay small however many there are."""
    own, others = tenants[:MAX_TENANT_LABELS], tenants[MAX_TENANT_LABELS:]
    return {**dict.fromkeys(others, OTHER_TENANTS), **{name: name for name in own}}


class Slot:
    """One request in flight; ``release`` may be called more than once."""

    __slots__ = ("_limiter", "_since_s", "_tenant")

    def __init__(self, limiter: InflightLimiter, tenant: str) -> None:
        self._limiter: InflightLimiter | None = limiter
        self._tenant = tenant
        self._since_s = time.monotonic()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._limiter is not None:
            self._limiter.leave(self._tenant, time.monotonic() - self._since_s)
            self._limiter = None


class InflightLimiter:
    """Requests being served, all of them and those of each tenant. Owns the two counts, and knows
    how long requests take."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self.num_inflight = 0
        self._mean_ms = 0.0  # of a request, the latest counting most; 0 = none has ended yet
        self._of_tenant: dict[str, int] = {}

    def acquire(self, identity: Identity) -> Slot:
        """Raises RateLimitedError when enough requests are being served, QuotaError when the
        tenant has its share of them."""
        if self.num_inflight >= self._max_inflight:
            message = f"{self._max_inflight} requests are being served: try again"
            raise RateLimitedError(
                message, stage="admission", retry_after_ms=self._retry_after_ms(self.num_inflight)
            )
        tenant, num_own = identity.tenant, self._of_tenant.get(identity.tenant, 0)
        if 0 < identity.max_inflight <= num_own:
            message = f"tenant {tenant} has {num_own} requests being served: try again"
            raise QuotaError(
                message, stage="admission", retry_after_ms=self._retry_after_ms(num_own)
            )
        self.num_inflight += 1
        self._of_tenant[tenant] = num_own + 1
        return Slot(self, tenant)

    def _retry_after_ms(self, num_served: int) -> int:
        """Of so many that began at any time, the next ends after a share of what one takes."""
        return retry_after_ms(self._mean_ms / num_served if self._mean_ms else SHORT_WAIT_MS)

    def leave(self, tenant: str, took_s: float) -> None:
        """A slot was released. No tenant without requests stays in memory."""
        took_ms = took_s * MS_PER_S
        self._mean_ms += MEMORY * (took_ms - self._mean_ms) if self._mean_ms else took_ms
        self.num_inflight -= 1
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


async def read_body(request: Request, config: GatewayConfig) -> bytes:
    """Raises RequestTooLargeError as soon as the limit is passed, before the rest arrives;
    CancelledError when the client leaves, DeadlineError when it takes too long."""
    limit = config.max_body_bytes
    declared = headers_of(request).get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(config.request_timeout_ms * NS_PER_MS / NS_PER_S):
            return await _read_at_most(request.receive, limit)
    except TimeoutError as error:
        raise DeadlineError("the body did not arrive in time", stage="receive") from error


async def _read_at_most(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            metrics.CANCELS.labels(stage="receive").inc()
            raise CancelledError("the client went away", stage="receive")
        part, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {limit} bytes", stage="receive")
