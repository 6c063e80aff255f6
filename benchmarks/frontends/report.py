"""The results as one table: a row for each side and way of streaming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = (
    "side", "step ms", "at once or a second", "requests / CPU s", "CPU µs", "requests/s",
    "frontend's core",
    "TTFT p50 ms", "ms a token", "added p50 ms", "added p99 ms", "foreign cores",
)  # fmt: skip


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for key, result in results.items():
        name, step_ms = key.split()
        parts = [part for part in result if part.isdigit() or part.endswith("/s")]
        lines += [_row(name, step_ms, part, result) for part in parts]
    return "\n".join(lines) + "\n"


def _row(name: str, step_ms: str, load: str, result: Mapping[str, Any]) -> str:
    """``load``: so many at once, or so many a second."""
    figures = result[load]
    beside = result["beside"] if load == "1" else result.get(f"{load} beside")
    cells = (
        name, step_ms, load,
        f"{figures['requests_per_cpu_s']:.0f}", f"{figures['cpu_us']:.0f}",
        f"{figures['requests_per_s']:.0f}", f"{figures['cpu_share']:.0%}",
        f"{figures['ttft_p50_ms']:.2f}",
        f"{(figures['e2e_p50_ms'] - figures['ttft_p50_ms']) / (result['tokens'] - 1):.2f}",
        *(
            f"{figures[f'ttft_{p}_ms'] - beside[f'ttft_{p}_ms']:.2f}" if beside else "–"
            for p in ("p50", "p99")
        ),
        f"{result['foreign_cores']:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"
