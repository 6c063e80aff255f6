from __future__ import annotations

from isthmus.common.timeline import Event, Timeline, spans_of


def test_what_was_marked_first_wins_a_merge_whatever_its_order() -> None:
    timeline = Timeline({Event.ARRIVED: 1, Event.ROUTED: 5})
    other = Timeline({Event.ROUTED: 9, Event.ADMITTED: 5})
    timeline.merge(other)
    assert timeline.items() == [(Event.ARRIVED, 1), (Event.ROUTED, 5), (Event.ADMITTED, 5)]
    timeline.mark(Event.FINISHED, 7)
    assert other.at_ns(Event.FINISHED) is None


def test_a_merge_into_an_empty_one_is_a_copy() -> None:
    timeline, other = Timeline(), Timeline({Event.ARRIVED: 1})
    timeline.merge(other)
    timeline.mark(Event.ROUTED, 2)
    assert other.items() == [(Event.ARRIVED, 1)]


def test_a_span_is_never_negative_and_needs_both_ends() -> None:
    known = {Event.ARRIVED: 1, Event.TOKENISED: 500_000_001, Event.ROUTED: 2}
    assert spans_of(Timeline(known)) == {"tokenise": 0.5, "route": 0.0}


def test_the_last_bytes_are_no_part_of_decoding() -> None:
    known = {Event.SECOND_TOKEN: 0, Event.LAST_TOKEN: 500_000_000, Event.FINISHED: 750_000_000}
    assert spans_of(Timeline(known)) == {"decode": 0.5, "last_flush": 0.25}
