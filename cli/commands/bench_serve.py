"""`isthmus bench serve`: open-loop load on any OpenAI-compatible server, judged by its targets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from isthmus.cli.bench_figures import line, show
from isthmus.cli.options import Output
from isthmus.cli.output import OutputFormat, print_json, progress, stderr
from isthmus.common.errors import ConfigError
from isthmus.loadgen.client import Endpoint
from isthmus.loadgen.open_loop import run_calls
from isthmus.loadgen.plan import LoadPlan
from isthmus.loadgen.plots import plot_rates, plot_run
from isthmus.loadgen.prompts import PromptMaker
from isthmus.loadgen.search import Search, outcome_of, search_goodput
from isthmus.loadgen.summary import Summary, summarise
from isthmus.loadgen.types import Record, Status, Targets
from isthmus.workload import Call, Mix, Share, at_rate, parse_lengths, read_trace, repeat
from isthmus.workload.plots import require_plots
from isthmus.workload.search import Outcome, longest_wait_s
from isthmus.workload.traces import MOONCAKE_BLOCK_TOKENS

_STAGE = "bench"
_OF_A_MIX = ("prompt", "answer", "cv", "prefixes", "prefix_tokens", "slo_class")
"""Parameters of calls that are made up: a trace has all of that."""
_KEY_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is the same at every rate."""

    endpoint: Endpoint
    plan: LoadPlan
    prompts: PromptMaker
    targets: Targets
    warm_up: int

    async def send(
        self, calls: list[Call], rate: float | None, number: int
    ) -> tuple[list[Record], Summary]:
        """The ``number``-th run: its prompts are not those of another."""
        prompts = replace(self.prompts, run=number)
        label = f"{len(calls)} calls" + (f" at {rate:g}/s" if rate else "")
        with progress() as bar:
            task = bar.add_task(label, total=len(calls))
            async with self.endpoint as endpoint:
                records = await run_calls(
                    endpoint,
                    calls,
                    prompts,
                    on_progress=lambda _, ended: bar.update(task, completed=ended),
                )
        summary = summarise(records, self.targets, self.warm_up)
        stderr.print(line(summary))
        return records, summary


def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model to name; empty = the server's first.")] = "",
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Calls per second; several = one run each. None: a trace's own."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Calls of a run (of a trace: at most).")
    ] = 100,
    prompt: Annotated[
        str, typer.Option(help="Prompt tokens: 128, 64-512, lognormal:512:0.8, exponential:200.")
    ] = "128",
    answer: Annotated[str, typer.Option(help="Output tokens, written alike.")] = "32",
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness: 1 = Poisson, more = Gamma, 0 = a clock.")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Replay: Azure's .csv or Mooncake's .jsonl.")
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-6, help="Multiplies a trace's lengths.")] = 1.0,
    prefixes: Annotated[int, typer.Option(min=0, help="Number of prefixes shared by calls.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a shared prefix.")] = 512,
    ttft_ms: Annotated[float | None, typer.Option(help="Target; none = always met.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Target; none = always met.")] = None,
    slo_class: Annotated[str, typer.Option("--class", help="SLO class to ask for.")] = "",
    send_targets: Annotated[
        bool, typer.Option(help="Tell the server the targets, in Isthmus's headers.")
    ] = True,
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that attains enough.")
    ] = False,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Enough, for --search.")] = 0.9,
    warm_up: Annotated[int, typer.Option(min=0, help="First calls that do not count.")] = 0,
    vocab: Annotated[int, typer.Option(min=0, help="Send token ids below this; 0 = text.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same calls.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest silence of an answer.")] = 600,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Longest whole call.")] = 1_800,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = "",
    save: Annotated[Path | None, typer.Option(help="Write all figures as JSON.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write each call as a JSON line.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG.")] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Send calls when they are due, whatever becomes of the earlier ones, and judge each answer.

    TTFT counts from when a call was due. Goodput is calls a second that met both targets; refused
    and failed calls count as offered."""
    _refuse_idle_flags(_given(context), num_rates=len(rate or ()))
    targets = Targets(ttft_ms, tpot_ms)
    if search:
        longest_wait_s([targets.slo])
    if plot:
        require_plots()
    url = url.rstrip("/").removesuffix("/v1")
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * scale)) if trace else prefix_tokens
    share = Share(
        1.0, parse_lengths(prompt), parse_lengths(answer), slo_class, num_prefixes=prefixes
    )
    run = _Run(
        endpoint=Endpoint(
            url=url,
            model=model or _first_model(url, api_key),
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            targets=targets if send_targets else None,
            api_keys={"": api_key} if api_key else {},
        ),
        plan=LoadPlan(
            num_calls=requests,
            seed=seed,
            mix=Mix((share,)),
            cv=cv,
            trace=read_trace(trace) if trace else (),
            scale=scale,
        ),
        prompts=PromptMaker(seed, vocab, block_tokens),
        targets=targets,
        warm_up=warm_up,
    )
    rates: list[float | None] = [*rate] if rate else [None]
    _check(run, rates, search)
    if search:
        found, runs = asyncio.run(_search(run, rates[0] or 1.0, attainment))
    else:
        found, runs = None, asyncio.run(_all(run, rates))
    summaries = [summary for _, summary in runs]
    result = {
        "endpoint": run.endpoint.url,
        "model": run.endpoint.model,
        "runs": [summary.as_json() for summary in summaries],
        "search": asdict(found) if found else None,
    }
    if save:
        save.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if records:
        _write_records(records, [record for made, _ in runs for record in made])
    if plot and len(runs) == 1:
        plot_run(plot, runs[0][0], targets)
    elif plot:
        plot_rates(plot, {run.endpoint.model: summaries}, attainment)
    if output is OutputFormat.JSON:
        print_json(result)
    else:
        show(summaries, found)
    if not any(record.status is Status.DONE for made, _ in runs for record in made):
        stderr.print("no call was served")
        raise typer.Exit(1)


def _given(context: typer.Context) -> dict[str, str]:
    """The flags that the command line has, by the name of their parameter."""
    given: dict[str, str] = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        # By its name: some versions of typer bring a click of their own.
        if parameter.name is not None and source is not None and source.name == "COMMANDLINE":
            given[parameter.name] = parameter.opts[0]
    return given


def _refuse_idle_flags(given: dict[str, str], num_rates: int) -> None:
    """A flag that would change nothing is a misunderstanding. Raises ConfigError that names it."""
    if "trace" in given:
        idle, why = [name for name in _OF_A_MIX if name in given], "a --trace has its own"
    else:
        idle, why = [name for name in ("scale",) if name in given], "it is for a --trace"
        if "prefix_tokens" in given and "prefixes" not in given:
            idle, why = ["prefix_tokens"], "it needs --prefixes"
    if "attainment" in given and "search" not in given and "plot" not in given:
        idle, why = ["attainment"], "it is for --search and --plot"
    if idle:
        flags = ", ".join(given[name] for name in idle)
        raise ConfigError(f"{flags} would change nothing: {why}", stage=_STAGE)
    if "search" in given and num_rates > 1:
        message = "--search tries rates of its own, from one --rate on: give one"
        raise ConfigError(message, stage=_STAGE)


def _check(run: _Run, rates: list[float | None], search: bool) -> None:
    if not run.plan.trace and rates == [None] and not search:
        raise ConfigError("--rate is needed without --trace", stage=_STAGE)
    if any(rate is not None and rate <= 0 for rate in rates):
        raise ConfigError("--rate must be positive", stage=_STAGE)
    num_calls = len(run.plan.trace[: run.plan.num_calls]) or run.plan.num_calls
    if run.warm_up >= num_calls:
        raise ConfigError(f"--warm-up leaves none of {num_calls} calls", stage=_STAGE)


def _first_model(url: str, api_key: str) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=10, trust_env=False)
        if response.status_code in _KEY_REFUSED:
            message = f"{url} refused the API key" if api_key else f"{url} asks for an --api-key"
            raise ConfigError(f"{message} (status {response.status_code})", stage=_STAGE)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models does not say a model: {error}", stage=_STAGE) from error


async def _all(run: _Run, rates: list[float | None]) -> list[tuple[list[Record], Summary]]:
    return [await run.send(run.plan.calls(rate), rate, number) for number, rate in enumerate(rates)]


async def _search(
    run: _Run, start: float, asked: float
) -> tuple[Search, list[tuple[list[Record], Summary]]]:
    runs: list[tuple[list[Record], Summary]] = []

    calls = run.plan.calls(start)

    async def attempt(rate: float, copies: int) -> Outcome:
        runs.append(await run.send(at_rate(repeat(calls, copies), rate), rate, len(runs)))
        return outcome_of(*runs[-1])

    wait_s = longest_wait_s([run.targets.slo])
    found = await search_goodput(
        attempt, start=start, num_calls=len(calls), wait_s=wait_s, asked=asked
    )
    return found, runs


def _write_records(path: Path, records: list[Record]) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for record in records:
            row: dict[str, Any] = asdict(record) | {
                "status": record.status.value,
                "ttft_ms": record.ttft_ms,
                "tpot_ms": record.tpot_ms,
            }
            lines.write(json.dumps(row) + "\n")
