"""Which instances serve a request. Torch-free, and free of gRPC but for ``router.feed``."""

from isthmus.router.admission import FilterReason
from isthmus.router.explain import DecisionRecord
from isthmus.router.policy import Candidate, Policy, Pool
from isthmus.router.router import Router, create_policy
from isthmus.router.snapshot import InstanceSnapshot, RouterSnapshot
from isthmus.router.state import RouterState
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery

__all__ = [
    "Candidate",
    "DecisionRecord",
    "FilterReason",
    "InstanceSnapshot",
    "Outcome",
    "OutcomeKind",
    "Policy",
    "Pool",
    "RouteQuery",
    "Router",
    "RouterSnapshot",
    "RouterState",
    "create_policy",
]
