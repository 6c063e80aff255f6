"""`isthmus config check`: the configuration as it takes effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from isthmus.cli.inert import warn_of_inert
from isthmus.cli.options import Output, parse_settings
from isthmus.cli.output import OutputFormat, print_json, stdout
from isthmus.common.config import ClusterConfig, load_config

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
MASK = "********"


@app.callback()
def group() -> None:
    """Keeps `check` a subcommand while it is the only one."""


@app.command("check")
def check(
    file: Annotated[Path | None, typer.Argument(help="YAML file; none = the defaults.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key.path=value")] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Print the effective tree: file, environment and --set over the defaults."""
    config = load_config(file, parse_settings(settings or []))
    warn_of_inert(config)
    tree = effective_tree(config)
    if output is OutputFormat.JSON:
        print_json(tree)
    else:
        stdout.print(
            yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), markup=False, end=""
        )


def effective_tree(config: ClusterConfig) -> dict[str, Any]:
    """The tree with secrets masked."""
    tree = config.model_dump(mode="json")
    tree["gateway"]["api_keys"] = [MASK] * len(config.gateway.api_keys)
    for name, tenant in config.tenants.items():
        tree["tenants"][name]["api_keys"] = [MASK] * len(tenant.api_keys)
    return tree
