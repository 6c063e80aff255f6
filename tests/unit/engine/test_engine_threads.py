"""The engine thread steps while others add, abort and look."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.config import EngineConfig
from isthmus.common.errors import ConfigError
from isthmus.common.ids import RequestId
from isthmus.engine.core import EngineCore
from tests.support.engine_driver import Driver, generate, make_prompt, make_request
from tests.support.tiny_model import TinyModel, make_tiny_core

pytestmark = pytest.mark.usefixtures("async_scheduling")

PATIENCE_S = 30.0


class EngineThread:
    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, threading.Event] = defaultdict(threading.Event)
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.core.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _loop(self) -> None:
        while self.core.wait_for_work(PATIENCE_S):
            output = self.core.step()
            for update in output.updates if output else ():
                self.tokens[update.request_id].extend(update.token_ids)
                if update.finish_reason is not None:
                    self.finished[update.request_id].set()


def test_requests_from_another_thread_get_what_they_would_get_alone() -> None:
    requests = [make_request(f"r{i}", make_prompt(3 + 5 * i, salt=i)) for i in range(8)]
    expected = [generate(make_tiny_core(), request)[0].token_ids for request in requests]
    core = make_tiny_core(num_blocks=30, max_num_batched_tokens=16)
    doomed = [make_request(f"x{i}", make_prompt(20, salt=9 + i), max_tokens=60) for i in range(8)]
    with EngineThread(core) as engine:
        for request, other in zip(requests, doomed, strict=True):
            core.add(other)
            core.add(request)
            core.check_integrity()
            assert core.abort(other.request_id)
            assert core.load().num_blocks == 29
        for request in requests:
            assert engine.finished[request.request_id].wait(PATIENCE_S)
    assert [engine.tokens[request.request_id] for request in requests] == expected
    core.check_integrity()
    assert core.load().free_blocks == 29


def test_waiting_for_work_times_out_wakes_on_work_and_ends_on_close() -> None:
    core = make_tiny_core()
    assert not core.wait_for_work(0)
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(core.wait_for_work(PATIENCE_S)))
    waiter.start()
    core.add(make_request("r", make_prompt(4)))
    waiter.join(PATIENCE_S)
    assert woken == [True]
    core.close()
    assert not core.wait_for_work(PATIENCE_S)
    assert core.step() is None


def test_load_tells_what_waits_and_what_runs() -> None:
    clock = VirtualClock(start_ns=10**18)
    core = make_tiny_core(clock=clock, max_num_batched_tokens=8, max_num_seqs=1)
    core.add(make_request("running", make_prompt(20)))
    core.add(make_request("waiting", make_prompt(11, salt=1)))
    clock.advance_ms(40)
    core.step()
    load = core.load()
    assert (load.running_seqs, load.running_context_tokens) == (1, 8)
    assert (load.waiting_seqs, load.waiting_tokens, load.oldest_wait_ms) == (1, 11 + 12, 40)
    assert load.steps == 1
    assert load.free_blocks == load.num_blocks - 5
    Driver(core).run()
    assert core.load().waiting_seqs == core.load().running_seqs == 0
    assert core.load().cached_blocks == (20 + 7) // 4 + (11 + 7) // 4


def test_step_time_is_averaged_over_steps() -> None:
    clock = VirtualClock()
    model = TinyModel()
    core = make_tiny_core(model, clock=clock)
    core.add(make_request("r", make_prompt(4), max_tokens=3))
    model.before_forward = lambda: clock.advance_ms(10)
    core.step()
    assert core.load().step_ms == pytest.approx(10)
    model.before_forward = lambda: clock.advance_ms(20)
    output = core.step()
    assert core.load().step_ms == pytest.approx(11)
    assert output is not None
    assert output.ended_ns - output.started_ns == 20_000_000


def test_store_takes_the_memory_it_was_given() -> None:
    model = TinyModel()
    block_bytes = make_tiny_core(model).kv_store.block_bytes
    config = EngineConfig(block_size=4, kv_cache_gib=(10.5 * block_bytes) / 2**30)
    core = EngineCore(model, config, VirtualClock())
    assert core.num_blocks == 10
    assert core.max_model_len == 36
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        EngineCore(model, EngineConfig(num_blocks=1), VirtualClock())


def test_longest_sequence_is_bounded_by_request_model_and_store() -> None:
    model = TinyModel()
    config = EngineConfig(block_size=4, num_blocks=1000)
    assert EngineCore(model, config, VirtualClock()).max_model_len == 512
    assert EngineCore(model, config, VirtualClock(), max_model_len=100).max_model_len == 100
    assert EngineCore(model, config, VirtualClock(), max_model_len=9999).max_model_len == 512


def test_block_table_of_an_unknown_request_is_empty() -> None:
    assert make_tiny_core().block_table(RequestId("nobody")) == ()
