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
from isthmus.router import DecisionRecord, Outcome
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
    assert told["measured_ms"] == {"tokenise": 2.0, "ttft": 90.0}
    assert told["predicted_ms"]["ttft"] > 0
    assert told["slo"]["class_name"] == "gold"
    assert told["decision"]["decode"]["instance_id"] == "d0"
    assert told["outcomes"] == ["first_token", "finished"]
    assert told["timeline"]["first_flush"] == 90 * MS
