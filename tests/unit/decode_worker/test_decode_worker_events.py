from __future__ import annotations

import asyncio

import pytest

from isthmus.common.errors import OutOfBlocksError
from isthmus.common.ids import RequestId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import FinishReason, LocalPrefillReason, TokenLogprob, Usage
from isthmus.decode_worker.events import Failed, Finished, Outbox, Started, TokenDelta
from isthmus.decode_worker.service import to_response
from isthmus.protos.v1 import common_pb2

A, B = RequestId("a"), RequestId("b")


@pytest.mark.asyncio
async def test_what_gathers_before_a_write_goes_out_together() -> None:
    outbox = Outbox()
    outbox.put(TokenDelta(A, (1,)))
    outbox.put(TokenDelta(B, (2,)))
    assert len(await outbox.take()) == 2
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(TokenDelta(A, (3,)))
    assert await waiting == [TokenDelta(A, (3,))]


@pytest.mark.asyncio
async def test_a_closed_outbox_says_what_is_left_and_ends() -> None:
    outbox = Outbox()
    outbox.put(Started(A, 0))
    outbox.close()
    assert await outbox.take() == [Started(A, 0)]
    assert await outbox.take() == []


def test_events_become_one_message() -> None:
    logprob = TokenLogprob(7, -0.5, 1, ((9, -0.25), (7, -0.5)))
    timeline = Timeline({Event.ADMITTED: 5})
    response = to_response(
        [
            Started(A, 16),
            TokenDelta(A, (7,), (logprob,), timeline=timeline),
            Finished(
                A,
                FinishReason.STOP,
                7,
                Usage(20, 1, 16),
                timeline,
                LocalPrefillReason.PREFILL_FAILED,
                4096,
            ),
            Failed(B, OutOfBlocksError("full", retry_after_ms=50), "prefill-1"),
        ]
    )
    assert response.started[0].num_cached_tokens == 16
    assert list(response.deltas[0].token_ids) == [7]
    assert [item.token_id for item in response.deltas[0].logprobs[0].top] == [9, 7]
    assert [item.event for item in response.deltas[0].timeline.events] == ["admitted"]
    finished = response.finished[0]
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert (finished.stop_token_id, finished.local_reason) == (7, "prefill_failed")
    assert (finished.transferred_bytes, finished.usage.num_cached_tokens) == (4096, 16)
    failed = response.failed[0]
    assert (failed.error.code, failed.error.retryable) == ("out_of_blocks", True)
    assert failed.error.retry_after_ms == 50
    assert failed.failed_instance == "prefill-1"
