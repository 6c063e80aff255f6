"""The offered rate that each policy holds with 90 % good: cell by cell, kept as it goes.

A cell is a trace, kinds of GPU, a number of instances, a policy and a part of the trace. Its rates
are those of one grid (``STEP`` apart), the same for all policies, so that they meet the very same
calls at the very same rates; a search goes up or down from a guess, then halves what is left. Every
run is a line of ``runs.jsonl``: who interrupts the table and starts it again with the same folder
runs only what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf, log
from pathlib import Path

from benchmarks.simulator.scale import Load, scenario_of
from isthmus.common.errors import ConfigError
from isthmus.sim import run_scenario, with_policy
from isthmus.sim.build import make_calls
from isthmus.workload import Call, at_rate

STEP = 1.07
ASKED = 0.9
KINDS = (("a100",), ("a100", "h100"))
SMALL = 64  # instances, for which ``GUESSES`` and numbers of requests are
REQUESTS = {"azure": (1_500, 3_000), "mooncake": (1_500, 2_400)}  # with A100 alone, with both kinds
"""About five TTFT targets long at the rates that the best policy holds, or longer …"""
LARGE = 1.5
"""… where there are more instances, which share bursts and hold more each."""
GUESSES = {"azure": (70.0, 150.0), "mooncake": (8.0, 16.0)}
LEAST = 0.1  # of a guess: whoever does not hold that holds nothing

Held = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Cell:
    """``part``: of the trace, 0 = its beginning."""

    load: str
    kinds: str
    instances: int
    policy: str
    part: int

    @property
    def row(self) -> tuple[str, str, int]:
        return self.load, self.kinds, self.instances


@dataclass(frozen=True, slots=True)
class Point:
    cell: Cell
    rate: float
    requests: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    simulated_s: float
    cpu_s: float


class Runs:
    """Owns the file of points."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "runs.jsonl"
        self.points: dict[tuple[Cell, float], Point] = {}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                read = json.loads(line)
                self._keep(Point(**(read | {"cell": Cell(**read["cell"])})))

    def get(self, cell: Cell, rate: float, make: Callable[[], Point]) -> Point:
        """Runs it unless it has been run."""
        found = self.points.get((cell, rate))
        if found is None:
            found = make()
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(found)) + "\n")
            self._keep(found)
        return found

    def of(self, cell: Cell) -> list[Point]:
        return sorted((p for p in self.points.values() if p.cell == cell), key=lambda p: p.rate)

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(cell for cell, _ in self.points))

    def _keep(self, point: Point) -> None:
        self.points[point.cell, point.rate] = point


def on_grid(place: int) -> float:
    """Three digits, so that a rate reads as it is."""
    return float(f"{STEP**place:.3g}")


def search(holds: Held, guess: float) -> float | None:
    """The highest rate of the grid that is held while the next one is not; None = none found.
    A rate that is not held is believed, though a higher one may be by chance."""
    place = round(log(guess) / log(STEP))
    lowest = place + log(LEAST) / log(STEP)
    low: int | None = None
    high: int | None = None
    stride = 2
    while low is None or high is None:
        if holds(on_grid(place)):
            low, place = place, place + stride
        elif place < lowest:
            return None
        else:
            high, place = place, place - stride
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(on_grid(middle)):
            low = middle
        else:
            high = middle
    return on_grid(low)


@dataclass(frozen=True, slots=True)
class Known:
    """What the runs of a cell say of the rate that it holds: at least ``low``, and less than
    ``high``; 0 and infinity where they say nothing."""

    low: float
    high: float

    @property
    def is_found(self) -> bool:
        """The two are neighbours on the grid."""
        return self.low > 0 and self.high <= self.low * (STEP + 0.02)


def known(points: Sequence[Point]) -> Known:
    """Of the points of one cell. As in ``search`` a rate that is not held ends it."""
    good = [point.rate for point in points if point.attainment >= ASKED]
    if good:
        above = (p.rate for p in points if p.attainment < ASKED and p.rate > max(good))
        return Known(max(good), min(above, default=inf))
    return Known(0.0, min((point.rate for point in points), default=inf))


def cells(
    loads: Iterable[str],
    kinds: Iterable[Sequence[str]],
    sizes: Iterable[int],
    policies: Sequence[str],
    parts: Iterable[int],
) -> Iterator[Cell]:
    """The most telling first: small clusters, the first part of a trace."""
    for size, part, load, together in product(sizes, parts, loads, kinds):
        for policy in policies:
            yield Cell(load, "+".join(together), size, policy, part)


def num_calls(cell: Cell) -> int:
    each = REQUESTS[cell.load][cell.kinds.count("+")] / SMALL
    return round(each * cell.instances * (LARGE if cell.instances > SMALL else 1.0))


def calls_of(cell: Cell, load: Load, profile: Path) -> list[Call]:
    """Parts of a trace follow each other; one that is not long enough is repeated, with prefixes
    of its own. Raises ConfigError."""
    count = num_calls(cell)
    first = cell.part * count
    copies = 1
    while True:
        scenario = scenario_of(
            load, profile, tuple(cell.kinds.split("+")), cell.instances, 0, copies
        )
        calls = make_calls(scenario)
        if len(calls) >= first + count:
            break
        copies += -(-(first + count - len(calls)) // len(calls))
        if copies > 100:
            raise ConfigError(f"{load.trace}: too short", stage="workload")
    calls = calls[first : first + count]
    return [replace(c, index=i, due_s=c.due_s - calls[0].due_s) for i, c in enumerate(calls)]


def run_point(cell: Cell, load: Load, profile: Path, rate: float) -> Point:
    kinds = tuple(cell.kinds.split("+"))
    calls = at_rate(calls_of(cell, load, profile), rate)
    scenario = with_policy(scenario_of(load, profile, kinds, cell.instances, 0, 1), cell.policy)
    cpu = time.process_time()
    report = run_scenario(scenario, calls).report
    return Point(
        cell=cell,
        rate=rate,
        requests=len(calls),
        attainment=report.total.attainment,
        ttft_attainment=report.total.ttft_attainment,
        tpot_attainment=report.total.tpot_attainment,
        simulated_s=calls[-1].due_s,
        cpu_s=time.process_time() - cpu,
    )


def guess_for(cell: Cell, runs: Runs) -> float:
    """What the same policy held in the most alike cell that is known; else a share of a guess."""
    for like in (
        replace(cell, part=0),
        replace(cell, part=0, instances=256),
        replace(cell, part=0, instances=SMALL),
    ):
        if low := known(runs.of(like)).low:
            return low * cell.instances / like.instances
    guess = GUESSES[cell.load][cell.kinds.count("+")] * cell.instances / SMALL
    return guess if cell.policy == "goodput" else 0.6 * guess


def fill(
    runs: Runs, wanted: Iterable[Cell], loads: dict[str, Load], profile: Path,
    on_point: Callable[[Point], None], on_cell: Callable[[Cell, float | None], None],
) -> None:  # fmt: skip
    for cell in wanted:

        def holds(rate: float, cell: Cell = cell) -> bool:
            load = loads[cell.load]
            point = runs.get(cell, rate, lambda: run_point(cell, load, profile, rate))
            on_point(point)
            return point.attainment >= ASKED

        on_cell(cell, search(holds, guess_for(cell, runs)))
