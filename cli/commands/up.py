"""`isthmus up`: bring a cluster up and stay with it, or leave it running with --detach."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from isthmus.cli.inert import warn_of_inert
from isthmus.cli.options import DEFAULT_CLUSTER, Output, StateDir, parse_settings, set_path
from isthmus.cli.output import OutputFormat, print_json, stderr, stdout
from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.logging import configure_logging
from isthmus.controlplane.detach import start_detached
from isthmus.controlplane.main import run_cluster
from isthmus.controlplane.preflight import with_absolute_paths
from isthmus.controlplane.progress import Progress, ReadyCluster, Stage
from isthmus.controlplane.state_file import state_folder

POOLS = ("prefill", "decode", "mixed")


def up(
    file: Annotated[Path | None, typer.Argument(help="YAML file with the configuration.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory, .gguf file, or 'sample' (the default).")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill instances.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode instances.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Instances that do both by themselves.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of one step.")
    ] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(help="Memory for KV blocks of one instance, in GiB.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the gateway.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 = any.")] = None,
    gateways: Annotated[
        int | None, typer.Option(help="Gateways, on ports that follow the first one's.")
    ] = None,
    router: Annotated[str | None, typer.Option(help="auto, embedded or process.")] = None,
    actuator: Annotated[str | None, typer.Option(help="ray or process.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    state_dir: StateDir = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any key: --set router.policy=round_robin")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running.")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Start a cluster. Ctrl-C stops it; a second Ctrl-C ends it at once."""
    flags: dict[str, object] = {
        "name": name,
        "state_dir": str(state_dir) if state_dir else None,
        "model.path": model,
        "model.served_name": served_name,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.replicas": gateways,
        "router.mode": router,
        "lifecycle.actuator": actuator,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        "mixed.replicas": mixed,
    }
    for pool in POOLS:
        flags[f"{pool}.engine.block_size"] = block_size
        flags[f"{pool}.engine.max_num_batched_tokens"] = max_num_batched_tokens
        flags[f"{pool}.engine.kv_cache_gib"] = kv_cache_gib
    config = with_absolute_paths(load_config(file, overrides(flags, settings or [])))
    warn_of_inert(config)
    configure_logging(config.logging, role="control")
    if detach:
        ready = start_detached(config, show_progress)
        show_ready(ready, output, is_detached=True, needs_key=_needs_key(config))
    else:
        run_cluster(
            config,
            show_progress,
            lambda ready: show_ready(ready, output, needs_key=_needs_key(config)),
        )


def overrides(flags: dict[str, object], settings: list[str]) -> dict[str, Any]:
    """Flags that were given, as a tree, with ``--set`` winning over them.

    Asking for mixed instances alone leaves out the default prefill and decode instance.
    """
    given = {path: value for path, value in flags.items() if value is not None}
    if given.get("mixed.replicas"):
        given = {"prefill.replicas": 0, "decode.replicas": 0} | given
    tree: dict[str, Any] = {}
    for path, value in given.items():
        set_path(tree, path, value)
    for path, value in _leaves(parse_settings(settings), ""):
        set_path(tree, path, value)
    return tree


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_STYLES = {Stage.INSTANCE: "green", Stage.WARNING: "yellow", Stage.STOP: "bold"}


def show_progress(progress: Progress) -> None:
    style = _STYLES.get(progress.stage, "dim")
    stderr.print(f"[{style}]{progress.stage.value:>8}[/]  {escape(progress.message)}")


def _needs_key(config: ClusterConfig) -> bool:
    tenants = config.tenants.values()
    return bool(config.gateway.api_keys) or any(tenant.all_hashes for tenant in tenants)


def show_ready(
    ready: ReadyCluster,
    output: OutputFormat,
    *,
    is_detached: bool = False,
    needs_key: bool = False,
) -> None:
    if output is OutputFormat.JSON:
        print_json(ready)
        return
    stdout.print(banner(ready, is_detached=is_detached, needs_key=needs_key))


def banner(ready: ReadyCluster, *, is_detached: bool = False, needs_key: bool = False) -> str:
    """What a newcomer needs next, as rich markup."""
    key = '-H "Authorization: Bearer $KEY" ' if needs_key else ""
    instances = ", ".join(f"{item.instance_id} (pid {item.pid})" for item in ready.instances)
    program, which = escape(program_name()), escape(selection(ready))
    end = f"stop it with: {program} down{which}" if is_detached else "Ctrl-C stops everything"
    is_elsewhere = ready.state_dir != default_state_dir()
    state = f"  state      {escape(ready.state_dir)}\n" if is_elsewhere else ""
    others = "".join(f"             {escape(url)}/v1\n" for url in ready.other_urls)
    body = f'{{"model": "{ready.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"\n[bold green]Isthmus is ready[/] after {ready.seconds:.1f} s  ({end})\n"
        f"  address    {escape(ready.url)}/v1\n"
        f"{others}"
        f"  model      {escape(ready.model)}\n"
        f"  instances  {escape(instances)}\n"
        f"  logs       {escape(ready.log_dir)}\n"
        f"{state}"
        f"  try        curl {escape(ready.url)}/v1/chat/completions "
        f"{key}-H 'Content-Type: application/json' -d '{escape(body)}'\n"
        f"  or         {program} chat{which}\n"
    )


def program_name() -> str:
    """``isthmus`` as the user's shell finds it: `make serve` activates no environment."""
    script = Path(sys.executable).with_name("isthmus")
    if shutil.which("isthmus") or not script.exists():
        return "isthmus"
    is_below = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if is_below else script))


def default_state_dir() -> str:
    return str(state_folder(ClusterConfig()))


def selection(ready: ReadyCluster) -> str:
    """The options with which other commands find this cluster, each with a space before it."""
    options: list[str] = []
    if ready.cluster != DEFAULT_CLUSTER:
        options += ["--name", ready.cluster]
    if ready.state_dir != default_state_dir():
        options += ["--state-dir", ready.state_dir]
    return "".join(f" {shlex.quote(option)}" for option in options)
