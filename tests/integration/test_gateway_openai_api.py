"""The official client against the gateway on a real port, fake decode instances behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from isthmus.common.config import ClusterConfig, GatewayConfig
from isthmus.gateway.limits import Identity
from isthmus.protos.v1 import common_pb2
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake]) as running:
        yield running


@pytest.mark.asyncio
async def test_chat_streamed_and_whole_are_the_same(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    fake.script = lambda _: Script((*gateway.ids("the 안녕 😀 end"), 2), num_cached_tokens=4)
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    choice = whole.choices[0]
    assert choice.message.content == "the 안녕 😀 end"
    assert choice.finish_reason == "stop"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert "\ufffd" not in text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    told, told_whole = chunks[-1].usage.model_dump(), whole.usage.model_dump()
    assert told.pop("isthmus")["good"] is told_whole.pop("isthmus")["good"] is True
    assert told == told_whole
    assert whole.usage.prompt_tokens == len(fake.requests[0].token_ids)
    assert whole.usage.completion_tokens == len(gateway.ids("the 안녕 😀 end")) + 1
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    prompt = gateway.tokenizer.decode(fake.requests[0].token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.asyncio
async def test_every_sampling_parameter_reaches_the_instance(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    async with gateway.openai() as client:
        await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={"5": -100},
            seed=-1,
            stop=["zz"],
            user="me",
            metadata={"a": "b"},
            store=False,
            extra_body={
                "top_k": 3,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 1,
                "stop_token_ids": [9],
            },
        )
    request = fake.requests[0]
    sampling = request.sampling
    assert sampling.max_tokens == 7
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.min_p, sampling.min_tokens) == (0.05, 1)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (0.1, 0.2)
    assert sampling.repetition_penalty == 1.1
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(5, -100)]
    assert sampling.seed == 2**64 - 1
    assert set(sampling.stop_token_ids) == {2, 9}
    assert request.timeout_ms > 0


@pytest.mark.asyncio
async def test_ignore_eos_leaves_only_the_clients_stops(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    fake.script = lambda _: Script((*gateway.ids("a"), 2, *gateway.ids("b")))
    async with gateway.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt="x", extra_body={"ignore_eos": True}
        )
    assert list(fake.requests[0].sampling.stop_token_ids) == []
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_exactly_before_a_stop_string_split_over_tokens(
    gateway: RunningGateway, fake: FakeDecode, stream: bool
) -> None:
    fake.script = lambda _: Script(gateway.ids("one zeta eta theta two"))
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stop=" zeta eta theta", stream=stream
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("one", "stop")


@pytest.mark.asyncio
async def test_text_held_back_comes_out_when_it_was_no_stop_string(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    fake.script = lambda _: Script(gateway.ids("one zeta eta"))
    async with gateway.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt="x", stop=[" zeta eta theta"], max_tokens=64
        )
    assert answer.choices[0].text == "one zeta eta"


@pytest.mark.asyncio
async def test_a_stop_token_of_the_client_ends_the_text_before_it(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    (stop,) = gateway.ids("!")
    fake.script = lambda _: Script(gateway.ids("one! two! three"))
    async with gateway.openai() as client:
        ended = await client.completions.create(
            model="tiny", prompt="x", extra_body={"stop": [stop]}, max_tokens=64
        )
        later = await client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=64,
            extra_body={"stop_token_ids": [stop], "min_tokens": len(gateway.ids("one! two"))},
        )
    assert ended.choices[0].text == "one"
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    assert ended.usage is not None
    assert ended.usage.completion_tokens == len(gateway.ids("one!"))
    assert later.choices[0].text == "one! two"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_cover_every_token_with_exact_bytes(
    gateway: RunningGateway, fake: FakeDecode, stream: bool
) -> None:
    ids = (*gateway.ids("a😀"), 2)
    fake.script = lambda _: Script(ids)
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            logprobs=True,
            top_logprobs=2,
            stream=stream,
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
            content = [item for part in parts for item in part.content or ()]
        else:
            content = answer.choices[0].logprobs.content
    assert len(content) == len(ids)
    data = b"".join(bytes(item.bytes or ()) for item in content)
    assert data == "a😀<|im_end|>".encode()
    assert all(len(item.top_logprobs) == 2 for item in content)


@pytest.mark.asyncio
async def test_several_choices_share_one_prompt(gateway: RunningGateway, fake: FakeDecode) -> None:
    texts = {0: "one", 1: " two", 2: " three"}

    def script(request: common_pb2.Request) -> Script:
        index = int(request.request_id.rpartition("-")[2].partition(".")[0])
        return Script((*gateway.ids(texts[index]), 2), num_cached_tokens=4 * bool(index))

    fake.script = script
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=3, seed=5, logprobs=True
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=3, seed=5, stream=True
        )
        streamed = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert streamed == texts
    first, *others = fake.requests[:3]
    assert [request.sampling.seed for request in (first, *others)] == [5, 6, 7]
    assert all(request.token_ids == first.token_ids for request in others)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(first.token_ids)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(gateway.ids(texts[choice.index])) + 1


@pytest.mark.asyncio
async def test_other_choices_wait_for_the_prompt_to_be_computed(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    seen_at_first: list[int] = []

    def script(request: common_pb2.Request) -> Script:
        seen_at_first.append(len(fake.submitted))
        return Script(gateway.ids("one"))

    fake.script = script
    async with gateway.openai() as client:
        await client.completions.create(model="tiny", prompt=["a", "b"], n=2)
    assert len(fake.submitted) == 4
    firsts = [request.request_id.rpartition("-")[2] for request in fake.requests[:2]]
    assert firsts == ["0.0", "2.0"]


@pytest.mark.asyncio
async def test_prompts_may_be_texts_ids_and_lists_of_both(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    ids = list(gateway.ids("the one"))
    async with gateway.openai() as client:
        for prompt, expected in (
            ("the one", [ids]),
            (ids, [ids]),
            (["the one", "x"], [ids, list(gateway.ids("x"))]),
            ([ids, [5, 6]], [ids, [5, 6]]),
        ):
            fake.submitted.clear()
            answer = await client.completions.create(model="tiny", prompt=prompt)
            assert [list(request.token_ids) for request in fake.requests] == expected
            assert [choice.text for choice in answer.choices] == ["hi"] * len(expected)
            assert [choice.index for choice in answer.choices] == list(range(len(expected)))
            assert fake.requests[0].sampling.max_tokens == 16


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(
    gateway: RunningGateway, fake: FakeDecode, stream: bool
) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt="the one", echo=True, logprobs=1, max_tokens=2, stream=stream
        )
        parts = [part.choices[0] async for part in answer] if stream else [answer.choices[0]]
    assert "".join(part.text for part in parts) == "the onehi"
    logprobs = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for item in logprobs for token in item.tokens or ()]
    values = [value for item in logprobs for value in item.token_logprobs or ()]
    offsets = [offset for item in logprobs for offset in item.text_offset or ()]
    assert "".join(tokens) == "the onehi"
    assert values[0] is None
    assert all(value == -0.5 for value in values[1:])
    assert [
        ("the onehi"[offset:])[: len(t)] for offset, t in zip(offsets, tokens, strict=True)
    ] == tokens


@pytest.mark.asyncio
async def test_max_tokens_zero_with_echo_scores_without_generating(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(
            model="tiny", prompt="the one", echo=True, logprobs=0, max_tokens=0
        )
    assert answer.choices[0].text == "the one"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or ()) == len(gateway.ids("the one"))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.asyncio
async def test_a_prompt_that_ends_inside_a_character_does_not_leak(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    data = "secret 안".encode()
    prompt = [3 + byte for byte in data[:-1]]
    fake.script = lambda _: Script([3 + data[-1], *gateway.ids("!")])
    async with gateway.openai() as client:
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
        deltas = [chunk.choices[0].text async for chunk in stream]
    assert "".join(deltas) == "안!"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_bad_requests_are_refused_by_name_before_any_instance(
    gateway: RunningGateway, fake: FakeDecode, extra: dict[str, object], param: str
) -> None:
    body = {"model": "tiny", "messages": MESSAGES} | extra
    async with gateway.http() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code", "reason", "stage"}
    assert answer.headers["x-request-id"]
    assert fake.submitted == []


@pytest.mark.asyncio
async def test_other_errors_have_openais_shape_too(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.NotFoundError, match="other"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
    async with gateway.http() as client:
        for method, path, status, code in (
            ("GET", "/nothing", 404, "unknown_route"),
            ("POST", "/v1/completions/", 404, "unknown_route"),
            ("GET", "/v1/models/other", 404, "model_not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("POST", "/v1/chat/completions", 400, "invalid_request"),
        ):
            answer = await client.request(method, path, content=b"{not json")
            assert answer.status_code == status
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code", "reason", "stage"}
            assert (error["code"], error["type"]) == (code, "invalid_request_error")
            assert answer.headers["x-request-id"]
            if status == 405:
                assert answer.headers["allow"]


@pytest.mark.asyncio
async def test_headers_carry_the_id_and_the_decision(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    prefill = FakeDecode(instance_id="prefill-0")
    async with gateway.http() as client:
        body = {"model": "tiny", "messages": MESSAGES, "stream": True}
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}
        )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-isthmus-decode"] == "decode-0"
    assert answer.headers["x-isthmus-local-prefill"] in ("short_prompt", "no_prefill_instance")
    assert prefill.instance_id not in answer.headers.values()
    assert fake.requests[0].request_id.startswith("mine-1.")
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.asyncio
async def test_models_tokens_and_operations(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    async with gateway.http() as client:
        tokens = (await client.post("/tokenize", json={"prompt": "the one 안"})).json()
        assert tokens["tokens"] == list(gateway.ids("the one 안"))
        assert tokens["count"] == len(tokens["tokens"])
        chat = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        assert chat["tokens"][0] == 1
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "the one 안"}
        refused = await client.post("/detokenize", json={"tokens": [99999]})
        assert refused.status_code == 400
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json()["ready"] is True
        assert (await client.get("/version")).json()["version"]
        assert "isthmus_requests_inflight" in (await client.get("/metrics")).text
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v1/chat/completions" in paths


@pytest.mark.asyncio
async def test_keys_bound_the_cache_and_are_required(tmp_path: Path) -> None:
    fake = FakeDecode()
    config = ClusterConfig(gateway=GatewayConfig(api_keys=["a", "b"]))
    async with running_gateway(tmp_path, [fake], config) as gateway:
        async with gateway.openai(api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="tiny", messages=MESSAGES)
        for key, salt in (("a", None), ("b", None), ("a", "s"), ("b", "s"), ("a", "s")):
            async with gateway.openai(api_key=key) as client:
                extra = {"cache_salt": salt} if salt else {}
                await client.completions.create(model="tiny", prompt="x", extra_body=extra)
        salts = [request.cache_salt for request in fake.requests]
        assert len(set(salts)) == 4
        assert salts[2] == salts[4]
        assert "s" not in salts
        async with gateway.http() as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.asyncio
async def test_too_large_and_too_many_are_told_before_any_work(tmp_path: Path) -> None:
    config = ClusterConfig(gateway=GatewayConfig(max_body_bytes=1000, max_inflight=1))
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake], config) as gateway, gateway.http() as client:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100

        for content in (b"x" * 1001, chunks()):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 413
        slot = gateway.gateway.limiter.acquire(Identity())
        body = {"model": "tiny", "prompt": "x"}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        slot.release()
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.asyncio
async def test_without_instances_the_answer_is_503_and_ready_says_why(tmp_path: Path) -> None:
    config = ClusterConfig(gateway=GatewayConfig(instance_wait_ms=0))
    async with running_gateway(tmp_path, (), config) as gateway, gateway.http() as client:
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "no decode or mixed instance" in json.dumps(ready.json())


@pytest.mark.asyncio
async def test_a_text_that_cannot_fit_is_refused_by_its_length(gateway: RunningGateway) -> None:
    text = "x" * (512 * gateway.tokenizer.longest_token + 1)
    bodies: tuple[tuple[str, dict[str, object]], ...] = (
        ("/v1/completions", {"model": "tiny", "prompt": text}),
        ("/v1/completions", {"model": "tiny", "prompt": ["x", text]}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [MESSAGES[0] | {"content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [MESSAGES[0] | {"content": text}]}),
    )
    async with gateway.http() as client:
        for path, body in bodies:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "characters, which are at least 51" in answer.text  # 513, or with the template
        shorter = await client.post("/tokenize", json={"prompt": text[:-1]})
        assert shorter.json()["count"] == len(text) - 1


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_routes_for_tokens_count_as_in_flight(tmp_path: Path, path: str) -> None:
    config = ClusterConfig(gateway=GatewayConfig(max_inflight=1))
    body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [5]}
    async with running_gateway(tmp_path, (), config) as gateway, gateway.http() as client:
        with gateway.gateway.limiter.acquire(Identity()):
            assert (await client.post(path, json=body)).status_code == 429
        assert (await client.post(path, json=body)).status_code == 200
        assert (await client.post(path, json={})).status_code == 400
        assert gateway.gateway.limiter.num_inflight == 0
