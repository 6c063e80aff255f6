"""What a simulated client asks for: a call of a workload, with its promise and its hashes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.common.clock import NS_PER_S
from isthmus.common.errors import ConfigError
from isthmus.common.ids import BlockHash, HashChain
from isthmus.common.types import Slo
from isthmus.workload import Call
from isthmus.workload.traces import MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Times count from the start of the run. ``num_output`` is what the model will say, which
    nobody knows before; ``max_output`` is what the client allowed."""

    index: int
    arrival_ns: int
    num_prompt: int
    num_output: int
    max_output: int
    hashes: HashChain = ()  # of the prompt's full blocks
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""
    cancel_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Clients:
    """How calls become requests. ``classes`` by name; a call that names none is dealt one by the
    classes' shares. Of all requests ``cancel_share`` lose patience after an exponentially
    distributed time of mean ``patience_s``."""

    classes: Mapping[str, tuple[Slo, float]]  # with its share
    tenants: Mapping[str, float] = field(default_factory=dict)  # with its share
    max_output: int = 2_048
    cancel_share: float = 0.0
    patience_s: float = 10.0
    seed: int = 0


def make_requests(
    calls: Iterable[Call],
    clients: Clients,
    block_size: int,
    trace_block: int = MOONCAKE_BLOCK_TOKENS,
) -> list[SimRequest]:
    """The same seed deals the same classes, tenants and patience, whatever the calls' times.

    Raises ConfigError for a class that is not known, blocks that do not divide a trace's, or a
    prompt that names one block twice.
    """
    draw = random.Random(clients.seed)
    names, shares = _dealt({name: share for name, (_, share) in clients.classes.items()})
    tenants, tenant_shares = _dealt(clients.tenants)
    hashes = _Hashes(block_size, trace_block)
    requests = []
    for call in calls:
        name = call.slo_class or draw.choices(names, shares)[0]
        tenant = call.tenant or (draw.choices(tenants, tenant_shares)[0] if tenants else "")
        is_impatient = draw.random() < clients.cancel_share
        patience_s = draw.expovariate(1 / clients.patience_s)
        if name not in clients.classes:
            known = ", ".join(sorted(clients.classes))
            raise ConfigError(f"no class of service '{name}'; known: {known}", stage="workload")
        arrival_ns = round(call.due_s * NS_PER_S)
        requests.append(
            SimRequest(
                index=call.index,
                arrival_ns=arrival_ns,
                num_prompt=call.num_prompt_tokens,
                num_output=call.num_output_tokens,
                max_output=max(clients.max_output, call.num_output_tokens),
                hashes=hashes.of(call),
                slo=clients.classes[name][0],
                tenant=tenant,
                cancel_ns=arrival_ns + round(patience_s * NS_PER_S) if is_impatient else None,
            )
        )
    return requests


def _dealt(shares: Mapping[str, float]) -> tuple[list[str], list[float]]:
    return list(shares), list(shares.values())


class _Hashes:
    """Block hashes that stand for a trace's block ids: equal where the trace says so."""

    def __init__(self, block_size: int, trace_block: int) -> None:
        self._block_size = block_size
        self._parts, rest = divmod(trace_block, block_size)
        self._known: dict[int, Sequence[BlockHash]] = {}
        self._suffixes = [part.to_bytes(4, "big") for part in range(self._parts)]
        self._problem = f"blocks of {block_size} do not divide the trace's of {trace_block} tokens"
        self._is_wrong = rest != 0

    def of(self, call: Call) -> HashChain:
        if not call.blocks:
            return ()
        if self._is_wrong:
            raise ConfigError(self._problem, stage="workload")
        if len(set(call.blocks)) < len(call.blocks):
            # Equal ids are equal blocks behind equal ones, which no two of one prompt can be.
            text = f"call {call.index} names a block twice in one prompt"
            raise ConfigError(text, stage="workload")
        chain: list[BlockHash] = []
        for block in call.blocks:
            chain += self._of_block(block)
        return tuple(chain[: call.num_prompt_tokens // self._block_size])

    def _of_block(self, block: int) -> Sequence[BlockHash]:
        hashes = self._known.get(block)
        if hashes is None:
            prefix = block.to_bytes(12, "big", signed=True)
            hashes = [BlockHash(prefix + suffix) for suffix in self._suffixes]
            self._known[block] = hashes
        return hashes
