"""The table of ``table`` as Markdown, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf
from pathlib import Path

from benchmarks.simulator.table import ASKED, STEP, Cell, Known, Point, Runs, known
from isthmus.workload.plots import new_figure

Row = tuple[str, str, int]


def rows(runs: Runs) -> dict[tuple[Row, int], dict[str, Known]]:
    """By row and part: what is known of each policy."""
    found: dict[tuple[Row, int], dict[str, Known]] = {}
    for cell in runs.cells():
        found.setdefault((cell.row, cell.part), {})[cell.policy] = known(runs.of(cell))
    return found


def ratio(rates: dict[str, Known], policy: str) -> str:
    """Of ``policy`` to the best of the others, or what it is at least."""
    mine = rates.get(policy)
    others = [rate for name, rate in rates.items() if name != policy]
    if mine is None or not mine.low or not others:
        return ""
    # What holds less than a rate of the grid holds the one below it at most.
    most = max(rate.low if rate.is_found else rate.high / STEP for rate in others)
    if most == inf:
        return ""
    is_exact = mine.is_found and any(rate.is_found and rate.low == most for rate in others)
    return f"{'' if is_exact else '≥ '}{mine.low / most:.2f}"


def as_markdown(runs: Runs, policies: list[str]) -> str:
    """The first policy is the one that is held against the best of the others."""
    head = ["trace", "GPUs", "instances", "part", *policies, f"{policies[0]} / best other"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for (row, part), rates in sorted(rows(runs).items(), key=lambda item: item[0]):
        told = [_rate(rates[name]) if name in rates else "" for name in policies]
        told.append(ratio(rates, policies[0]))
        lines.append(f"| {' | '.join([*map(str, row), str(part + 1), *told])} |")
    return "\n".join(lines) + "\n"


def write(runs: Runs, policies: list[str], folder: Path) -> None:
    """Raises ConfigError without matplotlib, when all but the picture is written."""
    (folder / "scale.md").write_text(as_markdown(runs, policies), encoding="utf-8")
    cells = [
        {
            **asdict(cell),
            "known": asdict(known(runs.of(cell))),
            "points": [_short(point) for point in runs.of(cell)],
        }
        for cell in runs.cells()
    ]
    text = json.dumps({"asked": ASKED, "cells": cells}, indent=1).replace("Infinity", "null")
    (folder / "scale.json").write_text(text + "\n", encoding="utf-8")
    _plot(runs, policies, folder / "scale.png")


def _short(point: Point) -> dict[str, object]:
    return {key: value for key, value in asdict(point).items() if key != "cell"}


def _rate(rate: Known) -> str:
    """``≥`` and ``<`` where the search is not over."""
    if rate.is_found:
        return f"{rate.low:.3g}/s"
    low = f"≥ {rate.low:.3g}/s" if rate.low else ""
    high = f"< {rate.high:.3g}/s" if rate.high < inf else ""
    return ", ".join(part for part in (low, high) if part)


def _plot(runs: Runs, policies: list[str], path: Path) -> None:
    """Attainment over the rate, a panel a row of the table, its first part only."""
    shown = sorted({cell.row for cell in runs.cells()})
    figure, panels = new_figure(len(shown), shares_y=True)
    for row, panel in zip(shown, panels, strict=True):
        for policy in policies:
            points = runs.of(Cell(*row, policy, 0))
            rates = [point.rate for point in points]
            panel.plot(rates, [point.attainment for point in points], "o-", label=policy)
        panel.axhline(ASKED, color="gray", linestyle=":")
        panel.set(title=f"{row[0]}, {row[2]} × {row[1]}", xlabel="offered (requests/s)")
        panel.set(xscale="log", ylim=(0.5, 1.02))
        panel.legend(fontsize=7)
    panels[0].set_ylabel("all targets met")
    figure.savefig(path, dpi=110)
