"""What the pages name exists: files, headings, metrics, configuration keys, modules, commands.

Only what is written as code, or is a link, is looked at; prose may say what it likes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel

from benchmarks.run import NAMES
from isthmus.cli.main import app
from isthmus.common import metrics
from isthmus.common.config import ClusterConfig, PoolConfig, node_of_mapping
from isthmus.common.tally import TallyHistogram

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = {init.parent.name for init in ROOT.glob("*/__init__.py")} | {"docs", "deploy", "tests"}
OF_TESTS = {folder.name for folder in (ROOT / "tests").iterdir() if folder.is_dir()}


def code_in(page: Path) -> Iterator[str]:
    """Spans, and the lines of blocks (fenced, or indented by four)."""
    is_fenced = False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


ALL_CODE = [(page.name, code) for page in PAGES for code in code_in(page)]


def headings_of(page: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    lines = page.read_text("utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    num_links = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if target.startswith(("http:", "https:")):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), (page.name, target)
            assert not anchor or anchor in headings_of(file), (page.name, target)
            num_links += 1
    assert num_links > 40


def test_metrics_are_declared() -> None:
    names = set()
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase | TallyHistogram):
            family = next(iter(metric.describe()))
            names.add(family.name + ("_total" if family.type == "counter" else ""))
    num_named = 0
    for page in PAGES:
        for name in re.findall(r"\bisthmus_[a-z0-9_]+", page.read_text("utf-8")):
            assert {name, re.sub(r"_(bucket|sum|count)$", "", name)} & names, (page.name, name)
            num_named += 1
    assert num_named > len(names)


def is_key(path: list[str], node: type[BaseModel] = ClusterConfig) -> bool:
    if not path:
        return True
    field = node.model_fields.get(path[0])
    if field is None:
        return False
    if named := node_of_mapping(field.annotation):
        return is_key(path[2:], named)
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return is_key(path[1:], field.annotation)
    return len(path) == 1


def is_module(path: list[str]) -> bool:
    """A module of ours, or a name that is in one."""
    for end in range(len(path), 0, -1):
        place = ROOT.joinpath(*path[:end])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return all(re.search(rf"\b{name}\b", file.read_text()) for name in path[end:])
    return False


def test_configuration_keys_and_modules_are_there() -> None:
    num_keys = 0
    for page, code in ALL_CODE:
        for setting in re.findall(r"--set ([\w.]+)=", code):
            # A simulated cluster has a list of pools, which is not in this tree.
            assert setting.startswith("pools.") or is_key(setting.split(".")), (page, code)
        is_file = re.search(r"\.(py|md|json|png)$", code)
        if is_file or not re.fullmatch(r"[a-z_]+(\.\w+)+(: .*)?", code):
            continue
        path = code.partition(":")[0].removeprefix("isthmus.").split(".")
        if path[0] not in {*ClusterConfig.model_fields, *FOLDERS}:
            continue
        # Pages name what is in every pool without the pool.
        assert is_key(path) or is_key(path, PoolConfig) or is_module(path), (page, code)
        num_keys += 1
    assert num_keys > 200


def test_files_and_tests_are_there() -> None:
    num_files = 0
    for page, code in ALL_CODE:
        for name in re.findall(r"(?<![\w/.~<-])[a-z_]+/[\w./-]*\w(?:::test_\w+)?(?![*\w])", code):
            path, _, test = name.partition("::")
            is_made = path.startswith("benchmarks/out")  # by measurements
            if is_made or path.split("/")[0] not in FOLDERS | OF_TESTS:
                continue
            found = [base / path for base in (ROOT, ROOT / "tests") if (base / path).exists()]
            assert found, (page, name)
            assert not test or f"def {test}(" in found[0].read_text("utf-8"), (page, name)
            num_files += 1
    assert num_files > 100


def test_targets_and_benchmarks_can_be_run() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    num_named = 0
    for page, code in ALL_CODE:
        for target in re.findall(r"^(?:\$ )?make ([a-z0-9-]+)", code):
            assert f"\n{target}:" in makefile, (page, code)
        for name in re.findall(r"make bench ARGS=\"?([a-z_]+)", code):
            assert name in NAMES, (page, code)
            num_named += 1
        for name in re.findall(r"(?<![/\w])benchmarks[./]([a-z_]+)", code):
            file = ROOT / "benchmarks" / name
            assert name == "out" or file.is_dir() or file.with_suffix(".py").exists(), (page, code)
            num_named += 1
    assert num_named > 20


def words_of(code: str) -> list[str]:
    """What follows ``isthmus`` where that is a command; empty where it is none."""
    match = re.match(r"(?:\$ )?isthmus ([a-z].*)", code)
    if match is None:
        return []
    text = re.split(r"\s{2,}|[│|;&]|\s#", match[1])[0]
    try:
        return shlex.split(text)
    except ValueError:  # the page breaks the line inside of quotes
        return text.split()


def test_commands_and_their_options_are_there() -> None:
    whole: Any = typer.main.get_command(app)
    num_options = 0
    for page, code in ALL_CODE:
        words = words_of(code)
        if not words:
            continue
        command = whole
        while words and hasattr(command, "commands"):
            command = command.commands.get(words.pop(0))
            assert command is not None, (page, code)
        known = {"--help"}.union(*(p.opts + p.secondary_opts for p in command.params))
        for word in words:
            option = word.strip("[]").partition("=")[0]
            if re.fullmatch(r"--?[a-z][\w-]*", option):
                assert option in known, (page, code, option)
                num_options += 1
    assert num_options > 20
