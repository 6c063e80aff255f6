"""A measurement as rows, as JSON and as a picture (which needs matplotlib, the bench extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.kvtransfer.bench.run import Result
from isthmus.kvtransfer.bench.ways import MEMCPY
from isthmus.workload.plots import new_figure


def rows_of(result: Result) -> list[dict[str, Any]]:
    """One for each way and case; ``of_memcpy`` and ``of_raw`` are ratios of rates, None where there
    is nothing to compare with."""
    rows = []
    for series in result.series:
        memcpy = result.find(MEMCPY, series.case)
        raw_way = result.baseline(series.way)
        raw = result.find(raw_way, series.case) if raw_way else None
        rows.append(
            {
                "way": series.way,
                "piece_bytes": series.case.piece_bytes,
                "count": series.case.count,
                "case": series.case.name,
                "ms": 1e3 * series.median_s,
                "gigabytes_per_s": series.gigabytes_per_s,
                "of_memcpy": series.ratio_to(memcpy) if memcpy else None,
                "of_raw": series.ratio_to(raw) if raw else None,
                "seconds_by_round": series.seconds,
            }
        )
    return rows


def plot(result: Result, path: Path) -> None:
    """The rate over the size of a piece, one panel for each number of pieces. Raises ConfigError
    without matplotlib."""
    counts = sorted({series.case.count for series in result.series})
    figure, panels = new_figure(len(counts), panel_inches=(4.5, 4), shares_y=True)
    for panel, count in zip(panels, counts, strict=True):
        for way in dict.fromkeys(series.way for series in result.series):
            found = [s for s in result.series if s.way == way and s.case.count == count]
            found.sort(key=lambda series: series.case.piece_bytes)
            sizes = [series.case.piece_bytes for series in found]
            panel.plot(sizes, [series.gigabytes_per_s for series in found], "o-", label=way)
        panel.set(xscale="log", yscale="log", xlabel="bytes of a piece", title=f"{count} at once")
        panel.grid(visible=True, which="both", alpha=0.3)
    panels[0].set_ylabel("GB/s")
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)
