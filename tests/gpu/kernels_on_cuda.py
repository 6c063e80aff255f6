"""A pytest plugin: runs the tests of the Triton kernels on a GPU, over the cases they have anyway.

``pytest -p tests.gpu.kernels_on_cuda tests/unit/kernels -k triton``. The tests make CPU tensors and
compare with the reference there. Each public function of the kernels' modules is replaced by one
that takes its tensors to the GPU, and what it changed and what it returns back. Tests by Hypothesis
get a few examples: every shape may need a kernel compiled.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from isthmus.kernels import triton as kernels_triton

MAX_EXAMPLES = 6
_is_under_way: list[str] = []


class Trip:
    """The tensors of one call, each taken to a device once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def there(self, value: Any) -> Any:
        """``value`` with every CPU tensor in it on the device."""
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            if id(value) not in self._taken:
                # A copy even where the device is the CPU, laid out as the tensor is.
                self._taken[id(value)] = (value, value.clone().to(self._device))
            return self._taken[id(value)][1]
        return mapped(value, self.there)

    def back(self, value: Any) -> Any:
        """``value`` with every tensor in it on the CPU."""
        if isinstance(value, torch.Tensor):
            return value.cpu()
        return mapped(value, self.back)

    def bring_changes(self) -> None:
        for here, there in self._taken.values():
            here.copy_(there)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Tuples and dataclasses with ``change`` of what they hold; anything else as it is."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(change(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: change(item) for name, item in items.items()}
        if any(changed[name] is not item for name, item in items.items()):
            return dataclasses.replace(value, **changed)
    return value


def travelling(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``function`` on ``device``, for callers on the CPU."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_under_way:  # called by another such function, with what was taken there
            return function(*args, **kwargs)
        trip = Trip(device)
        there_args = tuple(trip.there(arg) for arg in args)
        there_kwargs = {name: trip.there(value) for name, value in kwargs.items()}
        _is_under_way.append(function.__name__)
        try:
            result = function(*there_args, **there_kwargs)
        finally:
            _is_under_way.clear()
        trip.bring_changes()
        return trip.back(result)

    return call


def kernel_modules() -> list[ModuleType]:
    return [
        importlib.import_module(f"{kernels_triton.__name__}.{found.name}")
        for found in pkgutil.iter_modules(kernels_triton.__path__)
    ]


def replace_launchers(modules: list[ModuleType], device: str) -> int:
    """In whichever of the modules they are named; how many functions there are."""
    launchers = {
        value: travelling(value, device)
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in launchers:
                setattr(module, name, launchers[value])
            elif isinstance(value, dict) and name == "OPS":
                value.update({op: launchers.get(of, of) for op, of in value.items()})
    return len(launchers)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels-device",
        default="cuda",
        help="where the kernels' tensors go; cpu, with TRITON_INTERPRET=1, tries the plugin itself",
    )


def pytest_configure(config: pytest.Config) -> None:
    replace_launchers(kernel_modules(), config.getoption("--kernels-device"))


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        module = item.getparent(pytest.Module)
        assert module is not None
        # Without the mark the bodies run here, and no interpreter is started for them.
        module.own_markers = [mark for mark in module.own_markers if mark.name != "interpreted"]
        if getattr(item.obj, "is_hypothesis_test", False):
            own = item.obj._hypothesis_internal_use_settings
            item.obj._hypothesis_internal_use_settings = settings(
                parent=own, max_examples=min(MAX_EXAMPLES, own.max_examples)
            )
