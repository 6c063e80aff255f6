"""The frontends that are compared: each with its mock workers, started and stopped.

The frontend alone has core 0; its workers and the load share core 1. What the frontend is measured
by is its own CPU time, so that neither the load's limit nor other work on the machine counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import CLUSTER_NAME, MODEL_NAME, free_port, free_ports, wait_for
from benchmarks.peers.vllm_pair import stop_server
from isthmus.common.config import ClusterConfig, GatewayConfig, ModelConfig, RouterConfig
from isthmus.common.model_files import locate_model
from isthmus.gateway.main import CONFIG_VARIABLE
from isthmus.gateway.tokenizer import load_tokenizer

FRONTEND_CORE, LOAD_CORE = 0, 1
AT_ONCE = RouterConfig(policy="least_predicted_load")
"""Answers every query at once, by load and cached prefix, as Dynamo's router does."""
DYNAMO_STEP_MS = 5.0
"""A token takes its mocker so long, more or less, at a ratio of 1 (0 = at once)."""
TEXT = " the quick brown fox runs over all the hills to see what there is on the"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all sides share. ``model`` is a directory with the tokenizer, ``folder`` for logs."""

    venvs: Path
    model: Path
    folder: Path
    num_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class Frontend:
    """``pid`` is the root of its process tree; the mock behind it has a URL or a gRPC address."""

    url: str
    pid: int
    worker_url: str = ""
    decode_address: str = ""


class SideUnavailable(RuntimeError):  # noqa: N818 - a state of the side, not a mistake
    """It is not installed or does not come up; the message is one sentence for the reader."""


class Started:
    """Processes of one side, each pinned to a core and stopped by its own pid at the end."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder

    def ours(
        self, name: str, core: int, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A module of this repository; its stdout can be read."""
        command = [sys.executable, "-m", module, *words]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})}
        return self._process(name, core, command, env, subprocess.PIPE)

    def peers(
        self, name: str, core: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A program of a peer's own environment. Raises SideUnavailable when it is not there."""
        if not Path(command[0]).exists():
            raise SideUnavailable(f"{command[0]} is not installed")
        return self._process(name, core, command, {"PYTHONPATH": "", **(env or {})}, None)

    def _process(
        self, name: str, core: int, command: Sequence[str], env: Mapping[str, str],
        stdout: int | None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["taskset", "-c", str(core), *command], env=os.environ | dict(env),
                stdin=subprocess.PIPE, stdout=stdout or log, stderr=log,
                start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        self._stack.callback(stop_server, process)
        return process


def http_worker(started: Started, plan: Plan, name: str = "worker") -> str:
    """URL of a mock worker for those that pass HTTP on."""
    port = free_port()
    process = started.ours(
        name, LOAD_CORE, "benchmarks.frontends.http_worker", "--port", str(port),
        "--model", MODEL_NAME, "--tokens", str(plan.num_tokens), "--step-ms", str(plan.step_ms),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    wait_for(f"{url}/health", process, 20)
    return url


def isthmus(started: Started, plan: Plan, router: RouterConfig | None = None) -> Frontend:
    tokens = load_tokenizer(locate_model("sample")).encode(TEXT, add_special_tokens=False)
    behind = started.ours(
        "instances", LOAD_CORE, "benchmarks.frontends.instances", "--cluster", CLUSTER_NAME,
        "--model", MODEL_NAME, "--step-ms", str(plan.step_ms), "--token-ids", *map(str, tokens),
    )  # fmt: skip
    assert behind.stdout is not None
    addresses = json.loads(behind.stdout.readline())
    port = free_port()
    config = ClusterConfig(
        name=CLUSTER_NAME,
        gateway=GatewayConfig(port=port),
        model=ModelConfig(path="sample"),
        router=router or RouterConfig(),
    )
    gateway = started.ours(
        "gateway", FRONTEND_CORE, "isthmus.gateway.main", "--registry", addresses["registry"],
        env={CONFIG_VARIABLE: config.model_dump_json()},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    wait_for(f"{url}/ready", gateway, 60)
    return Frontend(url, gateway.pid, decode_address=addresses["decode"])


def dynamo(started: Started, plan: Plan, router_mode: str) -> Frontend:
    python = str(plan.venvs / "front-dynamo" / "bin" / "python")
    # The mocker knows no step of a given length: its own, divided by the ratio, comes near it.
    speedup = f"{DYNAMO_STEP_MS / plan.step_ms:g}" if plan.step_ms else "0"
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    # It still writes a line for each request then, as ours does.
    env = {"DYN_FILE_KV": str(plan.folder / "dynamo"), "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
    for role in ("prefill", "decode"):
        started.peers(
            f"dynamo-{role}", LOAD_CORE,
            [python, "-m", "dynamo.mocker", "--model-path", str(plan.model), "--model-name",
             MODEL_NAME, "--disaggregation-mode", role, "--speedup-ratio", speedup, *planes],
            env,
        )  # fmt: skip
    port = free_port()
    frontend = started.peers(
        "dynamo", FRONTEND_CORE,
        [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
         "--router-mode", router_mode, *planes],
        env,
    )  # fmt: skip
    return Frontend(f"http://127.0.0.1:{port}", frontend.pid)


def passing_on(
    started: Started, plan: Plan, program: Sequence[str], pair_flag: str, *, is_pair: bool
) -> Frontend:
    """A router that passes HTTP on: it does not look into the tokens."""
    first = http_worker(started, plan)
    if is_pair:
        second = http_worker(started, plan, "worker-2")
        workers = [pair_flag, "--prefill", first, "--decode", second]
    else:
        workers = ["--worker-urls", first]
    port, metrics_port = free_ports(2)
    frontend = started.peers(
        "router", FRONTEND_CORE,
        [*program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port",
         str(metrics_port), "--policy", "cache_aware", *workers],
    )  # fmt: skip
    return Frontend(f"http://127.0.0.1:{port}", frontend.pid, worker_url=first)


def sglang(started: Started, plan: Plan, *, is_pair: bool) -> Frontend:
    python = str(plan.venvs / "front-sglang" / "bin" / "python")
    program = (python, "-m", "sglang_router.launch_router", "--log-level", "warn")
    return passing_on(started, plan, program, "--pd-disaggregation", is_pair=is_pair)


def vllm(started: Started, plan: Plan, *, is_pair: bool) -> Frontend:
    command = str(plan.venvs / "front-vllm" / "bin" / "vllm-router")
    program = (command, "--log-level", "warning")
    return passing_on(started, plan, program, "--vllm-pd-disaggregation", is_pair=is_pair)


SIDES: dict[str, Callable[[Started, Plan], Frontend]] = {
    "isthmus": isthmus,
    "isthmus-at-once": lambda started, plan: isthmus(started, plan, AT_ONCE),
    "dynamo-kv": lambda started, plan: dynamo(started, plan, "kv"),
    "dynamo-rr": lambda started, plan: dynamo(started, plan, "round-robin"),
    "sglang": lambda started, plan: sglang(started, plan, is_pair=False),
    "sglang-pd": lambda started, plan: sglang(started, plan, is_pair=True),
    "vllm": lambda started, plan: vllm(started, plan, is_pair=False),
    "vllm-pd": lambda started, plan: vllm(started, plan, is_pair=True),
}


@contextmanager
def running(name: str, plan: Plan) -> Iterator[Frontend]:
    """Raises SideUnavailable."""
    with ExitStack() as stack:
        yield SIDES[name](Started(stack, plan.folder), plan)
