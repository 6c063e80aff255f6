"""KV in one byte an element in an engine: where it lies, how much fits, what it computes."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from isthmus.common.clock import VirtualClock
from isthmus.common.config import ClusterConfig, EngineConfig
from isthmus.common.errors import ConfigError
from isthmus.engine.core import EngineCore
from isthmus.engine.kv_store import KvStore, count_blocks, layout_of
from tests.support.device_core import device_runner
from tests.support.engine_driver import generate, make_prompt, make_request, prefill
from tests.support.tiny_model import TinyModel, make_tiny_core


def requests(count: int = 4) -> list[object]:
    return [make_request(f"r{i}", make_prompt(9 + 13 * i, salt=i)) for i in range(count)]


def tokens(core: EngineCore) -> list[list[int]]:
    return [outcome.token_ids for outcome in generate(core, *requests())]  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float32"])
def test_tokens_do_not_depend_on_chunks_blocks_or_batches(kv_dtype: str) -> None:
    expected = tokens(make_tiny_core(kv_dtype=kv_dtype))
    assert tokens(make_tiny_core(kv_dtype=kv_dtype, max_num_batched_tokens=7)) == expected
    assert tokens(make_tiny_core(kv_dtype=kv_dtype, block_size=16)) == expected
    alone = make_tiny_core(kv_dtype=kv_dtype)
    assert [generate(alone, request)[0].token_ids for request in requests()] == expected  # type: ignore[arg-type]


def test_a_device_writes_and_reads_fp8() -> None:
    config = EngineConfig(block_size=4, num_blocks=65, async_scheduling="on")
    config = config.model_copy(update={"kv_dtype": "fp8_e4m3"})  # which this device may not have
    core = EngineCore(TinyModel(), config, VirtualClock(10**18), runner_of=device_runner)
    assert core.kv_store.tensor.dtype is torch.float8_e4m3fn
    assert tokens(core)
    assert core.kv_store.scales is not None
    assert core.kv_store.scales.count_nonzero()


def test_about_twice_the_blocks_fit() -> None:
    spec = TinyModel().spec
    config = EngineConfig(kv_cache_gib=1)
    wide = count_blocks(config, layout_of(spec, 16, "bfloat16"))
    narrow = count_blocks(config, layout_of(spec, 16, "int8"))
    assert narrow / wide == pytest.approx(16 / (8 + 4), rel=1e-3)  # vectors of eight elements


def test_a_block_holds_its_scales() -> None:
    core = make_tiny_core(kv_dtype="int8")
    prefill(core, make_request("r", make_prompt(10)))
    store, block_id = core.kv_store, core.block_table("r")[1]  # type: ignore[arg-type]
    assert store.scales is not None
    content = torch.frombuffer(bytearray(store.read_block(block_id)), dtype=torch.int8)
    layers = content.view(store.layout.num_layers, -1)
    vectors = store.tensor[block_id].flatten(1)
    assert torch.equal(layers[:, : vectors.shape[1]], vectors)
    scales = layers[:, vectors.shape[1] :].contiguous().view(torch.float32)
    assert torch.equal(scales, store.scales[block_id].flatten(1))
    assert scales.all()


def test_staging_lies_behind_the_blocks() -> None:
    layout = layout_of(TinyModel().spec, 4)
    store = KvStore(layout, 3, "cpu", staging_bytes=1000)
    assert store.num_bytes == store.memory.numel() == 3 * layout.block_bytes + 1000
    store.memory[3 * layout.block_bytes :] = 255
    assert not store.tensor.count_nonzero()


def test_a_block_whose_scales_would_lie_askew_is_refused() -> None:
    spec = TinyModel().spec
    layout = layout_of(spec, 1, "int8")
    object.__setattr__(layout, "head_dim", 1)
    object.__setattr__(layout, "num_kv_heads", 1)
    with pytest.raises(ConfigError, match="do not fill whole words in int8"):
        KvStore(layout, 2, "cpu")


def test_a_cpu_is_refused_fp8_before_anything_is_loaded() -> None:
    with pytest.raises(ValidationError, match="read by attention on GPUs only"):
        EngineConfig(kv_dtype="fp8_e4m3")
    with pytest.raises(ValidationError, match="'auto', 'bfloat16', 'float32', 'int8' or"):
        EngineConfig.model_validate({"kv_dtype": "int4"})


def pools(prefill_dtype: str, decode_dtype: str, **prefill: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "prefill": {"replicas": 1, "engine": {"kv_dtype": prefill_dtype}, **prefill},
            "decode": {"replicas": 1, "engine": {"kv_dtype": decode_dtype}},
        }
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [("int8", "auto"), ("int8", "bfloat16"), ("bfloat16", "float32")],
)
def test_pools_between_which_kv_cannot_go_are_refused_when_they_are_configured(
    source: str, target: str
) -> None:
    with pytest.raises(ValidationError, match=rf"KV in {source} \(prefill.engine.kv_dtype\)"):
        pools(source, target)
    assert pools(source, target, replicas=0).prefill.engine.kv_dtype == source


@pytest.mark.parametrize("source", ["auto", "bfloat16", "float32", "int8"])
def test_pools_that_keep_less_on_the_decode_side_are_taken(source: str) -> None:
    assert pools(source, "int8").decode.engine.kv_dtype == "int8"


# --- windows -------------------------------------------------------------------------------------


def admitted(windows: tuple[int, ...], num_tokens: int) -> EngineCore:
    """An engine that has taken over a prompt whose KV a peer has moved."""
    core = EngineCore(
        TinyModel(0, windows),
        EngineConfig(block_size=4, num_blocks=65, watermark=0.0),
        VirtualClock(10**18),
    )
    request = make_request("r", make_prompt(num_tokens))
    core.admit_with_kv(core.reserve(request), request, 5)
    return core


def test_the_layout_has_the_windows_of_the_model() -> None:
    assert admitted((0, 9), 5).kv_layout.windows == (0, 9)


def test_blocks_that_were_not_moved_are_no_prefix_for_others() -> None:
    """Position 30 comes next; a window of 9 begins at token 22, in the sixth block."""
    assert admitted((), 30).cached_hashes()
    core = admitted((0, 9), 30)
    assert core.cached_hashes() == []
    while core.step() is not None:
        assert core.cached_hashes() == []
    core.check_integrity()
    assert core.load().free_blocks == core.load().num_blocks


def test_a_prompt_that_no_window_has_left_is_a_prefix_for_others() -> None:
    assert len(admitted((0, 9), 10).cached_hashes()) == 2
