"""The goodput path after something went wrong: lost news, slow spells, absences, cancels."""

from __future__ import annotations

import pytest

from isthmus.common.types import Slo
from isthmus.router import Outcome, RouteQuery
from isthmus.router.verdict import Admitted
from tests.support.router_cluster import Cluster, make_query

STRICT = Slo("strict", ttft_ms=1_000, is_strict=True)


def cluster_of(prefills: int = 1, decodes: int = 1, **config: object) -> Cluster:
    return Cluster(prefills, decodes, policy="goodput", exploration=0, **config)


def ask(cluster: Cluster, name: str, num_tokens: int = 320, **changes: object) -> RouteQuery:
    return make_query(num_tokens, name, arrival_ns=cluster.clock.now_ns(), **changes)


def idle_for(cluster: Cluster, span_ms: float, *names: str) -> None:
    """Time passes; the instances report that nothing is there."""
    for _ in range(int(span_ms / 100)):
        cluster.clock.advance_ms(100)
        for name in names or ("p0", "d0"):
            cluster.report(name)


def test_prompt_whose_outcome_never_came_is_not_waited_for() -> None:
    cluster = cluster_of()
    assert isinstance(cluster.router.submit(ask(cluster, "lost", 600)), Admitted)
    idle_for(cluster, 3_000)
    assert cluster.router.state.ledger.pending("p0").prompts_ms == 0
    verdict = cluster.router.submit(ask(cluster, "next", 600, slo=STRICT))
    assert isinstance(verdict, Admitted)
    assert verdict.decision.prefill is not None
    assert verdict.decision.predicted_ttft_ms == pytest.approx(600 + 2 * 5)
    cluster.check()


def test_prompt_that_reports_speak_of_is_waited_for_however_long_it_takes() -> None:
    cluster = cluster_of()
    made = cluster.router.submit(ask(cluster, "slow", 600))
    assert isinstance(made, Admitted)
    for _ in range(30):
        cluster.clock.advance_ms(100)
        cluster.report("p0", running_seqs=1)
        cluster.report("d0")
    assert cluster.router.state.ledger.pending("p0").prompts_ms == pytest.approx(600 + 2 * 5)
    cluster.check()


def test_successor_of_a_cancelled_prompt_begins_when_that_was_cancelled() -> None:
    cluster = cluster_of()
    first = cluster.router.submit(ask(cluster, "first", 2_000))
    assert isinstance(first, Admitted)
    ledger = cluster.router.state.ledger
    cluster.clock.advance_ms(2_000)
    cluster.report("p0", running_seqs=1)
    cluster.report("d0")
    second = cluster.router.route(ask(cluster, "second", 600))
    assert second.prefill is not None
    cluster.clock.advance_ms(400)
    cluster.router.report(first.decision.decision_id, Outcome.cancelled())
    assert ledger.pending("p0").head_since_ns == cluster.clock.monotonic_ns()
    assert ledger.pending("p0").head_ms == pytest.approx(600 + 2 * 5)
    cluster.check()
