from __future__ import annotations

from isthmus.prefill_worker.call import CALL_TRANSITIONS, CallState


def test_every_open_state_can_fail_and_ends_lead_nowhere() -> None:
    ends = {CallState.FINISHED, CallState.FAILED}
    for state in CallState:
        assert CALL_TRANSITIONS.is_terminal(state) == (state in ends)
        assert CALL_TRANSITIONS.can(state, CallState.FAILED) == (state not in ends)
