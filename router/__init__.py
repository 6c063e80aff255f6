"""Which instances serve a request. Torch-free; gRPC is for what brings news (``router.feed``) and
for what lets other processes ask (``router.service``, ``router.host``), not for deciding."""

from isthmus.router.admission import FilterReason
from isthmus.router.explain import DecisionRecord
from isthmus.router.policy import Candidate, Policy, Pool
from isthmus.router.router import Router, create_policy
from isthmus.router.snapshot import InstanceSnapshot, RouterSnapshot
from isthmus.router.state import RouterState
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery
from isthmus.router.verdict import Admitted, Held, Rejected, Settled, Verdict

__all__ = [
    "Admitted",
    "Candidate",
    "DecisionRecord",
    "FilterReason",
    "Held",
    "InstanceSnapshot",
    "Outcome",
    "OutcomeKind",
    "Policy",
    "Pool",
    "Rejected",
    "RouteQuery",
    "Router",
    "RouterSnapshot",
    "RouterState",
    "Settled",
    "Verdict",
    "create_policy",
]
