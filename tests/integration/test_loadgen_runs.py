"""The load generator against a real gateway: what it measures, and what it makes of refusals."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from isthmus.common.errors import CapacityError
from isthmus.loadgen import Endpoint, Status, Targets, run_calls, summarise
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import running_gateway

pytestmark = pytest.mark.asyncio
WORD = tuple(3 + ord(letter) for letter in "hello")


def calls(count: int, prompt_tokens: int = 8, **more: object) -> list[Call]:
    return [Call(i, 0.01 * i, prompt_tokens, len(WORD), **more) for i in range(count)]  # type: ignore[arg-type]


async def test_every_call_is_measured_and_counted(tmp_path: Path) -> None:
    fake = FakeDecode(script=lambda _: Script(WORD))
    async with running_gateway(tmp_path, [fake]) as gateway:
        heard: list[int] = []
        async with Endpoint(gateway.url, "tiny", timeout_s=20) as endpoint:
            records = await run_calls(
                endpoint,
                calls(6),
                PromptMaker(seed=1, vocab=200),
                on_progress=lambda _, ended: heard.append(ended),
            )
    assert [record.status for record in records] == [Status.DONE] * 6
    assert {record.num_tokens for record in records} == {len(WORD)}
    assert {record.num_prompt_tokens for record in records} == {8}
    for record in records:
        assert record.call.due_s <= record.sent_s < record.first_s <= record.last_s
    assert heard[-1] == 6
    assert summarise(records, Targets()).attainment == 1.0


async def test_calls_are_sent_while_earlier_ones_wait(tmp_path: Path) -> None:
    gate = asyncio.Event()
    fake = FakeDecode(script=lambda _: Script(WORD, gate=gate))

    def open_when_all_are_sent(sent: int, _: int) -> None:
        if sent == 5:
            gate.set()

    async with (
        running_gateway(tmp_path, [fake]) as gateway,
        Endpoint(gateway.url, "tiny", timeout_s=20) as endpoint,
    ):
        records = await run_calls(
            endpoint, calls(5), PromptMaker(1), on_progress=open_when_all_are_sent
        )
    assert all(record.status is Status.DONE for record in records)
    assert min(record.first_s for record in records) > max(record.sent_s for record in records)


async def test_refused_and_broken_answers_are_told_apart(tmp_path: Path) -> None:
    full = CapacityError("every place is taken", stage="route", retry_after_ms=1000)
    fake = FakeDecode(script=lambda _: Script(WORD, error=full))
    async with running_gateway(tmp_path, [fake]) as gateway:
        async with Endpoint(gateway.url, "tiny", timeout_s=20) as endpoint:
            (refused,) = await run_calls(endpoint, calls(1), PromptMaker(1))
        async with Endpoint(gateway.url, "none-such", timeout_s=20) as endpoint:
            (wrong,) = await run_calls(endpoint, calls(1), PromptMaker(1))
    async with Endpoint("http://127.0.0.1:1", "tiny", timeout_s=20) as endpoint:
        (gone,) = await run_calls(endpoint, calls(1), PromptMaker(1))
    assert refused.status is Status.REJECTED
    assert "every place is taken" in refused.problem
    assert (wrong.status, wrong.http_status) == (Status.ERROR, 404)
    assert "none-such" in wrong.problem
    assert gone.status is Status.ERROR
    assert gone.ttft_ms is None


async def test_prompts_begin_alike_exactly_where_blocks_are_the_same() -> None:
    maker = PromptMaker(seed=5, vocab=1000, block_tokens=4)
    first, second, third = (
        maker.prompt(Call(i, 0.0, 12, 1, blocks)) for i, blocks in enumerate([(1, 2), (1, 3), ()])
    )
    assert [len(prompt) for prompt in (first, second, third)] == [12] * 3
    assert first[:4] == second[:4]
    assert first[4:8] != second[4:8]
    assert third[:4] not in (first[:4], second[:4])
    assert isinstance(PromptMaker(seed=5).prompt(Call(0, 0.0, 12, 1)), str)


async def test_the_command_measures_and_writes_what_it_found(tmp_path: Path) -> None:
    fake = FakeDecode(script=lambda _: Script(WORD))
    async with running_gateway(tmp_path, [fake]) as gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "isthmus.cli.main", "bench", "serve", "--url", gateway.url, "-o", "json"),
            *("--rate", "40", "--rate", "80", "--requests", "8", "--prompt", "4-16"),
            *("--answer", "5", "--ttft-ms", "60000", "--warm-up", "2"),
            *("--records", str(tmp_path / "calls.jsonl"), "--save", str(tmp_path / "all.json")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 0, errors.decode()
    result = json.loads(out)
    assert [run["num_offered"] for run in result["runs"]] == [6, 6]
    assert [run["attainment"] for run in result["runs"]] == [1.0, 1.0]
    assert json.loads((tmp_path / "all.json").read_text())["model"] == "tiny"
    assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == 16


async def test_the_command_refuses_what_makes_no_sense() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "isthmus.cli.main", "bench", "serve", "--model", "m", "--prompt", "many"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 50)
    assert process.returncode == 1
    assert "lognormal:MEDIAN:SIGMA" in errors.decode()
