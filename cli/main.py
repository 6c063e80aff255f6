"""`isthmus`: the command line. Commands parse, call and render; nothing is decided here.

Every failure is one sentence on stderr and a non-zero exit; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as package_version
from typing import Annotated, NoReturn

import typer

# Read by gRPC while it is loaded. Ray forks from this process to start its own, which exec at once:
# there is nothing for gRPC to prepare, and it would say so on the terminal.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from isthmus.cli.commands import (
    bench,
    chat,
    config,
    doctor,
    down,
    explain,
    plan,
    profile,
    scale,
    sim,
    status,
    up,
)
from isthmus.cli.options import Output
from isthmus.cli.output import OutputFormat, print_error, print_json, stdout
from isthmus.common.errors import IsthmusError

app = typer.Typer(
    name="isthmus",
    help="Serve a language model on a pool for prompts and a pool for tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("down")(down.down)
app.command("status")(status.status)
app.command("scale")(scale.scale)
app.command("explain")(explain.explain)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("profile")(profile.profile)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(sim.app, name="sim")
app.command("plan")(plan.plan)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command. ``--debug`` is read in ``main``, before anything can fail."""


@app.command("version")
def version(output: Output = OutputFormat.TEXT) -> None:
    """Show the version."""
    number = package_version("isthmus")
    if output is OutputFormat.JSON:
        print_json({"version": number})
    else:
        stdout.print(f"isthmus {number}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point; ends the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments)
    except IsthmusError as error:
        if "--debug" in arguments:
            raise
        print_error(error, _output_of(arguments))
    except BrokenPipeError:
        # Whoever read our output has gone; Python must not try to flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _output_of(arguments: Sequence[str]) -> OutputFormat:
    """The output asked for, as far as it can be known of a command that failed."""
    return OutputFormat.JSON if "json" in arguments or "-ojson" in arguments else OutputFormat.TEXT


if __name__ == "__main__":
    main()
