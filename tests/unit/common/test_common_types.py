from __future__ import annotations

import pytest

from isthmus.common.clock import SystemClock, VirtualClock
from isthmus.common.cluster import INSTANCE_TRANSITIONS, InstanceState, LatencyModel
from isthmus.common.kv_layout import KvLayout
from isthmus.common.logging import RateLimitedLog
from isthmus.common.state_machine import IllegalTransitionError

LAYOUT = KvLayout("m", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def test_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(start_ns=5)
    assert clock.now_ns() == clock.monotonic_ns() == 5
    clock.advance_ms(1.5)
    assert clock.now_ns() == 1_500_005


def test_system_clock_does_not_go_back() -> None:
    clock = SystemClock()
    assert clock.monotonic_ns() <= clock.monotonic_ns()


def test_block_bytes_of_the_sample_model() -> None:
    assert LAYOUT.block_bytes == 16 * 23_040  # 23,040 bytes a token


def test_layouts_that_split_heads_differently_are_compatible() -> None:
    half = KvLayout("m", 30, 3, 64, 16, "bfloat16", tp_rank=1, tp_size=2)
    whole = KvLayout("m", 30, 6, 64, 16, "bfloat16")
    assert half.compat_hash == whole.compat_hash
    assert half.difference(whole) == ""
    uneven = KvLayout("m", 30, 4, 64, 16, "bfloat16", tp_rank=1, tp_size=2, total_kv_heads=9)
    assert uneven.heads == range(5, 9)
    assert uneven.compat_hash == KvLayout("m", 30, 9, 64, 16, "bfloat16").compat_hash


def test_layouts_of_unlike_block_sizes_are_compatible() -> None:
    large = KvLayout("m", 30, 3, 64, 32, "bfloat16")
    assert large.compat_hash == LAYOUT.compat_hash
    assert large.difference(LAYOUT) == ""


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (KvLayout("m", 30, 3, 64, 16, "bfloat16", windows=(8,)), "windows: () here, (8,) there"),
        (KvLayout("n", 30, 3, 64, 16, "bfloat16"), "model_fingerprint: m here, n there"),
        (KvLayout("m", 30, 4, 64, 16, "bfloat16"), "kv_heads: 3 here, 4 there"),
    ],
)
def test_difference_of_layouts_is_named(other: KvLayout, text: str) -> None:
    assert LAYOUT.compat_hash != other.compat_hash
    assert LAYOUT.difference(other) == text


def test_instance_cannot_come_back_from_the_end() -> None:
    assert INSTANCE_TRANSITIONS.is_terminal(InstanceState.STOPPED)
    with pytest.raises(IllegalTransitionError, match="STOPPED → READY"):
        INSTANCE_TRANSITIONS.check(InstanceState.STOPPED, InstanceState.READY)
    for state in InstanceState:
        if not INSTANCE_TRANSITIONS.is_terminal(state):
            assert INSTANCE_TRANSITIONS.can(state, InstanceState.LOST)


def test_latency_model_counts_the_pairs_of_a_chunk() -> None:
    model = LatencyModel(prefill_base=1, prefill_token=2, prefill_pair=0.5)
    assert model.prefill_ms(4, cached=3) == 1 + 2 * 4 + 0.5 * (4 * 3 + 8)
    assert model.decode_step_ms(2, 100) == 20 + 2


class Recorded:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))


def test_first_message_of_a_kind_is_said_at_once_and_the_rest_counted() -> None:
    recorded = Recorded()
    limited = RateLimitedLog(recorded, period_s=3600)  # type: ignore[arg-type]
    for _ in range(5):
        limited.warning("a", "lost", peer="x")
    limited.warning("b", "other")
    assert [line[0] for line in recorded.lines] == ["lost", "other"]
    unlimited = RateLimitedLog(recorded, period_s=0)  # type: ignore[arg-type]
    unlimited.warning("a", "again")
    assert recorded.lines[-1] == ("again", {"suppressed": 0})
