"""A decoder's forward pass in one call of the library.

Between two ops in Python lie some microseconds and, with several threads, a meeting of threads that
have gone to sleep; a step has some 250 ops. The ops, their order and every bit are those of
``CpuKernels``, one by one.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from isthmus.kernels.cpu.binding import NO_WINDOW, DecoderParts, LayerParts, Library, StepParts
from isthmus.kernels.cpu.parts import (
    attention_parts,
    layer_address,
    linear_parts,
    rope_parts,
    scales_address,
)
from isthmus.kernels.memory import zeros_in_huge_pages

if TYPE_CHECKING:
    from isthmus.common.layer_progress import LayerMarks
    from isthmus.kernels.decoder import DecoderLayer, DecoderTensors, StepTensors

_NO_WORKSPACE = torch.empty(0)


class CpuDecoderStep:
    """Holds a decoder's weights in the form that the library reads. Any thread may run it."""

    def __init__(self, library: Library, decoder: DecoderTensors, num_threads: int) -> None:
        self._library = library
        self._decoder = decoder  # keeps alive what the addresses below point to
        self._workspaces: list[torch.Tensor] = []  # of no step at present
        self._layers = (LayerParts * len(decoder.layers))(
            *map(_layer_parts, decoder.layers, decoder.windows)
        )
        self._parts = DecoderParts(
            layers=self._layers,
            num_layers=len(decoder.layers),
            final_norm=decoder.final_norm.data_ptr(),
            lm_head=linear_parts(decoder.lm_head),
            eps=decoder.norm_eps,
            num_threads=num_threads,
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        step: StepTensors,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        decoder = self._decoder
        num_tokens, num_logits = hidden.shape[0], step.logits_index.shape[0]
        assert hidden.dtype == torch.float32
        assert hidden.is_contiguous()
        assert step.logits_index.dtype == torch.int64
        assert kv.shape[1] == len(decoder.layers)
        workspace = self._take_workspace(num_tokens)
        logits = torch.empty(num_logits, decoder.lm_head.out_features)
        parts = StepParts(
            attention=attention_parts(
                step.query_start,
                step.seq_lens,
                step.block_table,
                decoder.num_heads,
                decoder.scale,
                kv,
                kv_scales,
            ),
            rope=rope_parts(
                decoder.cos_sin, step.positions, step.slot_mapping, decoder.num_heads, kv, kv_scales
            ),
            hidden=hidden.data_ptr(),
            logits_index=step.logits_index.data_ptr(),
            kv=layer_address(kv, 0),
            kv_scales=scales_address(kv, kv_scales, 0),
            layer_bytes=kv.stride(1) * kv.element_size(),
            scale_layer_stride=0 if kv_scales is None else kv_scales.stride(1),
            num_tokens=num_tokens,
            num_logits=num_logits,
            workspace=workspace.data_ptr(),
            logits=logits.data_ptr(),
            num_final_layers=None if marks is None else marks.address,
        )
        self._library.decoder_step(ctypes.byref(self._parts), ctypes.byref(parts))
        self._workspaces.append(workspace)
        return logits

    def _take_workspace(self, num_tokens: int) -> torch.Tensor:
        """Memory that a step before has left, unless it is too small: fresh pages cost time."""
        size = self._library.workspace_size(ctypes.byref(self._parts), num_tokens)
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            workspace = _NO_WORKSPACE
        if workspace.numel() >= size:
            return workspace
        return zeros_in_huge_pages((size,), torch.float32)


def _layer_parts(layer: DecoderLayer, window: int | None) -> LayerParts:
    return LayerParts(
        qkv=linear_parts(layer.qkv),
        output=linear_parts(layer.output),
        gate_up=linear_parts(layer.gate_up),
        down=linear_parts(layer.down),
        attention_norm=_address(layer.attention_norm),
        ffn_norm=_address(layer.ffn_norm),
        query_norm=_address(layer.query_norm),
        key_norm=_address(layer.key_norm),
        window=NO_WINDOW if window is None else window,
    )


def _address(vector: torch.Tensor | None) -> int | None:
    if vector is None:
        return None
    assert vector.dtype == torch.float32
    assert vector.is_contiguous()
    return vector.data_ptr()
