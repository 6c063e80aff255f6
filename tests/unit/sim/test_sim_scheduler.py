"""The simulator's scheduler reckons as the engine's does."""

from __future__ import annotations

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.cluster import Role
from isthmus.common.pacing import ChunkBudget
from isthmus.engine.block_table import TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.pacer import Pacer
from isthmus.engine.scheduler import Scheduler as EngineScheduler
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from isthmus.sim.scheduler import Scheduler
from isthmus.sim.sequence import SeqState, SimSequence
from tests.support.engine_driver import make_prompt, make_request
from tests.support.sim_runs import MODEL, make_spec

NUM_BLOCKS, BLOCK = 8, 16
NUM_ARRIVED, NUM_WAITING = 20, NUM_BLOCKS * BLOCK  # the older one finds no room any more


class Recorded(ChunkBudget):
    """Remembers what was taken from it: (tokens left, tokens computed before)."""

    __slots__ = ()
    taken: list[tuple[int, int]] = []  # noqa: RUF012 - emptied by every test

    def take(self, num_left: int, num_computed: int) -> int:
        self.taken.append((num_left, num_computed))
        return super().take(num_left, num_computed)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    Recorded.taken.clear()
    for module in ("isthmus.engine.pacer", "isthmus.sim.pacer"):
        monkeypatch.setattr(f"{module}.ChunkBudget", Recorded)
    return Recorded.taken


def test_the_engine_takes_a_newcomers_last_token_behind_those_that_are_computed(
    taken: list[tuple[int, int]],
) -> None:
    kv = KvCacheManager(NUM_BLOCKS + 1, BLOCK, 0.0, enable_prefix_cache=False)
    scheduler = EngineScheduler(kv, Pacer(VirtualClock()), 512, 1)
    scheduler.add(engine_sequence("older", NUM_WAITING))
    arrived = engine_sequence("arrived", NUM_ARRIVED - 1)
    arrived.added_ns = 1
    arrived.table = kv.try_allocate(NUM_ARRIVED - 1, [], state=TableState.RESERVED)
    assert arrived.table is not None
    kv.move(arrived.table, TableState.USED)
    arrived.num_computed_tokens = NUM_ARRIVED - 1
    arrived.append_token(1)
    scheduler.add_with_kv(arrived)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.scheduled == (arrived,)
    assert taken == [(1, NUM_ARRIVED - 1)]


def engine_sequence(name: str, num_tokens: int) -> Sequence:
    return Sequence(make_request(name, make_prompt(num_tokens)), SequenceMode.FULL, [], 0)


def test_the_simulator_takes_it_behind_as_many(taken: list[tuple[int, int]]) -> None:
    spec = make_spec("d0", Role.DECODE, num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_seqs=1)
    scheduler = Scheduler(spec)
    arrived = SimSequence(object(), NUM_ARRIVED - 1, 8, added_ns=1)
    arrived.move_to(SeqState.RESERVING)
    scheduler.lines.reserving.append(arrived)
    assert scheduler.try_grant() is arrived
    scheduler.arrived(arrived, first_ns=1)
    older = SimSequence(object(), NUM_WAITING, 8)
    older.move_to(SeqState.WAITING)
    scheduler.lines.waiting.append(older)
    assert scheduler.plan(0, MODEL) == []
    assert arrived.state is SeqState.DECODING
    assert taken == [(1, NUM_ARRIVED - 1)]
