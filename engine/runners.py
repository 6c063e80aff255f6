"""What an engine's device decides: its runner, whether it plans ahead, its memory for KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from isthmus.common.config import EngineConfig
from isthmus.common.logging import get_logger
from isthmus.engine.device import device_of
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.runner import ModelRunner, Runner
from isthmus.engine.trial_step import measure_kv_bytes
from isthmus.kernels import select
from isthmus.kernels.registry import OpChoice

# From a model, its KV store, the configuration and the longest sequence.
RunnerOf = Callable[[LanguageModel, KvStore, EngineConfig, int], Runner]

_LOOKING_OPS = frozenset({"rope_and_cache", "paged_attention"})

_log = get_logger("engine")


def make_runner(
    model: LanguageModel, kv_store: KvStore, config: EngineConfig, max_model_len: int
) -> Runner:
    """On the CPU the engine thread computes, elsewhere the device does. A model of several ranks
    takes batches of the host, whatever its ranks compute with."""
    device = device_of(config.device)
    if device.torch_device.type == "cpu" or model.spec.tp_size > 1:
        return ModelRunner(model, kv_store)
    kernels = select(config.device, config.num_threads, overrides=config.kernels)
    waiting = ops_that_wait(kernels.choices)
    if config.cuda_graphs and waiting:
        _log.warning("no CUDA graphs: some kernels wait for the device", ops=", ".join(waiting))
        config = config.model_copy(update={"cuda_graphs": False})
    return DeviceRunner(model, kernels, kv_store, config, max_model_len, device)


def ops_that_wait(choices: Iterable[OpChoice]) -> list[str]:
    """Ops of a forward pass that cannot be captured: the reference's look at what is on the
    device."""
    return [c.op for c in choices if c.implementation == "reference" and c.op in _LOOKING_OPS]


def measured_kv_bytes(model: LanguageModel, config: EngineConfig) -> int:
    """For ``count_blocks``: 0 where the configuration says how much, or nothing can be measured."""
    device = device_of(config.device)
    is_open = not config.num_blocks and not config.kv_cache_gib
    if not is_open or device.torch_device.type == "cpu" or model.spec.tp_size > 1:
        return 0
    kernels = select(config.device, config.num_threads, overrides=config.kernels)
    layout = layout_of(model.spec, config.block_size, config.kv_dtype)
    return measure_kv_bytes(model, kernels, config, layout, device)


def is_asynchronous(config: EngineConfig) -> bool:
    """Whether the next step is planned while one runs. Where the thread that would plan is the one
    that computes, or that talks to other ranks, it would gain nothing, and cost what is computed
    for nothing when a sequence stops."""
    if config.async_scheduling == "auto":
        return config.device.partition(":")[0] != "cpu" and config.tp_size == 1
    return config.async_scheduling == "on"
