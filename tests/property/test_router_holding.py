"""The holding queue: nobody is lost, nobody is served twice, nobody waits for ever."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import RequestId
from isthmus.common.types import Slo
from isthmus.router.capacity import Capacity
from isthmus.router.holding import HoldingQueue, Lane
from isthmus.router.shares import TenantShares
from isthmus.router.types import RouteQuery

MODELS = ["m", "n"]
TENANTS = ["a", "b", ""]


class HoldingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = HoldingQueue(TenantShares({"a": 3.0}), ageing_ms=500, max_held=1_000)
        self.now_ns = 0
        self.count = 0
        self.waiting: dict[RequestId, str] = {}

    @rule(
        model=st.sampled_from(MODELS),
        tenant=st.sampled_from(TENANTS),
        work_ms=st.floats(0.1, 500),
        start_ms=st.none() | st.integers(-100, 2_000),
        timeout_ms=st.none() | st.integers(1, 3_000),
        is_strict=st.booleans(),
    )
    def enter(
        self,
        model: str,
        tenant: str,
        work_ms: float,
        start_ms: int | None,
        timeout_ms: int | None,
        is_strict: bool,
    ) -> None:
        self.count += 1
        request_id = RequestId(str(self.count))
        query = RouteQuery(request_id, model, 10, slo=Slo(is_strict=is_strict), tenant=tenant)
        start_ns = None if start_ms is None else self.now_ns + start_ms * NS_PER_MS
        expires_ns = None if timeout_ms is None else self.now_ns + timeout_ms * NS_PER_MS
        self.queue.enter(query, work_ms, start_ns, self.now_ns, expires_ns)
        self.waiting[request_id] = model

    @rule(model=st.sampled_from(MODELS), is_spare=st.booleans())
    def start_first(self, model: str, is_spare: bool) -> None:
        order = list(self.queue.in_order(model, self.now_ns, lambda _: is_spare))
        ids = [held.query.request_id for held in order]
        assert len(ids) == len(set(ids))
        present = {name for name, of in self.waiting.items() if of == model}
        assert set(ids) <= present
        left = [held for held in order if held.lane is Lane.ON_TIME]
        if is_spare:
            assert set(ids) == present
        else:
            assert order[1:] == left or order == left
        if order:
            self.queue.started(order[0], self.now_ns)
            del self.waiting[order[0].query.request_id]

    @rule(model=st.sampled_from(MODELS), ready_ms=st.floats(0, 500), workers=st.integers(1, 4))
    def leave_out(self, model: str, ready_ms: float, workers: int) -> None:
        capacity = Capacity.even(workers, ready_ms)
        out = self.queue.left_out(model, self.now_ns, capacity)
        assert len({id(held) for held, _ in out}) == len(out)
        for held, before_ms in out:
            assert before_ms >= 0
            assert held.lane is Lane.ON_TIME
            if held.query.slo.is_strict:
                self.queue.remove(held.query.request_id)
                del self.waiting[held.query.request_id]
            else:
                self.queue.demote(held)
        assert not self.queue.left_out(model, self.now_ns, capacity)

    @rule(pick=st.integers(0, 60))
    def cancel(self, pick: int) -> None:
        request_id = RequestId(str(pick))
        was_waiting = self.waiting.pop(request_id, None) is not None
        assert (self.queue.remove(request_id) is not None) == was_waiting
        assert self.queue.remove(request_id) is None

    @rule(ms=st.integers(0, 800))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * NS_PER_MS
        for held in self.queue.expired(self.now_ns):
            assert held.expires_ns is not None
            assert held.expires_ns <= self.now_ns
            assert self.queue.remove(held.query.request_id) is held
            del self.waiting[held.query.request_id]

    @invariant()
    def is_sound(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        assert all(request_id in self.queue for request_id in self.waiting)
        change_ns = self.queue.next_change_ns()
        assert change_ns is not None or not any(
            held.expires_ns is not None or held.lane is Lane.ON_TIME
            for held in self.queue._held.values()
        )


TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
