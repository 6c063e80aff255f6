"""From files, the environment and flags to one tree, and from its problems to words."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from isthmus.common.config.cluster import ClusterConfig
from isthmus.common.errors import ConfigError

ENV_PREFIX = "ISTHMUS_"
# Others of one level are not part of the tree: processes pass things to each other in some.
_TOP_TEXTS = frozenset(
    name for name, field in ClusterConfig.model_fields.items() if field.annotation is str
)


def load_config(
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """The effective tree. ``overrides`` is nested like the tree.

    Raises ConfigError with one line per problem; an unknown key names the nearest known one.
    """
    # Over the dumped defaults: a pool of which only `cpus` is given keeps its number of replicas.
    tree = ClusterConfig().model_dump()
    if file is not None:
        tree = _merge(tree, read_yaml(file))
    tree = _merge(tree, _from_environ(os.environ if environ is None else environ))
    tree = _merge(tree, dict(overrides or {}))
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error)), stage="config") from error


def read_yaml(file: Path, stage: str = "config") -> dict[str, Any]:
    """The mapping that a file holds, empty for an empty file. Raises ConfigError."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage=stage) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}", stage=stage) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a mapping, not {type(data).__name__}", stage=stage)
    return data


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in environ.items():
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        if not name.startswith(ENV_PREFIX):
            continue
        if len(keys) == 1:
            if keys[0] in _TOP_TEXTS and value:
                tree[keys[0]] = value
            continue
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = yaml.safe_load(value)
    return tree


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both_maps = isinstance(old, dict) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both_maps and isinstance(old, dict) else value
    return merged


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if not path:  # of the whole tree, and names its keys itself
            lines.append(problem["msg"].removeprefix("Value error, "))
        elif problem["type"] == "extra_forbidden":
            lines.append(f"unknown key '{path}'{_nearest(problem['loc'])}")
        else:
            text, given = problem["msg"].removeprefix("Value error, "), problem["input"]
            is_part = isinstance(given, Mapping)  # of the tree, too large to be of help
            lines.append(f"{path}: {text}" if is_part else f"{path}: {text} (got {given!r})")
    return lines


def node_of_mapping(annotation: Any) -> type[BaseModel] | None:
    """The kind of node that a mapping of names holds; None for anything else."""
    kinds = get_args(annotation) if get_origin(annotation) is dict else ()
    is_node = bool(kinds) and isinstance(kinds[1], type) and issubclass(kinds[1], BaseModel)
    return kinds[1] if is_node else None


def _nearest(loc: tuple[int | str, ...]) -> str:
    node: type[BaseModel] = ClusterConfig
    parents = iter(loc[:-1])
    for part in parents:
        annotation = node.model_fields[str(part)].annotation
        if named := node_of_mapping(annotation):
            next(parents, None)  # the name that an operator chose
            annotation = named
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        node = annotation
    matches = difflib.get_close_matches(str(loc[-1]), node.model_fields, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean '{'.'.join([*map(str, loc[:-1]), matches[0]])}'?"
    return f"; known keys here: {', '.join(sorted(node.model_fields))}"
