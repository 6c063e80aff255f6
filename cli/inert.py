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


def strict_without_target(config: ClusterConfig) -> list[str]:
    """Classes that would refuse what comes too late, and never say what too late is."""
    return [
        f"slo.classes.{name}"
        for name, made in config.slo.classes.items()
        if made.mode == "strict" and (made.ttft_ms, made.tpot_ms, made.e2e_ms) == (None,) * 3
    ]


def warn_of_inert(config: ClusterConfig) -> None:
    for path in strict_without_target(config):
        stderr.print(
            f"Warning: {path} is strict and has no target: it refuses only requests that bring "
            "one of their own",
            markup=False,
        )
    paths = inert_settings(config)
    if paths:
        stderr.print(
            f"Warning: without effect under router.policy {config.router.policy}: "
            f"{', '.join(paths)} (only the {HEEDING_POLICY} policy heeds them)",
            markup=False,
        )
