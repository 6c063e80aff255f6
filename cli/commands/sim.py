"""`isthmus sim`: what a cluster would do, without one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from isthmus.cli.options import Output
from isthmus.cli.output import (
    OutputFormat,
    figures,
    print_json,
    print_table,
    progress,
    stderr,
    stdout,
    table,
    warn_of_short,
)
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
from isthmus.common.config import RouterConfig
from isthmus.common.errors import ConfigError
from isthmus.sim import GoodputSearch, Run, Scenario, SimReport, search_goodput, with_policy
from isthmus.sim import run_scenario as run_once
from isthmus.sim.plots import plot_rates, plot_run
from isthmus.sim.run import Probe
from isthmus.workload.figures import written
from isthmus.workload.plots import require_plots
from isthmus.workload.search import WHY_CAPPED

app = typer.Typer(
    no_args_is_help=True,
    help="Simulate a cluster with the router's own code.",
    pretty_exceptions_enable=False,
)
Policy = Annotated[list[str] | None, typer.Option("--policy", help="Of the router; repeatable.")]
Attainment = Annotated[float, typer.Option(min=0, max=1, help="Enough, for --search.")]
Save = Annotated[Path | None, typer.Option(help="Write all figures as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Write a PNG.")]
SearchFlag = Annotated[
    bool, typer.Option("--search", help="Find the highest rate that attains enough.")
]


@app.command("run")
def run(
    file: File = None,
    pool: Counts = None,
    trace: Trace = None,
    rate: Rate = None,
    requests: Requests = None,
    ttft_ms: Target = None,
    tpot_ms: Target = None,
    policy: Annotated[str, typer.Option(help="Of the router; none = the scenario's.")] = "",
    settings: Settings = None,
    search: SearchFlag = False,
    attainment: Attainment = 0.9,
    save: Save = None,
    plot: Plot = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Run one scenario; with --search, at the rate up to which enough requests are good."""
    if plot:
        require_plots()
    flags = Flags(settings, pool, trace, rate, requests, ttft_ms, tpot_ms)
    scenario = load(file, flags)
    scenario = with_policy(scenario, policy) if policy else scenario
    if search:
        found = _search(scenario, attainment)
        result = _search_json(found)
        if plot:
            plot_rates(plot, {scenario.router.policy: found.probes}, attainment)
    else:
        done = _run(scenario)
        result = done.report.as_json()
        if plot:
            plot_run(plot, done.records)
    _save(save, result)
    if output is OutputFormat.JSON:
        print_json(result)
    elif search:
        _show_searches({scenario.router.policy: found})
    else:
        _show(done.report, scenario)


@app.command("compare")
def compare(
    file: File = None,
    pool: Counts = None,
    trace: Trace = None,
    rate: Rate = None,
    requests: Requests = None,
    ttft_ms: Target = None,
    tpot_ms: Target = None,
    policy: Policy = None,
    settings: Settings = None,
    search: SearchFlag = False,
    attainment: Attainment = 0.9,
    save: Save = None,
    plot: Plot = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Run one scenario under several policies, with the same arrivals."""
    if plot:
        require_plots()
    flags = Flags(settings, pool, trace, rate, requests, ttft_ms, tpot_ms)
    scenario = load(file, flags)
    names = policy or list(_policies())
    if search:
        searches = {name: _search(with_policy(scenario, name), attainment) for name in names}
        result: dict[str, Any] = {name: _search_json(found) for name, found in searches.items()}
        series = {name: found.probes for name, found in searches.items()}
    else:
        reports = {name: _run(with_policy(scenario, name)).report for name in names}
        result = {name: report.as_json() for name, report in reports.items()}
        series = {
            name: (Probe(r.offered_rate, r.total.attainment, r.total.goodput, r.total.num_offered),)
            for name, r in reports.items()
        }
    if plot:
        plot_rates(plot, series, attainment)
    _save(save, result)
    if output is OutputFormat.JSON:
        print_json(result)
    elif search:
        _show_searches(searches)
    else:
        _show_side_by_side(reports)


def _policies() -> tuple[str, ...]:
    return get_args(RouterConfig.model_fields["policy"].annotation)


def _run(scenario: Scenario) -> Run:
    _check_policy(scenario.router.policy)
    with progress() as bar:
        task = bar.add_task(f"{scenario.name}, {scenario.router.policy}", total=None)
        return run_once(
            scenario, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _search(scenario: Scenario, asked: float) -> GoodputSearch:
    _check_policy(scenario.router.policy)

    def tell(probe: Probe) -> None:
        name = scenario.router.policy
        stderr.print(
            f"{name}: {probe.num_requests} requests at {probe.rate:.4g}/s → "
            f"{probe.attainment:.1%} good",
            markup=False,
        )

    return search_goodput(scenario, asked=asked, on_probe=tell)


def _check_policy(name: str) -> None:
    if name not in _policies():
        known = ", ".join(_policies())
        raise ConfigError(f"no policy '{name}'; known: {known}", stage="sim")


def _search_json(found: GoodputSearch) -> dict[str, Any]:
    return asdict(found)


def _save(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# --- what is shown --------------------------------------------------------------------------------


def _show(report: SimReport, scenario: Scenario) -> None:
    total = report.total
    stdout.print(
        f"{report.name}: {report.num_instances} instances, {report.num_gpus} GPUs, "
        f"policy {report.policy}, {total.num_offered} requests at {report.offered_rate:.3g}/s"
    )
    classes = table("class", "offered", "good", "TTFT met", "TPOT met", "goodput/s", "refused")
    for name, item in [("all", total), *report.classes.items()]:
        classes.add_row(
            name,
            str(item.num_offered),
            f"{item.attainment:.1%}",
            f"{item.ttft_attainment:.1%}",
            f"{item.tpot_attainment:.1%}",
            f"{item.goodput:.3g}",
            ", ".join(f"{reason} {count}" for reason, count in item.rejected.items()) or "–",
        )
    print_table(classes)
    if report.tenants:
        tenants = table("tenant", "good")
        for name, attainment in report.tenants.items():
            tenants.add_row(name, f"{attainment:.1%}")
        print_table(tenants)
    spreads = table("ms", "mean", "p50", "p90", "p99", "max")
    for name, spread in (
        ("TTFT", total.ttft),
        ("TPOT", total.tpot),
        ("second token gap", total.second_token_gap),
        ("end to end", total.e2e),
    ):
        spreads.add_row(name, *figures(spread))
    print_table(spreads)
    roles = table("role", "instances", "GPUs", "busy", "preempted")
    for role, use in report.roles.items():
        roles.add_row(
            role,
            str(use.num_instances),
            str(use.num_gpus),
            f"{use.utilisation:.0%}",
            str(use.num_preempted),
        )
    print_table(roles)
    stdout.print(
        f"goodput per GPU {report.goodput_per_gpu:.3g}/s; {report.local_share:.0%} of the prompts "
        f"computed where they decode; {report.cached_share:.0%} of the prompt tokens cached; "
        f"{report.transferred_gb:.3g} GB moved; {report.num_retried} requests sent again"
    )
    _show_coverage(report, scenario)
    waits_ms = [part.ttft_ms or part.e2e_ms or 0.0 for part in scenario.classes.values()]
    warn_of_short(report.span_s, max(waits_ms) / 1e3, total.e2e)


def _show_coverage(report: SimReport, scenario: Scenario) -> None:
    quantiles = sorted({part.quantile for part in scenario.classes.values()})
    asked = f" (asked: {', '.join(f'{quantile:.0%}' for quantile in quantiles)})"
    asked = asked if report.policy == "goodput" else ""
    for name, said in report.coverage.items():
        if said.covered is not None:
            stdout.print(
                f"{name} predicted: {said.covered:.1%} of {said.count} not exceeded{asked}; "
                f"measured / predicted p50 {written(said.ratio_p50, 2)}, "
                f"p90 {written(said.ratio_p90, 2)}"
            )
    if not scenario.noise and not scenario.faults:
        stdout.print(
            "without noise or faults many predictions come true exactly, and a rounding decides "
            "whether they were exceeded: coverage says little here"
        )


def _show_side_by_side(reports: dict[str, SimReport]) -> None:
    made = table(
        "policy", "good", "goodput/s", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "refused",
        "local", "cached",
    )  # fmt: skip
    for name, report in reports.items():
        total = report.total
        made.add_row(
            name,
            f"{total.attainment:.1%}",
            f"{total.goodput:.4g}",
            written(total.ttft.p50),
            written(total.ttft.p90),
            written(total.tpot.p50, 1),
            written(total.tpot.p90, 1),
            str(sum(total.rejected.values())),
            f"{report.local_share:.0%}",
            f"{report.cached_share:.0%}",
        )
    print_table(made)


def _show_searches(searches: dict[str, GoodputSearch]) -> None:
    made = table("policy", "goodput/s", "per GPU", "of the best", "runs")
    best = max(found.rate for found in searches.values()) or 1.0
    for name, found in searches.items():
        num_gpus = found.best.num_gpus if found.best is not None else 1
        bound = "≥ " if found.is_capped else ""
        made.add_row(
            name,
            f"{bound}{found.rate:.4g}",
            f"{found.rate / num_gpus:.3g}",
            f"{found.rate / best:.2f}",
            str(len(found.probes)),
        )
    print_table(made)
    if any(found.is_capped for found in searches.values()):
        stderr.print(WHY_CAPPED)
