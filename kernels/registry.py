"""Chooses which implementation computes each op; the caller holds on to what it gets.

::

    device   first      else
    cpu      cpu        reference
    cuda     triton     reference (torch, whose products are cuBLAS's)

An implementation offers some ops; what it lacks comes from the next. The operator may name another
for an op (``engine.kernels``). ``pack_linear`` and ``linear`` always come from one implementation:
no other reads its packed weights. Choosing happens once, when a model is loaded.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from isthmus.common.errors import ConfigError
from isthmus.common.logging import get_logger
from isthmus.kernels import reference
from isthmus.kernels.cpu import BuildError, CpuKernels, kv_blocks
from isthmus.kernels.types import PackedLinear, TokenScores

Implementation = Literal["auto", "cpu", "reference", "triton"]

_PREFERENCES = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
_FOLLOWS = {"pack_linear": "linear"}
_CPU_OPS = (
    *("pack_linear", "linear", "rms_norm", "add_rms_norm", "silu_mul"),
    *("rope_and_cache", "paged_attention", "quantise_kv"),
)

_log = get_logger("kernels")


@dataclass(frozen=True, slots=True)
class OpChoice:
    """Which implementation computes an op, and why that one."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKernels:
    """A ``Kernels`` whose ops are the chosen ones, and how they came to be chosen."""

    choices: tuple[OpChoice, ...]
    description: str
    pack_linear: Callable[..., PackedLinear]
    linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[..., torch.Tensor]
    rope_and_cache: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    quantise_kv: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    dequantise_kv: Callable[..., torch.Tensor]
    copy_blocks: Callable[..., None]
    gather_blocks: Callable[..., torch.Tensor]
    scatter_blocks: Callable[..., None]
    adjust_logits: Callable[..., None]
    draw_tokens: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    describe_tokens: Callable[..., TokenScores]

    def describe(self) -> str:
        return self.description


OPS = tuple(f.name for f in fields(SelectedKernels) if f.name not in {"choices", "description"})


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one implementation does on this device; ``problem`` says why nothing, where so."""

    description: str = ""
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    problem: str = ""


def select(
    device: str = "cpu",
    num_threads: int = 1,
    implementation: Implementation = "auto",
    overrides: Mapping[str, str] | None = None,
) -> SelectedKernels:
    """The kernels for ``device`` (``cpu``, ``cuda``, ``cuda:1``); made once for equal arguments.

    ``auto`` takes the fastest that works here, op by op; a name takes that implementation for all
    that it offers. ``overrides`` maps an op to the implementation it must come from.
    Raises BuildError when an implementation was asked for by name and does not work here,
    ConfigError for an override that names nothing known or what does not work here.
    """
    wanted = tuple(sorted((overrides or {}).items()))
    return _select(device.partition(":")[0], num_threads, implementation, wanted)


def describe(device: str = "cpu") -> str:
    """One line for an operator: what ``select`` chooses for the device."""
    return select(device).describe()


@functools.cache
def _select(
    device: str,
    num_threads: int,
    implementation: Implementation,
    wanted: tuple[tuple[str, str], ...],
) -> SelectedKernels:
    overrides = dict(wanted)
    _check_names(overrides)
    preferred = _PREFERENCES[device] if implementation == "auto" else (implementation, "reference")
    names = dict.fromkeys((*preferred, *overrides.values()))
    offers = {name: _offer(name, device, num_threads) for name in names}
    first = preferred[0]
    if offers[first].problem and implementation != "auto":
        raise BuildError(offers[first].problem)
    if offers[first].problem:
        _log.warning(f"no {first} kernels; falling back to torch", reason=offers[first].problem)
    choices = tuple(_choose(op, first, overrides, offers) for op in OPS)
    ops: dict[str, Any] = {c.op: offers[c.implementation].ops[c.op] for c in choices}
    return SelectedKernels(choices=choices, description=_summary(first, choices, offers), **ops)


def _check_names(overrides: Mapping[str, str]) -> None:
    for op, name in overrides.items():
        if op in _FOLLOWS:
            raise _wrong(op, f"{op} follows {_FOLLOWS[op]}: name that")
        if op not in OPS:
            raise _wrong(op, f"unknown op {op!r}{_nearest(op, OPS)}")
        if name not in _LOADERS:
            raise _wrong(op, f"unknown implementation {name!r}{_nearest(name, _LOADERS)}")


def _choose(
    op: str, first: str, overrides: Mapping[str, str], offers: Mapping[str, _Offer]
) -> OpChoice:
    name = overrides.get(_FOLLOWS.get(op, op))
    if name is not None:
        if offers[name].problem:
            raise _wrong(op, f"no {name} kernels here: {offers[name].problem}")
        if op not in offers[name].ops:
            raise _wrong(op, f"{name} has no {op}; it has {', '.join(offers[name].ops)}")
        return OpChoice(op, name, "overridden")
    if op in offers[first].ops:
        return OpChoice(op, first, "first choice")
    return OpChoice(op, "reference", offers[first].problem or f"{first} has none")


def _summary(first: str, choices: Iterable[OpChoice], offers: Mapping[str, _Offer]) -> str:
    """``cpu (…)``, and how many ops come from elsewhere."""
    counts: dict[str, int] = {}
    for choice in choices:
        counts[choice.implementation] = counts.get(choice.implementation, 0) + 1
    main = first if first in counts else "reference"
    others = [f"{count} ops of {name}" for name, count in counts.items() if name != main]
    return ", ".join((offers[main].description, *others))


def _offer(name: str, device: str, num_threads: int) -> _Offer:
    try:
        return _LOADERS[name](device, num_threads)
    except BuildError as error:
        return _Offer(problem=str(error))


def _reference(_device: str, _num_threads: int) -> _Offer:
    return _Offer(reference.describe(), reference.OPS)


def _cpu(device: str, num_threads: int) -> _Offer:
    if device != "cpu":
        raise BuildError(f"they do not run on {device}")
    kernels = CpuKernels(num_threads)
    return _Offer(
        kernels.describe(), {op: getattr(kernels, op) for op in _CPU_OPS} | dict(kv_blocks.OPS)
    )


def _triton(device: str, _num_threads: int) -> _Offer:
    if importlib.util.find_spec("triton") is None:
        raise BuildError("Triton is not installed: pip install 'isthmus[gpu]'")
    from isthmus.kernels.triton import ops

    if device == "cpu" and not ops.is_interpreted():
        raise BuildError("they need a GPU")
    return _Offer(ops.describe(), ops.OPS)


_LOADERS: Mapping[str, Callable[[str, int], _Offer]] = {
    "cpu": _cpu,
    "reference": _reference,
    "triton": _triton,
}


def _wrong(op: str, message: str) -> ConfigError:
    return ConfigError(f"engine.kernels: {message}", stage="load", param=f"engine.kernels.{op}")


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    known_names = ", ".join(known)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {known_names}"
