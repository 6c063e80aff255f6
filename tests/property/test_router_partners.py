"""Who may hand KV to whom is the same however the instances came and went."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import ClusterView
from tests.support.router_cluster import LAYOUT, make_info


def view_of(cluster: ClusterView, name: str) -> tuple[frozenset[object], bool]:
    view = cluster.views[InstanceId(name)]
    return frozenset(view.fed_keys), bool(view.problem)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_partners_do_not_depend_on_the_past(seed: int) -> None:
    rnd = random.Random(seed)
    cluster = ClusterView(3, 1_000)
    for epoch in range(1, 30):
        name = f"i{rnd.randrange(6)}"
        if rnd.random() < 0.3:
            cluster.remove(InstanceId(name), "left", 0)
            continue
        layout = replace(LAYOUT, dtype=rnd.choice(["float32", "float32", "float16", "int8"]))
        model = rnd.choice(["m", "m", "n"])
        cluster.upsert(
            make_info(name, rnd.choice([*Role]), epoch=epoch, kv_layout=layout, model=model)
        )
        anew = ClusterView(3, 1_000)
        for view in cluster:
            anew.upsert(view.info)
        for known in cluster.views:
            assert view_of(cluster, known) == view_of(anew, known)
