"""What several commands share: the output option, where a cluster's state is, and --set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from isthmus.cli.output import OutputFormat
from isthmus.common.config import load_config
from isthmus.common.errors import ConfigError
from isthmus.controlplane.state_file import ClusterState, find_running, state_folder

Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Form of the result.")]
ClusterName = Annotated[
    str, typer.Option("--name", envvar="ISTHMUS_NAME", help="Name of the cluster.")
]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of the cluster's state, else $ISTHMUS_STATE_DIR."),
]
DEFAULT_CLUSTER = "isthmus"


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``key.path=value`` items as a nested tree; values are YAML. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not path:
            message = f"--set needs key.path=value, not '{setting}'"
            raise ConfigError(message, stage="config")
        set_path(tree, path, _value(setting, text))
    return tree


def _value(setting: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        message = f"--set {setting}: the value is not valid YAML"
        raise ConfigError(message, stage="config") from error


def set_path(tree: dict[str, Any], path: str, value: object) -> None:
    """Sets ``a.b.c`` in a nested tree. Raises ConfigError when ``a.b`` holds a value already."""
    *parents, last = path.split(".")
    node = tree
    for key in parents:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{path}: {key} is a value, not a group", stage="config")
    node[last] = value


def running_cluster(name: str, state_dir: Path | None) -> ClusterState:
    """The running cluster of that name. Raises ConfigError when there is none in that folder."""
    overrides = {"state_dir": str(state_dir)} if state_dir else {}
    folder = state_folder(load_config(overrides=overrides))
    state = find_running(folder, name)
    if state is None:
        message = (
            f"no cluster named {name} is running on this machine, going by {folder} (--state-dir "
            "names another folder); start one with `isthmus up`"
        )
        raise ConfigError(message, stage="control")
    return state
