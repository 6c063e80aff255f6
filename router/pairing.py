"""Who may hand KV to whom, from what instances say of themselves: plain checks without effects.

A prefill instance is found by every key of a store that it can fill, a decode instance by its own.
Transfers check the same once more when two instances meet (``kvtransfer.handshake``).
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import fed_dtypes

CompatKey = tuple[str, str, str, str, str]


def compat_key(info: InstanceInfo) -> CompatKey:
    """Two instances may hand KV to each other when these agree: model, layout, connector, version
    up to its patch level, and dtype."""
    return _key(info, info.kv_layout.dtype)


def fed_keys(info: InstanceInfo) -> tuple[CompatKey, ...]:
    """Of all instances that may get KV from this one, which can convert it to some dtypes."""
    return tuple(_key(info, dtype) for dtype in fed_dtypes(info.kv_layout.dtype))


def pairing_problems(infos: Iterable[InstanceInfo]) -> dict[InstanceId, str]:
    """Names, for every instance without a compatible partner, what stands in the way; none for
    those that have nobody of the other role."""
    known = list(infos)
    prefills = [info for info in known if info.role is Role.PREFILL]
    decodes = [info for info in known if info.role is Role.DECODE]
    if not (prefills and decodes):
        return {}
    fed = {key for info in prefills for key in fed_keys(info)}
    kept = {compat_key(info) for info in decodes}
    problems = {
        info.instance_id: _difference(info, decodes[0], is_sender=True)
        for info in prefills
        if kept.isdisjoint(fed_keys(info))
    }
    return problems | {
        info.instance_id: _difference(info, prefills[0], is_sender=False)
        for info in decodes
        if compat_key(info) not in fed
    }


def _key(info: InstanceInfo, dtype: str) -> CompatKey:
    version = ".".join(info.version.split(".")[:2])
    return info.model, info.kv_layout.compat_hash, info.connector, version, dtype


def _difference(info: InstanceInfo, other: InstanceInfo, *, is_sender: bool) -> str:
    parts = [
        f"{name}: {mine} here, {theirs} there"
        for name, mine, theirs in (
            ("model", info.model, other.model),
            ("connector", info.connector, other.connector),
            ("version", info.version, other.version),
        )
        if mine != theirs
    ]
    mine, theirs = info.kv_layout, other.kv_layout
    layout = mine.difference(theirs)
    dtype = mine.cannot_feed(theirs) if is_sender else theirs.cannot_feed(mine)
    differences = ", ".join(part for part in (*parts, layout, dtype) if part)
    return f"incompatible with {other.instance_id}: {differences}"
