"""One call of paged attention, checked once, and what both of its kernels are launched with."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from isthmus.kernels.triton.attention_tile import LOG2_E
from isthmus.kernels.triton.compilation import Constant
from isthmus.kernels.triton.quant import as_bytes

LaunchArgument = torch.Tensor | int | float | bool | None

_KV_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
_QUANTISED_DTYPES = {torch.int8, torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments as ``Kernels.paged_attention`` has them, lengths known, ``out`` [T, H·D] added.

    q may be a view: rows at any distance, the heads of a row side by side. kv may have any stride
    of blocks and of layers; within a layer of a block it is contiguous.
    """

    q: torch.Tensor
    kv: torch.Tensor
    layer: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    out: torch.Tensor
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    kv_scales: torch.Tensor | None
    max_query_len: int
    max_seq_len: int

    def __post_init__(self) -> None:
        _, num_heads, head_dim = self.q.shape
        assert self.q.stride(2) == 1, self.q.stride()
        assert self.q.stride(1) == head_dim, self.q.stride()
        assert self.kv.shape[5] == head_dim, (self.kv.shape, head_dim)
        assert num_heads % self.num_kv_heads == 0, (num_heads, self.num_kv_heads)
        assert self.kv[0, 0].is_contiguous()
        indices = (self.query_start, self.seq_lens, self.block_table)
        assert all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in indices)
        assert self.query_start.shape[0] == self.num_sequences + 1
        assert self.scale > 0, self.scale
        if self.kv_scales is None:
            assert self.kv.dtype in _KV_DTYPES, self.kv.dtype
        else:
            assert self.kv.dtype in _QUANTISED_DTYPES, self.kv.dtype
            assert self.kv_scales.shape == self.kv.shape[:-1], self.kv_scales.shape
            assert self.kv_scales[0, 0].is_contiguous()

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def d_tile(self) -> int:
        return d_tile_of(self.head_dim)

    @property
    def num_sms(self) -> int:
        return _num_sms(self.q.device)

    def launch_arguments(self) -> dict[str, LaunchArgument]:
        """The arguments that the decode and the prefill kernel have in common."""
        # exp(x) is exp2(x · log₂e); tanh takes e²ˣ, hence twice that under a soft cap.
        if self.soft_cap is None:
            score_scale, inner_scale = self.scale * LOG2_E.value, 0.0
        else:
            score_scale = self.soft_cap * LOG2_E.value
            inner_scale = 2.0 * LOG2_E.value * self.scale / self.soft_cap
        scales = None if self.kv_scales is None else self.kv_scales[:, self.layer]
        return {
            "q": self.q,
            "kv": as_bytes(self.kv[:, self.layer]),
            "kv_scales": scales,
            "query_start": self.query_start,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "out": self.out,
            "num_tokens": self.num_tokens,
            "q_stride": self.q.stride(0),
            "block_stride": self.kv.stride(0),
            "scale_block_stride": 0 if scales is None else scales.stride(0),
            "table_stride": self.block_table.stride(0),
            "score_scale": score_scale,
            "inner_scale": inner_scale,
            "window": self.sliding_window or 0,
            "GROUP": self.group_size,
            "G": self.num_kv_heads,
            "B": self.kv.shape[4],
            "D": self.head_dim,
            "D_TILE": self.d_tile,
            "WINDOWED": self.sliding_window is not None,
            "SOFT_CAPPED": self.soft_cap is not None,
            "UPCAST": bool(triton.knobs.runtime.interpret),
        }


@dataclass(frozen=True, slots=True)
class CallForm:
    """What of a call decides how a kernel is compiled; types as Triton writes them."""

    head_dim: int
    kv_type: str = "bf16"
    group_size: int = 4
    num_kv_heads: int = 8
    is_windowed: bool = False
    has_soft_cap: bool = False

    @property
    def kv_bytes(self) -> int:
        return 2 if self.kv_type == "bf16" else 1

    @property
    def label(self) -> str:
        flags = ("-window" if self.is_windowed else "") + ("-cap" if self.has_soft_cap else "")
        return f"{self.kv_type}-{self.group_size}x{self.head_dim}{flags}"

    def types(self) -> dict[str, str]:
        """Of the run-time arguments among ``AttentionCall.launch_arguments``."""
        strides = ("q_stride", "block_stride", "scale_block_stride", "table_stride")
        return {
            "q": "*bf16",
            "kv": f"*{self.kv_type}",
            **({} if self.kv_type == "bf16" else {"kv_scales": "*fp32"}),
            **dict.fromkeys(("query_start", "seq_lens", "block_table"), "*i32"),
            "out": "*bf16",
            **dict.fromkeys(("num_tokens", *strides, "window"), "i32"),
            **dict.fromkeys(("score_scale", "inner_scale"), "fp32"),
        }

    def constants(self) -> dict[str, Constant]:
        """The compile-time ones."""
        return {
            **({"kv_scales": None} if self.kv_type == "bf16" else {}),
            "GROUP": self.group_size,
            "G": self.num_kv_heads,
            "B": 16,
            "D": self.head_dim,
            "D_TILE": d_tile_of(self.head_dim),
            "WINDOWED": self.is_windowed,
            "SOFT_CAPPED": self.has_soft_cap,
            "UPCAST": False,
        }


ALIGNED = frozenset({"q_stride", "block_stride", "scale_block_stride"})
# Numbers that change from step to step: a kernel is not compiled anew for a 1 or a multiple of 16.
UNSPECIALISED = ("num_tokens", "table_stride", "window")


def d_tile_of(head_dim: int) -> int:
    """The head size as a tile has it: a power of two that the matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; one on the CPU, where the kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
