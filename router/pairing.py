"""Who may hand KV to whom, from what instances say of themselves: plain checks without effects.

A prefill instance is found by every key of a store that it can fill, a decode instance by its own.
Transfers check the same once more when two instances meet (``kvtransfer.handshake``), and which
connector of those in common they use (``kvtransfer.negotiation``).
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import AUTO_CONNECTORS
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import fed_dtypes

CompatKey = tuple[str, str, str, str, str]


def compat_key(info: InstanceInfo) -> CompatKey:
    """What decides from whom an instance can get KV: model, layout, connectors, version up to its
    patch level, and dtype. Those who agree in it get theirs from the same instances."""
    version = ".".join(info.version.split(".")[:2])
    layout = info.kv_layout
    return info.model, layout.compat_hash, info.connector, version, layout.dtype


def fed_keys(info: InstanceInfo, kept: Iterable[CompatKey]) -> tuple[CompatKey, ...]:
    """Those of ``kept`` whose instances may get KV from this one: it can convert to some dtypes,
    and a connector that both have is enough."""
    own, dtypes = compat_key(info), fed_dtypes(info.kv_layout.dtype)
    return tuple(key for key in kept if _feeds(own, key, dtypes))


def pairing_problems(infos: Iterable[InstanceInfo]) -> dict[InstanceId, str]:
    """Names, for every instance without a compatible partner, what stands in the way; none for
    those that have nobody of the other role."""
    known = list(infos)
    prefills = [info for info in known if info.role is Role.PREFILL]
    decodes = [info for info in known if info.role is Role.DECODE]
    if not (prefills and decodes):
        return {}
    kept = {compat_key(info) for info in decodes}
    feeds = {info.instance_id: fed_keys(info, kept) for info in prefills}
    fed = {key for keys in feeds.values() for key in keys}
    problems = {
        info.instance_id: _difference(info, decodes[0], is_sender=True)
        for info in prefills
        if not feeds[info.instance_id]
    }
    return problems | {
        info.instance_id: _difference(info, prefills[0], is_sender=False)
        for info in decodes
        if compat_key(info) not in fed
    }


def _feeds(source: CompatKey, target: CompatKey, dtypes: tuple[str, ...]) -> bool:
    model, layout, connectors, version, _ = source
    return (
        (model, layout, version) == (target[0], target[1], target[3])
        and target[4] in dtypes
        and not _spoken(connectors).isdisjoint(_spoken(target[2]))
    )


def _spoken(connectors: str) -> frozenset[str]:
    """Of an instance's list; ``auto`` promises no more than it says: some may not run there."""
    return frozenset(AUTO_CONNECTORS if connectors == "auto" else connectors.split(","))


def _difference(info: InstanceInfo, other: InstanceInfo, *, is_sender: bool) -> str:
    parts = [
        f"{name}: {mine} here, {theirs} there"
        for name, mine, theirs in (
            ("model", info.model, other.model),
            ("version", info.version, other.version),
        )
        if mine != theirs
    ]
    if _spoken(info.connector).isdisjoint(_spoken(other.connector)):
        parts.append(f"connector: {info.connector} here, {other.connector} there")
    mine, theirs = info.kv_layout, other.kv_layout
    layout = mine.difference(theirs)
    dtype = mine.cannot_feed(theirs) if is_sender else theirs.cannot_feed(mine)
    differences = ", ".join(part for part in (*parts, layout, dtype) if part)
    return f"incompatible with {other.instance_id}: {differences}"
