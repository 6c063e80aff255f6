"""The engine on a GPU: steps that never wait, replays, and the tokens of the host's sampler.

Run by ``make gpu``. The model is tiny, random and float32, so that sums in another order rarely
decide between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.models import Shape, random_decoder
from isthmus.common.clock import SystemClock
from isthmus.common.config import EngineConfig
from isthmus.common.types import Request
from isthmus.engine.core import EngineCore
from isthmus.engine.device import CudaDevice, device_of
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.kv_store import layout_of
from isthmus.engine.staging import Buffer, Readback, Staging
from isthmus.engine.trial_step import measure_kv_bytes
from isthmus.kernels import reference, select
from isthmus.kernels.types import SamplingRows
from tests.support.engine_driver import Driver, generate, make_prompt, make_request

pytestmark = pytest.mark.gpu

SHAPE = Shape("tiny", 2, 128, 256, 8, 2, 32, 512, has_tied_embeddings=False)
MAX_MODEL_LEN = 256


@pytest.fixture
def strict_sync() -> Iterator[None]:
    """Any operation that makes the host wait for the device raises, where it is switched on."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_engine(dtype: str = "float32", **engine: object) -> EngineCore:
    settings: dict[str, object] = {
        "device": "cuda:0",
        "num_blocks": 200,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 12,
        **engine,
    }
    model = random_decoder(
        SHAPE, select("cuda"), "cuda:0", max_model_len=MAX_MODEL_LEN, dtype=dtype
    )
    return EngineCore(model, EngineConfig.model_validate(settings), SystemClock())


def workload() -> list[Request]:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "seed": 2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logprobs": 3},
        {"temperature": 1.0, "seed": 4, "logit_bias": ((5, 4.0),), "frequency_penalty": 0.3},
    ]
    return [
        make_request(f"r{i}", make_prompt(5 + 9 * i, salt=i), max_tokens=12 + i, **kinds[i % 6])
        for i in range(10)
    ]


def tokens_of(engine: EngineCore) -> list[list[int]]:
    outcomes = generate(engine, *workload())
    assert engine.load().free_blocks == engine.load().num_blocks
    return [outcome.token_ids for outcome in outcomes]


def test_graphs_and_planning_ahead_change_no_token() -> None:
    expected = tokens_of(make_engine(cuda_graphs=False, async_scheduling="off"))
    assert tokens_of(make_engine(cuda_graphs=False, async_scheduling="on")) == expected
    assert tokens_of(make_engine(cuda_graphs=True, async_scheduling="off")) == expected
    assert tokens_of(make_engine()) == expected


def test_a_prompt_gets_the_distribution_that_the_reference_gives() -> None:
    """Chunks over a paged prefix, and decode steps after them, of the whole model."""
    requests = [
        make_request(f"r{i}", make_prompt(9 + 40 * i, salt=i), prompt_logprobs=0, logprobs=0)
        for i in range(3)
    ]
    engines = []
    for kernels in (select("cuda"), reference):
        model = random_decoder(
            SHAPE, kernels, "cuda:0", max_model_len=MAX_MODEL_LEN, dtype="float32"
        )
        config = EngineConfig(
            device="cuda:0", num_blocks=60, max_num_batched_tokens=32, cuda_graphs=False
        )
        engines.append(EngineCore(model, config, SystemClock()))
    for ours, theirs in zip(*(generate(engine, *requests) for engine in engines), strict=True):
        mine = [entry.logprob for entry in (*ours.prompt_logprobs, ours.logprobs[0])]
        expected = [entry.logprob for entry in (*theirs.prompt_logprobs, theirs.logprobs[0])]
        assert mine == pytest.approx(expected, abs=2e-2)


def test_scarce_blocks_change_no_token() -> None:
    expected = tokens_of(make_engine())
    assert tokens_of(make_engine(num_blocks=30, max_num_batched_tokens=24)) == expected


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.usefixtures("strict_sync")
def test_no_step_waits_for_the_device_but_for_its_results(cuda_graphs: bool) -> None:
    engine = make_engine("bfloat16", cuda_graphs=cuda_graphs)
    generate(engine, *workload())  # kernels are compiled, memory is taken
    for request in workload():
        engine.add(request)
    torch.cuda.set_sync_debug_mode("error")
    outcomes = Driver(engine).run()
    torch.cuda.set_sync_debug_mode("default")
    errors = [outcome.updates[-1].error for outcome in outcomes.values()]
    assert errors == [None] * len(workload())


def test_replays_take_no_memory() -> None:
    kernels, device = select("cuda"), device_of("cuda:0")
    model = random_decoder(SHAPE, kernels, "cuda:0", max_model_len=MAX_MODEL_LEN)
    runners: list[DeviceRunner] = []

    def runner_of(*args: object) -> DeviceRunner:
        model, store, config, max_model_len = args
        runners.append(DeviceRunner(model, kernels, store, config, max_model_len, device))  # type: ignore[arg-type]
        return runners[-1]

    config = EngineConfig(device="cuda:0", num_blocks=100, max_num_seqs=12)
    EngineCore(model, config, SystemClock(), runner_of=runner_of)
    graphs = runners[0].graphs
    assert graphs.buckets == (1, 2, 4, 8, 12)
    for bucket in graphs.buckets:
        runners[0].stage_padding(bucket)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        first = graphs.replay(bucket)
        address = first.data_ptr()
        assert graphs.replay(bucket).data_ptr() == address
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.isfinite(first).all()


def test_staging_is_pinned_and_its_copies_arrive() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    staging = Staging(device, {"ids": Buffer(1000, torch.int64)})
    readback = Readback(device, {"ids": Buffer(1000, torch.int64)})
    assert device.pinned(4, torch.int64).is_pinned()
    for step in range(5):
        staging.begin()
        turn = readback.begin()
        values = torch.arange(step, step + 900)
        there = staging.put("ids", values.numpy())
        back = readback.put("ids", there * 2)
        staging.end()
        readback.end()
        readback.wait(turn)
        assert (back == 2 * values.numpy()).all()


def test_the_card_draws_what_the_reference_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 5000, generator=generator) * 3
    rows = SamplingRows(
        temperature=torch.tensor([0.0, 0.3, 1.0, 1.7] * 8),
        top_k=torch.tensor([0, 0, 50, 7] * 8, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9] * 16, dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0, 0.02, 0.0] * 8),
        uniforms=torch.rand(32, generator=generator, dtype=torch.float64),
    )
    expected, _ = reference.draw_tokens(logits.clone(), rows)
    there = SamplingRows(
        rows.temperature.cuda(),
        rows.top_k.cuda(),
        rows.top_p.cuda(),
        rows.min_p.cuda(),
        rows.uniforms.cuda(),
    )
    actual, is_usable = select("cuda").draw_tokens(logits.cuda(), there)
    assert bool(is_usable.all())
    assert actual.tolist() == expected.tolist()


def test_kv_takes_what_a_trial_step_leaves_of_the_share() -> None:
    kernels, device = select("cuda"), device_of("cuda:0")
    model = random_decoder(SHAPE, kernels, "cuda:0", max_model_len=MAX_MODEL_LEN)
    layout = layout_of(model.spec, 16)
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free / total) + 0.1  # a tenth of the card, whatever else runs there
    config = EngineConfig(device="cuda:0", kv_cache_gib=0, gpu_memory_share=share)
    num_bytes = measure_kv_bytes(model, kernels, config, layout, device)
    assert 0 < num_bytes <= 0.1 * total
    assert torch.cuda.mem_get_info()[0] >= 0.9 * free
