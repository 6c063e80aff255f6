"""How commands speak: text for people, JSON for programs. The only module of the CLI that prints.

Results go to stdout, everything else (progress, warnings, errors) to stderr, so that the output of
``--output json`` can always be parsed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum, StrEnum
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from isthmus.common.errors import IsthmusError
from isthmus.workload.figures import Spread, written
from isthmus.workload.search import LASTING


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


# A pipe has no width.
_WIDTH = None if sys.stdout.isatty() else 240
_WIDEST = 1000
stdout = Console(highlight=False, soft_wrap=True, width=_WIDTH)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One line of JSON; dataclasses become objects."""
    sys.stdout.buffer.write(orjson.dumps(plain(value)) + b"\n")
    sys.stdout.flush()


def plain(value: object) -> Any:
    """A value of dicts, lists and scalars only."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def print_error(error: IsthmusError, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json({"error": {"code": error.code, "message": error.message}})
    else:
        stderr.print(f"[bold red]Error:[/] {escape(error.message)}")


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column)
    return made


def print_table(made: Table) -> None:
    """As wide as its contents: a narrow terminal breaks the lines, which beats cut cells."""
    width = Measurement.get(stdout, stdout.options.update(max_width=_WIDEST), made).maximum
    Console(highlight=False, soft_wrap=True, width=max(width, stdout.width)).print(made)


@contextmanager
def progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as bar:
        yield bar


def figures(item: Spread) -> tuple[str, ...]:
    """Cells of a table: mean, p50, p90, p99, max."""
    return tuple(written(value, 1) for value in (item.mean, item.p50, item.p90, item.p99, item.max))


def warn_of_short(span_s: float, wait_s: float, e2e: Spread) -> None:
    """Says that calls came for too short a time for their goodput to last, if so. ``wait_s``: how
    long a good one may wait."""
    needed_s = LASTING * max(wait_s, (e2e.p50 or 0.0) / 1e3)
    if span_s < needed_s:
        stderr.print(
            f"all calls came within {span_s:.3g} s, where {needed_s:.3g} s or more ({LASTING:g} "
            "times as long as a good one may wait, and as it takes) would show what can be kept up"
        )
