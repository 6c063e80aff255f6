"""The figures of `isthmus bench serve`, for people."""

from __future__ import annotations

from isthmus.cli.output import figures, print_table, stderr, stdout, table, warn_of_short
from isthmus.loadgen.search import Search
from isthmus.loadgen.summary import Summary
from isthmus.workload.figures import written
from isthmus.workload.search import WHY_CAPPED


def line(summary: Summary) -> str:
    return (
        f"{summary.offered_rate:.3g}/s offered: {summary.attainment:.1%} good, "
        f"goodput {summary.goodput:.3g}/s, TTFT p90 {written(summary.ttft.p90)} ms, "
        f"TPOT p90 {written(summary.tpot.p90, 1)} ms"
    )


def show(summaries: list[Summary], found: Search | None) -> None:
    made = table("offered/s", "good", "goodput/s", "tokens/s", "refused", "failed", "lag p99 ms")
    for summary in summaries:
        verdicts = summary.verdicts
        made.add_row(
            f"{summary.offered_rate:.3g}",
            f"{summary.attainment:.1%}",
            f"{summary.goodput:.3g}",
            f"{summary.output_tokens_per_s:.1f}",
            str(verdicts["rejected"]),
            str(verdicts["error"] + verdicts["timeout"]),
            written(summary.lag.p99, 1),
        )
    print_table(made)
    spreads = table("ms", "offered/s", "mean", "p50", "p90", "p99", "max")
    for summary in summaries:
        for name, item in (
            ("TTFT", summary.ttft),
            ("TPOT", summary.tpot),
            ("second token gap", summary.second_token_gap),
            ("end to end", summary.e2e),
        ):
            spreads.add_row(name, f"{summary.offered_rate:.3g}", *figures(item))
    print_table(spreads)
    for summary in summaries:
        for problem, count in summary.problems.items():
            stderr.print(f"{count} × {problem}", markup=False)
        if summary.is_generator_late:
            stderr.print(
                f"the generator sent calls up to {written(summary.lag.max)} ms late at "
                f"{summary.offered_rate:.3g}/s: its own speed is part of these figures"
            )
        if found is None:
            warn_of_short(summary.span_s, (summary.targets.ttft_ms or 0.0) / 1e3, summary.e2e)
    if found is not None:
        bound = "at least " if found.is_capped else ""
        stdout.print(f"goodput at {found.asked:.0%} attainment: {bound}{found.rate:.3g} requests/s")
        if found.is_capped:
            stderr.print(WHY_CAPPED)
