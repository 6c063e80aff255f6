"""`isthmus bench`: measure a server, or a part of one."""

from __future__ import annotations

import typer

from isthmus.cli.commands import bench_serve, bench_transfer

app = typer.Typer(
    no_args_is_help=True, help="Measure a server, or a part of one.", pretty_exceptions_enable=False
)
app.command("serve")(bench_serve.serve)
app.command("transfer")(bench_transfer.transfer)
