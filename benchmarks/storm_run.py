"""One storm from the start of its cluster to its report; see ``benchmarks/storm.py``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.engine_driver import make_prompt
from tests.support.serving import MODEL, Oracle, write_serving_model
from tests.support.storm import StormShape, Tally, storm
from tests.support.storm_cluster import StormCluster, storm_cluster
from tests.support.tiny_tokenizer import build_tiny_backend

REST_S = 60.0
NUM_PROBES = 10


@dataclass
class Report:
    seconds: float = 0.0
    longest_request_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    connections_cut: int = 0
    connections_garbled: int = 0
    failed_writes: int = 0
    chunks_flipped: int = 0
    flips_caught: int = 0
    flips_unjudged: int = 0
    transfers_completed: int = 0
    answers_compared: int = 0
    problems: list[str] = field(default_factory=list)


async def run(shape: StormShape, num_signals: int, num_cuts: int, folder: Path) -> Report:
    """A whole storm over a cluster of its own. What went wrong is in the report's ``problems``."""
    shape = replace(shape, vocab=build_tiny_backend().get_vocab_size())
    model = write_serving_model(folder / "model")
    oracle = Oracle(model)
    try:
        gateway = {"request_timeout_ms": int(1000 * shape.longest_s)}
        async with storm_cluster(model, oracle, folder / "run", gateway=gateway) as cluster:
            report = Report()
            acts = cluster.schedule(shape.num_requests, num_signals, num_cuts)
            async with cluster.running.supervised():
                began = time.monotonic()
                tally = await storm(cluster.running.url, MODEL, shape, acts)
                report.seconds = round(time.monotonic() - began, 1)
                await cluster.calm()
            await judge(cluster, tally, shape, oracle, report)
            return report
    finally:
        oracle.close()


async def judge(
    cluster: StormCluster, tally: Tally, shape: StormShape, oracle: Oracle, report: Report
) -> None:
    report.longest_request_s = round(tally.longest_s, 1)
    report.outcomes = dict(sorted(tally.outcomes.items()))
    report.done = dict(cluster.done)
    report.restarts = cluster.running.num_restarts
    report.connections_cut = cluster.proxied.num_cut
    report.connections_garbled = cluster.proxied.num_corrupted
    report.answers_compared = len(tally.answered)
    report.problems += tally.unexplained
    if tally.total != shape.num_requests:
        report.problems.append(f"{tally.total} of {shape.num_requests} requests accounted for")
    try:
        await cluster.running.wait_at_rest(REST_S)
        for number in range(NUM_PROBES):
            answer = await cluster.running.ask(make_prompt(20 + 9 * number, number), max_tokens=6)
            cluster.running.check(answer)
    except AssertionError as error:
        report.problems.append(str(error))
    wrong = tally.wrong(
        lambda answer: oracle.tokens(answer.prompt, **answer.sampling(shape.max_tokens))
    )
    report.problems += [f"wrong tokens: {answer}" for answer in wrong]
    faults = cluster.faults()
    report.failed_writes = faults.num_failed_writes
    report.chunks_flipped = len(faults.flipped)
    report.flips_caught = len(faults.flipped & faults.caught)
    report.flips_unjudged = len(faults.unjudged)
    report.transfers_completed = len(faults.completed)
    report.problems += [f"a flipped chunk was taken for good: {flip}" for flip in faults.missed]
    report.problems += [f"a sound chunk was refused: {it}" for it in faults.caught - faults.flipped]
