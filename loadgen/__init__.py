"""Open-loop load for any OpenAI-compatible endpoint, judged by TTFT and TPOT targets."""

from __future__ import annotations

from isthmus.loadgen.client import Endpoint
from isthmus.loadgen.open_loop import run_calls
from isthmus.loadgen.search import Probe, Search, search_goodput
from isthmus.loadgen.summary import Summary, summarise
from isthmus.loadgen.types import Record, Status, Targets, Verdict

__all__ = [
    "Endpoint",
    "Probe",
    "Record",
    "Search",
    "Status",
    "Summary",
    "Targets",
    "Verdict",
    "run_calls",
    "search_goodput",
    "summarise",
]
