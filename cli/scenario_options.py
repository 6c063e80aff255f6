"""What `isthmus sim` and `isthmus plan` share: a scenario, and flags over it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from isthmus.common.config import LoggingConfig, read_yaml
from isthmus.common.errors import ConfigError
from isthmus.common.logging import configure_logging
from isthmus.sim import Scenario, parse_scenario

_STAGE = "scenario"
PAIR: dict[str, Any] = {
    "name": "one pair",
    "pools": [{"role": "prefill"}, {"role": "decode"}],
    "workload": {"rate": 0.5, "requests": 500},
}

File = Annotated[
    Path | None, typer.Argument(help="Scenario, YAML; none = one prefill and one decode instance.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key.path=value; pools.0.count=4 is the first.")
]
Counts = Annotated[
    list[str] | None,
    typer.Option("--pool", help="role=count or role=countxTP, as prefill=2x4: replaces the pools."),
]
Trace = Annotated[Path | None, typer.Option(help="Azure's .csv or Mooncake's .jsonl.")]
Rate = Annotated[float | None, typer.Option(min=0, help="Requests per second.")]
Requests = Annotated[int | None, typer.Option(min=0, help="How many; of a trace 0 = all.")]
Target = Annotated[float | None, typer.Option(min=0, help="Milliseconds, of every class.")]


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says over the file; None = nothing."""

    settings: list[str] | None = None
    pools: list[str] | None = None
    trace: Path | None = None
    rate: float | None = None
    requests: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


def load(file: Path | None, flags: Flags) -> Scenario:
    """Raises ConfigError."""
    configure_logging(LoggingConfig(level="error"))
    tree = read_yaml(file, _STAGE) if file is not None else deepcopy(PAIR)
    if flags.pools:
        pattern = (tree.get("pools") or [{}])[0]
        tree["pools"] = [_pool(text, pattern, tree) for text in flags.pools]
    workload = tree.setdefault("workload", {})
    if flags.trace is not None:
        workload["trace"] = str(flags.trace.absolute())
        if file is None:  # at the trace's own speed, and all of it
            workload |= {"rate": 0, "requests": 0}
    for key, value in (("rate", flags.rate), ("requests", flags.requests)):
        if value is not None:
            workload[key] = value
    classes = tree.setdefault("classes", {"default": {}})
    for key, limit in (("ttft_ms", flags.ttft_ms), ("tpot_ms", flags.tpot_ms)):
        for item in classes.values() if limit is not None else ():
            item[key] = limit
    for setting in flags.settings or []:
        _set(tree, setting)
    return parse_scenario(tree, file.parent if file else Path(), str(file or "scenario"))


def _pool(text: str, first: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    role, _, size = text.partition("=")
    count, _, tp = size.partition("x")
    if not count.isdigit() or not (tp or "1").isdigit():
        message = f"--pool needs role=count or role=countxTP, not '{text}'"
        raise ConfigError(message, stage=_STAGE)
    same = [pool for pool in tree.get("pools", []) if pool.get("role") == role]
    pool = {**(same[0] if same else first), "role": role, "count": int(count)}
    return pool | ({"tp": int(tp)} if tp else {})


def _set(tree: Any, setting: str) -> None:
    """``a.0.b=value`` in a tree of mappings and lists; the value is YAML."""
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set needs key.path=value, not '{setting}'", stage=_STAGE)
    *parents, last = path.split(".")
    node = tree
    try:
        value = yaml.safe_load(text)
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = value
    except (AttributeError, IndexError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--set {setting}: there is no such place", stage=_STAGE) from error
