"""A text is as likely when it is decoded token by token as when it is computed at once.

Two kernels attend to the same KV, of whatever dtype: one for chunks of prompts, one for decode
steps. Where they disagree from some position on, a decode instance goes on with other tokens than
the instance that computed the prompt would have.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.engine.core import EngineCore
from tests.support.engine_driver import generate, make_prompt, make_request
from tests.support.tiny_models import save, tiny_model

FIRST, LAST = 88, 256  # positions that are scored both ways
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "int8": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", max_position_embeddings=512)
    return save(model, tmp_path_factory.mktemp("model"))


def make_core(folder: Path, kv_dtype: str, chunk: int) -> EngineCore:
    engine = {"num_blocks": 40, "kv_dtype": kv_dtype, "max_num_batched_tokens": chunk}
    model = ModelConfig(path=str(folder), dtype="float32")
    return EngineCore.build(model, EngineConfig.model_validate(engine), VirtualClock(10**18))


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_decode_and_prefill_score_a_text_alike_at_every_length(folder: Path, kv_dtype: str) -> None:
    prompt = make_prompt(FIRST)
    written = make_request("written", prompt, max_tokens=LAST - FIRST, logprobs=0)
    (decoded,) = generate(make_core(folder, kv_dtype, 512), written)
    assert len(decoded.token_ids) == LAST - FIRST
    text = (*prompt, *decoded.token_ids)
    for chunk in (512, 48):
        read = make_request("read", text, max_tokens=1, prompt_logprobs=0)
        (scored,) = generate(make_core(folder, kv_dtype, chunk), read)
        behind = scored.prompt_logprobs[-len(decoded.logprobs) :]
        assert [item.token_id for item in behind] == decoded.token_ids
        differences = [
            abs(one.logprob - other.logprob)
            for one, other in zip(decoded.logprobs, behind, strict=True)
        ]
        assert max(differences) <= TOLERANCE[kv_dtype], differences.index(max(differences))
