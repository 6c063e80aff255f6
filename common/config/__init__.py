"""The configuration of a cluster: one frozen tree, composed, never mutated.

Sources, later wins: defaults, a YAML file, ``ISTHMUS_*`` environment variables (``__`` between
levels), command-line flags. Unknown keys are errors that name the nearest known key.
"""

from isthmus.common.config.cluster import ClusterConfig
from isthmus.common.config.engine import (
    DTypeName,
    EngineConfig,
    KvDTypeName,
    ModelConfig,
    PoolConfig,
)
from isthmus.common.config.loading import ENV_PREFIX, load_config, node_of_mapping, read_yaml
from isthmus.common.config.processes import LifecycleConfig, LoggingConfig, RegistryConfig
from isthmus.common.config.serving import GatewayConfig, RouterConfig
from isthmus.common.config.transfer import (
    AUTO_CONNECTORS,
    UCX_CONNECTORS,
    ConnectorName,
    TransferConfig,
)

__all__ = [
    "AUTO_CONNECTORS",
    "ENV_PREFIX",
    "UCX_CONNECTORS",
    "ClusterConfig",
    "ConnectorName",
    "DTypeName",
    "EngineConfig",
    "GatewayConfig",
    "KvDTypeName",
    "LifecycleConfig",
    "LoggingConfig",
    "ModelConfig",
    "PoolConfig",
    "RegistryConfig",
    "RouterConfig",
    "TransferConfig",
    "load_config",
    "node_of_mapping",
    "read_yaml",
]
