"""Instances that die or slow down, clients that leave."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.common.types import Slo
from isthmus.sim.flight import START_NS
from isthmus.sim.records import RequestEnd
from isthmus.sim.report import make_report
from tests.support.sim_runs import MS, check_over, make_cluster, make_request, make_spec


def test_a_stream_goes_on_elsewhere_with_the_tokens_it_has() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED), make_spec("m1", Role.MIXED))
    cluster.offer([make_request(0, output=100)])
    cluster.queue.at(START_NS + 500 * MS, lambda _: cluster.kill(busy(cluster)))
    cluster.run()
    (record,) = cluster.records
    assert record.end is RequestEnd.FINISHED
    assert (record.num_attempts, record.num_tokens) == (2, 100)
    assert record.ttft_ms is not None
    assert record.ttft_ms < 500, "the first token was out before"
    check_over(cluster)


def busy(cluster: object) -> InstanceId:
    instances = cluster.instances.values()  # type: ignore[attr-defined]
    return next(i.spec.instance_id for i in instances if i.num_sequences)


def test_a_dead_prefill_instance_costs_the_prompt_not_the_request() -> None:
    cluster = make_cluster(make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE))
    cluster.offer([make_request(0, prompt=2_000)])
    cluster.queue.at(START_NS + 20 * MS, lambda _: cluster.kill(InstanceId("p0")))
    cluster.run()
    (record,) = cluster.records
    assert record.end is RequestEnd.FINISHED
    assert record.is_local
    check_over(cluster)


def test_an_instance_comes_back_empty_with_a_new_epoch() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED))
    cluster.offer([make_request(0, output=100), make_request(1, at_ms=3_000)])
    name = InstanceId("m0")
    cluster.queue.at(START_NS + 200 * MS, lambda _: cluster.kill(name))
    cluster.queue.at(START_NS + 1_000 * MS, lambda _: cluster.start_again(name))
    cluster.run()
    # The first may not go back to where it failed; the second may.
    assert [record.end for record in cluster.records] == [
        RequestEnd.REJECTED,
        RequestEnd.FINISHED,
    ]
    assert cluster.instances[name].epoch == 2
    check_over(cluster)


def test_an_instance_that_came_back_is_one_in_the_utilisation() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED))
    cluster.offer([make_request(0), make_request(1, at_ms=3_000)])
    name = InstanceId("m0")
    cluster.queue.at(START_NS + 1_000 * MS, lambda _: cluster.kill(name))
    cluster.queue.at(START_NS + 2_000 * MS, lambda _: cluster.start_again(name))
    cluster.run()
    busy_ns = sum(i.busy_ns for i in (*cluster.retired, *cluster.instances.values()))
    use = make_report("back", cluster).roles["mixed"]
    assert use.num_instances == 1
    assert use.utilisation == pytest.approx(busy_ns / cluster.since_start_ns)


def test_a_dead_instance_is_paid_for_all_the_same() -> None:
    cluster = make_cluster(
        make_spec("m0", Role.MIXED, num_gpus=4), make_spec("m1", Role.MIXED, num_gpus=2)
    )
    cluster.offer([make_request(0), make_request(1, at_ms=3_000)])
    cluster.queue.at(START_NS + 1_000 * MS, lambda _: cluster.kill(InstanceId("m0")))
    cluster.run()
    report = make_report("one left", cluster)
    assert (report.num_instances, report.num_gpus) == (2, 6)
    assert (report.roles["mixed"].num_instances, report.roles["mixed"].num_gpus) == (2, 6)
    assert report.goodput_per_gpu == report.total.goodput / 6 > 0


def test_without_anybody_to_serve_it_a_request_waits_as_long_as_the_gateway_would() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED), instance_wait_ms=2_000)
    cluster.kill(InstanceId("m0"))
    cluster.offer([make_request(0), make_request(1, at_ms=4_000)])
    cluster.queue.at(START_NS + 5_000 * MS, lambda _: cluster.start_again(InstanceId("m0")))
    cluster.run()
    assert [record.end for record in cluster.records] == [
        RequestEnd.REJECTED,
        RequestEnd.FINISHED,
    ]
    assert cluster.records[0].reason == "out_of_reach"
    check_over(cluster)


def test_a_client_that_leaves_gives_everything_back_at_every_stage() -> None:
    specs = [make_spec("p0", Role.PREFILL), make_spec("d0", Role.DECODE, num_blocks=40)]
    for leaves_ms in (0.5, 3, 20, 106, 108, 150, 400):
        cluster = make_cluster(*specs)
        cancel = round(leaves_ms * MS)
        cluster.offer([make_request(0, prompt=600, output=60, cancel_ns=cancel)])
        cluster.offer([make_request(1, at_ms=1, prompt=600, output=60)])
        cluster.run()
        assert [r.end for r in cluster.records] == [RequestEnd.CANCELLED, RequestEnd.FINISHED]
        check_over(cluster)


def test_a_client_that_leaves_counts_as_offered_once_a_target_is_missed() -> None:
    """As the gateway counts it."""
    for leaves_ms, num_offered in ((20, 1), (40, 2)):
        cluster = make_cluster(make_spec("m0", Role.MIXED))
        slo = Slo("gold", ttft_ms=30)
        leaves = make_request(0, prompt=600, output=60, slo=slo, cancel_ns=leaves_ms * MS)
        cluster.offer([leaves, make_request(1, at_ms=5_000)])
        cluster.run()
        report = make_report("leaves", cluster)
        assert report.total.verdicts == {"cancelled": 1, "good": 1}
        assert report.total.num_offered == num_offered
        assert report.total.attainment == 1 / num_offered


def test_a_slow_instance_takes_longer_for_a_while() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED))
    cluster.offer([make_request(0), make_request(1, 5_000), make_request(2, 10_000)])
    name = InstanceId("m0")
    cluster.queue.at(START_NS + 4_000 * MS, lambda _: cluster.slow_down(name, 3.0))
    cluster.queue.at(START_NS + 9_000 * MS, lambda _: cluster.slow_down(name, 1.0))
    cluster.run()
    before, slow, after = (record.tpot_ms or 0.0 for record in cluster.records)
    assert abs(slow / before - 3.0) < 0.01
    assert abs(after / before - 1.0) < 0.01
    check_over(cluster)


def test_a_stream_that_goes_on_elsewhere_is_due_from_the_first_token_that_its_client_has() -> None:
    cluster = make_cluster(make_spec("m0", Role.MIXED), make_spec("m1", Role.MIXED))
    cluster.offer([make_request(0, output=100)])
    cluster.queue.at(START_NS + 500 * MS, lambda _: cluster.kill(busy(cluster)))
    found = []

    def look(_: object) -> None:
        (scheduler,) = [i._scheduler for i in cluster.instances.values() if i.num_sequences]
        found.extend((s.first_ns, s.num_first) for s in scheduler.running)

    cluster.queue.at(START_NS + 800 * MS, look)
    cluster.run()
    (record,) = cluster.records
    assert record.num_attempts == 2
    assert record.first_ns is not None
    assert found == [(START_NS + record.first_ns, 1)]
