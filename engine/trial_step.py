"""How much of a GPU's memory is left for KV blocks: found by running the largest step once.

::

    share · total │ weights │ a step's own tensors, at their peak │ others │ KV blocks
                  └────────── allocated by torch, at the peak ────┘

Others are CUDA's context and other processes. What comes later (captured graphs, buffers of some
megabytes) has to fit into the share that is left out. The trial writes nothing: its slots are −1,
and all its tables name the null block.
"""

from __future__ import annotations

import torch

from isthmus.common.config import EngineConfig
from isthmus.common.kv_layout import KvLayout
from isthmus.engine.device import Device
from isthmus.engine.kv_store import KvStore
from isthmus.engine.models.types import ForwardBatch, LanguageModel
from isthmus.kernels import Kernels
from isthmus.kernels.types import SamplingRows


def measure_kv_bytes(
    model: LanguageModel, kernels: Kernels, config: EngineConfig, layout: KvLayout, device: Device
) -> int:
    """Bytes that KV blocks may take on a CUDA device: ``gpu_memory_share`` less all else."""
    on = device.torch_device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(on)
    with device.active():
        run_largest_step(model, kernels, config, layout, device)
        torch.cuda.synchronize(on)
    free, total = torch.cuda.mem_get_info(on)
    outside = total - free - torch.cuda.memory_reserved(on)
    peak = torch.cuda.max_memory_allocated(on)
    torch.cuda.empty_cache()
    return kv_budget(total, outside, peak, config.gpu_memory_share)


def kv_budget(total: int, outside: int, peak: int, share: float) -> int:
    """Bytes; 0 when weights and a step take all of the share."""
    return max(0, int(total * share) - outside - peak)


@torch.inference_mode()
def run_largest_step(
    model: LanguageModel, kernels: Kernels, config: EngineConfig, layout: KvLayout, device: Device
) -> None:
    """As many tokens as a step may have, and as many sampled rows."""
    store = KvStore(layout, 1, str(device.torch_device))
    batch = largest_batch(config, layout.block_size, model.spec.max_model_len, device.torch_device)
    logits = model.forward(batch, store.tensor, kv_scales=store.scales)
    rows = len(logits)

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device.torch_device)

    sampling = SamplingRows(
        temperature=full(1.0, torch.float32),
        top_k=full(0, torch.int32),
        top_p=full(0.9, torch.float64),
        min_p=full(0.0, torch.float32),
        uniforms=full(0.5, torch.float64),
    )
    kernels.draw_tokens(logits, sampling)


def largest_batch(
    config: EngineConfig, block_size: int, max_model_len: int, on: torch.device
) -> ForwardBatch:
    """Prompts as long as the budget and the model allow, that fill the budget."""
    budget = config.max_num_batched_tokens
    longest = min(budget, max_model_len)
    counts = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
    counts = counts[: config.max_num_seqs]
    lengths = torch.tensor(counts, dtype=torch.int32)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    num_tokens = int(starts[-1])
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=on),
        positions=torch.cat([torch.arange(count) for count in counts]).to(on),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=on),
        query_start=starts.to(on),
        seq_lens=lengths.to(on),
        block_table=torch.zeros(
            len(counts), -(-longest // block_size), dtype=torch.int32, device=on
        ),
        logits_index=torch.arange(min(config.max_num_seqs, num_tokens), device=on),
        max_query_len=longest,
        max_seq_len=longest,
    )
