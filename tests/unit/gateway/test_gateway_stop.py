"""Stop strings: what is held back, what is shown."""

from __future__ import annotations

from isthmus.gateway.stop import StopScanner


def test_only_a_possible_beginning_is_held_back() -> None:
    scanner = StopScanner([" zeta eta"])
    assert scanner.push("one") == "one"
    assert scanner.push(" ze") == ""
    assert scanner.push("bra") == " zebra"
    assert scanner.push("x zeta") == "x"
    assert scanner.push(" eta!") == ""
    assert scanner.matched == " zeta eta"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("the EN") == "the "
    assert scanner.flush() == "EN"
    assert scanner.flush() == ""


def test_a_match_that_ends_first_wins_over_one_that_began_first() -> None:
    scanner = StopScanner(["abcd", "c"])
    assert scanner.push("xabcd") == "xab"
    assert scanner.matched == "c"


def test_without_stops_nothing_is_touched() -> None:
    scanner = StopScanner(())
    assert scanner.push("anything") == "anything"
    assert scanner.flush() == ""
