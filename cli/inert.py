"""What a configuration asks for and its routing policy does not do: said before it is missed."""

from __future__ import annotations

from isthmus.cli.output import stderr
from isthmus.common.config import ClusterConfig

HEEDING_POLICY = "goodput"


def inert_settings(config: ClusterConfig) -> list[str]:
    """Their paths. Only the goodput policy holds requests back, refuses them for their targets and
    shares the work by weight. Classes' weights go unnamed: a class that is shipped has one."""
    if config.router.policy == HEEDING_POLICY:
        return []
    classes, tenants = config.slo.classes.items(), config.tenants.items()
    return [
        *(f"slo.classes.{name}.mode" for name, made in classes if made.mode == "strict"),
        *(f"tenants.{name}.weight" for name, tenant in tenants if tenant.weight != 1),
    ]


def warn_of_inert(config: ClusterConfig) -> None:
    paths = inert_settings(config)
    if paths:
        stderr.print(
            f"Warning: without effect under router.policy {config.router.policy}: "
            f"{', '.join(paths)} (only the {HEEDING_POLICY} policy heeds them)",
            markup=False,
        )
