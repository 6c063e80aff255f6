"""The records of decisions: each has a number of its own, the same in its name and its title."""

from __future__ import annotations

from pathlib import Path

RECORDS = sorted((Path(__file__).resolve().parents[2] / "docs" / "adr").glob("*.md"))


def test_records_are_numbered_without_a_gap_or_a_double() -> None:
    numbers = [int(record.name[:4]) for record in RECORDS]
    assert numbers == list(range(1, len(RECORDS) + 1))


def test_titles_have_the_numbers_of_their_files() -> None:
    for record in RECORDS:
        assert record.read_text().startswith(f"# {record.name[:4]} "), record.name
