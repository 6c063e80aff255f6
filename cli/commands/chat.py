"""`isthmus chat`: talk to the model in the terminal, or send one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape

from isthmus.cli.chat_client import ChatClient, first_model
from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, stderr, stdout
from isthmus.common.errors import IsthmusError

HELP = "/reset forgets the conversation, /exit ends; Ctrl-C breaks a reply off"


def chat(
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, then end.")] = (
        None
    ),
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    url: Annotated[str | None, typer.Option(help="Address of a gateway elsewhere.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Chat with the model; replies are streamed."""
    if url:
        address = url.rstrip("/").removesuffix("/v1")
    else:
        address = running_cluster(name, state_dir).gateway_url
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(5.0, read=600.0)
    with httpx.Client(base_url=address, headers=headers, trust_env=False, timeout=timeout) as http:
        options: dict[str, Any] = {
            key: value
            for key, value in (
                ("max_tokens", max_tokens),
                ("temperature", temperature),
                ("seed", seed),
            )
            if value is not None
        }
        client = ChatClient(http, first_model(http), options)
        if system:
            client.messages.append({"role": "system", "content": system})
        if message is not None:
            say(client, message, output)
        else:
            converse(client, output)


def converse(client: ChatClient, output: OutputFormat) -> None:
    """Reads messages from the terminal, or one per line from a pipe, until the end."""
    start = list(client.messages)
    if sys.stdin.isatty():
        stderr.print(f"[dim]{escape(client.model)} — {HELP}[/]")
    for text in read_messages():
        if text == "/exit":
            return
        if text == "/reset":
            client.messages[:] = start
            continue
        if text.startswith("/"):
            stderr.print(f"[dim]{HELP}[/]")
            continue
        try:
            say(client, text, output)
        except IsthmusError as error:
            if not sys.stdin.isatty():
                raise
            stderr.print(f"[red]{escape(error.message)}[/]")


def read_messages() -> Iterator[str]:
    """Messages that are not empty, until the end of the input."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = stdout.input("[bold cyan]> [/]") if is_terminal else input()
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip():
            yield text.strip()


def say(client: ChatClient, text: str, output: OutputFormat) -> None:
    """Prints the reply while it comes; Ctrl-C breaks it off and keeps what was said."""
    pieces: list[str] = []
    reply = client.stream_reply(text)
    try:
        for piece in reply:
            pieces.append(piece)
            if output is OutputFormat.TEXT:
                stdout.print(piece, end="", markup=False)
    except KeyboardInterrupt:
        reply.close()
    if output is OutputFormat.JSON:
        print_json(
            {
                "model": client.model,
                "content": "".join(pieces),
                "finish_reason": client.finish_reason,
                "usage": asdict(client.usage),
            }
        )
    else:
        stdout.print()
