"""The sample model on two gloo ranks: tokens of one rank, in little more than half the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tensor_parallel
from isthmus.common.clock import SystemClock
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.engine.core import EngineCore
from tests.support.engine_driver import generate, make_prompt, make_request
from tests.support.tp_ranks import ranked_engine

pytestmark = pytest.mark.timeout(180)

ENGINE = {"num_blocks": 40, "max_num_batched_tokens": 64}


@pytest.mark.asyncio
async def test_two_ranks_of_the_sample_give_the_tokens_of_one(tmp_path: Path) -> None:
    requests = [
        make_request("greedy", make_prompt(70), max_tokens=6),
        make_request("seeded", make_prompt(9, 1), max_tokens=6, temperature=0.9, seed=5),
    ]
    model = ModelConfig()
    core = EngineCore.build(model, EngineConfig.model_validate(ENGINE), SystemClock())
    expected = [outcome.token_ids for outcome in generate(core, *requests)]
    async with ranked_engine(model, tmp_path, tp_size=2, **ENGINE) as ranked:
        assert ranked.core.spec.fingerprint == core.spec.fingerprint
        assert [outcome.token_ids for outcome in generate(ranked.core, *requests)] == expected
        shares = [size / core.spec.weight_bytes for size in ranked.ranks.weight_bytes]
        assert max(shares) < tensor_parallel.MAX_SHARE
        assert [ranked.core.spec.num_kv_heads, ranked.core.spec.num_heads] == [2, 6]


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fifty_prompts_have_the_tokens_of_one_rank(dtype: str, tmp_path: Path) -> None:
    assert (
        tensor_parallel.main(
            ["--dtype", dtype, "--prompts", "50", "--out", str(tmp_path / "found.json")]
        )
        == 0
    )
