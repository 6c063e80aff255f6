"""The load one server gets, and the readings it gives.

Every figure has a budget of seconds: requests that run longer are cancelled, and the figure says
that it was cut. What a slow server could not show at all is a reading without a value.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.load import Figures, TooSlow, run_load
from benchmarks.machine import ForeignCpu, resident_mib
from benchmarks.peers.base import Server

PROMPT_TOKENS = 128
TTFT_REQUESTS = {128: 5, 512: 3, 2048: 2}
CONCURRENCIES = (1, 4, 16, 64)

TTFT = "ttft_ms_{}"
RATE = "tokens_per_s_{}"
TPOT = "tpot_ms_1"
MEMORY = "memory_mib"
START = "start_s"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every side alike."""

    output_tokens: int
    budget_s: float
    lengths: tuple[int, ...]
    concurrencies: tuple[int, ...]
    vocab: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure once; ``value`` is None when nothing arrived in time, ``note`` says why."""

    value: float | None
    foreign_cpu: float
    is_cut: bool = False
    num_errors: int = 0
    note: str = ""


Round = dict[str, Reading]


@dataclass(frozen=True, slots=True)
class Part:
    """One run of the load client and the figures taken from it."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    max_tokens: int
    figures: dict[str, Callable[[Figures], float]]


def parts(load: Load, stage: str) -> Iterator[Part]:
    """``alone``: one request at a time. ``loaded``: several. ``all``: both."""
    if stage in ("alone", "all"):
        for length in load.lengths:
            count = TTFT_REQUESTS.get(length, 2)
            yield Part(1, count, length, 1, {TTFT.format(length): lambda run: run.ttft_ms})
    for concurrency in load.concurrencies:
        if stage not in ("all", "alone" if concurrency == 1 else "loaded"):
            continue
        rate = {RATE.format(concurrency): lambda run: run.tokens_per_s}
        if concurrency == 1:
            both = {TPOT: lambda run: run.tpot_ms} | rate
            yield Part(1, 2, PROMPT_TOKENS, load.output_tokens, both)
        else:
            count = max(8, concurrency)
            yield Part(concurrency, count, PROMPT_TOKENS, load.output_tokens, rate)


class Stuck(RuntimeError):  # noqa: N818 - a state of the server, not a mistake
    """A server that answers no request at all any more; the message is for the reader."""


async def measure(server: Server, load: Load, stage: str, seed: int, readings: Round) -> None:
    """One round, kept in ``readings`` figure by figure.

    Raises httpx.HTTPError when the server goes away, Stuck when it answers nothing.
    """
    await warm_up(server, load, seed)
    for number, part in enumerate(parts(load, stage)):
        readings |= await read(server, load, part, seed + 1 + number)
        readings[MEMORY] = Reading(resident_mib(server.pid), 0.0)
        if any(readings[name].is_cut for name in part.figures):
            await settle(server, load, seed)


async def warm_up(server: Server, load: Load, seed: int) -> None:
    """Buffers, caches and compiled code of both kinds of step; what it takes counts nowhere."""
    try:
        await run_load(
            server.url, server.model, concurrency=2, num_requests=4, prompt_tokens=64,
            max_tokens=8, vocab=load.vocab, seed=seed, budget_s=load.budget_s,
        )  # fmt: skip
    except TooSlow:
        await settle(server, load, seed)
    except RuntimeError as error:
        raise Stuck(f"its answers fail ({error})") from error


async def read(server: Server, load: Load, part: Part, seed: int) -> Round:
    noise = ForeignCpu()
    try:
        run = await run_load(
            server.url, server.model, concurrency=part.concurrency,
            num_requests=part.num_requests, prompt_tokens=part.prompt_tokens,
            max_tokens=part.max_tokens, vocab=load.vocab, seed=seed, budget_s=load.budget_s,
        )  # fmt: skip
    except TooSlow as error:
        missing = Reading(None, noise.share(), is_cut=True, note=str(error))
        return dict.fromkeys(part.figures, missing)
    except RuntimeError as error:
        return dict.fromkeys(part.figures, Reading(None, noise.share(), note=str(error)))
    share = noise.share()
    return {
        name: Reading(value(run), share, run.is_cut, run.num_errors)
        for name, value in part.figures.items()
    }


async def settle(server: Server, load: Load, seed: int) -> None:
    """Waits until a cancelled load no longer holds the next figure up: one short answer.

    Raises Stuck when it does not come within twice a figure's time.
    """
    budget_s = 2 * load.budget_s
    try:
        await run_load(
            server.url, server.model, concurrency=1, num_requests=1, prompt_tokens=8,
            max_tokens=1, vocab=load.vocab, seed=seed, budget_s=budget_s,
        )  # fmt: skip
    except RuntimeError as error:
        raise Stuck(f"it gave no answer to a prompt of 8 tokens ({error})") from error


def measure_rounds(
    server: Server, load: Load, stage: str, rounds: Sequence[int]
) -> tuple[list[Round], str]:
    """The rounds that the server lived through, and why it did not live through all ("" = did)."""
    readings: list[Round] = []
    for number in rounds:
        one: Round = {}
        try:
            asyncio.run(measure(server, load, stage, 1000 * number, one))
        except httpx.HTTPError as error:
            return readings, f"its server stopped answering ({type(error).__name__}: {error})"
        except Stuck as error:
            return readings, str(error)
        finally:
            if one:
                readings.append(one)
    return readings, ""


def combine(readings: Sequence[Reading]) -> Reading:
    """The median of the rounds; cut when one was, missing when no round has a value."""
    values = [reading.value for reading in readings if reading.value is not None]
    return Reading(
        value=statistics.median(values) if values else None,
        foreign_cpu=statistics.median(reading.foreign_cpu for reading in readings),
        is_cut=any(reading.is_cut for reading in readings),
        num_errors=sum(reading.num_errors for reading in readings),
        note=next((reading.note for reading in readings if reading.note), ""),
    )


def medians(rounds: Sequence[Round]) -> Round:
    names = list(dict.fromkeys(name for readings in rounds for name in readings))
    return {name: combine([r[name] for r in rounds if name in r]) for name in names}
