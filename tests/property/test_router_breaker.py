"""The breaker: legal moves only, and no sequence of events can keep it shut for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId
from isthmus.router.breaker import Breaker, BreakerState

OPEN_MS = 1_000
steps = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "succeed", "fail", "release"]),
        st.integers(0, 3),
        st.integers(0, 1_500),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_breaker_always_recovers(history: list[tuple[str, int, int]]) -> None:
    breaker = Breaker(max_failures=3, open_ms=OPEN_MS)
    now_ns = 0
    probes: set[DecisionId] = set()
    for action, number, ms in history:
        now_ns += ms * NS_PER_MS
        decision = DecisionId(str(number))
        match action:
            case "dispatch" if breaker.allows(now_ns):
                breaker.dispatched(decision, now_ns)
                probes.add(decision)
            case "succeed":
                breaker.succeeded(now_ns)
                assert breaker.state(now_ns) is BreakerState.CLOSED
            case "fail":
                breaker.failed(now_ns)
            case "release":
                breaker.released(decision)
        assert breaker.is_closed == (breaker.state(now_ns) is BreakerState.CLOSED)
    for decision in probes:  # every dispatched request ends somehow
        breaker.released(decision)
    now_ns += OPEN_MS * NS_PER_MS
    assert breaker.allows(now_ns)
    assert breaker.wait_ms(now_ns) == 0
