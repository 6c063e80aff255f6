"""What `isthmus explain` makes of a record."""

from __future__ import annotations

import pytest
from rich.console import Console

from isthmus.cli import output
from isthmus.cli.commands import explain
from isthmus.common.errors import NoInstanceError
from isthmus.common.ids import InstanceId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import Slo
from isthmus.router import DecisionRecord, Held, Outcome
from tests.support.router_cluster import Cluster, make_query

MS = 1_000_000
GOLD = Slo("gold", 500.0, 50.0, quantile=0.99, is_strict=True)


def record_of(cluster: Cluster, name: str = "r-0.0") -> DecisionRecord:
    return cluster.router.log.of_request(name)[-1]


@pytest.fixture
def decided() -> DecisionRecord:
    cluster = Cluster(2, 1)
    decision = cluster.router.route(make_query(name="r-0.0", slo=GOLD, tenant="acme"))
    timeline = Timeline({Event.ARRIVED: 0, Event.TOKENISED: 2 * MS, Event.FIRST_FLUSH: 90 * MS})
    cluster.router.report(decision.decision_id, Outcome.first_token())
    cluster.router.report(decision.decision_id, Outcome.finished(3.0, timeline))
    return record_of(cluster)


@pytest.fixture
def refused() -> DecisionRecord:
    cluster = Cluster(0, 1)
    cluster.router.state.stream_broken(InstanceId("d0"), 1, "test")
    with pytest.raises(NoInstanceError):
        cluster.router.route(make_query(name="r-0.0"))
    return record_of(cluster)


def shown(record: DecisionRecord, monkeypatch: pytest.MonkeyPatch) -> str:
    console = Console(width=200, record=True, highlight=False, file=None)
    monkeypatch.setattr(explain, "stdout", console)
    monkeypatch.setattr(explain, "print_table", console.print)
    explain.show(record)
    return console.export_text()


def test_a_decision_is_shown_with_its_why_and_its_times(
    decided: DecisionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(decided, monkeypatch)
    assert "class gold (TTFT ≤ 500 ms, TPOT ≤ 50 ms; 0.99 of them, strict)" in text
    assert "tenant acme" in text
    assert "first_token → finished" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert decided.decision is not None
    assert rows["ttft"] == [f"{decided.decision.predicted_ttft_ms:.1f}", "90.0"]
    assert rows["tokenise"] == ["–", "2.0"]
    assert len([line for line in text.splitlines() if "→ d0" in line and "by " not in line]) == 2


def test_a_refusal_is_shown_with_its_reason_and_who_was_left_out(
    refused: DecisionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(refused, monkeypatch)
    assert "refused  no_instance (out_of_reach)" in text
    assert "left out d0: suspect" in text
    assert "outcome" not in text


def test_json_has_predicted_and_measured_beside_each_other(decided: DecisionRecord) -> None:
    told = output.plain(explain.as_json(decided))
    assert told["measured_ms"] == {"tokenise": 2.0, "ttft": 90.0, "tpot": 3.0}
    assert told["predicted_ms"]["tpot"] > 0
    assert told["predicted_ms"]["ttft"] > 0
    assert told["slo"]["class_name"] == "gold"
    assert told["decision"]["decode"]["instance_id"] == "d0"
    assert told["outcomes"] == ["first_token", "finished"]
    assert told["timeline"]["first_flush"] == 90 * MS


def test_a_predicted_ttft_counts_from_the_arrival_as_the_measured_does() -> None:
    cluster = Cluster(1, 1)
    query = make_query(name="r-0.0", arrival_ns=cluster.clock.now_ns())
    cluster.clock.advance_ms(700)
    decision = cluster.router.route(query)
    record = record_of(cluster)
    predicted = explain.predicted_ms(record)
    assert predicted["ttft"] == pytest.approx(700 + decision.predicted_ttft_ms, abs=0.01)


def test_why_a_request_waited_or_is_late_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1, 1, policy="goodput", exploration=0)
    query = make_query(name="late", slo=Slo("a", 1_000.0), arrival_ns=cluster.clock.now_ns())
    cluster.clock.advance_ms(900)
    cluster.router.submit(query)
    assert "late: first of" in shown(record_of(cluster, "late"), monkeypatch)
    names = [f"r{number}" for number in range(8)]
    held = [
        name for name in names if isinstance(cluster.router.submit(make_query(600, name)), Held)
    ]
    for _ in range(100):
        cluster.clock.advance_ms(200)
        for name in ("p0", "d0"):
            cluster.report(name)
        cluster.router.tick()
    record = record_of(cluster, held[0])
    assert record.held_for
    assert f"waited   in the router: {record.held_for}" in shown(record, monkeypatch)
