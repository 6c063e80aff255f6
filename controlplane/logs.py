"""Log files of the processes of a cluster: where they are and why a process says it ended."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

_TAIL_BYTES = 16_384
_CONSOLE_PROBLEM = re.compile(r"""\bproblem=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)""")


def log_file(log_dir: Path, name: str) -> Path:
    return log_dir / f"{name}.log"


def last_problem(file: Path) -> str:
    """The last ``problem`` field in a log, or its last line when nothing names a problem.

    Understands both formats of ``common.logging``. Empty when there is no log.
    """
    lines = [line for line in tail(file).splitlines() if line.strip()]
    for line in reversed(lines):
        problem = _problem_of(line)
        if problem:
            return problem
    return lines[-1].strip()[:300] if lines else ""


def tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _problem_of(line: str) -> str:
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("problem", ""))
        except ValueError:
            return ""
    found = _CONSOLE_PROBLEM.search(line)
    if found is None:
        return ""
    text = found.group(1)
    return str(ast.literal_eval(text)) if text[0] in "'\"" else text
