"""A deterministic two-layer transformer with paged attention, small enough for engine tests.

It computes in float64 and keeps KV in float32, so that its choices do not depend on how tokens were
batched or chunked. ``fail_next`` makes forward passes raise; ``before_forward`` runs once, at the
start of the next one, to act while a step is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from isthmus.common.clock import Clock, VirtualClock
from isthmus.common.config import EngineConfig
from isthmus.common.layer_progress import LayerMarks
from isthmus.engine.core import EngineCore
from isthmus.engine.models.types import ForwardBatch, ModelSpec
from isthmus.engine.runners import RunnerOf, make_runner
from isthmus.kernels.reference.quant import quantise_kv

VOCAB_SIZE = 64
_NUM_LAYERS = 2
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_DIM = 8
_HIDDEN_SIZE = _NUM_HEADS * _HEAD_DIM
_MAX_MODEL_LEN = 512

# What a fixture adds to the EngineConfig of ``make_tiny_core``.
ENGINE_DEFAULTS: dict[str, object] = {}


class TinyModel:
    """Implements ``LanguageModel``; equal seeds give equal weights. ``windows``: of the layers, as
    KV layouts have them."""

    def __init__(self, seed: int = 0, windows: tuple[int, ...] = ()) -> None:
        self.spec = ModelSpec(
            name="tiny",
            architecture="tiny",
            fingerprint=f"tiny-{seed}",
            num_layers=_NUM_LAYERS,
            num_heads=_NUM_HEADS,
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=_HEAD_DIM,
            hidden_size=_HIDDEN_SIZE,
            vocab_size=VOCAB_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            sliding_window=None,
            dtype="float32",
            eos_token_ids=(0,),
            weight_bytes=0,
            layer_windows=windows,
        )
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            scale = rows**-0.5
            shape = (rows, columns)
            return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

        kv_size = _NUM_KV_HEADS * _HEAD_DIM
        self._embedding = weight(VOCAB_SIZE, _HIDDEN_SIZE) * VOCAB_SIZE**0.5
        self._positions = weight(_MAX_MODEL_LEN, _HIDDEN_SIZE) * _MAX_MODEL_LEN**0.5
        self._projections = [
            {
                "q": weight(_HIDDEN_SIZE, _HIDDEN_SIZE) * 2,
                "k": weight(_HIDDEN_SIZE, kv_size),
                "v": weight(_HIDDEN_SIZE, kv_size),
                "o": weight(_HIDDEN_SIZE, _HIDDEN_SIZE) * 2,
            }
            for _ in range(_NUM_LAYERS)
        ]
        self._head = weight(_HIDDEN_SIZE, VOCAB_SIZE) * 2
        self.forward_sizes: list[int] = []  # scheduled tokens of each pass
        self.fail_next = 0
        self.poison_token: int | None = None  # makes logits NaN wherever it is the input
        self.before_forward: Callable[[], None] | None = None
        self.after_layer: Callable[[int], None] = lambda layer: None  # its KV is marked as final

    def forward(
        self,
        batch: ForwardBatch,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.forward_sizes.append(len(batch.input_ids))
        if self.before_forward is not None:
            hook, self.before_forward = self.before_forward, None
            hook()
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the tiny model was told to fail")
        hidden = self._embedding[batch.input_ids] + self._positions[batch.positions]  # [T, E]
        for layer in range(_NUM_LAYERS):
            hidden = hidden + self._attention(layer, hidden, batch, (kv, kv_scales))
            if marks is not None:
                marks.mark(layer + 1)
            self.after_layer(layer)
        logits = hidden[batch.logits_index] @ self._head  # [K, V]
        if self.poison_token is not None:
            logits[batch.input_ids[batch.logits_index] == self.poison_token] = torch.nan
        return logits.float()

    def _attention(
        self,
        layer: int,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        store: tuple[torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        weights = self._projections[layer]
        kv, scales = store
        block_size = kv.shape[4]
        normed = torch.nn.functional.layer_norm(hidden, (_HIDDEN_SIZE,))
        query = (normed @ weights["q"]).view(-1, _NUM_HEADS, _HEAD_DIM)
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        blocks, offsets = slots // block_size, slots % block_size
        for index, name in enumerate(("k", "v")):
            values = (normed[written] @ weights[name]).view(-1, _NUM_KV_HEADS, _HEAD_DIM)
            if scales is None:
                kv[blocks, layer, index, :, offsets] = values.to(kv.dtype)
            else:
                quantised, own = quantise_kv(values, kv.dtype)
                kv[blocks, layer, index, :, offsets] = quantised
                scales[blocks, layer, index, :, offsets] = own
        out = torch.empty_like(query)
        bounds = batch.query_start.tolist()
        for row, (start, end) in enumerate(pairwise(bounds)):
            length = int(batch.seq_lens[row])
            table = batch.block_table[row, : -(-length // block_size)].long()
            keys, values = (
                self._gather(_wide(kv, scales, (table, layer, i)), length) for i in (0, 1)
            )
            scores = torch.einsum("thd,shd->hts", query[start:end], keys) * _HEAD_DIM**-0.5
            distance = batch.positions[start:end, None] - torch.arange(length)
            visible = distance >= 0
            if self.spec.layer_windows and self.spec.layer_windows[layer]:
                visible &= distance < self.spec.layer_windows[layer]
            scores = scores.masked_fill(~visible, float("-inf"))
            out[start:end] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
        return out.reshape(-1, _HIDDEN_SIZE) @ weights["o"]

    @staticmethod
    def _gather(blocks: torch.Tensor, length: int) -> torch.Tensor:
        """[M, G, B, D] → [length, H, D] float64, KV heads repeated for their query heads."""
        tokens = blocks.transpose(1, 2).reshape(-1, _NUM_KV_HEADS, _HEAD_DIM)[:length]
        return tokens.double().repeat_interleave(_NUM_HEADS // _NUM_KV_HEADS, dim=1)


def _wide(
    kv: torch.Tensor, scales: torch.Tensor | None, at: tuple[torch.Tensor, int, int]
) -> torch.Tensor:
    """[M, G, B, D] float64"""
    vectors = kv[at].double()
    return vectors if scales is None else vectors * scales[at].unsqueeze(-1)


def make_tiny_core(
    model: TinyModel | None = None,
    clock: Clock | None = None,
    runner_of: RunnerOf = make_runner,
    **engine: object,
) -> EngineCore:
    """An engine over a TinyModel; ``engine`` overrides fields of a small EngineConfig."""
    settings: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 65,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "watermark": 0.0,
        **ENGINE_DEFAULTS,
        **engine,
    }
    config = EngineConfig.model_validate(settings)
    clock = clock or VirtualClock(start_ns=10**18)
    return EngineCore(model or TinyModel(), config, clock, runner_of=runner_of)
