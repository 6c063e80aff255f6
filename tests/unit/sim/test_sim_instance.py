"""One instance of each role behind the router, followed to the millisecond."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.sim.records import RequestEnd
from isthmus.sim.spec import Batching
from tests.support.sim_runs import (
    MODEL,
    chain,
    check_over,
    listen_always,
    make_cluster,
    make_request,
    make_spec,
)

QUIET = {"dispatch_ms": 0.0, "transfer_setup_ms": 0.0}


def decode_ms(num_steps: int, num_tokens: int, num_seqs: int = 1) -> float:
    """Steps of equally long sequences; the first attends to ``num_tokens`` each."""
    return sum(
        MODEL.decode_ms(num_seqs, num_seqs * (num_tokens + step)) for step in range(num_steps)
    )


def test_a_request_alone_takes_what_the_model_says() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED), **QUIET)
    cluster.offer([make_request(0, prompt=100, output=10)])
    assert cluster.run()
    (record,) = cluster.records
    assert record.ttft_ms == pytest.approx(MODEL.prefill_ms(100), abs=1e-3)
    assert record.e2e_ms == pytest.approx(MODEL.prefill_ms(100) + decode_ms(9, 101), abs=1e-3)
    assert record.second_gap_ms == pytest.approx(decode_ms(1, 101), abs=1e-3)
    check_over(cluster)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    spec = make_spec("m0", Role.MIXED, max_num_batched_tokens=64)
    cluster = make_cluster(spec, **QUIET)
    cluster.offer([make_request(0, prompt=150, output=1)])
    cluster.run()
    chunks = [MODEL.prefill_ms(64), MODEL.prefill_ms(64, 64), MODEL.prefill_ms(22, 128)]
    assert cluster.records[0].e2e_ms == pytest.approx(sum(chunks), abs=1e-3)
    check_over(cluster)


def test_a_pair_sends_the_first_token_from_prefill_and_the_kv_after_it() -> None:
    num_bytes = 100 * 4_096
    specs = [make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE)]
    specs = [make_spec(s.instance_id, s.role, link_bytes_per_ms=num_bytes / 50) for s in specs]
    cluster = make_cluster(*specs, dispatch_ms=0.0, transfer_setup_ms=2.0)
    cluster.offer([make_request(0, prompt=100, output=10)])
    cluster.run()
    (record,) = cluster.records
    assert not record.is_local
    assert record.ttft_ms == pytest.approx(MODEL.prefill_ms(100), abs=1e-3)
    # One chunk: nothing travels before it is computed.
    assert record.second_gap_ms == pytest.approx(2 + 50 + decode_ms(1, 101), abs=0.01)
    check_over(cluster)


@pytest.mark.parametrize("output", [1, 10])
def test_the_way_to_the_client_delays_the_first_token_and_the_end_alike(output: int) -> None:
    found = []
    for delivery_ms in (0.0, 30.0):
        cluster = make_cluster(
            make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE), delivery_ms=delivery_ms
        )
        cluster.offer([make_request(0, output=output)])
        cluster.run()
        found.append(cluster.records[0])
        check_over(cluster)
    near, far = found
    assert near.ttft_ms is not None
    assert near.e2e_ms is not None
    assert far.ttft_ms == pytest.approx(near.ttft_ms + 30)
    assert far.e2e_ms == pytest.approx(near.e2e_ms + 30)
    assert (far.tpot_ms is None) == (near.tpot_ms is None) == (output == 1)
    assert far.second_gap_ms == near.second_gap_ms


def test_two_transfers_share_a_link() -> None:
    num_bytes = 100 * 4_096
    slow = {"link_bytes_per_ms": num_bytes / 50, "max_num_batched_tokens": 200}
    cluster = make_cluster(
        make_spec("p0", Role.PREFILL, **slow), make_spec("d0", Role.DECODE, **slow), **QUIET
    )
    cluster.offer([make_request(0), make_request(1, at_ms=1)])
    cluster.run()
    gaps = [record.second_gap_ms for record in cluster.records]
    first_ms, second_ms = MODEL.prefill_ms(100), MODEL.prefill_ms(100)
    assert second_ms < 50, "the second begins while the first travels"
    assert gaps[0] is not None
    assert gaps[0] > 50 + first_ms / 4
    check_over(cluster)


def test_decodes_get_a_token_in_every_step_beside_the_chunks_of_a_long_prompt() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED, max_num_batched_tokens=64), **QUIET)
    cluster.offer([make_request(0, prompt=60, output=50), make_request(1, 30, 1_000, 2)])
    cluster.run()
    talker, reader = cluster.records
    longest_step = MODEL.mixed_ms(MODEL.chunk_ms(64, 1_000), 1, 200)
    assert talker.tpot_ms is not None
    assert MODEL.decode_ms(1, 60) < talker.tpot_ms < longest_step
    assert reader.ttft_ms is not None
    assert reader.ttft_ms > 1_000 / 63 * (5 + 6.3)
    check_over(cluster)


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED), **QUIET)
    hashes = chain(100 // 16)
    cluster.offer([make_request(0, hashes=hashes), make_request(1, 5_000, hashes=hashes)])
    cluster.run()
    assert [record.num_cached for record in cluster.records] == [0, 96]
    assert cluster.records[1].ttft_ms == pytest.approx(MODEL.prefill_ms(4, 96), abs=1e-3)
    check_over(cluster)


def test_the_router_learns_who_has_a_prefix_and_sends_its_like_there() -> None:
    specs = [make_spec(f"m{number}", Role.MIXED) for number in range(4)]
    cluster = make_cluster(*specs, **QUIET)
    hashes = chain(50)
    first = make_request(0, prompt=800, output=4, hashes=hashes)
    others = [make_request(n, 1_000 * n, prompt=800, output=4, hashes=hashes) for n in range(1, 5)]
    cluster.offer([first, *others])
    cluster.run()
    assert [record.num_cached for record in cluster.records[1:]] == [784] * 4
    check_over(cluster)


def test_when_blocks_run_out_the_youngest_gives_way_and_still_gets_every_token() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED, num_blocks=20), **QUIET)
    cluster.offer([make_request(0, 0, 100, 150), make_request(1, 1, 100, 150)])
    cluster.run()
    assert cluster.instances[InstanceId("m0")].num_preempted > 0
    assert [record.num_tokens for record in cluster.records] == [150, 150]
    first, second = cluster.records
    assert first.end_ns is not None
    assert second.end_ns is not None
    assert first.end_ns < second.end_ns
    check_over(cluster)


def test_one_that_gave_way_is_no_prompt_once_it_has_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the engine reports it: nobody waits for its first token."""
    cluster = make_cluster(
        make_spec("m0", Role.MIXED, num_blocks=20), report_interval_ms=7.0, **QUIET
    )
    instance = cluster.instances[InstanceId("m0")]
    told: list[tuple[int, int | None]] = []
    monkeypatch.setattr(
        cluster.router.state,
        "reported",
        lambda report, _: told.append((report.waiting_seqs, report.prompt_seqs)),
    )
    listen_always(cluster)
    cluster.offer([make_request(0, 0, 100, 150), make_request(1, 1, 100, 150)])
    assert cluster.run()
    assert instance.num_preempted > 0
    begun = told.index((0, 0))  # both have a token
    assert {num_prompts for _, num_prompts in told[:begun]} == {1, 2}
    assert {num_waiting for num_waiting, _ in told[begun:]} == {0, 1}
    assert {num_prompts for _, num_prompts in told[begun:]} == {0}
    check_over(cluster)


def test_reservations_wait_in_line_for_blocks() -> None:
    cluster = make_cluster(
        make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE, num_blocks=10), **QUIET
    )
    cluster.offer([make_request(number, prompt=130, output=4) for number in range(3)])
    cluster.run()
    starts = [record.ttft_ms for record in cluster.records]
    assert all(value is not None for value in starts)
    assert starts == sorted(starts, key=lambda value: value or 0)
    check_over(cluster)


def test_kv_that_moves_while_later_chunks_are_computed_is_counted_too() -> None:
    cluster = make_cluster(
        make_spec("p0", Role.PREFILL, max_num_batched_tokens=64),
        make_spec("d0", Role.DECODE),
        router={"policy": "round_robin", "min_remote_tokens": 0},
        **QUIET,
    )
    cluster.offer([make_request(0, prompt=150)])
    cluster.run()
    assert not cluster.records[0].is_local
    assert cluster.handovers.num_bytes == 150 * 4_096
    check_over(cluster)


def test_an_output_of_one_token_moves_no_kv() -> None:
    cluster = make_cluster(make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE), **QUIET)
    cluster.offer([make_request(0, output=1)])
    cluster.run()
    assert cluster.handovers.num_bytes == 0
    assert cluster.records[0].end is RequestEnd.FINISHED
    check_over(cluster)


def test_prompts_first_batches_everything_that_waits() -> None:
    spec = make_spec("m0", Role.MIXED, batching=Batching.PROMPTS_FIRST)
    cluster = make_cluster(spec, **QUIET)
    cluster.offer([make_request(0), make_request(1, 1), make_request(2, 2)])
    cluster.run()
    first_ms = MODEL.prefill_ms(100)
    both_ms = MODEL.prefill_base + 2 * MODEL.chunk_ms(100, 0)
    assert cluster.records[0].ttft_ms == pytest.approx(first_ms, abs=1e-3)
    assert cluster.records[1].ttft_ms == pytest.approx(first_ms + both_ms - 1, abs=1e-3)
    assert cluster.records[2].ttft_ms == pytest.approx(first_ms + both_ms - 2, abs=1e-3)
    # Its first decode step came after the others' prompts.
    assert cluster.records[0].second_gap_ms == pytest.approx(
        both_ms + MODEL.decode_ms(3, 303), abs=1e-3
    )
    check_over(cluster)
