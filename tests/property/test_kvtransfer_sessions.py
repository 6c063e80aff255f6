"""Any interleaving of pushes, faults, cancels, losses and deadlines ends, and never ends wrong.

The model is the target's memory before the transfer and the source's blocks: COMPLETE means that
exactly the ticket's blocks changed, to exactly those bytes, and every later write is a bug. Layers
that are pushed while they are computed hold noise until then, which nobody may ever see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import BlockId
from isthmus.kvtransfer.chunks import LayerPart
from isthmus.kvtransfer.receive_session import ReceiveSession, ReceiveState
from isthmus.kvtransfer.send_session import SendSession, SendState
from tests.support.transfer_pair import (
    CHECKED,
    CONFIG,
    LAYOUT,
    NUM_BLOCKS,
    TransferPair,
    transfer_pair,
)

FAULTS = ("", "refuse", "fail", "delay=2", "delay=7", "hang", "drop", "duplicate")
DAMAGE = ("flip", "corrupt")  # what only checksums can tell
ACTIONS = (
    "push",
    "push",
    "push",
    "compute",
    "compute",
    "sweep prefill",
    "sweep prefill",
    "sweep decode",
    "sweep decode",
    "cancel send",
    "cancel receive",
    "expect",
    "announce",
    "wait 100",
    "wait 600",
    "forget decode",
    "forget prefill",
    "forget prefill gone",
)
LAYER_BYTES = LAYOUT.layer_bytes


@dataclass(frozen=True)
class Push:
    first: int
    stop: int
    layers: range
    is_early: bool  # it is pushed before its layers are computed


class Computation:
    """Layers of source blocks that are pushed early, computed in the order of their pushes."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._layers = memory.reshape(NUM_BLOCKS, LAYOUT.num_layers, LAYER_BYTES)
        self._results: list[tuple[list[BlockId], range, npt.NDArray[np.uint8]]] = []
        self._num_done = 0

    def begin(self, block_ids: list[BlockId], layers: range) -> LayerPart:
        place = np.ix_(block_ids, layers)
        self._results.append((block_ids, layers, self._layers[place].copy()))
        self._layers[place] ^= 0x5A
        number = len(self._results)
        return LayerPart(layers, lambda: self._num_done >= number)

    def advance(self) -> None:
        if self._num_done < len(self._results):
            block_ids, layers, result = self._results[self._num_done]
            self._layers[np.ix_(block_ids, layers)] = result
            self._num_done += 1


@dataclass
class Run:
    """One transfer under way. The premises of quiescence are kept: while time passes a living
    sender is driven, so what it posted ends (or hangs), and a dead one does nothing more."""

    pair: TransferPair
    send: SendSession
    receive: ReceiveSession
    source: list[BlockId]
    pushes: list[Push]
    computation: Computation
    is_prefill_alive: bool = True

    async def act(self, action: str) -> None:
        verb, _, rest = action.partition(" ")
        if verb == "push":
            self.push()
        elif verb == "compute":
            self.computation.advance()
        elif verb == "expect":
            self.receive.expect(max(1, self.send.num_chunks + len(self.pushes)))
        elif verb == "announce":
            self.receive.announced(self.send.ticket.num_tokens)
        elif verb == "cancel":
            session = self.send if rest == "send" else self.receive
            session.cancel()
        elif verb == "sweep":
            await self.sweep(rest)
        elif verb == "wait":
            await self.wait(int(rest))
        else:
            await self.forget(rest)

    def push(self) -> None:
        if self.pushes and self.send.is_open and self.is_prefill_alive:
            push = self.pushes.pop(0)
            block_ids = self.source[push.first : push.stop]
            part = LayerPart(push.layers)
            if push.is_early:
                part = self.computation.begin(block_ids, push.layers)
            self.send.push(push.first, block_ids, not self.pushes, part=part)

    async def sweep(self, side: str) -> None:
        if side == "decode":
            await self.pair.decode.manager.sweep_once()
        elif self.is_prefill_alive:
            await self.pair.prefill.manager.sweep_once()

    async def wait(self, milliseconds: int) -> None:
        for _ in range(10):
            await self.sweep("prefill")
        self.pair.clock.advance_ms(milliseconds)

    async def forget(self, whom: str) -> None:
        if whom == "decode":
            await self.pair.prefill.manager.forget(self.pair.decode.ref.instance_id)
            return
        is_gone = whom.endswith("gone")
        self.is_prefill_alive &= not is_gone
        await self.pair.decode.manager.forget(self.pair.prefill.ref.instance_id, is_gone=is_gone)

    async def finish(self) -> None:
        """All is pushed, the deadline passes, the quarantine is waited out."""
        while self.pushes and self.send.is_open and self.is_prefill_alive:
            self.push()
            self.computation.advance()
            await self.sweep("prefill")
            await self.sweep("decode")
        for _ in range(20):
            self.computation.advance()
            await self.wait(100)
            await self.sweep("decode")
        self.is_prefill_alive = True  # its process is gone; only its bookkeeping is looked at
        await self.pair.prefill.manager.forget(self.pair.decode.ref.instance_id)
        await self.pair.prefill.manager.sweep_once()


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[int], list[int], list[Push]]:
    """(source blocks, target blocks, pushes). A chunk goes whole or layer by layer; its last layers
    may come behind the first ones of the next chunk."""
    count = draw(st.integers(1, 6))
    ids = st.integers(0, NUM_BLOCKS - 1)
    source = draw(st.lists(ids, min_size=count, max_size=count, unique=True))
    target = draw(st.lists(ids, min_size=count, max_size=count, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    pushes: list[Push] = []
    late: list[Push] = []
    for first, stop in pairwise([0, *cuts, count]):
        if not draw(st.booleans()):
            pushes += [*late, Push(first, stop, range(LAYOUT.num_layers), False)]
            late = []
            continue
        pushes += [Push(first, stop, range(1), draw(st.booleans())), *late]
        late = [Push(first, stop, range(1, LAYOUT.num_layers), False)]
        if draw(st.booleans()):
            pushes, late = pushes + late, []
    return source, target, pushes + late


@settings(max_examples=100, deadline=None)
@given(
    transfer=transfers(),
    faults=st.lists(st.sampled_from(FAULTS), max_size=4)
    | st.lists(st.sampled_from(FAULTS + 2 * DAMAGE), max_size=4),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=25),
)
def test_every_interleaving_ends_right_or_not_complete(
    transfer: tuple[list[int], list[int], list[Push]], faults: list[str], actions: list[str]
) -> None:
    source, target, pushes = transfer
    is_damaged = any(fault in DAMAGE for fault in faults)
    script = ",".join(f"{index}:{fault}" for index, fault in enumerate(faults) if fault)

    async def trial() -> None:
        async with transfer_pair(script, CHECKED if is_damaged else CONFIG) as pair:
            before = pair.decode.memory.copy().reshape(NUM_BLOCKS, -1)
            wanted = pair.prefill.memory.reshape(NUM_BLOCKS, -1)[source]
            send, receive = pair.open(target, timeout_ms=1_500)
            computation = Computation(pair.prefill.memory)
            run = Run(pair, send, receive, [*map(BlockId, source)], [*pushes], computation)
            at_proof = None
            for action in actions:
                await run.act(action)
                if at_proof is None and receive.is_quiescent and not receive.is_open:
                    at_proof = pair.decode.memory.tobytes()
            await run.finish()

            now = pair.decode.memory.reshape(NUM_BLOCKS, -1)
            assert not send.is_open
            assert not receive.is_open
            assert receive.is_quiescent
            if at_proof is not None:
                assert pair.decode.memory.tobytes() == at_proof, "written after the proof"
            others = np.setdiff1d(np.arange(NUM_BLOCKS), target)
            assert (now[others] == before[others]).all(), "a block outside the ticket changed"
            is_done = send.state is SendState.DONE and not is_damaged
            if receive.state is ReceiveState.COMPLETE or is_done:
                assert (now[target] == wanted).all()
            for index, block in enumerate(target if not is_damaged else ()):
                rows = (kv[i].reshape(-1, LAYER_BYTES) for kv, i in
                        ((now, block), (before, block), (wanted, index)))  # fmt: skip
                for layer, old, new in zip(*rows, strict=True):
                    assert layer.tobytes() in (old.tobytes(), new.tobytes())
            await _check_outcomes(send.drained(), send.state is SendState.DONE)
            await _check_outcomes(receive.wait_complete(), receive.state is ReceiveState.COMPLETE)
            pair.assert_idle()

    asyncio.run(trial())


async def _check_outcomes(wait: Awaitable[None], is_good: bool) -> None:
    try:
        await wait
    except IsthmusError:
        assert not is_good
    else:
        assert is_good


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 7)), delays=st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_any_order_of_arrival_completes(cuts: set[int], delays: list[int]) -> None:
    script = ",".join(f"{index}:delay={polls}" for index, polls in enumerate(delays))
    edges = [0, *sorted(cuts), 8]

    async def run() -> None:
        async with transfer_pair(script) as pair:
            send, receive = pair.open(range(8))
            for start, end in pairwise(edges):
                send.push(start, [BlockId(20 - block) for block in range(start, end)], end == 8)
            await pair.drive(12)
            await receive.wait_complete()
            expected = pair.prefill.blocks([BlockId(20 - block) for block in range(8)])
            assert (pair.decode.blocks([BlockId(block) for block in range(8)]) == expected).all()
            pair.assert_idle()

    asyncio.run(run())


def test_a_corrupting_connector_is_seen_by_this_model() -> None:
    """The check above can fail: corrupt bytes do not equal the model."""

    async def run() -> bool:
        async with transfer_pair("0:corrupt") as pair:
            send, receive = pair.open([4])
            send.push(0, [BlockId(9)], is_last=True)
            await pair.drive(4)
            assert receive.state is ReceiveState.COMPLETE
            arrived, sent = pair.decode.blocks([BlockId(4)]), pair.prefill.blocks([BlockId(9)])
            return bool((arrived == sent).all())

    assert not asyncio.run(run())
