"""`isthmus bench transfer`: what moving KV costs here, connector by connector."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.options import Output
from isthmus.cli.output import OutputFormat, print_json, print_table, stderr, table
from isthmus.kvtransfer.bench.cases import cases_of, parse_size
from isthmus.kvtransfer.bench.report import plot as draw
from isthmus.kvtransfer.bench.report import rows_of
from isthmus.kvtransfer.bench.run import measure, ways_of

_CONNECTORS = ("shm", "nixl", "nixl, tcp", "ucx", "ucx, tcp", "collective")
_SIZES = ("16KiB", "360KiB", "1MiB", "4MiB", "16MiB")
_COUNTS = (1, 32, 1000)


def transfer(
    connector: Annotated[
        list[str] | None,
        typer.Option(help="Connectors, default: all; 'nixl, tcp' = with UCX_TLS=tcp."),
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="Bytes of a piece; default: 16KiB to 16MiB.")
    ] = None,
    count: Annotated[
        list[int] | None, typer.Option(min=1, help="Pieces of one write; default: 1, 32, 1000.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Memory of either side.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Each way has one turn a round.")] = 7,
    writes: Annotated[int, typer.Option(min=1, help="Writes of a turn; the median counts.")] = 7,
    save: Annotated[Path | None, typer.Option(help="Write all figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG.")] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Time writes between two processes, beside a plain copy and raw NIXL.

    Pieces lie scattered over both pools. Two cores must be free: both ends are driven all the time.
    """
    pool_bytes = parse_size(pool)
    cases = cases_of(size or _SIZES, count or _COUNTS, pool_bytes)
    ways = ways_of(connector or _CONNECTORS)
    with stderr.status("") as line:
        result = measure(ways, cases, pool_bytes, rounds, writes, line.update)
    rows = rows_of(result)
    found: dict[str, Any] = {
        "rows": rows,
        "left_out": result.left_out,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    if save:
        save.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(result, plot)
    if output is OutputFormat.JSON:
        print_json(found)
        return
    made = table("pieces", "way", "ms", "GB/s", "of memcpy", "of raw")
    for row in rows:
        made.add_row(
            row["case"],
            row["way"],
            f"{row['ms']:.3f}",
            f"{row['gigabytes_per_s']:.2f}",
            _ratio(row["of_memcpy"]),
            _ratio(row["of_raw"]),
        )
    print_table(made)
    for way, why in result.left_out.items():
        stderr.print(f"left out: {way}: {why}", markup=False)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
