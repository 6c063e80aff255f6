"""Measures the CPU kernels against torch and against what one core can read from memory.

    python benchmarks/kernels.py [--threads N] [--repeat N] [--only ops|steps]

Every figure is the best of several repetitions, the two sides taking turns; with one thread it is
processor time, which other processes disturb less. The steps are forward passes of the shape of
SmolLM2-135M (30 layers, each with weights of its own, so that weights come from memory and not from
a cache); "torch" is the reference implementation with float32 weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isthmus.kernels import Kernels, PackedLinear, select
from isthmus.kernels.decoder import DecoderTensors, fuse
from isthmus.kernels.memory import zeros_in_huge_pages
from isthmus.kernels.types import Quantization

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 576, 1536, 9, 3, 64, 30, 49152
BLOCK_SIZE = 16
EPS = 1e-5
WEIGHTS: dict[str, tuple[torch.dtype, Quantization]] = {
    "bfloat16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
    "float32": (torch.float32, "none"),
}


@dataclass(frozen=True)
class Bench:
    ours: Kernels
    torch_ops: Kernels
    num_threads: int
    repeat: int

    def best_of(self, *actions: Callable[[], object], times: int = 1) -> list[float]:
        """Seconds of each action at its best; they take turns, so that noise meets all alike."""
        clock = time.thread_time if self.num_threads == 1 else time.perf_counter
        best = [float("inf")] * len(actions)
        for _ in range(self.repeat * times):
            for index, action in enumerate(actions):
                started = clock()
                action()
                best[index] = min(best[index], clock() - started)
        return best

    def compare(self, action: Callable[[Kernels], object], times: int = 1) -> list[float]:
        return self.best_of(lambda: action(self.ours), lambda: action(self.torch_ops), times=times)

    def read_bandwidth(self) -> float:
        """Bytes a second at which torch sums 256 MiB."""
        data = torch.ones(1 << 26)
        return data.numel() * 4 / self.best_of(data.sum)[0]


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class Model:
    """A forward pass over random weights, through one implementation of the kernels."""

    def __init__(self, kernels: Kernels, weights: str, num_blocks: int) -> None:
        dtype, quantization = WEIGHTS[weights]

        def pack(width: int, depth: int) -> PackedLinear:
            weight = (torch.randn(width, depth) * depth**-0.5).to(dtype)
            return kernels.pack_linear(weight, None, quantization)

        self.kernels = kernels
        qkv_width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [
            Layer(
                torch.ones(HIDDEN),
                torch.ones(HIDDEN),
                pack(qkv_width, HIDDEN),
                pack(HIDDEN, HIDDEN),
                pack(2 * FFN, HIDDEN),
                pack(HIDDEN, FFN),
            )
            for _ in range(LAYERS)
        ]
        self.lm_head = pack(VOCAB, HIDDEN)
        self.cos_sin = torch.randn(8192, HEAD_DIM)
        self.kv = zeros_in_huge_pages(
            (num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), dtype
        ).normal_()
        self.fused = fuse(
            kernels,
            DecoderTensors(
                layers=self.layers,
                windows=[None] * LAYERS,
                final_norm=self.layers[0].ffn_norm,
                lm_head=self.lm_head,
                cos_sin=self.cos_sin,
                num_heads=HEADS,
                scale=HEAD_DIM**-0.5,
                norm_eps=EPS,
            ),
        )

    @property
    def weight_bytes(self) -> int:
        linears = [p for x in self.layers for p in (x.qkv, x.output, x.gate_up, x.down)]
        return sum(packed.num_bytes for packed in (*linears, self.lm_head))

    def step(self, batch: Batch) -> torch.Tensor:
        ops = self.kernels
        residual = batch.hidden.clone()
        if self.fused is not None:
            return self.fused(residual, batch, self.kv)
        normed = ops.rms_norm(residual, self.layers[0].attention_norm, EPS)
        for index, layer in enumerate(self.layers):
            heads = ops.linear(normed, layer.qkv).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            ops.rope_and_cache(
                q, k, v, self.cos_sin, batch.positions, self.kv, index, batch.slot_mapping
            )
            attended = ops.paged_attention(
                *(q, self.kv, index, batch.query_start, batch.seq_lens, batch.block_table),
                HEAD_DIM**-0.5,
            )
            normed, residual = ops.add_rms_norm(
                ops.linear(attended, layer.output), residual, layer.ffn_norm, EPS
            )
            activated = ops.silu_mul(ops.linear(normed, layer.gate_up))
            normed, residual = ops.add_rms_norm(
                ops.linear(activated, layer.down), residual, layer.attention_norm, EPS
            )
        return ops.linear(normed[batch.logits_index], self.lm_head)


@dataclass(frozen=True)
class Batch:
    hidden: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_index: torch.Tensor


def make_batch(num_sequences: int, query_len: int, seq_len: int) -> Batch:
    """Each sequence has ``seq_len`` tokens, of which the last ``query_len`` are run."""
    blocks_each = -(-seq_len // BLOCK_SIZE)
    table = torch.arange(num_sequences * blocks_each).view(num_sequences, blocks_each)
    positions = torch.arange(seq_len - query_len, seq_len).repeat(num_sequences)
    sequence = torch.arange(num_sequences).repeat_interleave(query_len)
    slots = table[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(num_sequences + 1) * query_len
    return Batch(
        hidden=torch.randn(num_sequences * query_len, HIDDEN),
        positions=positions,
        slot_mapping=slots,
        query_start=starts.int(),
        seq_lens=torch.full((num_sequences,), seq_len, dtype=torch.int32),
        block_table=table.int(),
        logits_index=starts[1:] - 1,
    )


def run_ops(bench: Bench, bandwidth: float) -> None:
    print(f"\n{'op':<44}{'ours':>10}{'torch':>10}{'ratio':>8}   rate")
    for weights in WEIGHTS:
        for rows in (1, 4, 16):
            run_linear(bench, bandwidth, weights, rows, VOCAB)
        run_linear(bench, bandwidth, weights, 512, 2 * FFN)
    for sequences, query, context in ((1, 1, 1024), (16, 1, 1024), (1, 512, 512), (1, 512, 2048)):
        run_attention(bench, sequences, query, context)
    for rows in (1, 512):
        run_small_ops(bench, rows)


def run_linear(bench: Bench, bandwidth: float, weights: str, rows: int, width: int) -> None:
    dtype, quantization = WEIGHTS[weights]
    weight, x = torch.randn(width, HIDDEN).to(dtype), torch.randn(rows, HIDDEN)
    packed = bench.ours.pack_linear(weight, None, quantization)
    plain = bench.torch_ops.pack_linear(weight, None, quantization)
    times = bench.best_of(
        lambda: bench.ours.linear(x, packed), lambda: bench.torch_ops.linear(x, plain)
    )
    flops, rate = 2 * rows * HIDDEN * width / times[0], packed.num_bytes / times[0]
    note = f"{flops / 1e9:.1f} GFLOP/s, weights at {rate / 1e9:.1f} GB/s"
    name = f"linear {weights} [{rows}, {HIDDEN}] x {width}"
    report(name, times, f"{note} ({rate / bandwidth:.0%} of reading)")


def run_attention(bench: Bench, sequences: int, query: int, context: int) -> None:
    batch = make_batch(sequences, query, context)
    kv = torch.randn(batch.block_table.numel(), 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()
    q = torch.randn(sequences * query, HEADS, HEAD_DIM)
    tables = (batch.query_start, batch.seq_lens, batch.block_table, HEAD_DIM**-0.5)
    times = bench.compare(lambda kernels: kernels.paged_attention(q, kv, 0, *tables))
    pairs = sequences * query * (context - (query - 1) / 2)
    flops, rate = 4 * HEADS * HEAD_DIM * pairs / times[0], kv.numel() * 2 / times[0]
    name = f"attention bf16 {sequences} x {query} queries, {context} keys"
    report(name, times, f"{flops / 1e9:.1f} GFLOP/s, {rate / 1e9:.1f} GB/s")


def run_small_ops(bench: Bench, rows: int) -> None:
    x, weight, gate_up = torch.randn(rows, HIDDEN), torch.ones(HIDDEN), torch.randn(rows, 2 * FFN)
    times = bench.compare(lambda kernels: kernels.add_rms_norm(x, x, weight, EPS), times=10)
    report(f"add_rms_norm [{rows}, {HIDDEN}]", times)
    times = bench.compare(lambda kernels: kernels.silu_mul(gate_up), times=10)
    report(f"silu_mul [{rows}, 2 x {FFN}]", times)


def run_steps(bench: Bench, bandwidth: float) -> None:
    print(f"\n{'step':<44}{'ours':>10}{'torch':>10}{'ratio':>8}   rate")
    steps = [
        *((f"decode, batch {n}, context 512", make_batch(n, 1, 512)) for n in (1, 4, 16)),
        *((f"prefill of {n} tokens", make_batch(1, n, n)) for n in (128, 512, 2048)),
    ]
    num_blocks = max(batch.block_table.numel() for _, batch in steps)
    for weights in WEIGHTS:
        ours = Model(bench.ours, weights, num_blocks)
        plain = Model(bench.torch_ops, weights, num_blocks)
        for name, batch in steps:
            run_step(bench, bandwidth, f"{name}, {weights}", ours, plain, batch)


def run_step(
    bench: Bench, bandwidth: float, name: str, ours: Model, plain: Model, batch: Batch
) -> None:
    times = bench.best_of(lambda: ours.step(batch), lambda: plain.step(batch))
    num_tokens = len(batch.positions)
    note = f"{num_tokens / times[0]:.0f} tokens/s"
    if num_tokens <= 16:
        rate = ours.weight_bytes / times[0]
        note += f", weights at {rate / 1e9:.1f} GB/s ({rate / bandwidth:.0%} of reading)"
    report(name, times, note)


def report(name: str, times: list[float], note: str = "") -> None:
    ours, theirs = times
    print(f"{name:<44}{ours * 1e3:>8.3f}ms{theirs * 1e3:>8.3f}ms{theirs / ours:>7.2f}x   {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("ops", "steps"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bench = Bench(
        ours=select("cpu", options.threads, "cpu"),
        torch_ops=select("cpu", options.threads, "reference"),
        num_threads=options.threads,
        repeat=options.repeat,
    )
    bandwidth = bench.read_bandwidth()
    print(f"{bench.ours.describe()} against {bench.torch_ops.describe()}")
    print(f"reading: {bandwidth / 1e9:.1f} GB/s with {options.threads} thread(s)")
    if options.only != "steps":
        run_ops(bench, bandwidth)
    if options.only != "ops":
        run_steps(bench, bandwidth)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
