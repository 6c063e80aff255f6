"""Where requests go: pairs, local prefill, caches, load, fairness."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from isthmus.common.cluster import LatencyModel, LinkRate, Role
from isthmus.common.ids import InstanceId
from isthmus.common.types import LocalPrefillReason, RouteDecision
from isthmus.router import FilterReason, Outcome
from tests.support.router_cluster import LATENCY, LAYOUT, Cluster, hashes_of, make_query

POLICIES = ["least_predicted_load", "round_robin", "least_loaded"]


def pair(decision: RouteDecision) -> tuple[str | None, str | None]:
    return (
        decision.prefill.instance_id if decision.prefill else None,
        decision.decode.instance_id if decision.decode else None,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_long_prompt_goes_to_a_pair(policy: str) -> None:
    cluster = Cluster(1, 1, policy=policy)
    decision = cluster.router.route(make_query())
    assert pair(decision) == ("p0", "d0")
    assert decision.local_reason is LocalPrefillReason.NONE
    assert decision.policy == policy
    assert decision.predicted_ttft_ms == pytest.approx(5 + 320)
    assert decision.predicted_tpot_ms > 20


@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompt_is_computed_on_decode(policy: str) -> None:
    cluster = Cluster(1, 1, policy=policy, min_remote_tokens=32)
    short = cluster.router.route(make_query(31))
    assert pair(short) == (None, "d0")
    assert short.local_reason is LocalPrefillReason.SHORT_PROMPT
    assert pair(cluster.router.route(make_query(32))) == ("p0", "d0")


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_that_decode_holds_already_is_not_computed_remotely(policy: str) -> None:
    cluster = Cluster(1, 1, policy=policy)
    query = make_query(320)
    cluster.store("d0", query.hash_chains[0])
    decision = cluster.router.route(query)
    assert pair(decision) == (None, "d0")
    assert decision.local_reason is LocalPrefillReason.PREFIX_CACHED
    assert decision.cached_tokens == 304  # never the last token, so never the last block


def test_half_cached_prompt_is_still_computed_remotely() -> None:
    cluster = Cluster(1, 1)
    query = make_query(320)
    cluster.store("d0", query.hash_chains[0][:10])
    assert pair(cluster.router.route(query)) == ("p0", "d0")


@pytest.mark.parametrize("policy", POLICIES)
def test_only_decode_up_means_local_prefill_with_the_reason(policy: str) -> None:
    cluster = Cluster(0, 2, policy=policy)
    decision = cluster.router.route(make_query())
    assert decision.prefill is None
    assert decision.local_reason is LocalPrefillReason.NO_PREFILL_INSTANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_instance_serves_alone(policy: str) -> None:
    cluster = Cluster(mixed=1, policy=policy)
    decision = cluster.router.route(make_query())
    assert pair(decision) == (None, "m0")
    assert decision.local_reason is LocalPrefillReason.MIXED_ROLE


def test_swamped_prefill_pool_makes_local_prefill_the_better_choice() -> None:
    cluster = Cluster(1, 1)
    cluster.report("p0", waiting_seqs=20, waiting_tokens=10_000)
    decision = cluster.router.route(make_query())
    assert pair(decision) == (None, "d0")
    assert decision.local_reason is LocalPrefillReason.POLICY


def test_decode_instance_with_a_lucky_fit_gets_no_prompt_of_an_idle_prefill_pool() -> None:
    cluster = Cluster(0, 1)
    cluster.join("p0", Role.PREFILL, latency=replace(LATENCY, prefill_token=4.0))
    assert pair(cluster.router.route(make_query())) == ("p0", "d0")


def test_busy_decode_instance_is_spared_a_local_prefill() -> None:
    cluster = Cluster(1, 1)
    cluster.report("p0", waiting_seqs=4, waiting_tokens=1_500)
    cluster.report("d0", running_seqs=10, running_context_tokens=4_000, free_blocks=700)
    assert pair(cluster.router.route(make_query())) == ("p0", "d0")


def test_prefill_instance_with_the_prefix_is_chosen() -> None:
    cluster = Cluster(4, 1)
    query = make_query(320)
    cluster.store("p2", query.hash_chains[0][:15])
    decision = cluster.router.route(query)
    assert pair(decision) == ("p2", "d0")
    assert decision.cached_tokens == 240


def test_prefix_is_given_up_when_its_holder_is_swamped() -> None:
    cluster = Cluster(2, 1)
    query = make_query(320)
    cluster.store("p0", query.hash_chains[0][:15])
    cluster.report("p0", waiting_seqs=3, waiting_tokens=1_200)
    assert pair(cluster.router.route(query)) == ("p1", "d0")


def test_whole_prompt_ignores_caches() -> None:
    cluster = Cluster(1, 1)
    query = make_query(320, needs_whole_prompt=True)
    cluster.store("p0", query.hash_chains[0])
    cluster.store("d0", query.hash_chains[0])
    decision = cluster.router.route(query)
    assert pair(decision) == ("p0", "d0")
    assert decision.cached_tokens == 0
    assert decision.predicted_ttft_ms == pytest.approx(5 + 320)


def test_less_loaded_decode_instance_is_chosen() -> None:
    cluster = Cluster(1, 2)
    cluster.report("d0", running_seqs=8, running_context_tokens=4_000, free_blocks=700)
    assert pair(cluster.router.route(make_query())) == ("p0", "d1")


def test_burst_between_two_reports_is_spread() -> None:
    cluster = Cluster(4, 4)
    decisions = [cluster.router.route(make_query(name=str(n))) for n in range(40)]
    prefills = Counter(pair(decision)[0] for decision in decisions)
    decodes = Counter(pair(decision)[1] for decision in decisions)
    assert set(prefills.values()) == {10}
    assert set(decodes.values()) == {10}
    cluster.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_finished_at_once", [True, False])
@pytest.mark.parametrize("cause", ["suspect", "draining", "breaker"])
def test_one_of_four_unhealthy_leaves_an_even_spread_over_the_others(
    policy: str, is_finished_at_once: bool, cause: str
) -> None:
    cluster = Cluster(4, 4, policy=policy, breaker_failures=1, breaker_open_ms=60_000)
    for name, role in (("p1", Role.PREFILL), ("d2", Role.DECODE)):
        view = cluster.router.cluster.views[InstanceId(name)]
        if cause == "suspect":
            cluster.router.state.stream_broken(InstanceId(name), 1, "test")
        elif cause == "draining":
            draining = type(view.info.state).DRAINING
            cluster.join(name, role, state=draining)
        else:
            view.breaker.failed(cluster.clock.monotonic_ns())
    prefills: Counter[str | None] = Counter()
    decodes: Counter[str | None] = Counter()
    for number in range(60):
        decision = cluster.router.route(make_query(name=str(number)))
        prefills[pair(decision)[0]] += 1
        decodes[pair(decision)[1]] += 1
        if is_finished_at_once:
            cluster.router.report(decision.decision_id, Outcome.finished())
    assert prefills == {"p0": 20, "p2": 20, "p3": 20}
    assert decodes == {"d0": 20, "d1": 20, "d3": 20}


def test_sixty_four_idle_instances_are_all_used() -> None:
    cluster = Cluster(64, 64)
    used = set()
    for number in range(64):
        decision = cluster.router.route(make_query(name=str(number)))
        cluster.router.report(decision.decision_id, Outcome.finished())
        used |= set(pair(decision))
    assert len(used) == 128


def test_preferred_decode_is_honoured_while_it_is_healthy() -> None:
    cluster = Cluster(2, 4)
    query = make_query(prefer_decode=InstanceId("d3"))
    assert {pair(cluster.router.route(query))[1] for _ in range(8)} == {"d3"}
    cluster.router.state.stream_broken(InstanceId("d3"), 1, "test")
    assert pair(cluster.router.route(query))[1] != "d3"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_layout": LAYOUT.__class__("other weights", 4, 2, 16, 16, "float32")},
        {"kv_layout": LAYOUT.__class__("fingerprint", 4, 2, 32, 16, "float32")},
        {"connector": "nixl"},
        {"version": "0.2.0"},
    ],
)
def test_incompatible_pair_is_never_routed_and_says_why(changes: dict[str, object]) -> None:
    cluster = Cluster(decodes=1)
    cluster.join("p0", Role.PREFILL, **changes)
    decision = cluster.router.route(make_query())
    assert pair(decision) == (None, "d0")
    assert decision.local_reason is LocalPrefillReason.NO_PREFILL_INSTANCE
    snapshot = cluster.router.snapshot()
    assert not snapshot.is_disaggregated
    problems = {instance.instance_id: instance.problem for instance in snapshot.instances}
    assert "incompatible with d0" in problems[InstanceId("p0")]
    assert "here" in problems[InstanceId("p0")]
    record = cluster.router.log.last(1)[0]
    assert record.filtered == {InstanceId("p0"): FilterReason.INCOMPATIBLE}


def test_patch_levels_are_compatible_and_tp_sizes_too() -> None:
    cluster = Cluster(decodes=1)
    halved = LAYOUT.__class__("fingerprint", 4, 1, 16, 16, "float32", tp_size=2)
    cluster.join("p0", Role.PREFILL, version="0.1.7", kv_layout=halved)
    assert pair(cluster.router.route(make_query())) == ("p0", "d0")
    assert cluster.router.snapshot().is_disaggregated


def test_two_models_in_one_cluster_keep_apart() -> None:
    cluster = Cluster(1, 1)
    other = LAYOUT.__class__("other", 4, 2, 16, 16, "float32")
    cluster.join("p1", Role.PREFILL, model="n", kv_layout=other)
    cluster.join("d1", Role.DECODE, model="n", kv_layout=other)
    assert pair(cluster.router.route(make_query())) == ("p0", "d0")
    assert pair(cluster.router.route(make_query(model="n"))) == ("p1", "d1")


def test_faster_instance_gets_more_work() -> None:
    cluster = Cluster(decodes=1)
    cluster.join("p0", Role.PREFILL, latency=LatencyModel(5, 1.0))
    cluster.join("p1", Role.PREFILL, latency=LatencyModel(5, 0.25))
    decisions = [cluster.router.route(make_query(name=str(n))) for n in range(10)]
    chosen = Counter(pair(decision)[0] for decision in decisions if decision.prefill)
    assert chosen["p1"] > 2 * chosen["p0"]


def test_silent_instance_is_doubted_more_and_more() -> None:
    cluster = Cluster(1, 2, stale_load_ms=1_000)
    cluster.report("d1", running_seqs=2, running_context_tokens=200)
    cluster.clock.advance_ms(1_500)
    assert pair(cluster.router.route(make_query()))[1] == "d0"
    cluster.clock.advance_ms(5_000)
    cluster.report("d1", running_seqs=2, running_context_tokens=200)
    assert pair(cluster.router.route(make_query()))[1] == "d1"


def test_a_link_that_was_measured_to_be_slow_is_avoided() -> None:
    """Two equal pairs' worth of instances; from p0 everything goes fifty thousand times slower."""
    cluster = Cluster(2, 1)
    slow = (LinkRate(InstanceId("d0"), 1e5),)
    fast = (LinkRate(InstanceId("d0"), 5e9),)
    for _ in range(4):
        cluster.report("p0", links=slow)
        cluster.report("p1", links=fast)
        decision = cluster.router.route(make_query())
        assert decision.prefill is not None
        assert decision.prefill.instance_id == "p1"
        cluster.router.report(decision.decision_id, Outcome.finished())


def test_unrelated_prefixes_share_nothing() -> None:
    cluster = Cluster(2, 1)
    cluster.store("p0", hashes_of(list(range(1_000, 1_320))))
    assert cluster.router.route(make_query()).cached_tokens == 0
