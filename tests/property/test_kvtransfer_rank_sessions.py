"""Whatever single ranks do and in whichever order: a transfer of several ranks ends, never ends
wrong, and nothing is written to any rank's blocks after the proof that nothing can be."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import BlockId
from isthmus.kvtransfer.connectors.fake import parse_script
from isthmus.kvtransfer.receive_session import ReceiveState
from isthmus.kvtransfer.send_session import SendState
from tests.support.rank_ports import rank_pair
from tests.support.transfer_pair import LAYOUT, NUM_BLOCKS, TransferEnd, TransferPair, ranked

NUM_HEADS = 2
SIZES = (1, 2, 4)
FAULTS = ("", "refuse", "fail", "delay=2", "delay=5", "hang", "drop", "duplicate")
ACTIONS = ("push", "push", "cancel send", "cancel receive", "announce", "forget prefill", "wait")
SOURCE, TARGET = [3, 8, 1], [5, 9, 2]

# An action of an instance, or one rank's connector that is driven: ("prefill", rank).
Action = str | tuple[str, int]


def drives() -> st.SearchStrategy[Action]:
    return st.tuples(st.sampled_from(("prefill", "decode")), st.integers(0, max(SIZES) - 1))


async def drive(end: TransferEnd, rank: int) -> None:
    await end.manager._sweep(rank % len(end.stores.ports), 0.0)


def memories(pair: TransferPair) -> list[np.ndarray]:
    return [memory.copy().reshape(NUM_BLOCKS, -1) for memory in pair.decode.stores.memories]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    scripts=st.lists(st.lists(st.sampled_from(FAULTS), max_size=3), min_size=4, max_size=4),
    actions=st.lists(st.sampled_from(ACTIONS) | drives() | drives(), max_size=30),
)
def test_every_order_of_ranks_ends_right_or_not_complete(
    sizes: tuple[int, int], scripts: list[list[str]], actions: list[Action]
) -> None:
    async def trial() -> None:
        source, target = (ranked(LAYOUT, NUM_HEADS, size) for size in sizes)
        async with rank_pair(source, target) as (pair, _):
            for connector, faults in zip(pair.prefill.stores.connectors, scripts, strict=False):
                script = ",".join(f"{i}:{fault}" for i, fault in enumerate(faults) if fault)
                connector._faults = parse_script(script)[1]
            before = memories(pair)
            send, receive = pair.open(TARGET, timeout_ms=1_500)
            pushes = [(index, [BlockId(block)]) for index, block in enumerate(SOURCE)]

            def push() -> None:
                index, block_ids = pushes.pop(0)
                send.push(index, block_ids, is_last=not pushes)

            async def act(action: Action) -> None:
                if not isinstance(action, str):
                    await drive(getattr(pair, action[0]), action[1])
                elif action == "push" and pushes and send.is_open:
                    push()
                elif action == "announce":
                    receive.announced(receive.ticket.num_tokens)
                elif action.startswith("cancel"):
                    (send if action.endswith("send") else receive).cancel()
                elif action == "forget prefill":
                    await pair.decode.manager.forget(pair.prefill.ref.instance_id)
                elif action == "wait":  # what a living sender has posted ends meanwhile
                    for _ in range(8):
                        await pair.prefill.manager.sweep_once()
                    pair.clock.advance_ms(100)

            at_proof = None
            for action in actions:
                await act(action)
                if at_proof is None and receive.is_quiescent and not receive.is_open:
                    at_proof = memories(pair)
            while pushes and send.is_open:
                push()
            for _ in range(25):
                await act("wait")
                await pair.decode.manager.sweep_once()
            await pair.prefill.manager.forget(pair.decode.ref.instance_id)
            await pair.prefill.manager.sweep_once()

            now = memories(pair)
            assert not send.is_open
            assert not receive.is_open
            assert receive.is_quiescent
            if at_proof is not None:
                same = zip(at_proof, now, strict=True)
                assert all((then == here).all() for then, here in same), "written after the proof"
            others = np.setdiff1d(np.arange(NUM_BLOCKS), TARGET)
            for was, is_now in zip(before, now, strict=True):
                assert (was[others] == is_now[others]).all(), "a block outside the ticket changed"
            if receive.state is ReceiveState.COMPLETE or send.state is SendState.DONE:
                num_tokens = len(TARGET) * LAYOUT.block_size
                arrived = pair.decode.stores.tokens([*map(BlockId, TARGET)], num_tokens)
                sent = pair.prefill.stores.tokens([*map(BlockId, SOURCE)], num_tokens)
                assert (arrived == sent).all()
            if receive.state is not ReceiveState.COMPLETE:
                try:
                    await receive.wait_complete()
                except IsthmusError:
                    pass
                else:
                    raise AssertionError("it did not complete and raised nothing")
            pair.assert_idle()

    asyncio.run(trial())
