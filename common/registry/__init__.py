"""Where instances are found: the ``Registry`` protocol and its in-process implementation.

The gRPC one is ``common.registry.embedded``, apart so that this package needs no gRPC.
"""

from isthmus.common.registry.base import (
    Changes,
    Entry,
    Listing,
    Registry,
    WatchEvent,
    deciders_prefix,
    epoch_key,
    instance_key,
    instances_prefix,
    leader_key,
    routers_prefix,
)
from isthmus.common.registry.election import Candidate
from isthmus.common.registry.lease import KeptLease
from isthmus.common.registry.memory import MemoryRegistry
from isthmus.common.registry.resume import resume_watch

__all__ = [
    "Candidate",
    "Changes",
    "Entry",
    "KeptLease",
    "Listing",
    "MemoryRegistry",
    "Registry",
    "WatchEvent",
    "deciders_prefix",
    "epoch_key",
    "instance_key",
    "instances_prefix",
    "leader_key",
    "resume_watch",
    "routers_prefix",
]
