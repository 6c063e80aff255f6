"""The simulated instance against a plain one that takes every step and knows no leaps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.cluster import Role
from tests.support.sim_runs import MODEL, make_cluster, make_request, make_spec

BUDGET = 64
MAX_SEQS = 4


@dataclass
class Plain:
    arrives_ms: float
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0
    first_ms: float = 0.0
    end_ms: float = 0.0


def run_plainly(sequences: list[Plain]) -> None:
    """Decodes first, then chunks of who runs, then newcomers; blocks without end."""
    now_ms, waiting, running = 0.0, sorted(sequences, key=lambda s: s.arrives_ms), []
    while waiting or running:
        if not running and waiting and waiting[0].arrives_ms > now_ms:
            now_ms = waiting[0].arrives_ms
        decodes = [s for s in running if s.generated]
        budget = BUDGET - len(decodes)
        chunks = []
        for sequence in [s for s in running if not s.generated]:
            count = min(sequence.prompt - sequence.computed, budget)
            if count:
                chunks.append((sequence, count))
                budget -= count
        while budget and waiting and waiting[0].arrives_ms <= now_ms and len(running) < MAX_SEQS:
            sequence = waiting.pop(0)
            running.append(sequence)
            count = min(sequence.prompt, budget)
            chunks.append((sequence, count))
            budget -= count
        context = sum(s.prompt + s.generated for s in decodes)
        if chunks:
            chunk_ms = sum(MODEL.chunk_ms(count, s.computed) for s, count in chunks)
            now_ms += MODEL.mixed_ms(chunk_ms, len(decodes), context)
        else:
            now_ms += MODEL.decode_ms(len(decodes), context)
        for sequence in decodes:
            sequence.generated += 1
        for sequence, count in chunks:
            sequence.computed += count
            if sequence.computed == sequence.prompt:
                sequence.generated, sequence.first_ms = 1, now_ms
        for sequence in [s for s in running if s.generated >= s.output]:
            sequence.end_ms = now_ms
            running.remove(sequence)


@given(
    st.lists(
        st.tuples(st.integers(0, 2_000), st.integers(1, 200), st.integers(1, 60)),
        min_size=1,
        max_size=12,
        unique_by=lambda item: item[0],
    )
)
@settings(max_examples=60, deadline=None)
def test_times_are_those_of_taking_every_step(asked: list[tuple[int, int, int]]) -> None:
    asked = sorted(asked)
    # A third of a millisecond: no arrival coincides with the end of a step.
    plain = [Plain(at + 1 / 3, prompt, output) for at, prompt, output in asked]
    run_plainly(plain)
    cluster = make_cluster(
        make_spec(
            "m0", Role.MIXED, max_num_batched_tokens=BUDGET, max_num_seqs=MAX_SEQS, num_blocks=9_999
        ),
        dispatch_ms=0.0,
        router={"policy": "round_robin"},
    )
    cluster.offer(
        make_request(index, at + 1 / 3, prompt, output)
        for index, (at, prompt, output) in enumerate(asked)
    )
    cluster.run()
    for expected, record in zip(plain, cluster.records, strict=True):
        assert record.ttft_ms is not None
        assert record.e2e_ms is not None
        arrives_ms = record.request.arrival_ns / 1e6
        assert abs(arrives_ms + record.ttft_ms - expected.first_ms) < 0.01
        assert abs(arrives_ms + record.e2e_ms - expected.end_ms) < 0.01
