"""`isthmus plan`: which cluster gives most goodput per GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import Output
from isthmus.cli.output import OutputFormat, print_json, print_table, progress, stdout, table
from isthmus.cli.scenario_options import (
    Counts,
    File,
    Flags,
    Rate,
    Requests,
    Settings,
    Target,
    Trace,
    load,
)
from isthmus.sim import Budget, Candidate, Plan, Shape, make_plan, shapes
from isthmus.workload.search import WHY_CAPPED


def plan(
    file: File = None,
    gpus: Annotated[int, typer.Option(min=1, help="At most so many.")] = 4,
    tp: Annotated[list[int] | None, typer.Option(min=1, help="Sizes to try; repeatable.")] = None,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Share to be good.")] = 0.9,
    mixed: Annotated[bool, typer.Option(help="Try clusters of mixed instances too.")] = True,
    fill: Annotated[bool, typer.Option(help="Only clusters that use every GPU.")] = False,
    tolerance: Annotated[float, typer.Option(min=0.005, max=1, help="Of a rate.")] = 0.05,
    show: Annotated[int, typer.Option(min=1, help="Lines of the table.")] = 8,
    pool: Counts = None,
    trace: Trace = None,
    rate: Rate = None,
    requests: Requests = None,
    ttft_ms: Target = None,
    tpot_ms: Target = None,
    settings: Settings = None,
    save: Annotated[Path | None, typer.Option(help="Write all figures as JSON.")] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Try pool sizes, tensor parallelism and mixed instances in the simulator; best first."""
    scenario = load(file, Flags(settings, pool, trace, rate, requests, ttft_ms, tpot_ms))
    budget = Budget(gpus, tuple(tp or (1,)), with_mixed=mixed, must_fill=fill)
    with progress() as bar:
        task = bar.add_task("shapes", total=None)

        def tell(done: int, total: int, shape: Shape, found: Candidate | None) -> None:
            what = f"{found.goodput_per_gpu:.3g}/s per GPU" if found is not None else "ruled out"
            bar.update(task, completed=done, total=total, description=f"{shape}: {what}")

        tried = list(shapes(budget))
        made = make_plan(scenario, tried, asked=attainment, tolerance=tolerance, on_shape=tell)
    if save is not None:
        save.write_text(json.dumps(made.as_json(), indent=2) + "\n", encoding="utf-8")
    if output is OutputFormat.JSON:
        print_json(made.as_json())
    else:
        _show(made, show)


def _show(made: Plan, count: int) -> None:
    rows = table("cluster", "GPUs", "goodput/s", "per GPU", "of the best", "why not more")
    best = made.best.goodput_per_gpu
    for item in made.candidates[:count]:
        rows.add_row(
            str(item.shape),
            str(item.shape.num_gpus),
            f"{'≥ ' if item.is_capped else ''}{item.rate:.3g}",
            f"{item.goodput_per_gpu:.3g}",
            f"{item.goodput_per_gpu / best:.2f}" if best else "–",
            item.limit,
        )
    print_table(rows)
    if not best:
        stdout.print(f"no cluster of that size attains {made.asked:.0%} at any rate")
        return
    stdout.print(
        f"best: {made.best.shape}, {made.best.goodput_per_gpu:.3g} requests/s per GPU with "
        f"{made.asked:.0%} good"
    )
    if any(item.is_capped for item in made.candidates):
        stdout.print(WHY_CAPPED)
    if made.ties:
        names = ", ".join(str(item.shape) for item in made.ties)
        stdout.print(f"a tie with the best, within {made.tolerance:.0%}: {names}", markup=False)
    others = made.candidates[1 + len(made.ties) :]
    if others:
        share = 1 - others[0].goodput_per_gpu / best
        stdout.print(f"next best: {others[0].shape}, {share:.0%} less; {others[0].limit}")
    if made.ruled_out:
        stdout.print(f"{len(made.ruled_out)} others were ruled out by one run each")
    if made.skipped and len(made.candidates) + len(made.ruled_out) == 1:
        stdout.print("no other shape could be tried: there is nothing to compare it with")
    if made.skipped:
        reasons = sorted(set(made.skipped.values()))
        stdout.print(f"{len(made.skipped)} were not tried: {'; '.join(reasons)}", markup=False)
