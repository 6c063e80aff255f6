"""A request on its way through a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.types import RouteDecision
from isthmus.router import RouteQuery
from isthmus.sim.links import Transfer
from isthmus.sim.prefix_fetch import Fetch
from isthmus.sim.records import Record
from isthmus.sim.requests import SimRequest
from isthmus.sim.sequence import SimSequence
from isthmus.sim.spec import MODEL

START_NS = 1_000_000_000
"""When a run starts: not 0, which some code takes for "never"."""


@dataclass(eq=False, slots=True)
class Flight:
    """``decode`` also computes a local prompt."""

    request: SimRequest
    record: Record
    decision: RouteDecision | None = None
    decode: SimSequence | None = None
    prefill: SimSequence | None = None
    fetch: Fetch | None = None
    transfer: Transfer | None = None
    excluded: frozenset[InstanceId] = frozenset()
    held_until_ns: int = 0

    @property
    def is_over(self) -> bool:
        return self.record.end is not None

    @property
    def request_id(self) -> RequestId:
        return RequestId(str(self.request.index))

    def query(self, timeout_ms: float) -> RouteQuery:
        request, record = self.request, self.record
        arrival_ns = START_NS + request.arrival_ns
        return RouteQuery(
            request_id=self.request_id,
            model=MODEL,
            num_prompt_tokens=request.num_prompt + record.num_tokens,
            hash_chains=(request.hashes,) if request.hashes else (),
            slo=request.slo,
            tenant=request.tenant,
            max_output_tokens=request.max_output,
            arrival_ns=arrival_ns,
            deadline_ns=arrival_ns + round(timeout_ms * NS_PER_MS),
            exclude=self.excluded,
        )

    def leg(self, most_tokens: int, *, is_for_peer: bool = False) -> SimSequence:
        """``most_tokens`` of output: an answer may be cut off by what fits, as the engine does."""
        request, first_ns = self.request, self.record.first_ns
        return SimSequence(
            owner=self,
            num_prompt=request.num_prompt,
            num_output=min(most_tokens, request.num_output),
            hashes=request.hashes,
            num_generated=self.record.num_tokens,
            tpot_ms=request.slo.tpot_ms,
            most_output=min(most_tokens, request.max_output),
            is_for_peer=is_for_peer,
            first_ns=START_NS + first_ns if first_ns is not None else 0,
            num_first=1 if first_ns is not None else 0,
        )


def flight_of(sequence: SimSequence) -> Flight:
    flight = sequence.owner
    assert isinstance(flight, Flight)
    return flight
