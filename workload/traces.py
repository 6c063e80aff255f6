"""Recorded workloads: the CSV of the Azure LLM inference traces and Mooncake's JSON lines.

- Azure (Splitwise, ISCA 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``, a date and a time.
- Mooncake (FAST 2025): ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``, one
  id for each 512 tokens of the prompt; equal ids are equal blocks behind equal ones.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from isthmus.common.errors import ConfigError
from isthmus.workload.types import Call

MOONCAKE_BLOCK_TOKENS = 512
_Row = tuple[float, int, int, tuple[int, ...]]  # seconds, prompt, output, blocks


def read_trace(path: Path, limit: int = 0) -> list[Call]:
    """By the name's ending: .csv is Azure's form, .jsonl Mooncake's. ``limit`` > 0: that many.

    Raises ConfigError, with the line, for what cannot be read."""
    readers = {".csv": read_azure, ".jsonl": read_mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: a trace ends in {' or '.join(readers)}", stage="workload")
    return reader(path, limit)


def read_azure(path: Path, limit: int = 0) -> list[Call]:
    """Raises ConfigError."""

    def rows(lines: Iterator[str]) -> Iterator[_Row]:
        for row in csv.DictReader(lines):
            # Seven digits of a second are more than the standard library reads on Python 3.11.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            seconds = (at - datetime(1970, 1, 1)).total_seconds()
            yield seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()

    return _read(path, rows, limit)


def read_mooncake(path: Path, limit: int = 0) -> list[Call]:
    """Raises ConfigError."""

    def rows(lines: Iterator[str]) -> Iterator[_Row]:
        for line in lines:
            if line.strip():
                item = json.loads(line)
                yield (
                    float(item["timestamp"]) / 1e3,
                    int(item["input_length"]),
                    int(item["output_length"]),
                    tuple(int(block) for block in item.get("hash_ids", ())),
                )

    return _read(path, rows, limit)


def _read(path: Path, rows: Callable[[Iterator[str]], Iterator[_Row]], limit: int) -> list[Call]:
    read: list[_Row] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for row in rows(iter(lines)):
                read.append(row)
                if len(read) == limit:
                    break
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", stage="workload") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: after {len(read)} calls: {error!r}", stage="workload"
        ) from error
    if not read:
        raise ConfigError(f"{path}: no calls in it", stage="workload")
    read.sort(key=lambda row: row[0])  # stable: calls of one moment keep their order
    start = read[0][0]
    return [
        Call(index, at - start, max(1, prompt), max(1, output), blocks)
        for index, (at, prompt, output, blocks) in enumerate(read)
    ]
