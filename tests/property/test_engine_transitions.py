"""Life cycles of sequences and block tables: the tables are complete, and the engine obeys them."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.errors import OutOfBlocksError
from isthmus.common.ids import RequestId
from isthmus.common.state_machine import IllegalTransitionError, Transitions
from isthmus.engine.block_table import TABLE_TRANSITIONS, TableState
from isthmus.engine.flight import FLIGHT_TRANSITIONS, FlightState
from isthmus.engine.runners import RunnerOf, make_runner
from isthmus.engine.sequence import SEQ_TRANSITIONS, SeqStatus, Sequence
from isthmus.engine.types import Reservation, SequenceMode
from tests.support.device_core import device_runner
from tests.support.engine_driver import make_prompt, make_request
from tests.support.tiny_model import TinyModel, make_tiny_core

MACHINES = [
    (SEQ_TRANSITIONS, SeqStatus.WAITING, SeqStatus.FINISHED),
    (TABLE_TRANSITIONS, TableState.RESERVED, TableState.FREED),
    (FLIGHT_TRANSITIONS, FlightState.PLANNED, FlightState.LANDED),
]


@pytest.mark.parametrize(("transitions", "first", "last"), MACHINES)
def test_every_state_is_reachable_and_leads_to_the_end(
    transitions: Transitions[Enum], first: Enum, last: Enum
) -> None:
    def reachable(start: Enum) -> set[Enum]:
        found, stack = {start}, [start]
        while stack:
            for state in transitions.table[stack.pop()] - found:
                found.add(state)
                stack.append(state)
        return found

    assert set(transitions.table) == set(type(first)) == reachable(first)
    assert all(last in reachable(state) for state in type(first))
    assert [state for state in type(first) if transitions.is_terminal(state)] == [last]


@given(moves=st.lists(st.sampled_from(SeqStatus), max_size=8))
def test_sequence_refuses_exactly_the_moves_outside_the_table(moves: list[SeqStatus]) -> None:
    sequence = Sequence(make_request("r", (1,)), SequenceMode.FULL, [], added_ns=0)
    for status in moves:
        before = sequence.status
        if SEQ_TRANSITIONS.can(before, status):
            sequence.move_to(status)
            assert sequence.status is status
        else:
            with pytest.raises(IllegalTransitionError):
                sequence.move_to(status)
            assert sequence.status is before


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(1, 30)),
        st.tuples(st.just("prefill"), NAMES, st.integers(1, 30)),
        st.tuples(st.just("reserve"), NAMES, st.integers(1, 30)),
        st.tuples(st.sampled_from(["admit", "cancel", "quarantine"]), NAMES, st.just(0)),
        st.tuples(st.sampled_from(["abort", "release_hold", "end_quarantine"]), NAMES, st.just(0)),
        st.tuples(st.sampled_from(["step", "fail", "in_flight"]), NAMES, st.integers(1, 3)),
    ),
    max_size=40,
)


class EnginePlayer:
    """Calls the engine as a worker would, in any order, also while the model runs."""

    def __init__(self, async_scheduling: str, runner_of: RunnerOf) -> None:
        self.model = TinyModel()
        self.core = make_tiny_core(
            self.model,
            num_blocks=14,
            max_num_batched_tokens=8,
            max_num_seqs=3,
            runner_of=runner_of,
            cuda_graphs=False,
            async_scheduling=async_scheduling,
        )
        self.reservations: dict[str, tuple[Reservation, int]] = {}
        self.in_engine: set[str] = set()
        self.failures = 0

    def play(self, command: str, name: str, size: int) -> None:
        request_id = RequestId(name)
        match command:
            case "add" | "prefill" | "reserve":
                if name not in self.in_engine and name not in self.reservations:
                    self.enter(command, name, size)
            case "admit" | "cancel" | "quarantine" if name in self.reservations:
                self.end_reservation(command, name)
            case "abort":
                self.core.abort(request_id)
                self.core.release_hold(request_id)
                self.in_engine.discard(name)
            case "release_hold":
                self.core.release_hold(request_id)
            case "end_quarantine":
                self.core.release_quarantine(request_id)
            case "in_flight":
                self.model.before_forward = lambda: self.play("abort", name, size)
                self.step()
            case "fail" if self.failures < 2:
                self.model.fail_next = 1
                self.step()
            case "step":
                for _ in range(size):
                    self.step()

    def enter(self, command: str, name: str, size: int) -> None:
        request = make_request(name, make_prompt(size, salt=ord(name) % 3), max_tokens=9)
        if command == "reserve":
            with suppress(OutOfBlocksError):
                self.reservations[name] = (self.core.reserve(request), size)
            return
        mode = SequenceMode.FULL if command == "add" else SequenceMode.PREFILL_ONLY
        self.core.add(request, mode)
        self.in_engine.add(name)

    def end_reservation(self, command: str, name: str) -> None:
        reservation, size = self.reservations.pop(name)
        if command != "admit":
            self.core.cancel_reservation(reservation, quarantine=command == "quarantine")
            return
        request = make_request(name, make_prompt(size, salt=ord(name) % 3), max_tokens=9)
        self.core.admit_with_kv(reservation, request, first_token=1)
        self.in_engine.add(name)

    def step(self) -> None:
        output = self.core.step()
        self.core.check_integrity()
        self.model.before_forward = None
        self.model.fail_next = 0
        if output is None:
            return
        has_failed = any(update.error is not None for update in output.updates)
        self.failures = self.failures + 1 if has_failed else 0
        for update in output.updates:
            if update.finish_reason is not None:
                self.core.release_hold(update.request_id)
                self.in_engine.discard(update.request_id)


@pytest.mark.parametrize(
    ("async_scheduling", "runner_of"),
    [("off", make_runner), ("on", make_runner), ("on", device_runner)],
)
@settings(max_examples=50, deadline=None)
@given(commands=COMMANDS)
def test_engine_never_leaks_a_block_whatever_the_order_of_calls(
    async_scheduling: str, runner_of: RunnerOf, commands: list[tuple[str, str, int]]
) -> None:
    player = EnginePlayer(async_scheduling, runner_of)
    for command in commands:
        player.play(*command)
        player.core.check_integrity()
    for name in ("a", "b", "c", "d", "e"):
        for command in ("cancel", "abort", "release_hold", "end_quarantine"):
            player.play(command, name, 0)
    while player.core.step() is not None:  # what is in flight is void by now
        player.core.check_integrity()
    load = player.core.load()
    assert (load.running_seqs, load.waiting_seqs, load.held_blocks) == (0, 0, 0)
    assert load.free_blocks == load.num_blocks
