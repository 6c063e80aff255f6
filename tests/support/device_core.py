"""Engines whose steps go through the code for a device, on CPU tensors."""

from __future__ import annotations

from isthmus.common.config import EngineConfig
from isthmus.engine.core import EngineCore
from isthmus.engine.device import HostDevice
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.kv_store import KvStore
from isthmus.engine.models.types import LanguageModel
from isthmus.engine.runner import Runner
from isthmus.kernels import reference
from tests.support.tiny_model import TinyModel, make_tiny_core


def device_runner(
    model: LanguageModel, kv_store: KvStore, config: EngineConfig, max_model_len: int
) -> Runner:
    """Staging, graphs and sampler of a device that is never behind: a step's results exist when
    its launch returns, but the host looks at them only when the next one is launched."""
    return DeviceRunner(model, reference, kv_store, config, max_model_len, HostDevice())


def make_device_core(model: TinyModel | None = None, **engine: object) -> EngineCore:
    settings = {"async_scheduling": "on", **engine}
    return make_tiny_core(model, runner_of=device_runner, **settings)
