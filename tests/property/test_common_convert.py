"""Domain types come back from the wire as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.cluster import (
    InstanceInfo,
    InstanceState,
    LatencyModel,
    LinkRate,
    LoadReport,
    Role,
)
from isthmus.common.ids import BlockHash, InstanceId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch
from isthmus.common.kv_layout import DTYPE_BYTES, KvLayout
from isthmus.protos.convert.instances import info_from_pb, info_to_pb, load_from_pb, load_to_pb
from isthmus.protos.convert.kv_events import kv_batch_from_pb, kv_batch_to_pb
from isthmus.protos.v1 import common_pb2 as pb

FIGURE = st.floats(0, 1e6)
COUNT = st.integers(0, 2**31)
SIZE = st.integers(1, 2**31)
HASHES = st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=4).map(tuple)
EVENTS = st.lists(
    st.one_of(
        HASHES.map(BlocksStored),
        HASHES.map(BlocksRemoved),
        st.builds(CacheCleared),
    ),
    max_size=4,
).map(tuple)
INFOS = st.builds(
    InstanceInfo,
    instance_id=st.text(max_size=9).map(InstanceId),
    role=st.sampled_from(Role),
    state=st.sampled_from(InstanceState),
    epoch=COUNT,
    address=st.text(max_size=9),
    metrics_address=st.text(max_size=9),
    model=st.text(max_size=9),
    model_path=st.text(max_size=9),
    kv_layout=st.builds(
        KvLayout,
        model_fingerprint=st.text(max_size=9),
        num_layers=SIZE,
        num_kv_heads=SIZE,
        head_dim=SIZE,
        block_size=SIZE,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    ),
    num_blocks=COUNT,
    max_num_batched_tokens=COUNT,
    max_num_seqs=COUNT,
    max_model_len=COUNT,
    connector=st.sampled_from(["nixl", "local"]),
    latency=st.builds(LatencyModel, FIGURE, FIGURE, FIGURE, FIGURE, FIGURE, FIGURE),
    node=st.text(max_size=9),
    pid=COUNT,
    version=st.text(max_size=9),
)
LOADS = st.builds(
    LoadReport,
    instance_id=st.text(max_size=9).map(InstanceId),
    epoch=COUNT,
    seq=COUNT,
    at_ns=COUNT,
    waiting_seqs=COUNT,
    waiting_tokens=COUNT,
    oldest_wait_ms=FIGURE,
    running_seqs=COUNT,
    running_context_tokens=COUNT,
    num_blocks=COUNT,
    free_blocks=COUNT,
    held_blocks=COUNT,
    cached_blocks=COUNT,
    inflight_transfer_bytes=COUNT,
    step_ms=FIGURE,
    steps=COUNT,
    links=st.lists(
        st.builds(LinkRate, target_id=st.text(max_size=9).map(InstanceId), bytes_per_s=FIGURE),
        max_size=3,
    ).map(tuple),
    prompt_seqs=st.none() | COUNT,
)


@given(INFOS)
def test_instance_record_survives(info: InstanceInfo) -> None:
    data = info_to_pb(info).SerializeToString()
    assert info_from_pb(pb.InstanceInfo.FromString(data)) == info


@given(LOADS)
def test_load_report_survives(load: LoadReport) -> None:
    data = load_to_pb(load).SerializeToString()
    assert load_from_pb(pb.LoadReport.FromString(data)) == load


@given(EVENTS, COUNT, st.booleans())
def test_cache_events_survive(events: tuple[object, ...], first_seq: int, snapshot: bool) -> None:
    batch = KvEventBatch(InstanceId("i"), 3, first_seq, events, snapshot)  # type: ignore[arg-type]
    data = kv_batch_to_pb(batch).SerializeToString()
    back = kv_batch_from_pb(pb.KvEventBatch.FromString(data))
    assert back == batch
    assert back.next_seq == first_seq + len(events)
