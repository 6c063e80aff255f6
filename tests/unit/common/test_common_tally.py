"""A tally reads like a histogram of prometheus_client's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from isthmus.common.tally import TallyHistogram

BOUNDS = (0.002, 0.5, 1, 80)
# At a bound, between two, below and beyond all of them.
VALUES = (0.0, 0.002, 0.25, 0.5, 0.75, 1.0, 79.5, 80.0, 1024.0)


def exposed(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_it_exposes_what_a_histogram_would() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram("gap_seconds", "A gap", buckets=BOUNDS, registry=registry)
    histogram = Histogram("gap_seconds", "A gap", buckets=BOUNDS, registry=other)
    assert exposed(registry) == exposed(other)
    for value in VALUES:
        tally.observe(value)
        histogram.observe(value)
    assert exposed(registry) == exposed(other)


def test_equal_observations_count_as_many() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    together = TallyHistogram("gap_seconds", "A gap", buckets=BOUNDS, registry=registry)
    apart = TallyHistogram("gap_seconds", "A gap", buckets=BOUNDS, registry=other)
    together.observe(0.25, 3)
    for _ in range(3):
        apart.observe(0.25)
    assert exposed(registry) == exposed(other)


def test_each_set_of_labels_has_a_tally_of_its_own() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    names = ("stage", "kind")
    tally = TallyHistogram("part_seconds", "A part", names, buckets=BOUNDS, registry=registry)
    histogram = Histogram("part_seconds", "A part", names, buckets=BOUNDS, registry=other)
    assert exposed(registry) == exposed(other)
    for number, value in enumerate(VALUES):
        labels = {"stage": f"s{number % 2}", "kind": f'"{number % 3}"'}
        tally.labels(**labels).observe(value)
        histogram.labels(**labels).observe(value)
    assert exposed(registry) == exposed(other)
    assert tally.labels(kind="x", stage="y") is tally.labels(stage="y", kind="x")
