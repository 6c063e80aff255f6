"""Whatever comes, goes and dies: every request ends once, every block comes back, and a leap over
many decode steps is the same as taking them one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.cluster import Role
from isthmus.common.ids import InstanceId
from isthmus.sim.cluster import SimCluster
from isthmus.sim.flight import START_NS
from isthmus.sim.records import RequestEnd
from isthmus.sim.requests import SimRequest
from isthmus.sim.step_model import DecodeLine, Leap, StepModel
from tests.support.sim_runs import MS, chain, check_over, make_cluster, make_spec

requests = st.lists(
    st.builds(
        lambda at, prompt, output, shared, patience: (at, prompt, output, shared, patience),
        st.integers(0, 3_000),
        st.integers(1, 300),
        st.integers(1, 120),
        st.integers(0, 3),
        st.one_of(st.none(), st.integers(0, 2_000)),
    ),
    min_size=1,
    max_size=25,
)
faults = st.lists(
    st.tuples(st.integers(0, 4_000), st.sampled_from(["p0", "d0", "d1", "m0"]), st.booleans()),
    max_size=4,
)
policies = st.sampled_from(["round_robin", "least_predicted_load", "goodput"])


def build(
    asked: list[tuple[int, int, int, int, int | None]], num_blocks: int, policy: str
) -> SimCluster:
    specs = [
        make_spec(
            name,
            role,
            num_blocks=num_blocks,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            fetch_min_tokens=16 if role is Role.PREFILL else 0,
        )
        for name, role in (
            ("p0", Role.PREFILL),
            ("d0", Role.DECODE),
            ("d1", Role.DECODE),
            ("m0", Role.MIXED),
        )
    ]
    cluster = make_cluster(*specs, router={"policy": policy, "min_remote_tokens": 8})
    cluster.offer(
        SimRequest(
            index,
            at * MS,
            prompt,
            output,
            output,
            hashes=chain(prompt // 16, first=1_000 * shared) if shared else (),
            cancel_ns=None if patience is None else (at + patience) * MS,
        )
        for index, (at, prompt, output, shared, patience) in enumerate(sorted(asked, key=str))
    )
    return cluster


@given(requests, faults, st.sampled_from([30, 60, 400]), policies)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_every_block_comes_back(
    asked: list[tuple[int, int, int, int, int | None]],
    faults: list[tuple[int, str, bool]],
    num_blocks: int,
    policy: str,
) -> None:
    cluster = build(asked, num_blocks, policy)
    for at, name, comes_back in faults:
        instance_id = InstanceId(name)
        cluster.queue.at(START_NS + at * MS, cluster.kill, instance_id)
        if comes_back:
            cluster.queue.at(START_NS + (at + 700) * MS, cluster.start_again, instance_id)
    events = 0
    while not cluster.run(max_events=50):
        events += 50
        assert events < 1_000_000, "the run does not end"
        for instance in cluster.instances.values():
            instance.check_integrity()
    assert len(cluster.records) == len(asked)
    for record in cluster.records:
        if record.end is RequestEnd.FINISHED:
            assert record.num_tokens == record.request.num_output
    check_over(cluster)


@given(requests)
@settings(max_examples=20, deadline=None)
def test_a_run_is_a_function_of_its_inputs(
    asked: list[tuple[int, int, int, int, int | None]],
) -> None:
    outcomes = []
    for _ in range(2):
        cluster = build(asked, 60, "least_predicted_load")
        cluster.run()
        outcomes.append([(r.end, r.first_ns, r.second_ns, r.end_ns) for r in cluster.records])
    assert outcomes[0] == outcomes[1]


models = st.builds(
    lambda base, seq, context: StepModel(5.0, 0.1, 0.0, DecodeLine(base, seq, context)),
    st.floats(0.1, 50),
    st.floats(0, 2),
    st.sampled_from([0.0, 1e-9, 1e-5, 0.001, 0.1]),
)


@given(models, st.integers(1, 64), st.integers(1, 5_000), st.integers(1, 400), st.floats(0.3, 3))
def test_a_leap_takes_as_long_as_its_steps(
    model: StepModel, num_seqs: int, context: int, num_steps: int, factor: float
) -> None:
    leap = Leap.of(model, num_seqs, context, factor)
    total_ms = 0.0
    for step in range(num_steps):
        total_ms += factor * model.decode_ms(num_seqs, context + step * num_seqs)
    assert abs(leap.after_ms(num_steps) - total_ms) <= 1e-6 * total_ms
    # Asked in the middle of the last step, it is that one which has begun.
    middle_ms = (leap.after_ms(num_steps) + leap.after_ms(num_steps - 1)) / 2
    assert leap.steps_until(middle_ms) == num_steps
    assert leap.steps_until(0.0) == 1
