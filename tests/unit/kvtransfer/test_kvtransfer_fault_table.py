"""The table of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`([\w/]+\.py)?(?:::(test_\w+))?`")


def test_every_test_that_the_table_names_is_there() -> None:
    text = (ROOT / "docs" / "kv-transfer-faults.md").read_text("utf-8")
    num_named = 0
    for line in text.splitlines():
        if not line.startswith("| ") or "`" not in line:
            continue
        file = ""
        for given, name in NAMED.findall(line.rsplit("|", 2)[1]):
            file = given or file
            num_named += 1
            source = (ROOT / "tests" / file).read_text("utf-8")
            assert not name or f"def {name}(" in source, f"{file}::{name}"
    assert num_named > 40
