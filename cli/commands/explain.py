"""`isthmus explain`: why a request went where it went, and what was measured of it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.markup import escape

from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, print_table, stdout, table
from isthmus.common.errors import InvalidRequestError
from isthmus.common.registry.embedded import EmbeddedRegistryClient
from isthmus.common.timeline import SPANS, spans_of
from isthmus.common.types import Slo
from isthmus.router.explain import DecisionRecord
from isthmus.router.explain_client import explain as ask_routers
from isthmus.router.explain_client import find_deciders

MS_PER_S = 1000


def explain(
    request_id: Annotated[
        str, typer.Argument(help="As in the header x-isthmus-request-id, or as the client gave it.")
    ],
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show why a request was sent where it was, or refused."""
    state = running_cluster(name, state_dir)
    records = asyncio.run(_records(state.registry_address, state.cluster, request_id))
    if not records:
        message = (
            f"no router of {name} knows {request_id}: it may be too long ago, or the gateway "
            "refused it before a router saw it"
        )
        raise InvalidRequestError(message, stage="explain")
    if output is OutputFormat.JSON:
        print_json([as_json(record) for record in records])
        return
    for record in records:
        show(record)


async def _records(registry_address: str, cluster: str, request_id: str) -> list[DecisionRecord]:
    registry = EmbeddedRegistryClient(registry_address)
    try:
        return await ask_routers(await find_deciders(registry, cluster), request_id)
    finally:
        await registry.close()


def measured_ms(record: DecisionRecord) -> dict[str, float]:
    """Stage → milliseconds, of the stages whose ends are both known, and the TPOT."""
    measured = {name: MS_PER_S * value for name, value in spans_of(record.timeline).items()}
    if record.tpot_ms is not None:
        measured["tpot"] = record.tpot_ms
    return {name: round(value, 3) for name, value in measured.items()}


def predicted_ms(record: DecisionRecord) -> dict[str, float]:
    """The same stages, as far as the router predicts them. The TTFT counts from the arrival, like
    the measured one: what had passed before the decision, and what that predicted."""
    decision = record.decision
    if decision is None:
        return {}
    predicted = {
        "ttft": record.elapsed_ms + decision.predicted_ttft_ms,
        "tpot": decision.predicted_tpot_ms,
    }
    if record.candidates:
        best = record.candidates[0]
        predicted |= {"queue": best.queue_ms, "prefill": best.prefill_ms}
    return {name: round(value, 3) for name, value in predicted.items()}


def as_json(record: DecisionRecord) -> dict[str, Any]:
    decision = record.decision
    return {
        "request_id": record.request_id,
        "at_unix_ns": record.at_ns,
        "num_prompt_tokens": record.num_prompt_tokens,
        "max_output_tokens": record.max_output_tokens,
        "slo": record.slo,
        "tenant": record.tenant,
        "decision": decision,
        "error": record.error,
        "candidates": record.candidates,
        "filtered": record.filtered,
        "num_filtered": record.num_filtered,
        "outcomes": record.outcomes,
        "held_for": record.held_for,
        "elapsed_ms": record.elapsed_ms,
        "predicted_ms": predicted_ms(record),
        "measured_ms": measured_ms(record),
        "timeline": {event.value: at_ns for event, at_ns in record.timeline.items()},
    }


def show(record: DecisionRecord) -> None:
    stdout.print(f"[bold]{escape(record.request_id)}[/]  {escape(describe_slo(record.slo))}")
    tenant = f"  tenant {record.tenant}" if record.tenant else ""
    stdout.print(
        f"prompt {record.num_prompt_tokens} tokens, output at most {record.max_output_tokens}"
        f"{escape(tenant)}"
    )
    stdout.print(escape(verdict_of(record)))
    if record.held_for:
        stdout.print(f"waited   in the router: {escape(record.held_for)}")
    if record.error is None:
        outcomes = " → ".join(kind.value for kind in record.outcomes) or "not known yet"
        stdout.print(f"outcome  {outcomes}")
    _show_stages(record)
    _show_candidates(record)
    for instance_id, reason in record.filtered.items():
        stdout.print(f"left out {escape(instance_id)}: {reason.value}")
    if record.num_filtered > len(record.filtered):
        stdout.print(f"left out {record.num_filtered - len(record.filtered)} more")


def describe_slo(slo: Slo) -> str:
    targets = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "E2E": slo.e2e_ms}
    said = [f"{name} ≤ {value:g} ms" for name, value in targets.items() if value is not None]
    mode = "strict" if slo.is_strict else "best effort"
    detail = f"{', '.join(said)}; {slo.quantile:g} of them, {mode}" if said else "no targets"
    return f"class {slo.class_name} ({detail})"


def verdict_of(record: DecisionRecord) -> str:
    if record.error is not None:
        error = record.error
        return f"refused  {error.code} ({error.reason}): {error.message}"
    decision = record.decision
    if decision is None or decision.decode is None:
        return "nothing was decided"
    where = decision.decode.instance_id
    path = f"{decision.prefill.instance_id} → {where}" if decision.prefill else f"{where} alone"
    why = f" ({decision.local_reason.value})" if decision.prefill is None else ""
    return f"{decision.action.value:<8} {path}{why}, by {decision.policy}: {decision.reason}"


def _show_stages(record: DecisionRecord) -> None:
    predicted, measured = predicted_ms(record), measured_ms(record)
    made = table("stage", "predicted ms", "measured ms")
    for stage in (*SPANS, "tpot"):
        if stage in predicted or stage in measured:
            made.add_row(stage, _figure(predicted.get(stage)), _figure(measured.get(stage)))
    if made.row_count:
        print_table(made)


def _show_candidates(record: DecisionRecord) -> None:
    if not record.candidates:
        return
    made = table("candidate", "score", "queue ms", "prefill ms", "TPOT ms", "cached", "local")
    for item in record.candidates:
        is_pair = item.prefill != item.decode
        made.add_row(
            f"{item.prefill} → {item.decode}" if is_pair else item.decode,
            _figure(item.score),
            _figure(item.queue_ms),
            _figure(item.prefill_ms),
            _figure(item.tpot_ms),
            str(item.cached_tokens),
            "" if is_pair else item.local_reason,
        )
    print_table(made)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
