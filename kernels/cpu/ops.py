"""The launchers: they allocate results, check what they were given once, and call the library.

A row of ``linear`` and of ``paged_attention`` is the same bits whatever batch or chunk it comes in
and however many threads run: every sum has one order, set by the model's shapes and by positions.
So greedy and seeded output does not depend on batch size, chunk size or placement.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from isthmus.kernels import reference
from isthmus.kernels.cpu.binding import NO_WINDOW, load_library
from isthmus.kernels.cpu.build import build_library
from isthmus.kernels.cpu.parts import (
    KV_TYPES,
    attention_parts,
    layer_address,
    linear_parts,
    quantise_parts,
    rope_parts,
    scales_address,
)
from isthmus.kernels.cpu.step import CpuDecoderStep
from isthmus.kernels.memory import HugePageArena
from isthmus.kernels.reference.quant import quantise_weight
from isthmus.kernels.types import PackedLinear, Quantization

if TYPE_CHECKING:
    from isthmus.kernels.decoder import DecoderTensors

PANEL = 16
MOST_DIMS = 5  # of what is quantised in one call
# Word i of a bfloat16 panel row holds column i (low half) and column i + 8 (high half).
_BF16_COLUMN_ORDER = [column for i in range(8) for column in (i, i + 8)]


class CpuKernels:
    """The ops on the CPU with ``num_threads`` threads for products and attention.

    Raises BuildError when the library can be neither found nor compiled.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._library = load_library(build_library())
        assert num_threads >= 1, num_threads
        self._num_threads = num_threads
        self._arena = HugePageArena()

    def describe(self) -> str:
        return f"cpu ({self._library.path.name}, threads: {self._num_threads})"

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantization: Quantization = "none",
    ) -> PackedLinear:
        """Panels as linear.h describes them; zeros beyond the weight's own rows and columns."""
        assert weight.dtype in {torch.float32, torch.bfloat16}, weight.dtype
        out_features, in_features = weight.shape
        scales = None
        if quantization == "int8":
            weight, scales = quantise_weight(weight)
            scales = _padded(scales, PANEL)
            panels = _int8_panels(weight)
        else:
            panels = _float_panels(weight)
        padded_bias = weight.new_zeros(out_features, dtype=torch.float32) if bias is None else bias
        return PackedLinear(
            in_features,
            out_features,
            self._arena.copy(panels),
            _padded(padded_bias.float(), PANEL),
            scales,
        )

    def fuse(self, decoder: DecoderTensors) -> CpuDecoderStep:
        return CpuDecoderStep(self._library, decoder, self._num_threads)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        num_rows, depth = x.shape
        assert depth == packed.in_features, (x.shape, packed.in_features)
        x = _dense(x)
        out = x.new_empty(num_rows, packed.out_features)
        self._library.linear(
            ctypes.byref(linear_parts(packed)),
            x.data_ptr(),
            num_rows,
            out.data_ptr(),
            self._num_threads,
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = _dense(x), _dense(weight)
        assert weight.shape == x.shape[-1:], (x.shape, weight.shape)
        out = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, *_rows(x), out.data_ptr())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = _dense(x), _dense(residual), _dense(weight)
        assert x.shape == residual.shape, (x.shape, residual.shape)
        assert weight.shape == x.shape[-1:], (x.shape, weight.shape)
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library.add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            *_rows(x),
            out.data_ptr(),
            total.data_ptr(),
        )
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = _dense(gate_up)
        num_rows, both = gate_up.shape
        assert both % 2 == 0, gate_up.shape
        out = gate_up.new_empty(num_rows, both // 2)
        self._library.silu_mul(gate_up.data_ptr(), num_rows, both // 2, out.data_ptr())
        return out

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        if kv.dtype not in KV_TYPES:
            reference.rope_and_cache(
                q, k, v, cos_sin, positions, kv, layer, slot_mapping, kv_scales=kv_scales
            )
            return
        num_tokens, num_heads, _ = q.shape
        assert _has_dense_rows(q)
        assert _has_dense_rows(k)
        assert _has_dense_rows(v)
        assert k.shape == v.shape == (num_tokens, kv.shape[3], kv.shape[5])
        cos_sin = _dense(cos_sin)
        self._library.rope_and_cache(
            ctypes.byref(rope_parts(cos_sin, positions, slot_mapping, num_heads, kv, kv_scales)),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            num_tokens,
            layer_address(kv, layer),
            scales_address(kv, kv_scales, layer),
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
        *,
        soft_cap: float | None = None,
        kv_scales: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
    ) -> torch.Tensor:
        if soft_cap is not None or kv.dtype not in KV_TYPES:
            return reference.paged_attention(
                *(q, kv, layer, query_start, seq_lens, block_table, scale, sliding_window),
                soft_cap=soft_cap,
                kv_scales=kv_scales,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
        num_tokens, num_heads, head_dim = q.shape
        assert _has_dense_rows(q)
        query_start, seq_lens, block_table = map(_dense, (query_start, seq_lens, block_table))
        out = q.new_zeros(num_tokens, num_heads * head_dim)
        self._library.paged_attention(
            ctypes.byref(
                attention_parts(query_start, seq_lens, block_table, num_heads, scale, kv, kv_scales)
            ),
            q.data_ptr(),
            q.stride(0),
            layer_address(kv, layer),
            scales_address(kv, kv_scales, layer),
            NO_WINDOW if sliding_window is None else sliding_window,
            out.data_ptr(),
            self._num_threads,
        )
        return out

    def quantise_kv(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates nothing where ``out`` is given, x has five dimensions at most and dtype is
        int8."""
        if (
            dtype != torch.int8
            or x.dtype not in (torch.float32, torch.bfloat16)
            or x.dim() > MOST_DIMS
            or not x.numel()
        ):
            return reference.quantise_kv(x, dtype, out)
        quantised, scales = out or (
            torch.empty(x.shape, dtype=dtype),
            torch.empty(x.shape[:-1], dtype=torch.float32),
        )
        missing = (None,) * (MOST_DIMS - x.dim())
        views = (x[missing], quantised[missing], scales[missing])
        self._library.quantise_kv(ctypes.byref(quantise_parts(*views)))
        return quantised, scales


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """The tensor with zeros at the end of its first dimension, up to a multiple."""
    missing = -tensor.shape[0] % multiple
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def _float_panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] → [⌈N/16⌉, K, 16]"""
    rows = _padded(weight, PANEL).view(-1, PANEL, weight.shape[1])
    if weight.dtype == torch.bfloat16:
        rows = rows[:, _BF16_COLUMN_ORDER]
    return rows.transpose(1, 2)


def _int8_panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] → [⌈N/16⌉, ⌈K/2⌉, 16, 2]"""
    rows = _padded(_padded(weight, PANEL).T, 2).T
    return rows.view(-1, PANEL, rows.shape[1] // 2, 2).transpose(1, 2)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _rows(x: torch.Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width, width


def _has_dense_rows(x: torch.Tensor) -> bool:
    """[T, heads, D] float32 whose heads lie side by side; rows may be any distance apart."""
    return x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
