"""What a newer peer may say that this version has never heard of."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import InstanceState, Role
from isthmus.common.errors import InternalError, LayoutMismatchError
from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored
from isthmus.common.types import FinishReason, LocalPrefillReason, RouteAction
from isthmus.protos.convert.decisions import decision_from_pb, local_reason_from_pb
from isthmus.protos.convert.instances import info_from_pb, info_to_pb, role_from_pb, state_from_pb
from isthmus.protos.convert.kv_events import kv_batch_from_pb, split_hashes
from isthmus.protos.convert.prefill import update_from_pb
from isthmus.protos.convert.requests import finish_reason_from_pb
from isthmus.protos.v1 import common_pb2, prefill_pb2, router_pb2
from isthmus.router.kv_index import ApplyResult, KvIndex
from tests.support.router_cluster import make_info

NEVER_HEARD_OF = 99
HASHES = [BlockHash(bytes([n]) * 16) for n in range(3)]


def test_a_reason_to_end_still_ends_a_request() -> None:
    assert finish_reason_from_pb(NEVER_HEARD_OF) is FinishReason.STOP  # type: ignore[arg-type]
    assert finish_reason_from_pb(common_pb2.FINISH_REASON_UNSPECIFIED) is None


def test_a_state_means_that_what_runs_goes_on_and_nothing_new_comes() -> None:
    assert state_from_pb(NEVER_HEARD_OF) is InstanceState.DRAINING  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, NEVER_HEARD_OF])
def test_a_role_is_a_typed_error(value: common_pb2.Role) -> None:
    with pytest.raises(InternalError, match=f"role {value} is not known here"):
        role_from_pb(value)


def test_an_action_admits_and_a_reason_to_compute_locally_is_one() -> None:
    message = router_pb2.RouteDecision(action=NEVER_HEARD_OF, local_reason="moonlight")  # type: ignore[arg-type]
    decision = decision_from_pb(message)
    assert decision.action is RouteAction.ADMIT
    assert decision.local_reason is LocalPrefillReason.POLICY
    assert local_reason_from_pb("") is LocalPrefillReason.NONE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "fp4"}, "dtype fp4 is not known here"),
        ({"kind": "recurrent"}, "kind recurrent in order HND is not known here"),
        ({"order": "NHD"}, "order NHD is not known here"),
        ({"block_size": 0}, "block_size 0"),
        ({"tp_size": 3, "total_kv_heads": 2}, "cannot be dealt"),
        ({"tp_rank": 7}, "rank 7 of 1"),
    ],
)
def test_a_store_of_which_nothing_is_known_is_a_typed_error(
    change: dict[str, object], problem: str
) -> None:
    message = info_to_pb(make_info("d0", Role.DECODE))
    for name, value in change.items():
        setattr(message.kv_layout, name, value)
    with pytest.raises(LayoutMismatchError, match=problem):
        info_from_pb(message)


def test_a_cache_event_changes_nothing_and_the_next_ones_still_count() -> None:
    index = KvIndex(100)
    kinds = common_pb2.KvEvent
    batch = common_pb2.KvEventBatch(instance_id="d0", epoch=1, is_snapshot=True)
    batch.events.add(kind=kinds.KIND_STORED, hashes=b"".join(HASHES[:2]))
    index.apply(kv_batch_from_pb(batch))
    batch = common_pb2.KvEventBatch(instance_id="d0", epoch=1, first_seq=1)
    batch.events.add(kind=NEVER_HEARD_OF, hashes=HASHES[0])  # type: ignore[arg-type]
    batch.events.add(kind=kinds.KIND_REMOVED, hashes=HASHES[1])
    known = kv_batch_from_pb(batch)
    assert known.events == (BlocksStored(()), BlocksRemoved((HASHES[1],)))
    assert index.apply(known) is ApplyResult.APPLIED
    assert index.match((HASHES,)) == {InstanceId("d0"): 1}
    batch = common_pb2.KvEventBatch(instance_id="d0", epoch=1, first_seq=3)
    batch.events.add(kind=kinds.KIND_STORED, hashes=HASHES[1])
    assert index.apply(kv_batch_from_pb(batch)) is ApplyResult.APPLIED


def test_half_a_hash_is_none() -> None:
    assert split_hashes(HASHES[0] + b"half") == (HASHES[0],)


def test_an_update_of_a_prefill_stream_is_passed_over() -> None:
    assert update_from_pb(prefill_pb2.PrefillResponse()) is None
