"""The table, the ratios and the plot of what was measured; knows how figures read, runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.bounds import Bounds
from benchmarks.engine.measure import (
    CONCURRENCIES,
    MEMORY,
    PROMPT_TOKENS,
    RATE,
    START,
    TPOT,
    TTFT,
    TTFT_REQUESTS,
    Reading,
    Round,
)
from benchmarks.limit import Limits
from isthmus.workload.plots import new_figure


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side; ``skipped`` says why it has none or not all."""

    name: str
    title: str
    rival: str
    bytes_per_weight: float
    num_rounds: int
    readings: Round
    skipped: str = ""


LABELS = {
    **{TTFT.format(n): f"TTFT, cold, {n} tokens (ms)" for n in TTFT_REQUESTS},
    TPOT: "TPOT, 1 request (ms)",
    **{RATE.format(n): f"output tokens/s, {n} at once" for n in CONCURRENCIES},
    MEMORY: "resident memory (MiB)",
    START: "start until ready (s)",
}
RATES = {RATE.format(n) for n in CONCURRENCIES}


def is_rate(name: str) -> bool:
    """Whether more is better."""
    return name in RATES


def text(reading: Reading | None) -> str:
    if reading is None:
        return "–"
    if reading.value is None:
        return reading.note
    digits = f"{reading.value:.0f}" if reading.value >= 100 else f"{reading.value:.3g}"
    marks = (" (cut)" if reading.is_cut else "") + (
        f" ({reading.num_errors} failed)" if reading.num_errors else ""
    )
    return digits + marks


def ratio(ours: Reading | None, theirs: Reading | None) -> float | None:
    """Ours over theirs; None where one has no value."""
    if ours is None or theirs is None or ours.value is None or not theirs.value:
        return None
    return ours.value / theirs.value


def bound_of(name: str, bounds: Bounds, output_tokens: int) -> float | None:
    """The best value the limits allow, in the figure's unit; None for memory and start."""
    for length in TTFT_REQUESTS:
        if name == TTFT.format(length):
            return 1e3 * bounds.prefill_s(length)
    if name == TPOT:
        return 1e3 * bounds.decode_step_s(1, PROMPT_TOKENS + output_tokens // 2)
    for concurrency in CONCURRENCIES:
        if name == RATE.format(concurrency):
            return bounds.tokens_per_s(concurrency, PROMPT_TOKENS, output_tokens)
    return None


def share_of_limit(
    name: str, reading: Reading | None, bounds: Bounds, output_tokens: int
) -> float | None:
    """1 is as good as the limit allows."""
    bound = bound_of(name, bounds, output_tokens)
    if bound is None or reading is None or not reading.value:
        return None
    return reading.value / bound if is_rate(name) else bound / reading.value


def rows(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *body)]


def figure_names(results: Sequence[Result]) -> list[str]:
    return [name for name in LABELS if any(name in result.readings for result in results)]


def markdown(
    results: Sequence[Result], bounds: Mapping[str, Bounds], limits: Limits,
    output_tokens: int, machine: Mapping[str, object],
) -> str:  # fmt: skip
    shown = [result for result in results if result.readings]
    names = figure_names(shown)
    titles = [f"{result.title} ×{result.num_rounds}" for result in shown]
    lines = [
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('features')}; reads "
        f"{limits.read_bytes_per_s / 1e9:.1f} GB/s and multiplies at "
        f"{limits.flops_per_s / 1e9:.0f} GFLOP/s with {limits.num_threads} threads. "
        f"{PROMPT_TOKENS} tokens in and {output_tokens} out unless said; medians of the rounds "
        "(×n). “cut”: the figure's time was up before its requests had ended.",
        "",
        *rows(
            ["figure", *titles],
            [[LABELS[name], *(text(r.readings.get(name)) for r in shown)] for name in names],
        ),
        "",
        "Share of what the limits allow (memory reads, matrix products in bf16):",
        "",
        *rows(["figure", *titles], share_rows(shown, names, bounds, output_tokens)),
    ]
    lines += ratio_lines(shown, names)
    lines += ["", "CPU that others used meanwhile (share of a core):", ""]
    body = [[LABELS[name], *(foreign(r.readings.get(name)) for r in shown)] for name in names]
    lines += rows(["figure", *titles], [row for row in body if any(c != "–" for c in row[1:])])
    skipped = [result for result in results if result.skipped]
    lines += ["", *(f"{result.title}: {result.skipped}." for result in skipped)]
    return "\n".join(lines).rstrip() + "\n"


def foreign(reading: Reading | None) -> str:
    return "–" if reading is None or not reading.foreign_cpu else f"{reading.foreign_cpu:.0%}"


def share_rows(
    shown: Sequence[Result], names: Sequence[str], bounds: Mapping[str, Bounds], output_tokens: int
) -> list[list[str]]:
    body = []
    for name in names:
        shares = [
            share_of_limit(name, r.readings.get(name), bounds[r.name], output_tokens) for r in shown
        ]
        if any(share is not None for share in shares):
            body.append([LABELS[name], *("–" if s is None else f"{s:.0%}" for s in shares)])
    return body


def ratio_lines(shown: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Ours over the peer's: below 1 is better for times, above 1 for tokens/s."""
    ours = {result.name: result for result in shown if not result.rival}
    peers = [result for result in shown if result.rival in ours]
    if not peers:
        return []
    body = []
    for name in names:
        values = [ratio(ours[p.rival].readings.get(name), p.readings.get(name)) for p in peers]
        body.append([LABELS[name], *("–" if v is None else f"{v:.2f}×" for v in values)])
    header = ["figure", *(f"{ours[p.rival].title} / {p.title}" for p in peers)]
    note = "Ours over the peer's (times: less is better; tokens/s: more is better):"
    return ["", note, "", *rows(header, body)]


def plot(
    results: Sequence[Result], bounds: Mapping[str, Bounds], output_tokens: int, target: Path
) -> None:
    """Three panels: TTFT by length, TPOT, tokens/s by concurrency. Raises ConfigError without
    matplotlib."""
    shown = [result for result in results if result.readings]
    figure, axes = new_figure(3, panel_inches=(5, 4.5))
    for result in shown:
        draw_line(axes[0], result, {n: TTFT.format(n) for n in TTFT_REQUESTS})
        draw_line(axes[2], result, {n: RATE.format(n) for n in CONCURRENCIES})
    tpots = [(r.title, r.readings[TPOT].value) for r in shown if TPOT in r.readings]
    known = [(title, value) for title, value in tpots if value is not None]
    axes[1].barh([title for title, _ in known], [value for _, value in known])
    axes[1].invert_yaxis()
    ours = next((bounds[result.name] for result in shown if not result.rival), None)
    if ours is not None:
        draw_limits(axes, ours, output_tokens)
    for axis, title, label in zip(
        axes,
        ("TTFT of a cold prompt (ms)", "TPOT of one request (ms)", "output tokens/s"),
        ("prompt tokens", "ms", "requests at once"),
        strict=True,
    ):
        axis.set_title(title)
        axis.set_xlabel(label)
    for axis in (axes[0], axes[2]):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[2].legend(fontsize="small")
    figure.savefig(target, dpi=130)


def draw_line(axis, result: Result, names: Mapping[int, str]) -> None:  # type: ignore[no-untyped-def]
    readings = result.readings
    points = {x: readings[name].value for x, name in names.items() if name in readings}
    known = {x: value for x, value in points.items() if value}
    axis.plot(list(known), list(known.values()), marker="o", label=result.title)


def draw_limits(axes, bounds: Bounds, output_tokens: int) -> None:  # type: ignore[no-untyped-def]
    """The limits for the first of our sides, dotted."""
    style = {"linestyle": ":", "color": "black"}
    lengths, counts = list(TTFT_REQUESTS), list(CONCURRENCIES)
    axes[0].plot(lengths, [1e3 * bounds.prefill_s(n) for n in lengths], **style)
    axes[1].axvline(bound_of(TPOT, bounds, output_tokens), **style)
    rates = [bounds.tokens_per_s(n, PROMPT_TOKENS, output_tokens) for n in counts]
    axes[2].plot(counts, rates, label="limit of the machine, bf16", **style)
