"""Workloads as data: who asks when, for how long a prompt and how many tokens. Torch-free and pure.

The load generator sends them to a real server, the simulator to a simulated one: the same arrivals,
so that the two can be held against each other.
"""

from __future__ import annotations

from isthmus.workload.arrivals import Arrivals, arrival_times
from isthmus.workload.conversations import Conversations, converse
from isthmus.workload.lengths import Lengths, parse_lengths
from isthmus.workload.synthetic import Mix, Share, synthesise
from isthmus.workload.traces import read_azure, read_mooncake, read_trace
from isthmus.workload.types import Call, at_rate, mean_rate, repeat

__all__ = [
    "Arrivals",
    "Call",
    "Conversations",
    "Lengths",
    "Mix",
    "Share",
    "arrival_times",
    "at_rate",
    "converse",
    "mean_rate",
    "parse_lengths",
    "read_azure",
    "read_mooncake",
    "read_trace",
    "repeat",
    "synthesise",
]
