"""The forward pass of a decoder-only transformer over paged KV blocks.

One implementation for all supported families: ``DecoderConfig`` says which parts a family has.
Prompt chunks and decode steps are not told apart; each token attends to the KV of its sequence,
which is written before it is read. On the CPU activations are float32, on CUDA the model's dtype.
Of an instance of several ranks each runs this over its part of the weights (``parallel``).
"""

from __future__ import annotations

import torch

from isthmus.common.layer_progress import LayerMarks
from isthmus.engine.models.config import DecoderConfig
from isthmus.engine.models.parallel import Parallel
from isthmus.engine.models.types import ForwardBatch, ModelSpec
from isthmus.engine.models.weights import DecoderWeights, LayerWeights
from isthmus.kernels import Kernels
from isthmus.kernels.decoder import DecoderTensors, FusedDecoder, fuse


class Decoder:
    """A ``LanguageModel``. Stateless between calls: what a sequence leaves behind is in ``kv``."""

    def __init__(
        self,
        spec: ModelSpec,
        config: DecoderConfig,
        weights: DecoderWeights,
        cos_sin: torch.Tensor,  # [P, D] float32
        kernels: Kernels,
        parallel: Parallel,
    ) -> None:
        self.spec = spec
        self._parallel = parallel
        self._config = config
        self._weights = weights
        self._cos_sin = cos_sin
        self._kernels = kernels
        self._scale = config.head_dim**-0.5
        # Every layer ends in the norm of the next, which is added and applied in one go.
        self._next_norms = [layer.attention_norm for layer in weights.layers[1:]]
        self._next_norms.append(weights.final_norm)
        on_cpu = weights.embedding.device.type == "cpu"
        self._activation_dtype = torch.float32 if on_cpu else weights.embedding.dtype
        self._fused = self._fuse() if parallel.is_whole else None

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits float32 ``[K, V]`` of the rows in ``logits_index``; K may be 0.

        Of several ranks only the leader's are whole."""
        kernels, weights, eps = self._kernels, self._weights, self._config.norm_eps
        parallel = self._parallel
        residual = parallel.embed(  # [T, E]
            batch.input_ids, weights.embedding, self._activation_dtype
        )
        if self._fused is not None:
            return self._fused(residual, batch, kv, marks, kv_scales)
        normed = kernels.rms_norm(residual, weights.layers[0].attention_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(layer, index, normed, batch, (kv, kv_scales), marks)
            if index == last:  # KV is complete: only rows that need logits go on, [K, …]
                attended = attended[batch.logits_index]
                residual = residual[batch.logits_index]
            hidden = parallel.project_heads(kernels, attended, layer.output, self._config.head_dim)
            normed, residual = kernels.add_rms_norm(hidden, residual, layer.ffn_norm, eps)
            hidden = kernels.linear(normed, layer.gate_up)
            hidden = parallel.project_ffn(kernels, kernels.silu_mul(hidden), layer.down)
            normed, residual = kernels.add_rms_norm(hidden, residual, self._next_norms[index], eps)
        return parallel.logits(kernels, normed, weights.lm_head)

    def _fuse(self) -> FusedDecoder | None:
        weights = self._weights
        return fuse(
            self._kernels,
            DecoderTensors(
                layers=weights.layers,
                windows=self._config.layer_windows,
                final_norm=weights.final_norm,
                lm_head=weights.lm_head,
                cos_sin=self._cos_sin,
                num_heads=self.spec.num_heads,
                scale=self._scale,
                norm_eps=self._config.norm_eps,
            ),
        )

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        x: torch.Tensor,  # [T, E]
        batch: ForwardBatch,
        store: tuple[torch.Tensor, torch.Tensor | None],
        marks: LayerMarks | None,
    ) -> torch.Tensor:
        config, kernels = self._config, self._kernels
        kv, kv_scales = store
        heads, kv_heads, head_dim = self.spec.num_heads, self.spec.num_kv_heads, config.head_dim
        projected = kernels.linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, head_dim)
        q = projected[:, :heads]  # views: [T, H, D] and [T, G, D]
        k = projected[:, heads : heads + kv_heads]
        v = projected[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self._norm_heads(q, layer.query_norm)
            k = self._norm_heads(k, layer.key_norm)
        kernels.rope_and_cache(
            *(q, k, v, self._cos_sin, batch.positions, kv, index, batch.slot_mapping),
            kv_scales=kv_scales,
        )
        if marks is not None:
            marks.mark(index + 1)
        return kernels.paged_attention(
            q,
            kv,
            index,
            batch.query_start,
            batch.seq_lens,
            batch.block_table,
            self._scale,
            config.layer_windows[index],
            kv_scales=kv_scales,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._config.head_dim)
        return self._kernels.rms_norm(rows, weight, self._config.norm_eps).view(x.shape)
