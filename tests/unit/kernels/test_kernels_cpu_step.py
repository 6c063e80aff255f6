"""A decoder in one call gives the bits of its ops one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from isthmus.common.layer_progress import LayerCounter
from isthmus.kernels import Kernels, PackedLinear, reference, select
from isthmus.kernels.decoder import DecoderTensors, fuse
from isthmus.kernels.types import Quantization

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 48, 72, 6, 2, 32, 101
BLOCK_SIZE, EPS = 16, 1e-5


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    ffn_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class Step:
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_index: torch.Tensor


def decoder(
    kernels: Kernels,
    *,
    has_head_norms: bool,
    windows: list[int | None],
    quantization: Quantization = "none",
) -> DecoderTensors:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(width: int, depth: int) -> PackedLinear:
        weight = randn(width, depth) * depth**-0.5
        return kernels.pack_linear(weight.bfloat16(), randn(width), quantization)

    def layer() -> Layer:
        return Layer(
            attention_norm=randn(HIDDEN),
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            query_norm=randn(HEAD_DIM) if has_head_norms else None,
            key_norm=randn(HEAD_DIM) if has_head_norms else None,
            output=linear(HIDDEN, HEADS * HEAD_DIM),
            ffn_norm=randn(HIDDEN),
            gate_up=linear(2 * FFN, HIDDEN),
            down=linear(HIDDEN, FFN),
        )

    return DecoderTensors(
        layers=[layer() for _ in windows],
        windows=windows,
        final_norm=randn(HIDDEN),
        lm_head=linear(VOCAB, HIDDEN),
        cos_sin=randn(200, HEAD_DIM),
        num_heads=HEADS,
        scale=HEAD_DIM**-0.5,
        norm_eps=EPS,
    )


def steps() -> tuple[list[tuple[torch.Tensor, Step]], int]:
    """Two prompts, of 40 and 90 tokens, then a token of one beside a chunk of the other."""
    table = torch.tensor([[3, 7, 1, 9, 0, 0, 0], [2, 4, 5, 6, 8, 10, 11]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(2)

    def step(
        lengths: list[int], seq_lens: list[int], logits: list[int]
    ) -> tuple[torch.Tensor, Step]:
        owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = torch.cat(
            [torch.arange(s - n, s) for n, s in zip(lengths, seq_lens, strict=True)]
        )
        starts = torch.tensor([0, *lengths]).cumsum(0)
        slots = table.long()[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        hidden = torch.randn(len(positions), HIDDEN, generator=generator)
        return hidden, Step(
            *(positions, slots, starts.int(), torch.tensor(seq_lens, dtype=torch.int32), table),
            torch.tensor(logits),
        )

    return [step([40, 90], [40, 90], [39, 128, 129]), step([1, 20], [41, 110], [0, 20])], 12


def new_kv(num_blocks: int, num_layers: int) -> torch.Tensor:
    return torch.zeros(num_blocks, num_layers, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()


def op_by_op(
    kernels: Kernels, tensors: DecoderTensors, hidden: torch.Tensor, step: Step, kv: torch.Tensor
) -> torch.Tensor:
    residual, last = hidden, len(tensors.layers) - 1
    normed = kernels.rms_norm(residual, tensors.layers[0].attention_norm, EPS)
    next_norms = [layer.attention_norm for layer in tensors.layers[1:]] + [tensors.final_norm]
    for index, layer in enumerate(tensors.layers):
        heads = kernels.linear(normed, layer.qkv).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = (
                kernels.rms_norm(q, layer.query_norm, EPS),
                kernels.rms_norm(k, layer.key_norm, EPS),
            )
        kernels.rope_and_cache(
            *(q, k, v, tensors.cos_sin, step.positions, kv, index, step.slot_mapping)
        )
        attended = kernels.paged_attention(
            *(q, kv, index, step.query_start, step.seq_lens, step.block_table, tensors.scale),
            tensors.windows[index],
        )
        if index == last:
            attended, residual = attended[step.logits_index], residual[step.logits_index]
        projected = kernels.linear(attended, layer.output)
        normed, residual = kernels.add_rms_norm(projected, residual, layer.ffn_norm, EPS)
        activated = kernels.silu_mul(kernels.linear(normed, layer.gate_up))
        projected = kernels.linear(activated, layer.down)
        normed, residual = kernels.add_rms_norm(projected, residual, next_norms[index], EPS)
    return kernels.linear(normed, tensors.lm_head)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("windows", [[None, None, None], [24, None]])
def test_a_fused_decoder_gives_the_bits_of_its_ops(
    num_threads: int,
    has_head_norms: bool,
    quantization: Quantization,
    windows: list[int | None],
) -> None:
    kernels = select("cpu", 1, "cpu")
    tensors = decoder(
        kernels, has_head_norms=has_head_norms, windows=windows, quantization=quantization
    )
    fused = fuse(select("cpu", num_threads, "cpu"), tensors)
    assert fused is not None
    inputs, num_blocks = steps()
    kv, expected_kv = new_kv(num_blocks, len(windows)), new_kv(num_blocks, len(windows))
    for hidden, step in inputs:
        expected = op_by_op(kernels, tensors, hidden, step, expected_kv)
        assert expected.isfinite().all()
        assert torch.equal(fused(hidden.clone(), step, kv), expected)
        assert torch.equal(kv, expected_kv)


def test_a_step_without_logits_still_writes_kv() -> None:
    kernels = select("cpu", 1, "cpu")
    tensors = decoder(kernels, has_head_norms=False, windows=[None])
    fused = fuse(kernels, tensors)
    assert fused is not None
    (hidden, step), *_ = steps()[0]
    kv, expected_kv = new_kv(12, 1), new_kv(12, 1)
    op_by_op(kernels, tensors, hidden, step, expected_kv)
    nothing = replace(step, logits_index=torch.empty(0, dtype=torch.int64))
    assert fused(hidden.clone(), nothing, kv).shape == (0, VOCAB)
    assert torch.equal(kv, expected_kv)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_layers_that_a_running_step_calls_final_stay_as_they_are(num_threads: int) -> None:
    windows: list[int | None] = [None] * 24
    tensors = decoder(select("cpu", 1, "cpu"), has_head_norms=False, windows=windows)
    fused = fuse(select("cpu", num_threads, "cpu"), tensors)
    assert fused is not None
    inputs, num_blocks = steps()
    kv = new_kv(num_blocks, len(windows))
    counter = LayerCounter()
    seen: list[tuple[int, torch.Tensor]] = []
    with ThreadPoolExecutor(1) as pool:
        (hidden, step), *_ = inputs
        running = pool.submit(fused, hidden, step, kv, counter)
        while not running.done():
            count = counter.num_final_layers
            if count > (seen[-1][0] if seen else 0):
                seen.append((count, kv[:, :count].clone()))
        running.result()
    assert counter.num_final_layers == len(windows)
    assert [count for count, _ in seen] == sorted({count for count, _ in seen})
    for count, layers in seen:
        assert torch.equal(layers, kv[:, :count])


def test_the_reference_runs_op_by_op() -> None:
    tensors = decoder(reference, has_head_norms=False, windows=[None])
    assert fuse(reference, tensors) is None
