from __future__ import annotations

from isthmus.decode_worker.generation import GENERATION_TRANSITIONS, GenerationState


def test_every_state_can_end_badly_and_ends_lead_nowhere() -> None:
    ends = {GenerationState.FINISHED, GenerationState.FAILED, GenerationState.ABORTED}
    for state in GenerationState:
        assert GENERATION_TRANSITIONS.is_terminal(state) == (state in ends)
        if state not in ends:
            assert GENERATION_TRANSITIONS.can(state, GenerationState.FAILED)
            assert GENERATION_TRANSITIONS.can(state, GenerationState.ABORTED)


def test_nothing_finishes_before_its_first_token() -> None:
    for state in (GenerationState.QUEUED, GenerationState.PREFILLING):
        assert not GENERATION_TRANSITIONS.can(state, GenerationState.FINISHED)
