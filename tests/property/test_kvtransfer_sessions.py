"""Any interleaving of pushes, faults, cancels, losses and deadlines ends, and never ends wrong.

The model is the target's memory before the transfer and the source's blocks: COMPLETE means that
exactly the ticket's blocks changed, to exactly those bytes, and every later write is a bug.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import BlockId
from isthmus.kvtransfer.receive_session import ReceiveSession, ReceiveState
from isthmus.kvtransfer.send_session import SendSession, SendState
from tests.support.transfer_pair import (
    CHECKED,
    CONFIG,
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


Push = tuple[int, list[BlockId], bool]


@dataclass
class Run:
    """One transfer under way. The premises of quiescence are kept: while time passes a living
    sender is driven, so what it posted ends (or hangs), and a dead one does nothing more."""

    pair: TransferPair
    send: SendSession
    receive: ReceiveSession
    pushes: list[Push]
    is_prefill_alive: bool = True

    async def act(self, action: str) -> None:
        verb, _, rest = action.partition(" ")
        if verb == "push":
            self.push()
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
            self.send.push(*self.pushes.pop(0))

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
            await self.sweep("prefill")
            await self.sweep("decode")
        for _ in range(20):
            await self.wait(100)
            await self.sweep("decode")
        self.is_prefill_alive = True  # its process is gone; only its bookkeeping is looked at
        await self.pair.prefill.manager.forget(self.pair.decode.ref.instance_id)
        await self.pair.prefill.manager.sweep_once()


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(source blocks, target blocks, cut points of the pushes)."""
    count = draw(st.integers(1, 6))
    ids = st.integers(0, NUM_BLOCKS - 1)
    source = draw(st.lists(ids, min_size=count, max_size=count, unique=True))
    target = draw(st.lists(ids, min_size=count, max_size=count, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    return source, target, [0, *cuts, count]


@settings(max_examples=100, deadline=None)
@given(
    transfer=transfers(),
    faults=st.lists(st.sampled_from(FAULTS), max_size=4)
    | st.lists(st.sampled_from(FAULTS + 2 * DAMAGE), max_size=4),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=25),
)
def test_every_interleaving_ends_right_or_not_complete(
    transfer: tuple[list[int], list[int], list[int]], faults: list[str], actions: list[str]
) -> None:
    source, target, cuts = transfer
    is_damaged = any(fault in DAMAGE for fault in faults)
    script = ",".join(f"{index}:{fault}" for index, fault in enumerate(faults) if fault)
    pushes = [
        (start, [BlockId(block) for block in source[start:end]], end == len(source))
        for start, end in pairwise(cuts)
    ]

    async def trial() -> None:
        async with transfer_pair(script, CHECKED if is_damaged else CONFIG) as pair:
            before = pair.decode.memory.copy().reshape(NUM_BLOCKS, -1)
            send, receive = pair.open(target, timeout_ms=1_500)
            run = Run(pair, send, receive, pushes)
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
            wanted = pair.prefill.memory.reshape(NUM_BLOCKS, -1)[source]
            is_done = send.state is SendState.DONE and not is_damaged
            if receive.state is ReceiveState.COMPLETE or is_done:
                assert (now[target] == wanted).all()
            for index, block in enumerate(target):
                possible = (before[block].tobytes(), wanted[index].tobytes())
                assert is_damaged or now[block].tobytes() in possible
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
