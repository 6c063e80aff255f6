"""Sequences whose KV has arrived, beside prompts that are computed here."""

from __future__ import annotations

from isthmus.common.clock import VirtualClock
from isthmus.engine.block_table import TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.pacer import Pacer
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_prompt, make_request


class Bench:
    """A scheduler with blocks enough, and the part of the engine that lands its steps."""

    def __init__(self, budget: int = 16, max_num_seqs: int = 4) -> None:
        self.kv = KvCacheManager(257, 4, 0.0, enable_prefix_cache=False)
        self.scheduler = Scheduler(self.kv, Pacer(VirtualClock()), budget, max_num_seqs)
        self.now = 0

    def _sequence(self, name: str, num_tokens: int) -> Sequence:
        self.now += 1
        request = make_request(name, make_prompt(num_tokens), max_tokens=50)
        return Sequence(request, SequenceMode.FULL, [], added_ns=self.now)

    def wait(self, name: str, num_tokens: int) -> None:
        self.scheduler.add(self._sequence(name, num_tokens))

    def arrive(self, name: str, num_tokens: int = 8) -> None:
        sequence = self._sequence(name, num_tokens)
        table = self.kv.try_allocate(num_tokens, [], state=TableState.RESERVED)
        assert table is not None
        self.kv.move(table, TableState.USED)
        sequence.table = table
        sequence.num_computed_tokens = num_tokens
        sequence.append_token(1)
        self.scheduler.add_with_kv(sequence)

    def step(self) -> dict[str, int]:
        """How many tokens of each ran."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self._land(plan)
        return {s.request_id: n for s, n in zip(plan.scheduled, plan.counts, strict=True)}

    @staticmethod
    def _land(plan: StepPlan) -> None:
        for sequence, count, samples in zip(plan.scheduled, plan.counts, plan.samples, strict=True):
            sequence.land(count)
            if samples:
                sequence.land_token(1)


def test_kv_that_has_arrived_does_not_wait_for_the_chunks_of_a_prompt() -> None:
    bench = Bench()
    bench.wait("prompt", 60)
    assert bench.step() == {"prompt": 16}
    bench.arrive("a")
    bench.arrive("b")
    assert bench.step() == {"a": 1, "b": 1, "prompt": 14}
    assert bench.step() == {"a": 1, "b": 1, "prompt": 14}


def test_kv_that_has_arrived_does_not_wait_behind_an_older_prompt() -> None:
    bench = Bench()
    bench.wait("prompt", 60)
    bench.arrive("a")
    assert bench.step() == {"a": 1, "prompt": 15}


def test_the_last_place_goes_to_whoever_has_waited_longest() -> None:
    bench = Bench(max_num_seqs=2)
    bench.wait("prompt", 60)
    for name in "abc":
        bench.arrive(name)
    assert bench.step() == {"a": 1, "prompt": 15}
    assert bench.step() == {"a": 1, "prompt": 15}


def test_a_prompt_advances_however_many_arrive() -> None:
    bench = Bench(budget=4, max_num_seqs=8)
    bench.wait("prompt", 12)
    assert bench.step() == {"prompt": 4}
    for name in "abcdef":
        bench.arrive(name)
    for _ in range(3):
        assert bench.step() == {"a": 1, "b": 1, "c": 1, "prompt": 1}
