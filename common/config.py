"""The configuration of a cluster: one frozen tree, composed, never mutated.

Sources, later wins: defaults, a YAML file, ``ISTHMUS_*`` environment variables (``__`` between
levels), command-line flags. Unknown keys are errors that name the nearest known key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from isthmus.common.cluster import Role
from isthmus.common.config_node import Node
from isthmus.common.errors import ConfigError
from isthmus.common.kv_layout import QUANTISED, can_feed
from isthmus.common.slo import LabelName, SloConfig, TenantConfig, hash_key

ENV_PREFIX = "ISTHMUS_"
DTypeName = Literal["auto", "float32", "bfloat16"]
ConnectorName = Literal["nixl", "shm", "collective", "local", "fake"]
AUTO_CONNECTORS: tuple[ConnectorName, ...] = ("nixl", "shm", "collective")
"""What ``transfer.connector: auto`` stands for, where it can run."""
KvDTypeName = Literal["auto", "bfloat16", "float32", "int8", "fp8_e4m3"]


def _unquoted(value: object) -> object:
    """YAML takes a bare ``on`` or ``off`` for a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class ModelConfig(Node):
    path: str = Field("sample", description="directory, .gguf file, or 'sample' (SmolLM2-135M)")
    served_name: str = Field("", description="name in the API; default: the model's own")
    dtype: DTypeName = Field(
        "auto",
        description="weights, and KV where engine.kv_dtype is auto; auto = the checkpoint's, bf16",
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="weights of products, rounded when they are loaded; int8 = CPU only"
    )
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0 = the model's own limit")


class EngineConfig(Node):
    block_size: int = Field(16, ge=1, description="tokens per KV block")
    num_blocks: int = Field(0, ge=0, description="KV blocks; 0 = as many as kv_cache_gib holds")
    kv_cache_gib: float = Field(
        1.0,
        ge=0,
        description="memory for KV blocks of one instance; 0 = on a GPU (one rank) what "
        "gpu_memory_share leaves",
    )
    kv_dtype: KvDTypeName = Field(
        "auto",
        description="KV blocks: auto = as the weights; int8 and fp8_e4m3 (GPU only) take about "
        "half of bfloat16's memory. Prefill instances may keep a wider one than decode instances: "
        "KV is converted when it is sent",
    )
    gpu_memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a GPU for weights, steps and KV blocks, where kv_cache_gib is 0",
    )
    kv_memory: Literal["auto", "private", "shared"] = Field(
        "auto",
        description="whether other processes of the host can map the KV blocks, as connector shm "
        "needs them; auto = where that costs nothing (shared memory has huge pages) or shm is "
        "the connector (CPU only)",
    )
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one step")
    max_num_seqs: int = Field(64, ge=1, description="most running sequences")
    watermark: float = Field(0.02, ge=0, lt=0.5, description="share of blocks kept for growth")
    enable_prefix_cache: bool = Field(
        True, description="keep blocks of finished prompts for prompts that begin alike"
    )
    num_threads: int = Field(1, ge=1, description="CPU threads of the engine's kernels")
    kernels: dict[str, str] = Field(
        default_factory=dict,
        description="implementation (cpu, triton, reference) of an op, where it is to be another "
        "than the fastest; `isthmus doctor --kernels` lists the ops",
    )
    device: str = Field("cpu", description="cpu or cuda:N; of several ranks the first one's")
    tp_size: int = Field(
        1, ge=1, le=64, description="ranks (processes, devices) that hold an instance's model"
    )
    tp_timeout_ms: int = Field(
        30_000, ge=1, description="longest wait of one rank for another within a step"
    )
    async_scheduling: Annotated[Literal["auto", "on", "off"], BeforeValidator(_unquoted)] = Field(
        "auto", description="plan the next step while one runs; auto = on a GPU only"
    )
    cuda_graphs: bool = Field(
        True, description="capture decode steps at start and replay them (GPU only)"
    )

    @model_validator(mode="after")
    def _one_rank_measures(self) -> EngineConfig:
        if self.tp_size > 1 and not (self.kv_cache_gib or self.num_blocks):
            raise ValueError(
                "kv_cache_gib 0 is measured by one rank only: say how much, or num_blocks"
            )
        return self

    @model_validator(mode="after")
    def _device_reads_kv(self) -> EngineConfig:
        if self.kv_dtype == "fp8_e4m3" and self.device.startswith("cpu"):
            raise ValueError(
                "kv_dtype fp8_e4m3 is read by attention on GPUs only, and device is "
                f"{self.device}: take int8"
            )
        return self


class PoolConfig(Node):
    replicas: int = Field(0, ge=0, description="instances of this role")
    engine: EngineConfig = EngineConfig()
    cpus: list[int] = Field(default_factory=list, description="cores to pin to; empty = no pinning")
    zone: str = Field("", max_length=63, description="of this pool's instances; default: ``zone``")


class TransferConfig(Node):
    connector: Literal["auto"] | ConnectorName | list[ConnectorName] = Field(
        "auto",
        description="what may move KV: one connector or a list; two instances use the best that "
        "both have (docs/kv-transfer.md); auto = all but local (within one process) and fake "
        "(faults by script)",
    )
    deadline_ms: int = Field(
        30_000,
        ge=1,
        description="longest time without progress of KV that is being sent; a prompt may wait and "
        "be computed as long as its request's deadline allows",
    )
    handshake_timeout_ms: int = Field(
        5_000, ge=1, description="longest time for two instances to meet"
    )
    hold_ms: int = Field(
        60_000, ge=1, description="longest time blocks are kept for a peer after the first token"
    )
    peer_grace_ms: int = Field(
        60_000,
        ge=1,
        description="an instance that the registry has not listed for so long, and with which "
        "nothing is open, is forgotten with all that is kept for it: its mapped memory, its "
        "connector's descriptors, its channel",
    )
    quarantine_ms: int = Field(5_000, ge=0, description="rest after a transfer of unknown end")
    checksum: Literal["auto", "none", "xxh3"] = Field(
        "auto",
        description="compare every block that arrives with what was sent; auto = xxh3 where KV is "
        "in host memory",
    )
    on_failure: Literal["fail", "reprefill", "recompute"] = Field(
        "reprefill",
        description="when a prompt could not be computed or moved, and the request's class does "
        "not say: fail the request, try the other prefill instance that the router names, while "
        "there is time and no token is out, or compute it on the decode instance at once (which is "
        "also what follows when the other fails, or there is none)",
    )
    fetch_min_tokens: int = Field(
        64,
        ge=0,
        description="a prefill instance asks the decode instance for KV of a prompt's first tokens "
        "when that saves it computing so many of them (a conversation's last answer, say); "
        "0 = never",
    )
    fetch_timeout_ms: int = Field(
        2_000,
        ge=1,
        description="longest wait for such KV before the prompt is computed without it; a peer "
        "that is well sends it within milliseconds",
    )
    layers_per_push: int = Field(
        0,
        ge=0,
        description="layers whose KV leaves together while a prompt's later layers are computed; "
        "0 = as many as make 1 MiB; as many as the model has, or more = whole blocks after a step",
    )
    canary_every: int = Field(
        0,
        ge=0,
        description="every how many-th greedy request that was served with KV from elsewhere is "
        "computed again on its decode instance, when that is idle, and compared; 0 = none",
    )
    staging_mib: int = Field(
        32,
        ge=1,
        description="memory of a prefill instance for KV that is converted to another dtype on its "
        "way; it bounds what is under way at a time",
    )
    fault_script: str = Field("", description="scripted faults of the fake connector (tests)")

    @property
    def named_connectors(self) -> tuple[ConnectorName, ...]:
        """Those that the configuration names; none for ``auto``."""
        if self.connector == "auto":
            return ()
        return tuple(self.connector) if isinstance(self.connector, list) else (self.connector,)

    @property
    def needs_shared_memory(self) -> bool:
        """True where peers must be able to map the KV blocks."""
        return "shm" in self.named_connectors or self.fault_script.startswith("shm|")

    @model_validator(mode="after")
    def _names_one(self) -> TransferConfig:
        if isinstance(self.connector, list) and not self.connector:
            raise ValueError("connector: an empty list leaves nothing to move KV with")
        return self


class RouterConfig(Node):
    policy: Literal[
        "goodput",
        "least_predicted_load",
        "round_robin",
        "least_loaded",
        "power_of_two",
        "prefix_only",
    ] = Field(
        "least_predicted_load",
        description="which pair of instances serves a request; goodput also decides when, and whom "
        "overload leaves out",
    )
    mode: Literal["auto", "embedded", "process"] = Field(
        "auto",
        description="where decisions are made: in each gateway, or in processes of their own of "
        "which one leads; auto = in the gateway where there is one, in processes where there are "
        "several",
    )
    replicas: int = Field(
        2, ge=1, description="router processes, where there are any: one leads, the others stand by"
    )
    min_remote_tokens: int = Field(
        32, ge=0, description="fewer uncached prompt tokens than this are computed on decode"
    )
    index_max_blocks: int = Field(1_000_000, ge=1, description="bound of the prefix index")
    reservation_ttl_ms: int = Field(
        660_000,
        ge=1,
        description="when a decision of unknown outcome is written off; more than a request's "
        "deadline, else those that still wait are forgotten",
    )
    stale_load_ms: int = Field(2_000, ge=1, description="age after which a report is doubted")
    ageing_ms: int = Field(
        5_000,
        ge=0,
        description="wait of a request without a target, or behind it, after which it gets a share "
        "of the work whatever has targets (goodput)",
    )
    max_held: int = Field(
        4_096, ge=1, description="requests that wait in the router; more get 503 (goodput)"
    )
    exploration: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of decisions that go to any feasible pair, to learn of it (goodput)",
    )
    session_affinity_ms: float = Field(
        20.0,
        ge=0,
        description="what it is worth that a conversation goes on where its last turn was served; "
        "0 = nothing",
    )
    max_sessions: int = Field(65_536, ge=1, description="conversations that are remembered")
    breaker_failures: int = Field(3, ge=1, description="failures in a row that open a breaker")
    breaker_open_ms: int = Field(2_000, ge=1, description="pause before an instance is tried again")


class GatewayConfig(Node):
    host: str = Field("127.0.0.1", description="address on which the gateway listens")
    port: int = Field(
        8000,
        ge=0,
        le=65_535,
        description="of the first gateway, the next ones have the ports after it; 0 = any free",
    )
    replicas: int = Field(1, ge=1, le=64, description="gateway processes")
    request_timeout_ms: int = Field(600_000, ge=1, description="deadline of one request")
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="larger request bodies get 413")
    max_inflight: int = Field(1024, ge=1, description="more concurrent requests get 429")
    default_max_tokens: int = Field(
        0, ge=0, description="completion length when the client sets none; 0 = context length"
    )
    api_keys: list[str] = Field(default_factory=list, description="empty = no authentication")
    on_decode_loss: Literal["resume", "error"] = Field(
        "resume", description="what happens to a stream whose decode instance dies"
    )
    instance_wait_ms: int = Field(
        30_000,
        ge=0,
        description="longest wait for a decode or mixed instance to be ready when none is, before "
        "503; 0 = refuse at once",
    )


class RegistryConfig(Node):
    host: str = Field("127.0.0.1", description="address on which the registry listens")
    port: int = Field(0, ge=0, le=65_535, description="0 = any free port")
    lease_ms: int = Field(
        5_000, ge=100, description="an instance that was silent for this long is gone"
    )


class LifecycleConfig(Node):
    drain_ms: int = Field(10_000, ge=0, description="how long a drain waits for running work")
    ready_timeout_ms: int = Field(
        120_000, ge=1, description="longest start of the cluster, and of a worker that restarts"
    )
    max_restarts: int = Field(-1, ge=-1, description="restarts of one worker; -1 = unlimited")
    actuator: Literal["ray", "process"] = Field(
        "ray", description="who starts and restarts workers: Ray actors, or plain processes"
    )
    ray_address: str = Field(
        "", description="a running Ray cluster to join, host:port or auto; empty = a private one"
    )


class LoggingConfig(Node):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least serious messages that are logged"
    )
    format: Literal["json", "console"] = Field(
        "console", description="of the log files: one JSON object a line, or text for people"
    )


class ClusterConfig(Node):
    name: str = Field(
        "isthmus",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$",
        description="of the cluster; also of its files",
    )
    model: ModelConfig = ModelConfig()
    prefill: PoolConfig = PoolConfig(replicas=1)
    decode: PoolConfig = PoolConfig(replicas=1)
    mixed: PoolConfig = PoolConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    slo: SloConfig = SloConfig()
    tenants: dict[LabelName, TenantConfig] = Field(
        default_factory=dict,
        description="who may send requests, by name; the keys of gateway.api_keys are tenants "
        "without a name",
    )
    registry: RegistryConfig = RegistryConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    logging: LoggingConfig = LoggingConfig()
    host: str = Field("127.0.0.1", description="address on which workers listen")
    zone: str = Field(
        "",
        max_length=63,
        description="rack, rail group or zone of the instances that are started with this file; KV "
        "prefers links inside one",
    )
    state_dir: str = Field("", description="run-time state; default: the user's state folder")

    @property
    def tenant_weights(self) -> dict[str, float]:
        return {name: tenant.weight for name, tenant in self.tenants.items()}

    @property
    def has_router_processes(self) -> bool:
        """Routers run apart from the gateways."""
        if self.router.mode == "auto":
            return self.gateway.replicas > 1
        return self.router.mode == "process"

    def pool(self, role: Role) -> PoolConfig:
        """The instances of a role, with what the rest of the configuration asks of them."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        pool = pools[role]
        if not self.transfer.needs_shared_memory or pool.engine.kv_memory != "auto":
            return pool
        engine = pool.engine.model_copy(update={"kv_memory": "shared"})
        return pool.model_copy(update={"engine": engine})

    @model_validator(mode="after")
    def _kv_can_be_sent(self) -> ClusterConfig:
        """Both dtypes are known only where neither is ``auto``, but what is quantised is never
        restored; the rest is found out when instances meet."""
        source, target = self.prefill.engine.kv_dtype, self.decode.engine.kv_dtype
        if not (self.prefill.replicas and self.decode.replicas):
            return self
        knows_both = source != "auto" and target != "auto"
        if (source in QUANTISED or knows_both) and not can_feed(source, target):
            raise ValueError(
                f"KV in {source} (prefill.engine.kv_dtype) cannot become {target} "
                "(decode.engine.kv_dtype): a prefill instance converts to fewer bytes only"
            )
        return self

    @model_validator(mode="after")
    def _int8_runs_on_cpus(self) -> ClusterConfig:
        devices = {pool.engine.device for pool in (self.prefill, self.decode, self.mixed)}
        other = sorted(device for device in devices if not device.startswith("cpu"))
        if self.model.quantization == "int8" and other:
            raise ValueError(
                f"model.quantization int8 runs on the CPU only, and device is {other[0]}"
            )
        return self

    @model_validator(mode="after")
    def _a_key_names_one_tenant(self) -> ClusterConfig:
        owners = {hash_key(key): "gateway.api_keys" for key in self.gateway.api_keys}
        for name, tenant in self.tenants.items():
            for digest in tenant.all_hashes:
                if digest in owners:
                    raise ValueError(f"one key is in tenants.{name} and in {owners[digest]}")
                owners[digest] = f"tenants.{name}"
        return self

    @model_validator(mode="after")
    def _classes_of_tenants_are_known(self) -> ClusterConfig:
        for name, tenant in self.tenants.items():
            if tenant.default_class and tenant.default_class not in self.slo.classes:
                raise ValueError(
                    f"tenants.{name}.default_class {tenant.default_class!r} is not one of "
                    "slo.classes"
                )
        return self

    @model_validator(mode="after")
    def _reservations_outlive_requests(self) -> ClusterConfig:
        ttl_ms, timeout_ms = self.router.reservation_ttl_ms, self.gateway.request_timeout_ms
        if ttl_ms <= timeout_ms:
            raise ValueError(
                f"router.reservation_ttl_ms ({ttl_ms}) must be more than gateway.request_timeout_ms"
                f" ({timeout_ms}), else the router forgets requests that still wait"
            )
        return self


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
            lines.append(f"{path}: {problem['msg']} (got {problem['input']!r})")
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
