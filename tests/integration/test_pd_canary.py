"""Requests served with a peer's KV are computed again where they were decoded, and compared."""

from __future__ import annotations

import pytest

from isthmus.common.metrics import CANARY, CANARY_MISMATCH, CANARY_TOKENS
from isthmus.decode_worker.canary import CanaryResult
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import make_request
from tests.support.poll import poll_until
from tests.support.worker_pair import PROMPT, LocalPair, faulty, local_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(120)]


class Counts:
    """How far the canary's counters have moved since this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> dict[str, float]:
        own = ("decode", "decode-0")
        results = [result.value for result in CanaryResult]
        counts = {result: CANARY.labels(*own, result)._value.get() for result in results}
        alarm = CANARY_MISMATCH.labels(*own, "prefill-0")._value.get()
        return {**counts, "alarm": alarm, "tokens": CANARY_TOKENS.labels(*own)._value.get()}

    def moved(self) -> dict[str, float]:
        now = self._read()
        return {key: now[key] - self._before[key] for key in now if now[key] != self._before[key]}

    async def until(self, **wanted: float) -> None:
        await poll_until(lambda: wanted.items() <= self.moved().items(), 20)


def cached(pair: LocalPair) -> set[bytes]:
    assert pair.decode.engine is not None
    return set(pair.decode.engine.cached_hashes())


async def test_what_was_served_right_compares_equal_and_leaves_no_trace() -> None:
    async with local_pair(faulty("", canary_every=2)) as pair:
        counts = Counts()
        for salt in range(4):
            prompt = make_prompt(40, salt)
            answer = await pair.stream.run(make_request(prompt, max_tokens=6), pair.prefill_info)
            assert answer.finished is not None
            assert answer.finished.local_reason == "none"
            if salt == 0:
                await pair.wait_idle()
                assert counts.moved() == {}
            if salt == 1:
                known = cached(pair)
                await counts.until(equal=1)
                await pair.wait_idle()
                assert cached(pair) == known
        await counts.until(equal=2)
        # All of each prompt, although the instance has it in its cache.
        assert counts.moved() == {"equal": 2, "tokens": 80}
        await pair.wait_idle()


async def test_damage_that_no_checksum_sees_raises_the_alarm() -> None:
    config = faulty("0+:corrupt", checksum="none", canary_every=1)
    async with local_pair(config) as pair:
        counts = Counts()
        answer = await pair.run(max_tokens=9)
        assert answer.finished is not None
        assert answer.finished.local_reason == "none"  # nobody noticed
        await counts.until(mismatch=1, alarm=1)
        await pair.wait_idle()
        expected = make_request(PROMPT, max_tokens=9, cache_salt="alone")
        assert answer.tokens != (await pair.stream.run(expected, None)).tokens


async def test_what_is_sampled_or_computed_here_is_not_compared() -> None:
    async with local_pair(faulty("", canary_every=1)) as pair:
        counts = Counts()
        await pair.run(max_tokens=4, temperature=1.0)
        await pair.local(max_tokens=4)
        await pair.wait_idle()
        assert counts.moved() == {}


async def test_it_gives_way_to_a_request_and_comes_back() -> None:
    async with local_pair(faulty("", canary_every=1)) as pair:
        counts = Counts()
        model = pair.decode.model

        def hold_the_next() -> None:
            """The canary's first chunk has begun: its second is held at the door."""
            if model.forward_sizes[-1] > 1:
                model.gate.clear()
            else:
                model.before_forward = hold_the_next

        model.before_forward = hold_the_next
        await pair.run(max_tokens=2)
        await poll_until(lambda: model.num_held > 0)
        urgent = await pair.stream.submit(make_request(make_prompt(8), max_tokens=3), None)
        await counts.until(interrupted=1)
        model.gate.set()
        await urgent.end()
        assert len(urgent.tokens) == 3
        await counts.until(interrupted=1, equal=1)
        await pair.wait_idle()
