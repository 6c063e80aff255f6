"""When decode instances compute prompts beside their answers, and how room is left for that."""

from __future__ import annotations

from isthmus.common.types import RouteDecision, Slo
from isthmus.router import Outcome
from isthmus.router.verdict import Admitted, Held
from tests.support.router_cluster import Cluster, make_query

SLO = Slo("both", ttft_ms=3_000, tpot_ms=60)


def submit(cluster: Cluster, num_tokens: int, name: str) -> RouteDecision | None:
    query = make_query(num_tokens, name, slo=SLO, arrival_ns=cluster.clock.now_ns())
    verdict = cluster.router.submit(query)
    if isinstance(verdict, Held):
        return None
    assert isinstance(verdict, Admitted)
    return verdict.decision


def cluster_that_knows_answers(num_tokens: int) -> Cluster:
    """One prefill and one decode instance; answers have had so many tokens."""
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    for _ in range(40):
        cluster.router.knowledge.lengths.observe("m", SLO.class_name, 320, num_tokens)
    return cluster


def test_a_prompt_is_computed_beside_answers_and_longer_beside_long_ones() -> None:
    predicted_ms = []
    for answer in (6, 200):
        cluster = cluster_that_knows_answers(answer)
        resident = submit(cluster, 64, "resident")
        assert resident is not None
        cluster.router.report(resident.decision_id, Outcome.first_token())
        assert submit(cluster, 1_500, "long") is not None  # the prefill instance is busy then
        cluster.clock.advance_ms(50)
        second = submit(cluster, 700, "second")
        assert second is not None
        assert second.prefill is None
        predicted_ms.append(second.predicted_ttft_ms)
    # Between 700 tokens fit so many steps as the pace leaves room for, or as there are answers.
    assert predicted_ms[1] > 1.3 * predicted_ms[0] > 1.3 * 700


def test_answers_are_packed_so_that_decode_instances_stay_free_for_prompts() -> None:
    cluster = Cluster(6, 6, policy="goodput", exploration=0)
    used = set()
    for number in range(6):
        decision = submit(cluster, 320, str(number))
        assert decision is not None
        assert decision.prefill is not None
        assert decision.decode is not None
        used.add(decision.decode.instance_id)
    assert len(used) == 1
    cluster.check()


def test_packing_ends_where_answers_would_be_too_slow() -> None:
    cluster = Cluster(30, 6, policy="goodput", exploration=0)
    used = []
    for number in range(30):
        decision = submit(cluster, 320, str(number))
        assert decision is not None
        assert decision.decode is not None
        assert decision.predicted_tpot_ms < 60
        used.append(decision.decode.instance_id)
    assert 2 <= len(set(used)) < 6


def test_answers_without_a_target_are_spread() -> None:
    cluster = Cluster(4, 4, policy="goodput", exploration=0)
    used = set()
    for number in range(4):
        query = make_query(320, str(number), slo=Slo("keen", ttft_ms=3_000))
        verdict = cluster.router.submit(query)
        assert isinstance(verdict, Admitted)
        assert verdict.decision.decode is not None
        used.add(verdict.decision.decode.instance_id)
    assert len(used) == 4


def test_a_short_wait_is_no_reason_to_compute_a_prompt_where_it_is_decoded() -> None:
    """Though the decode instance has no residents, and could begin at once."""
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    assert submit(cluster, 400, "first") is not None
    cluster.clock.advance_ms(380)  # nearly done
    decision = submit(cluster, 2_000, "next")
    assert decision is None or decision.prefill is not None
