"""Remote or local prefill, where the answer does not depend on a policy."""

from __future__ import annotations

from isthmus.common.cluster import Role
from isthmus.common.types import LocalPrefillReason
from isthmus.router.predictor import DecodeOption


def local_prefill_reason(
    decode: DecodeOption, has_prefill: bool, min_remote_tokens: int
) -> LocalPrefillReason | None:
    """Why ``decode`` must compute the prompt itself; None when it may have it computed remotely.

    ``has_prefill``: some usable prefill instance may hand KV to it.
    """
    if decode.view.info.role is Role.MIXED:
        return LocalPrefillReason.MIXED_ROLE
    if not has_prefill:
        return LocalPrefillReason.NO_PREFILL_INSTANCE
    if decode.uncached_tokens >= min_remote_tokens:
        return None
    if decode.cached_tokens:
        return LocalPrefillReason.PREFIX_CACHED
    return LocalPrefillReason.SHORT_PROMPT
