"""What a private Ray finds in its environment.

Apart from ``actuators.ray`` because it has to be set before Ray is imported: Ray's native half
reads it while it is loaded.
"""

from __future__ import annotations

import os
import secrets

from isthmus.controlplane.actuators.base import process_environment

# What Ray's own processes do over and over although nobody reads it here: reports to a dashboard
# that has no pages, traces of tasks, searches for log files ten times a second, resources of a node
# that is the only one. At rest that costs more than everything of ours; Ray reads all of these when
# a process starts, and its watch over workers and memory is left as it is.
QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_task_events_report_interval_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "METRICS_RECORD_INTERVAL_S": "60",
    "RAY_DASHBOARD_AGENT_POLL_INTERVAL_S": "10",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "60",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
}


def private_environment() -> dict[str, str]:
    """Ray's processes inherit it, so all of them agree."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Other users of this machine reach its ports too: a token that only this cluster knows.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray's name for "only this machine": it then listens on the loopback interface alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        **QUIET,
    }


def prepare_environment(address: str) -> None:
    """For a private Ray sets the above; a Ray that is joined has settings of its own."""
    if not address:
        os.environ.update(process_environment(1) | private_environment())
