"""The whole tree, and what must be true across its sections."""

from __future__ import annotations

from pydantic import Field, model_validator

from isthmus.common.cluster import Role
from isthmus.common.config.engine import ModelConfig, PoolConfig
from isthmus.common.config.processes import LifecycleConfig, LoggingConfig, RegistryConfig
from isthmus.common.config.serving import GatewayConfig, RouterConfig
from isthmus.common.config.transfer import TransferConfig
from isthmus.common.config_node import Host, Node
from isthmus.common.kv_layout import QUANTISED, can_feed
from isthmus.common.slo import LabelName, SloConfig, TenantConfig, hash_key


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
    host: Host = Field("127.0.0.1", description="address on which workers listen")
    zone: str = Field(
        "",
        max_length=63,
        description="rack, rail group or zone of the instances that are started with this file; KV "
        "prefers links inside one (goodput)",
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
    def _tenants_have_keys(self) -> ClusterConfig:
        """A tenant without one can be nobody, and where none has one everybody is let in."""
        for name, tenant in self.tenants.items():
            if not tenant.all_hashes:
                raise ValueError(
                    f"tenants.{name} has no key: give it api_keys or key_hashes, by which it is "
                    "known"
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
