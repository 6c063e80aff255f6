"""Measures every way in every case, in rounds: in each round every way has its turn, so that what
the machine does meanwhile hits all of them alike."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from isthmus.common.config import UCX_CONNECTORS
from isthmus.common.errors import ConfigError, TransferError
from isthmus.kvtransfer.bench.cases import Case
from isthmus.kvtransfer.bench.ends import Pair
from isthmus.kvtransfer.bench.ways import MEMCPY, RAW_NIXL

_TCP = ", tcp"  # another transport, for those over UCX
_TOLD_APART = frozenset({"nixl", "ucx", "shm", "collective"})


@dataclass(slots=True)
class Series:
    """One way in one case: the median time of a write, round by round."""

    way: str
    case: Case
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gigabytes_per_s(self) -> float:
        return self.case.num_bytes / self.median_s / 1e9

    def ratio_to(self, other: Series) -> float:
        """Our rate over its rate; the median of the rounds, each of which compares neighbours."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclass(slots=True)
class Result:
    series: list[Series]
    left_out: dict[str, str]  # way → why

    def find(self, way: str, case: Case) -> Series | None:
        return next((s for s in self.series if s.way == way and s.case == case), None)

    def baseline(self, way: str) -> str | None:
        """The raw library that a way stands on, where it was measured."""
        name = way.removesuffix(_TCP)
        raw = RAW_NIXL + (_TCP if way.endswith(_TCP) else "")
        return raw if name == "nixl" and any(s.way == raw for s in self.series) else None


def ways_of(connectors: Sequence[str]) -> tuple[str, ...]:
    """The connectors with what they are compared with. Raises ConfigError for an unknown one."""
    ways = [MEMCPY]
    for connector in connectors:
        name = connector.removesuffix(_TCP)
        if name not in _TOLD_APART or (connector.endswith(_TCP) and name not in UCX_CONNECTORS):
            known = ", ".join(sorted(_TOLD_APART))
            raise ConfigError(
                f"not a connector to measure: '{connector}' (there are {known}, and with "
                f"'{_TCP}' behind it {' and '.join(sorted(UCX_CONNECTORS))})",
                stage="bench",
            )
        if name == "nixl" and importlib.util.find_spec("nixl_cu13") is not None:
            ways.append(RAW_NIXL + connector.removeprefix(name))
        ways.append(connector)
    return tuple(dict.fromkeys(ways))


def measure(
    ways: Sequence[str],
    cases: tuple[Case, ...],
    pool_bytes: int,
    num_rounds: int,
    num_writes: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Ways that cannot be had here are left out with the reason. Raises TransferError when one
    fails while it is measured."""
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        pairs: list[Pair] = []
        for way in ways:
            tell(f"starting {way}")
            try:
                pair = Pair(way, pool_bytes, cases)
            except TransferError as error:
                left_out[way] = error.message
                continue
            stack.callback(pair.close)
            pairs.append(pair)
        series = [Series(pair.way, case) for case in cases for pair in pairs]
        result = Result(series, left_out)
        for number in range(num_rounds):
            for case in cases:
                tell(f"round {number + 1} of {num_rounds}: {case.name}")
                for pair in pairs:
                    found = result.find(pair.way, case)
                    assert found is not None
                    found.seconds.append(statistics.median(pair.measure(case, num_writes)))
        return result
