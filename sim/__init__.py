"""The simulator: the router's own code, on virtual time, in front of simulated instances.

Says what a cluster would do before it is there: attainment, goodput and latencies of a scenario
(``sim.run``), and which cluster is worth its GPUs (``sim.planner``). Torch-free.
"""

from isthmus.sim.planner import Budget, Candidate, Plan, Shape, make_plan, shapes
from isthmus.sim.report import SimReport
from isthmus.sim.run import GoodputSearch, Run, run_scenario, search_goodput, with_policy
from isthmus.sim.scenario import Scenario, parse_scenario, read_scenario

__all__ = [
    "Budget",
    "Candidate",
    "GoodputSearch",
    "Plan",
    "Run",
    "Scenario",
    "Shape",
    "SimReport",
    "make_plan",
    "parse_scenario",
    "read_scenario",
    "run_scenario",
    "search_goodput",
    "shapes",
    "with_policy",
]
