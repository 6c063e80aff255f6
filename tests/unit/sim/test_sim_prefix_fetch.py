"""A prompt's first tokens come from the decode instance, as in ``prefill_worker.prefix_fetch``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.cluster import LoadReport, Role
from isthmus.common.ids import InstanceId
from isthmus.prefill_worker.prefix_fetch import num_fetchable_tokens
from isthmus.sim.cluster import SimCluster
from isthmus.sim.flight import START_NS
from isthmus.sim.kv_pool import KvPool
from isthmus.sim.prefix_fetch import FetchLine
from isthmus.sim.records import RequestEnd
from isthmus.sim.sequence import SimSequence
from tests.support.sim_runs import (
    MODEL,
    MS,
    chain,
    check_over,
    listen_always,
    make_cluster,
    make_request,
    make_scenario,
    make_spec,
)

BLOCK, PROMPT, HELD = 16, 1_000, 50 * 16
TOKEN_BYTES = 4_096
AGAIN_MS = 5_000.0
SLOW = 8_192.0  # bytes per ms: the prefix takes 400 ms
P0, D0 = InstanceId("p0"), InstanceId("d0")


def second_turn(
    *, least: int = 64, bytes_per_ms: float = 4_096_000.0, blocks: int = 1_000, **changes: Any
) -> SimCluster:
    """d0 holds 50 blocks of the second prompt; p0 has lost them, since it was started again."""
    cluster = make_cluster(
        make_spec("p0", Role.PREFILL, fetch_min_tokens=least, num_blocks=blocks,
                  link_bytes_per_ms=bytes_per_ms),
        make_spec("d0", Role.DECODE, link_bytes_per_ms=bytes_per_ms),
        router={"policy": "round_robin", "min_remote_tokens": 0},
        **changes,
    )  # fmt: skip
    hashes = chain(PROMPT // BLOCK)
    cluster.offer(
        [
            make_request(0, prompt=HELD, hashes=hashes[:50]),
            make_request(1, AGAIN_MS, prompt=PROMPT, hashes=hashes),
        ]
    )
    cluster.queue.at(START_NS + 2_000 * MS, cluster.kill, P0)
    cluster.queue.at(START_NS + 3_000 * MS, cluster.start_again, P0)
    return cluster


def at(cluster: SimCluster, after_ms: float, what: Any, argument: Any = None) -> None:
    cluster.queue.at(START_NS + round((AGAIN_MS + after_ms) * MS), what, argument)


def test_what_comes_is_not_computed() -> None:
    cluster = second_turn()
    assert cluster.run()
    record = cluster.records[1]
    assert record.num_cached == HELD
    asked_ms = 1.0 + 2.0 + HELD * TOKEN_BYTES / 4_096_000.0  # dispatch, set-up, travel
    computed_ms = MODEL.prefill_ms(PROMPT - HELD, HELD)
    assert record.ttft_ms == pytest.approx(asked_ms + computed_ms, abs=1e-3)
    assert cluster.fetches.num_bytes == HELD * TOKEN_BYTES
    assert record.predicted_ttft_ms == pytest.approx(record.ttft_ms, abs=2.0)
    index = cluster.router.state.index
    assert index.num_blocks(P0) == index.num_blocks(D0) == PROMPT // BLOCK
    check_over(cluster)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"least": 0}, id="never"),
        pytest.param({"least": HELD + 1}, id="too little"),
        pytest.param({"bytes_per_ms": 800.0}, id="too slow"),
    ],
)
def test_what_does_not_come_is_computed(changes: dict[str, Any]) -> None:
    cluster = second_turn(**changes)
    assert cluster.run()
    record = cluster.records[1]
    assert (record.end, record.num_cached) == (RequestEnd.FINISHED, 0)
    waited_ms = 2_000.0 if "bytes_per_ms" in changes else 0.0
    expected_ms = 1.0 + waited_ms + MODEL.prefill_ms(PROMPT)
    assert record.ttft_ms == pytest.approx(expected_ms, abs=1e-3)
    check_over(cluster)


def test_blocks_that_the_waiting_want_are_not_taken() -> None:
    cluster = second_turn(blocks=70)  # of which another prompt takes 40 first
    cluster.offer([make_request(2, AGAIN_MS - 1, prompt=640)])
    assert cluster.run()
    assert cluster.fetches.num_bytes == 0.0
    assert all(record.end is RequestEnd.FINISHED for record in cluster.records)
    check_over(cluster)


def test_who_waits_for_a_prefix_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``PrefixFetches.waiting``: a prompt, with what is left of it to compute."""
    cluster = second_turn(bytes_per_ms=SLOW, report_interval_ms=10.0)
    told: list[LoadReport] = []
    monkeypatch.setattr(cluster.router.state, "reported", lambda report, _: told.append(report))
    listen_always(cluster)
    cluster.queue.run(until_ns=START_NS + round((AGAIN_MS + 200) * MS))
    last = next(report for report in reversed(told) if report.instance_id == P0)
    assert (last.waiting_seqs, last.prompt_seqs) == (1, 1)
    assert last.waiting_tokens == PROMPT - HELD
    assert last.free_blocks == last.num_blocks - HELD // BLOCK
    assert cluster.run()
    check_over(cluster)


@pytest.mark.parametrize("name", [P0, D0], ids=["who fetches", "who has it"])
def test_who_dies_takes_the_fetch_along(name: InstanceId) -> None:
    cluster = second_turn(bytes_per_ms=SLOW)
    at(cluster, 200.0, cluster.kill, name)
    at(cluster, 300.0, cluster.start_again, name)
    assert cluster.run()
    assert cluster.fetches.num_bytes > 0
    assert cluster.records[1].end is (
        RequestEnd.FINISHED if name == P0 else RequestEnd.REJECTED  # d0 is not asked twice
    )
    check_over(cluster)


def test_a_client_that_leaves_ends_the_fetch() -> None:
    cluster = second_turn(bytes_per_ms=SLOW)
    at(cluster, 200.0, lambda _: cluster._cancel(cluster._flights[1]))
    assert cluster.run()
    assert cluster.fetches.num_bytes > 0
    assert cluster.records[1].end is RequestEnd.CANCELLED
    check_over(cluster)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 12), st.integers(1, 64))
def test_it_asks_for_what_a_worker_asks_for(
    num_prompt: int, num_held: int, num_here: int, least: int
) -> None:
    num_held = min(num_held, num_prompt) // BLOCK * BLOCK
    hashes = chain(num_prompt // BLOCK)
    here = list(hashes[:num_here])
    pool = KvPool(100, BLOCK)
    assert pool.try_take([], len(here))
    pool.release(pool.publish(here), 0)
    wanted = num_fetchable_tokens(num_prompt, num_held, BLOCK)
    missing = max(0, wanted - len(here) * BLOCK)
    sequence = SimSequence(object(), num_prompt, 1, hashes)
    line = FetchLine(pool, least)
    assert line.try_enter(sequence, num_held, 0) == (missing if missing >= least else 0)
    if sequence in list(line):
        line.arrived(sequence)
        assert pool.match(hashes, 100) == max(wanted // BLOCK, len(here))
    line.check_integrity()
    pool.check_integrity()
    assert pool.used == 0


def test_instances_of_a_scenario_fetch_as_live_ones_do() -> None:
    from isthmus.common.config import TransferConfig
    from isthmus.sim.build import make_specs

    pool = {"profile": {"coefficients": {"prefill_token": 0.1}}}
    specs = make_specs(
        make_scenario(
            pools=[
                {"role": "prefill", **pool},
                {"role": "prefill", "prefix_cache": False, **pool},
                {"role": "prefill", "batching": "prompts_first", **pool},
                {"role": "decode", **pool},
            ]
        )
    )
    least = TransferConfig().fetch_min_tokens
    assert [spec.fetch_min_tokens for spec in specs] == [least, 0, 0, 0]
