"""What would make a start fail, found before anything is started. Each failure is one sentence.

The memory figure is an estimate from the model's files (parameters × bytes each, the KV blocks that
were asked for, and a fixed part per process), compared with what the machine, or the container this
runs in, has left.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil

from isthmus.common.addresses import family_of, join_address
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, ModelConfig, PoolConfig
from isthmus.common.errors import ConfigError
from isthmus.common.gguf_file import read_gguf
from isthmus.common.memory import available_memory
from isthmus.common.model_files import SAMPLE, ModelFiles, ModelKind, locate_model
from isthmus.controlplane.context_limit import longest_sequence, read_model_config

GIB = 2**30
PORT_TRIES = 20
MAX_PORT = 65_535
PROCESS_BYTES = 450 * 2**20  # Python, torch and gRPC of one worker
CONTROL_BYTES = 300 * 2**20  # gateway and control plane
RAY_BYTES = 600 * 2**20
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """Paths that mean the same in every process, whatever folder it is started in."""
    update: dict[str, object] = {}
    if config.state_dir:
        update["state_dir"] = str(Path(config.state_dir).expanduser().absolute())
    if config.model.path != SAMPLE:
        path = str(Path(config.model.path).expanduser().absolute())
        update["model"] = config.model.model_copy(update={"path": path})
    return config.model_copy(update=update)


def check(config: ClusterConfig) -> ClusterConfig:
    """The configuration with free gateway ports chosen where 0 was asked for.

    Raises ConfigError or ModelError.
    """
    _check_pools(config)
    _check_packages(config)
    files = locate_model(config.model.path)
    check_length(config.model.max_model_len, files)
    estimate = estimate_memory(config, files)
    check_memory(estimate, available_memory())
    if config.registry.port:
        probe_port(config.registry.host, config.registry.port, "--set registry.port=…")
    port = probe_ports(config.gateway.host, config.gateway.port, config.gateway.replicas)
    shared_port = config.gateway.shared_port
    if shared_port:
        option = "--set gateway.shared_port=…"
        if port <= shared_port < port + config.gateway.replicas:
            raise ConfigError(
                f"port {shared_port} is a gateway's own already: choose another with {option}",
                stage="start",
            )
        probe_port(config.gateway.host, shared_port, option)
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})


def _check_pools(config: ClusterConfig) -> None:
    if config.decode.replicas + config.mixed.replicas == 0:
        message = "nothing would decode: ask for at least one decode or mixed instance"
        raise ConfigError(message, stage="start")


def _check_packages(config: ClusterConfig) -> None:
    needed = {"torch": "pip install 'isthmus[worker]'"}
    if config.transfer.named_connectors == ("nixl",) and config.prefill.replicas:
        needed["nixl_cu13"] = "pip install 'isthmus[nixl]', or use --set transfer.connector=auto"
    if config.transfer.named_connectors == ("ucx",) and config.prefill.replicas:
        needed["ucxx"] = "pip install 'isthmus[ucx]', or use --set transfer.connector=auto"
    if config.lifecycle.actuator == "ray":
        needed["ray"] = "pip install 'isthmus[ray]', or use --actuator process"
    for module, advice in needed.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed: {advice}", stage="start")


def check_length(max_model_len: int, files: ModelFiles) -> None:
    longest = longest_sequence(files)
    if longest is not None and max_model_len > longest:
        message = (
            f"max_model_len {max_model_len} is beyond the model's limit of {longest} tokens; "
            "choose a smaller --max-model-len"
        )
        raise ConfigError(message, stage="start")


def _active_roles(config: ClusterConfig) -> list[Role]:
    return [role for role in Role if config.pool(role).replicas]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of main memory; ``instances`` has one entry per role in use: (replicas, bytes each)."""

    instances: dict[Role, tuple[int, int]]
    rest: int

    @property
    def total(self) -> int:
        return self.rest + sum(replicas * each for replicas, each in self.instances.values())

    def explain(self) -> str:
        parts = [
            f"{replicas} {role.value} × {each / GIB:.1f}"
            for role, (replicas, each) in self.instances.items()
        ]
        return f"{' + '.join(parts)} + {self.rest / GIB:.1f} for the rest"


def estimate_memory(config: ClusterConfig, files: ModelFiles) -> MemoryEstimate:
    weights = weight_bytes(config.model, files)
    instances = {
        role: (config.pool(role).replicas, _instance_bytes(config.pool(role), weights))
        for role in _active_roles(config)
    }
    ray = RAY_BYTES if config.lifecycle.actuator == "ray" else 0
    return MemoryEstimate(instances, CONTROL_BYTES + ray)


def _instance_bytes(pool: PoolConfig, weights: int) -> int:
    processes = PROCESS_BYTES * pool.engine.tp_size
    if pool.engine.device != "cpu":
        return processes
    # A fixed number of blocks is checked by the engine, which knows the size of a block.
    kv = 0 if pool.engine.num_blocks else int(pool.engine.kv_cache_gib * GIB)
    return processes + weights + kv


def weight_bytes(model: ModelConfig, files: ModelFiles) -> int:
    """Bytes of the weights once loaded. Raises ModelFileError."""
    if files.kind is ModelKind.GGUF:
        num_parameters = sum(
            prod(tensor.shape) for tensor in read_gguf(files.path).tensors.values()
        )
        return num_parameters * _DTYPE_BYTES.get(model.dtype, 2)
    stored = _stored_dtype(files.path)
    size = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    return size * _DTYPE_BYTES.get(model.dtype, 2) // _DTYPE_BYTES.get(stored, 2)


def _stored_dtype(folder: Path) -> str:
    config = read_model_config(folder)
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def check_memory(estimate: MemoryEstimate, available: int) -> None:
    if estimate.total > available:
        message = (
            f"not enough memory: about {estimate.total / GIB:.1f} GiB are needed "
            f"({estimate.explain()}) and {available / GIB:.1f} GiB are free; use a smaller model, "
            "fewer instances or a smaller --kv-cache-gib"
        )
        raise ConfigError(message, stage="start")


def probe_ports(host: str, port: int, count: int) -> int:
    """The first of ``count`` ports in a row that can be bound, beginning with ``port`` or anywhere
    for 0. Raises ConfigError when one cannot."""
    if port + count - 1 > MAX_PORT:
        message = f"{count} ports from {port} on go beyond {MAX_PORT}; choose another with --port"
        raise ConfigError(message, stage="start")
    for _ in range(PORT_TRIES if port == 0 else 1):
        first = probe_port(host, port, "--port")
        try:
            for index in range(1, count):
                probe_port(host, first + index, "--port")
        except (ConfigError, OverflowError):
            if port:
                raise
        else:
            return first
    message = f"no {count} ports in a row are free on {host}; choose the first with --port"
    raise ConfigError(message, stage="start")


def probe_port(host: str, port: int, option: str) -> int:
    """The port if it can be bound, or a free one for 0. Raises ConfigError otherwise."""
    try:
        family = family_of(host)
    except OSError as error:
        message = f"cannot listen on {host}: {error.strerror}"
        raise ConfigError(message, stage="start") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(_explain_bind(host, port, option, error), stage="start") from error
        return int(probe.getsockname()[1])


def _explain_bind(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use{_owner(port)}; choose another with {option}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose another with {option}"
    return f"cannot listen on {join_address(host, port)}: {os.strerror(error.errno or 0)}"


def _owner(port: int) -> str:
    """Who listens there, as far as this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listener and connection.laddr and connection.laddr.port == port:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""
