"""Which connector two instances use: the best that every rank of both offers, decided without
asking. Both sides read the same two offers and come to the same choice.

::

    nixl, where both say that devices move the bytes (RDMA, GPU memory); else ucx, likewise
    shm, on one host
    nixl over what else there is (CMA within a host, TCP); else ucx
    collective
    local, fake (offered only where the configuration names them)

A new connector gets a line here. What decides is written in ``docs/kv-transfer.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.common.errors import HandshakeError
from isthmus.common.transfer import ConnectorOffer, TransferOffer

Ends = Sequence[ConnectorOffer]  # of one connector, one for each rank of both sides


@dataclass(frozen=True, slots=True)
class _Rung:
    connector: str
    holds: Callable[[Ends], bool] = lambda _: True


def _are_direct(ends: Ends) -> bool:
    return all(end.is_direct for end in ends)


_LADDER = (
    _Rung("nixl", _are_direct),
    _Rung("ucx", _are_direct),
    _Rung("shm"),
    _Rung("nixl"),
    _Rung("ucx"),
    _Rung("collective"),
    _Rung("local"),
    _Rung("fake"),
)
_MEANINGS = {  # of their domains
    "shm": "host, user and network namespace",
    "collective": "kind of memory",
    "local": "process",
}
ORDER = tuple(dict.fromkeys(rung.connector for rung in _LADDER))


def negotiate(ours: TransferOffer, theirs: TransferOffer) -> str:
    """The connector's name. Raises HandshakeError that names both lists, and for each connector of
    both lists what stands in its way."""
    ends = {name: _ends(name, ours, theirs) for name in ORDER}
    for rung in _LADDER:
        found = ends[rung.connector]
        if found and _has_one_domain(found) and rung.holds(found):
            return rung.connector
    here, there = offered_names(ours), offered_names(theirs)
    apart = [
        f"{name} needs one {_meaning(name)} ({_domains(ours, name)} here, "
        f"{_domains(theirs, name)} there)"
        for name in ORDER
        if ends[name]
    ]
    raise HandshakeError(
        f"no connector in common: {_listed(here)} here, {_listed(there)} at "
        f"{theirs.instance.instance_id}" + "".join(f"; {reason}" for reason in apart),
        stage="handshake",
        instance_id=theirs.instance.instance_id,
    )


def offered_names(offer: TransferOffer) -> tuple[str, ...]:
    """Connectors that every rank of the instance offers, the preferred ones first."""
    return tuple(
        name for name in ORDER if all(rank.connector(name) is not None for rank in offer.ranks)
    )


def _ends(name: str, ours: TransferOffer, theirs: TransferOffer) -> Ends:
    """Empty where some rank lacks it."""
    found = [rank.connector(name) for rank in (*ours.ranks, *theirs.ranks)]
    present = [end for end in found if end is not None]
    return present if len(present) == len(found) else []


def _has_one_domain(ends: Ends) -> bool:
    return len({end.domain for end in ends}) == 1


def _domains(offer: TransferOffer, name: str) -> str:
    ends = [rank.connector(name) for rank in offer.ranks]
    return ", ".join(sorted({end.domain for end in ends if end is not None}))


def _meaning(name: str) -> str:
    return _MEANINGS.get(name, "domain")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
